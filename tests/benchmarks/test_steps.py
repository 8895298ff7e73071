"""Steps within a time budget. They run in a process of their own, since they kill what is below."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_runs
from benchmarks.gpu_runs_table import table
from configs.paths import SOURCE_ROOT

PROGRAM = """
import sys
from pathlib import Path
from benchmarks.steps import Step, run_steps
steps = [Step(**{"limit_s": 30, "least_s": 0, **options}) for options in eval(sys.argv[1])]
run_steps(steps, {}, Path(sys.argv[2]), float(sys.argv[3]))
"""
# It starts a process in a session of its own, tells which, and hangs.
HANGS = """
import subprocess, sys, time
below = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(f'{{"below": {below.pid}}}', flush=True)
time.sleep(600)
"""
ORPHANS = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"


def step(name: str, program: str, **options: Any) -> dict[str, Any]:
    return {"name": name, "command": [sys.executable, "-c", program], **options}


def start(out: Path, steps: list[dict[str, Any]], budget_s: float = 60) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, repr(steps), str(out), str(budget_s)]
    return subprocess.Popen(command, cwd=SOURCE_ROOT)


def run(out: Path, steps: list[dict[str, Any]], budget_s: float = 60) -> dict[str, dict[str, Any]]:
    """Results of the steps by name."""
    assert start(out, steps, budget_s).wait(150) == 0
    return results(out)


def results(out: Path) -> dict[str, dict[str, Any]]:
    record = json.loads((out / "summary.json").read_text())
    return {result["name"]: result for result in record["steps"]}


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_a_step_that_hangs_is_killed_with_all_below_it_and_the_next_one_runs(
    tmp_path: Path,
) -> None:
    done = run(tmp_path, [step("hangs", HANGS, limit_s=2), step("next", "print('{\"x\": 1}')")])
    assert done["hangs"]["status"] == "killed after 2 s" and done["hangs"]["seconds"] < 10
    assert not Path(f"/proc/{done['hangs']['lines'][0]['below']}").exists()
    assert done["next"] == {
        "name": "next",
        "status": "ok",
        "seconds": done["next"]["seconds"],
        "lines": [{"x": 1}],
    }
    assert '{"x": 1}' in (tmp_path / "log.txt").read_text()


def test_processes_that_a_step_leaves_behind_are_named_and_killed(tmp_path: Path) -> None:
    done = run(tmp_path, [step("leaves", ORPHANS), step("next", "")])
    assert done["leaves"]["status"] == "ok" and done["leaves"]["left"] == ["sleep 600"]
    assert done["next"]["status"] == "ok" and "left" not in done["next"]
    assert "processes: 1" in table({"steps": list(done.values())}, tmp_path)


def test_what_is_done_survives_the_death_of_the_run(tmp_path: Path) -> None:
    runner = start(
        tmp_path, [step("first", "print('{}')"), step("second", "import time\ntime.sleep(5)")]
    )
    wait_until(lambda: (tmp_path / "summary.json").exists() and "first" in results(tmp_path))
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    assert {name: r["status"] for name, r in results(tmp_path).items()} == {"first": "ok"}


def test_steps_are_left_out_without_time_and_without_what_they_need(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        [
            step("fails", "raise SystemExit(3)"),
            step("needs it", "", needs=("fails",)),
            step("too long", "", least_s=100),
            step("short", "print('5')", expected=("5", "7")),
            step("not here", "", skipped="no reason"),
        ],
        budget_s=50,
    )
    statuses = {name: result["status"] for name, result in done.items()}
    assert statuses.pop("too long").startswith("dropped: ")
    assert statuses == {
        "fails": "exit code 3",
        "needs it": "dropped: fails has not succeeded",
        "short": "its output lacks 7",
        "not here": "skipped: no reason",
    }


def test_a_step_is_told_how_long_it_may_take(tmp_path: Path) -> None:
    program = "import json, sys; print(json.dumps({'words': sys.argv[1:]}))"
    steps = [step("first", program, margin_s=5.0), step("late", program, margin_s=5.0, limit_s=600)]
    done = run(tmp_path, [*steps, step("untold", program)], budget_s=50)
    words = {name: result["lines"][0]["words"] for name, result in done.items()}
    assert words["first"] == ["--within", "25.0"] and words["untold"] == []
    assert words["late"][0] == "--within" and 20 < float(words["late"][1]) <= 45


def test_long_output_loses_its_middle(tmp_path: Path) -> None:
    program = "print('begin', 'x' * 3_000_000, 'end')"
    run(tmp_path, [step("talks", program), step("next", "print('after')")])
    said = (tmp_path / "log.txt").read_text()
    assert 2_000_000 < len(said) < 2_200_000
    places = [said.index(word) for word in ("begin", "bytes left out", " end\n", "after")]
    assert places == sorted(places)


def test_every_run_is_made_of_steps_that_exist(tmp_path: Path) -> None:
    for name, (make, budget_s) in gpu_runs.RUNS.items():
        run_ = gpu_runs.Run(
            out=tmp_path, work=tmp_path, small=False, on_gpu=True, nano_vllm=tmp_path, brought=None
        )
        steps = make(run_)
        names = [step.name for step in steps]
        assert len(set(names)) == len(names) and budget_s <= 600, name
        for step in steps:
            assert set(step.needs) <= set(names[: names.index(step.name)])
            assert 0 < step.least_s < step.limit_s <= budget_s


def test_all_sections_of_a_check_fit_into_its_step(tmp_path: Path) -> None:
    from benchmarks.gpu_check import DEFAULT_SECTIONS, SECTIONS, limits_of

    for make, _ in gpu_runs.RUNS.values():
        steps = make(
            gpu_runs.Run(
                out=tmp_path, work=tmp_path, small=False, on_gpu=True, nano_vllm=None, brought=None
            )
        )
        for step in (step for step in steps if "benchmarks.gpu_check" in step.command):
            assert step.margin_s is not None
            within_s = step.limit_s - step.margin_s
            names = [word for word in step.command if word in SECTIONS] or DEFAULT_SECTIONS
            limits_s = limits_of(names, within_s)
            assert sum(limits_s.values()) <= within_s + 1e-6 < step.limit_s
            assert all(limit_s > 0.7 * SECTIONS[name][1] for name, limit_s in limits_s.items())


def test_what_ranks_have_logged_is_kept_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's folder goes with the machine."""
    logs = tmp_path / "logs"
    logs.mkdir()
    monkeypatch.setattr(gpu_runs, "_LOGS_OF_RAY", logs)
    (logs / "worker-1.err").write_text("first\n" + "x" * 100_000 + "last")
    (logs / "worker-2.err").touch()
    kept: set[Path] = set()
    gpu_runs.keep_logs_of_ray(tmp_path, kept)
    (logs / "worker-2.err").write_text("a spare cannot share")
    gpu_runs.keep_logs_of_ray(tmp_path, kept)
    said = (tmp_path / "log.txt").read_text()
    assert said.count("xlast") == said.count("a spare cannot share") == 1 and "first" not in said


def test_a_gpu_whose_memory_nvidia_smi_does_not_tell_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '[N/A]'\n")
    tool.chmod(0o755)
    (tmp_path / "torch.py").write_text(
        "class cuda:\n    is_available = staticmethod(lambda: True)\n"
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_runs.gpu_memory_mib() is None
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert gpu_runs.has_gpu()
    (tmp_path / "torch.py").write_text("raise ImportError\n")
    assert not gpu_runs.has_gpu()


def test_a_second_call_keeps_what_the_first_has_done_and_tells_how_the_rest_is_done(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_runs", "right", "--small"]
    command += ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    run(tmp_path / "out", [step("inputs", "")])
    command += ["--budget-s", "1", "--steps", "ray_generate", "transformers"]
    done = subprocess.run(command, cwd=SOURCE_ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1].endswith("--steps ray_generate transformers")
    statuses = {name: result["status"] for name, result in results(tmp_path / "out").items()}
    assert statuses.pop("inputs") == "ok"
    assert list(statuses) == ["ray_generate", "transformers"]
    assert all(status.startswith("dropped") for status in statuses.values())


def test_what_a_killed_check_leaves_is_one_file(tmp_path: Path) -> None:
    for place in range(2):
        (tmp_path / f"gpu_check_part_{place}.json").write_text(json.dumps({"rows": [place]}))
    gpu_runs.gather_parts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["parts.json"]
    parts = json.loads((tmp_path / "parts.json").read_text())
    assert parts == {f"gpu_check_part_{place}": {"rows": [place]} for place in range(2)}
