"""What a GPU costs the host: `python -m benchmarks.gpu_host [--out FILE] [--small]`.

    calls     microseconds of the host for one call of each kind that a step makes, most of them of
              kernels that do next to nothing
    stages    milliseconds of each stage of the launch of a decode step of the 0.6B shape, through
              graphs, by batch and way of sampling
    profile   where the host's time of such a launch goes: functions by their own time

A step is launched while the GPU computes those before it, so what counts is that the host's time
per step stays below the GPU's. Which calls that time is made of differs between machines: a virtual
machine may pay far more for each launch than the processor in it would.
`--small`: tiny shapes on any device, to try it where there is no GPU; times mean nothing.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import QWEN3_0_6B, RESULTS, commit
from benchmarks.common import machine as describe_machine
from benchmarks.gpu_check_common import Check, Row, rounded
from benchmarks.gpu_check_engine import (
    TINY,
    Parts,
    add,
    add_rows,
    blocks_for,
    near_zero,
    open_engine,
    prompts_of,
    run_all,
)
from benchmarks.gpu_check_process import write_json
from kernels.select import select_backend
from workers.device import open_device
from workers.model_runner import ModelRunner, PendingStep

_SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6},
    "Qwen3's own": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
}
_CONTEXT = 256
_SHOWN = 45


# Calls


def calls(check: Check) -> None:
    """Add a row per kind of call."""
    device = open_device(check.device.type)
    kernels = check.backends["triton"]
    dtype = check.dtype
    one, wide = check.normal(1), check.normal(16, 1024)
    square, weight = check.normal(1024, 1024), check.normal(1024)
    ids = torch.zeros(16, dtype=torch.int64, device=check.device)
    uploads = device.step_uploads(2**16)
    numbers = [ids.cpu().numpy()] * 4

    def upload() -> None:
        for array in numbers:
            uploads.put(array)
        uploads.send()

    kinds: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "torch.empty": lambda: torch.empty(16, 1024, dtype=dtype, device=check.device),
        "torch, in place": lambda: one.add_(1),
        "torch, a new tensor": lambda: wide + 1,
        "torch, index_select": lambda: wide.index_select(0, ids),
        "torch, matrix product": lambda: wide @ square,
        "ours, rms_norm": lambda: kernels.rms_norm(wide, weight, 1e-6),
        "ours, row_best": lambda: kernels.sampling.row_best(wide),
        "upload of 4 arrays": upload,
        "download": lambda: (device.to_host(ids), device.record_event()),
        "event": device.record_event,
    }
    if check.on_gpu:
        few = device.capture(lambda: one.add_(1))
        many = device.capture(lambda: [one.add_(1) for _ in range(256)])
        event = device.record_event()
        assert event is not None
        kinds |= {
            "graph of 1 kernel": few.replay,
            "graph of 256 kernels": many.replay,
            "event.query": event.query,
        }
    for name, call in kinds.items():
        check.add(name, partial(_host_us, check, call))


def _host_us(check: Check, call: Callable[[], object]) -> Row:
    """The median over rounds of few calls, between which the device is idle, so that no call waits
    until there is room for it.
    """
    num_rounds, num_calls = (2, 2) if check.small else (40, 16)
    seconds = []
    with torch.inference_mode():
        for _ in range(num_rounds):
            began = time.perf_counter()
            kept = [call() for _ in range(num_calls)]
            seconds.append((time.perf_counter() - began) / num_calls)
            del kept
            if check.on_gpu:
                torch.cuda.synchronize(check.device)
    return {"us": rounded(1e6 * statistics.median(seconds)), "least": rounded(1e6 * min(seconds))}


# Steps


def stages(check: Check, profiles: dict[str, str]) -> None:
    """Add a row per batch and way of sampling, and one of a step without graphs. `profiles` gets
    the functions of each.
    """
    raw, batches = (TINY, (2,)) if check.small else (QWEN3_0_6B, (1, 64, 256))
    context, num_steps = (8, 2) if check.small else (_CONTEXT, 60)
    for eager in (False, True):
        open_one = partial(
            open_engine,
            check,
            raw,
            "triton",
            near_zero,
            enforce_eager=eager,
            enable_prefix_caching=False,
            max_num_seqs=batches[-1],
            max_num_batched_tokens=64 if check.small else 16384,
            max_model_len=64 if check.small else None,
            num_kv_blocks=blocks_for(check, "triton", [context + 3 * num_steps] * batches[-1]),
        )
        rows: list[tuple[str, Callable[[Parts], Row]]] = []
        for batch in (batches[len(batches) // 2],) if eager else batches:
            for way, sampling in _SAMPLING.items():
                name = f"{'eager' if eager else 'graph'}, batch {batch}, {way}"
                measure = partial(_stages, check, batch, context, num_steps, sampling)
                rows.append((name, partial(measure, profiles, name)))
        add_rows(check, open_one, rows)


def _stages(
    check: Check,
    batch: int,
    context: int,
    num_steps: int,
    sampling: dict[str, Any],
    profiles: dict[str, str],
    name: str,
    parts: Parts,
) -> Row:
    engine, executor, config = parts
    pending: list[PendingStep] = []
    run = ModelRunner.run

    def noted(runner: ModelRunner, *arguments: Any) -> PendingStep:
        pending.append(run(runner, *arguments))
        return pending[-1]

    prompts = prompts_of({"vocab_size": config.model.vocab_size}, [context] * batch, seed=batch)
    for number, tokens in enumerate(prompts):
        add(engine, number, tokens, 3 * num_steps, **sampling)
    while any(
        seq.num_output_tokens < 2 for seq in (*engine.scheduler.running, *engine.scheduler.waiting)
    ):
        engine.step()
    ModelRunner.run = noted  # type: ignore[method-assign, assignment]
    profiler = cProfile.Profile()
    try:
        executor.launch_s.clear()
        began = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        step_ms = 1000 * (time.perf_counter() - began) / num_steps
        launch_ms = 1000 * statistics.median(executor.launch_s)
        seconds = [step.seconds for step in pending]
        profiler.enable()
        for _ in range(num_steps // 2):
            engine.step()
        profiler.disable()
    finally:
        ModelRunner.run = run  # type: ignore[method-assign]
    for number in range(batch):
        engine.finish(str(number), "measured")
    run_all(engine)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(_SHOWN)
    profiles[name] = text.getvalue()
    return {"step_ms": rounded(step_ms), "launch_ms": rounded(launch_ms)} | {
        f"{stage}_ms": rounded(1000 * statistics.median(of_step[stage] for of_step in seconds))
        for stage in ("prepare", "forward", "sample")
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_host.json")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on any device")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not args.small:
        parser.error("there is no GPU here; --small runs on a CPU, with TRITON_INTERPRET=1")
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    backends = {"triton": select_backend(device.type, "triton")}
    check = Check(device=device, small=args.small, backends=backends)
    profiles: dict[str, str] = {}
    record: dict[str, Any] = {
        "benchmark": "gpu_host",
        "small": args.small,
        "commit": commit(),
        "machine": describe_machine(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "rows": check.rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    check.on_row = lambda: write_json(args.out, record)
    calls(check)
    stages(check, profiles)
    for row in check.rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    for name, text in profiles.items():
        print(f"\n{name}\n{text}")
    sys.exit(any(not row.get("passed", True) for row in check.rows))


if __name__ == "__main__":
    main()
