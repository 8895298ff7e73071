"""Seven runs for a machine with a GPU that is ours for some minutes, each within a time budget:

    python -m benchmarks.gpu_runs right --out DIR --nano-vllm CHECKOUT
    python -m benchmarks.gpu_runs fast --out DIR
    python -m benchmarks.gpu_runs record --out DIR
    python -m benchmarks.gpu_runs weights --out DIR
    python -m benchmarks.gpu_runs serve --out DIR
    python -m benchmarks.gpu_runs large --out DIR
    python -m benchmarks.gpu_runs standby --out DIR

    right     are results right, is memory given back, which engine is faster on the same work
    fast      where the time of the kernels goes, and what CUDA's checkers say
    record    the whole GPU check
    weights   experts, and weights in 4 bits and FP8: right, and how fast
    serve     the server under load, also while a rank is killed
    large     8B and 32B shapes, rows of 32,768 tokens, seconds of a start from the page cache
    standby   what a rank that is killed, or writes where it may not, costs while a spare stands by,
              and what that spare costs

Each step is a process with a limit of its own, most important first (`benchmarks.steps`). `--steps
NAME ...` runs these alone, which is how a second call does what the first had no time for; the last
line printed is that command. DIR holds `summary.json`, `log.txt`, results of steps, and
`triton_cache.tar.xz`, the compiled kernels, with which `--triton-cache DIR` begins another time.
`--small`: tiny sizes on any device, to try a run where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu_check_cache import kernel_cache
from benchmarks.gpu_check_process import write_json
from benchmarks.gpu_runs_table import table
from benchmarks.steps import Result, Step, run_steps
from configs.paths import SOURCE_ROOT

# More memory than this in use after a step than before the run was left by the step.
_LEFT_MIB = 64.0
# How long a driver may take to free the memory of processes that have ended.
_FREED_S = 5.0
_LOGS_OF_RAY = Path("/tmp/ray/session_latest/logs")
_KEPT_LOG_BYTES = 30_000
# A test that hangs in a call of CUDA is ended, and named, by a thread.
_PYTEST_OPTIONS = (
    *("-v", "--tb=short", "-p", "no:cacheprovider"),
    *("--timeout", "60", "--timeout-method", "thread"),
)
# What the GPU check needs besides its sections, and a sweep after its last launch.
_CHECK_STARTS_S = 15.0
_SWEEP_ENDS_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the steps of a run are made from. `work`: for checkpoints and compiled kernels, kept for
    the next run on this machine. `brought`: a folder with the archive of compiled kernels.
    """

    out: Path
    work: Path
    small: bool
    on_gpu: bool
    nano_vllm: Path | None
    brought: Path | None

    @property
    def model(self) -> Path:
        return self.work / "model"

    def sized(self, small: object, real: object) -> str:
        return str(small if self.small else real)

    def python(self, module: str, *words: object) -> list[str]:
        command = [sys.executable, "-m", module, *map(str, words)]
        return [*command, "--small"] if self.small and module in _HAVE_SMALL else command

    def launch(self, *words: object) -> list[str]:
        return [sys.executable, str(SOURCE_ROOT / "launch.py"), *map(str, words)]


_HAVE_SMALL = (
    *("benchmarks.gpu_check", "benchmarks.gpu_sweep", "benchmarks.gpu_large"),
    *("benchmarks.gpu_attention_launches", "benchmarks.peer_workload"),
    *("benchmarks.peer_nano_vllm", "benchmarks.peer_transformers"),
)


# Steps


def _inputs(run: Run, shape: str = "0.6B", name: str = "inputs") -> Step:
    where = run.work / shape if name != "inputs" else run.work
    command = run.python("benchmarks.peer_workload", where, "--shape", run.sized("tiny", shape))
    return Step(name=name, command=command, limit_s=90, least_s=15)


def _gpu_check(
    run: Run, limit_s: float, name: str = "gpu_check", *sections: str, least_s: float = 45
) -> Step:
    command = run.python("benchmarks.gpu_check", "--out", run.out / f"{name}.json")
    command += ["--sections", *sections] if sections else []
    command += ["--triton-cache", str(run.out)]
    step = Step(
        name=name, command=command, limit_s=limit_s, least_s=least_s, margin_s=_CHECK_STARTS_S
    )
    return _interpreted(run, step)


def _interpreted(run: Run, step: Step) -> Step:
    """For a step whose kernels only Triton has: without a GPU in its interpreter, if that works."""
    if run.on_gpu:
        return step
    from benchmarks.gpu_check import interpreter_problem  # loads torch, which takes seconds

    problem = interpreter_problem(metadata.version("triton"), metadata.version("numpy"))
    return replace(step, environment={"TRITON_INTERPRET": "1"}, skipped=step.skipped or problem)


def _nano_vllm(run: Run) -> Step:
    checkout = run.nano_vllm
    command = run.python("benchmarks.peer_nano_vllm", "--checkout", checkout, "--model", run.model)
    reason = None if checkout is not None else "--nano-vllm names no checkout"
    return Step(
        name="nano_vllm",
        command=command,
        limit_s=130,
        least_s=50,
        needs=("inputs",),
        skipped=reason,
    )


def _transformers(run: Run) -> Step:
    command = run.python("benchmarks.peer_transformers", "--model", run.model)
    return Step(name="transformers", command=command, limit_s=130, least_s=50, needs=("inputs",))


def _generate(run: Run) -> Step:
    command = run.launch("generate", "What is 47 + 38?", "What is 82 - 35?", "--log-level", "error")
    expected = ("85", "47\n")
    return Step(name="ray_generate", command=command, limit_s=90, least_s=25, expected=expected)


def _bench(run: Run, attention: str) -> Step:
    command = run.launch("bench", "--model", run.model, "--max-model-len", 4096)
    command += ["--input", str(run.work / "workload.jsonl")]
    command += ["--attention-backend", attention] if run.on_gpu else []
    reason = None if run.on_gpu or attention == "triton" else "needs a GPU"
    return Step(
        name=f"ray_bench_{attention}",
        command=command,
        limit_s=100,
        least_s=35,
        needs=("inputs",),
        skipped=reason,
    )


def _lose_rank(run: Run) -> Step:
    command = run.python("cluster.commands.lose_rank", "--tp", 1)
    return Step(name="ray_lose_rank", command=command, limit_s=90, least_s=30)


def _lose_ranks(run: Run, how: str, shape: str = "0.6B", spares: str = "standby") -> Step:
    model = run.model if shape == "0.6B" else run.work / shape / "model"
    command = run.python("benchmarks.lose_ranks", "--model", model, "--tp", 1, "--signal", how)
    command += ["--device", "cuda" if run.on_gpu else "cpu", "--spares", spares]
    command += ["--streams", run.sized(2, 64), "--context", run.sized(20, 1000)]
    command += ["--tokens", run.sized(60, 500), "--kills", "2" if how == "kill" else "1"]
    command += ["--log-level", "info"]
    return Step(
        name=f"lose_ranks_{shape}_{how}" if how != "none" else f"{spares}_{shape}",
        command=command,
        limit_s=160,
        least_s=60,
        needs=("inputs" if shape == "0.6B" else f"inputs_{shape}",),
    )


def _soak(run: Run) -> Step:
    device = "cuda" if run.on_gpu else "cpu"
    command = run.python("tests.cluster.recovery.soak", "--device", device, "--tp", 1)
    command += ["--faults", run.sized(1, 8), "--kinds", "rank"]
    return Step(name="ray_soak", command=command, limit_s=120, least_s=40)


def _sweep(run: Run, kernel: str) -> Step:
    name = f"sweep_{kernel}"
    command = run.python("benchmarks.gpu_sweep", "--out", run.out / f"{name}.json")
    command += ["--kernels", kernel]
    step = Step(name=name, command=command, limit_s=130, least_s=40, margin_s=_SWEEP_ENDS_S)
    return _interpreted(run, step)


def _ncu(run: Run) -> Step:
    """Both attention kernels, after one launch of each that warms up."""
    program = run.python("benchmarks.gpu_attention_launches")
    ncu = shutil.which("ncu")
    if not run.on_gpu:
        return _interpreted(run, Step(name="ncu", command=program, limit_s=90, least_s=25))
    # The clock is the machine's own: a setting would stay for whoever comes after.
    command = ["ncu", "--clock-control", "none", "--print-details", "all"]
    for section in ("SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis"):
        command += ["--section", section]
    for section in ("WarpStateStats", "SchedulerStats", "Occupancy", "LaunchStats"):
        command += ["--section", section]
    command += ["--kernel-name", "regex:prefill_kernel|decode_kernel"]
    return Step(
        name="ncu",
        command=[*command, *program],
        limit_s=120,
        least_s=40,
        skipped=None if ncu else "ncu is not installed",
    )


def _pytest(run: Run, *files: str) -> Step:
    folder = SOURCE_ROOT / "tests" / "gpu"
    paths = [folder / file for file in files] or [folder]
    command = run.python("pytest", *_PYTEST_OPTIONS, *paths)
    return Step(name="tests", command=command, limit_s=180, least_s=40)


def _kernel_tests(run: Run) -> Step:
    """The tests of each kernel, which run on a GPU if there is one: in float16 too."""
    paths = sorted((SOURCE_ROOT / "tests" / "kernels").glob("test_gpu_*.py"))
    names = [path for path in paths if path.stem != "test_gpu_compile"]
    command = run.python("pytest", *_PYTEST_OPTIONS, "-n", "8", "--max-worker-restart", "8", *names)
    # In the interpreter of Triton 3.6, numpy warns.
    command += ["-k", "no_tokens", "-W", "ignore::DeprecationWarning"] if run.small else []
    return _interpreted(run, Step(name="kernel_tests", command=command, limit_s=150, least_s=50))


def _serve(run: Run) -> Step:
    command = run.python("benchmarks.serving", "--model", run.model, "--tp", 1)
    command += ["--ways", "direct", "--rounds", "1", "--streams", run.sized("2,4", "64,256")]
    command += ["--tokens", run.sized(8, 256)]
    return Step(name="serve", command=command, limit_s=120, least_s=40, needs=("inputs",))


def _serve_kill(run: Run) -> Step:
    command = run.python("benchmarks.serving_kill", "--model", run.model)
    command += ["--streams", run.sized(4, 256), "--tokens", run.sized(64, 512)]
    return Step(name="serve_kill", command=command, limit_s=150, least_s=60, needs=("inputs",))


def _starts(run: Run, shape: str, name: str) -> list[Step]:
    """Two starts whose weights lie in the page cache, since they were just written. Only the first
    may have to compile kernels.
    """
    model = run.model if name == "inputs" else run.work / shape / "model"
    command = run.launch("bench", "--model", model, "--max-model-len", 4096)
    command += ["--num-seqs", "1", "--max-input", "16", "--max-output", "8"]
    first = Step(name=f"start_{shape}", command=command, limit_s=120, least_s=40, needs=(name,))
    return [first, replace(first, name=f"start_{shape}_again")]


def _large(run: Run, shape: str) -> Step:
    command = run.python("benchmarks.gpu_large", "--shapes", shape)
    return _interpreted(run, Step(name=f"large_{shape}", command=command, limit_s=150, least_s=50))


def right(run: Run) -> list[Step]:
    sections = ("machine", "answers", "numerics", "decode", "mixed", "throughput", "prefill")
    check = _gpu_check(run, 345, "gpu_check", *sections, "tokens")
    steps = [_inputs(run), check, _nano_vllm(run)]
    steps += [_generate(run), _bench(run, "triton"), _lose_rank(run), _transformers(run)]
    return [*steps, _bench(run, "hybrid"), _bench(run, "flash_attn"), _soak(run)]


def fast(run: Run) -> list[Step]:
    steps = [_pytest(run), _kernel_tests(run), _sweep(run, "decode"), _sweep(run, "prefill")]
    # Mostly a call of its own: a checker of one family takes 150 seconds.
    return [*steps, _ncu(run), _gpu_check(run, 545, "sanitizer", "sanitizer", least_s=300)]


def record(run: Run) -> list[Step]:
    return [_gpu_check(run, 540)]


def weights(run: Run) -> list[Step]:
    sections = ("8B", "8B-int4", "8B-fp8", "30B-A3B", "grouped")
    check = _gpu_check(run, 530, "weights", "machine", "numerics", *sections)
    return [check, _kernel_tests(run)]


def serve(run: Run) -> list[Step]:
    return [_inputs(run), _serve(run), _serve_kill(run)]


def large(run: Run) -> list[Step]:
    steps = [_large(run, "8B"), _large(run, "32B"), _inputs(run), *_starts(run, "0.6B", "inputs")]
    return [*steps, _inputs(run, "8B", "inputs_8B"), *_starts(run, "8B", "inputs_8B")]


def standby(run: Run) -> list[Step]:
    steps = [_pytest(run, "test_gpu_memory.py", "test_gpu_standby.py"), _inputs(run)]
    steps += [_lose_ranks(run, "kill"), _lose_ranks(run, "stray"), _inputs(run, "8B", "inputs_8B")]
    steps += [_lose_ranks(run, "kill", "8B")]
    return [*steps, *(_lose_ranks(run, "none", "8B", spares) for spares in ("standby", "warm"))]


# By name: the steps of a run, and the seconds that it may take unless it is told otherwise.
RUNS: dict[str, tuple[Callable[[Run], list[Step]], float]] = {
    "right": (right, 420.0),
    "fast": (fast, 560.0),
    "record": (record, 560.0),
    "weights": (weights, 560.0),
    "serve": (serve, 240.0),
    "large": (large, 560.0),
    "standby": (standby, 560.0),
}


def earlier_results(out: Path, names: set[str]) -> list[Result]:
    """Of an earlier call with the same folder, what this one does not do again."""
    path = out / "summary.json"
    results: list[Result] = json.loads(path.read_text())["steps"] if path.exists() else []
    return [r for r in results if r["name"] not in names and not r["status"].startswith("dropped")]


def gather_parts(out: Path) -> None:
    """Put what a GPU check that was killed has left, a file per process, into `parts.json`."""
    paths = sorted(out.glob("*_part*.json"))
    if paths:
        write_json(out / "parts.json", {path.stem: json.loads(path.read_text()) for path in paths})
    for path in paths:
        path.unlink()


# The GPU


def has_gpu() -> bool:
    """Asks torch, in another process, so that this one takes no memory of the GPU."""
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def gpu_memory_mib() -> float | None:
    """Memory of the first GPU that is in use, None where nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        return float(done.stdout.splitlines()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def keep_logs_of_ray(out: Path, kept: set[Path]) -> None:
    """Append to `out/log.txt` the ends of logs of Ray's processes that are not `kept` yet: what
    ranks, spares and drivers said.
    """
    with (out / "log.txt").open("ab") as log:
        for path in sorted(_LOGS_OF_RAY.glob("worker-*.err")):
            if (real_path := path.resolve()) not in kept and path.stat().st_size:
                kept.add(real_path)
                log.write(f"\n--- {path.name}\n".encode() + path.read_bytes()[-_KEPT_LOG_BYTES:])


def memory_after(before_mib: float | None) -> Result:
    """What a step has left in the GPU's memory, some seconds after its processes have ended."""
    until_s = time.monotonic() + _FREED_S
    while (used_mib := gpu_memory_mib()) is not None and before_mib is not None:
        left_mib = used_mib - before_mib
        if left_mib <= _LEFT_MIB:
            return {"gpu_mib_left": 0.0}
        if time.monotonic() > until_s:
            return {"gpu_mib_left": left_mib}
        time.sleep(0.5)
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="for checkpoints; by default a temporary folder")
    parser.add_argument("--nano-vllm", type=Path, help="a checkout of nano-vLLM, to compare with")
    parser.add_argument("--triton-cache", type=Path, help="a folder with compiled kernels")
    parser.add_argument("--steps", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--budget-s", type=float, help="seconds for all of it")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    on_gpu, before_mib = has_gpu(), gpu_memory_mib()
    if not on_gpu and not args.small:
        parser.error("torch sees no GPU here; --small tries the run anywhere")
    work = args.work or Path(tempfile.gettempdir()) / f"eagleray_gpu_runs{'_small' * args.small}"
    run = Run(
        out=args.out.resolve(),
        work=work.resolve(),
        small=args.small,
        on_gpu=on_gpu,
        nano_vllm=args.nano_vllm.resolve() if args.nano_vllm else None,
        brought=args.triton_cache.resolve() if args.triton_cache else None,
    )
    make, budget_s = RUNS[args.run]
    steps = make(run)
    if unknown := set(args.steps or ()) - {step.name for step in steps}:
        names = ", ".join(step.name for step in steps)
        parser.error(f"{args.run} has no step {min(unknown)}; it has {names}")
    steps = [step for step in steps if not args.steps or step.name in args.steps]
    run.work.mkdir(parents=True, exist_ok=True)
    os.environ |= _environment(run)
    summary: dict[str, Any] = {"run": args.run, "small": args.small, "argv": sys.argv[1:]}
    summary["steps"] = earlier_results(run.out, {step.name for step in steps})
    with kernel_cache(run.brought or run.out, run.out) as cache:
        kept: set[Path] = set()

        def after(_: Step) -> Result:
            keep_logs_of_ray(run.out, kept)
            return memory_after(before_mib)

        run_steps(steps, summary, run.out, args.budget_s or budget_s, after)
        cache.pack()
    gather_parts(run.out)
    print("\n" + table(summary, run.out))
    if args.small:
        print("\ntiny sizes: times and speeds say nothing")
    if undone := _undone(steps, summary["steps"]):
        words = ["python", "-m", "benchmarks.gpu_runs", *sys.argv[1:], "--steps", *undone]
        print(f"\nnot done: {shlex.join(words)}")
    sys.exit(any(_has_failed(result) for result in summary["steps"]))


def _environment(run: Run) -> dict[str, str]:
    """For all steps: caches of compilers that they share, output at once, nothing from a hub."""
    here = [str(SOURCE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "TRITON_CACHE_DIR": str(run.work / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(run.work / "inductor"),
        "PYTHONPATH": os.pathsep.join(here),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _undone(steps: list[Step], results: list[Result]) -> list[str]:
    """The steps that there was no time for, after those that they need."""
    undone = {result["name"] for result in results if result["status"].startswith("dropped")}
    needed = {name for step in steps if step.name in undone for name in step.needs}
    return [step.name for step in steps if step.name in undone | needed]


def _has_failed(result: Result) -> bool:
    return not result["status"].startswith(("ok", "skipped")) or bool(result.get("gpu_mib_left"))


if __name__ == "__main__":
    main()
