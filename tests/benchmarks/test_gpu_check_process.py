"""The processes of the GPU check: they may crash, hang or run out of time, and kernels that they
compile are kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check, gpu_check_sanitizer
from benchmarks.gpu_check_cache import ARCHIVE, KernelCache, kernel_cache
from benchmarks.gpu_check_common import Check
from benchmarks.gpu_check_process import Section, run_section
from benchmarks.gpu_check_verdicts import UNPOISONED, poisoned
from tests.benchmarks.gpu_check_small import small

ROOT = Path(__file__).parents[2]


# Sections without torch, which start at once. Each adds a row, then ends in its own way.
ENDINGS = {
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "left": "print('cannot go on', file=sys.stderr); os._exit(3)",
    "silent": "os._exit(0)",
    "fine": "pass",
}
SECTION = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from benchmarks.gpu_check_process import run_section

def section(check):
    check.rows.append({{"name": "first", "passed": True}})
    check.on_row()
    {ending}
    check.rows.append({{"name": "last", "passed": True}})

run_section(SimpleNamespace(rows=[], on_row=None), section, Path(sys.argv[1]), float(sys.argv[2]))
"""


def section_of(part: Path, run: Callable[[Check], None], limit_s: float) -> Section:
    run_section(small(), run, part, time.monotonic() + limit_s)
    section: Section = json.loads(part.read_text())
    return section


def test_section_out_of_time_keeps_its_rows_and_a_broken_one_says_why(tmp_path: Path) -> None:
    part = tmp_path / "part.json"

    def slow(check: Check) -> None:
        check.add("first", lambda: {"passed": True})
        assert [row["name"] for row in json.loads(part.read_text())["rows"]] == ["first"]
        check.add("second", lambda: time.sleep(20) or {})  # type: ignore[func-returns-value]

    def broken(check: Check) -> None:
        check.add("raises", lambda: dict[str, Any]()["x"])
        check.add("goes on", lambda: {"passed": True})
        raise RuntimeError("no such device")

    section = section_of(part, slow, 0.2)
    assert [row["name"] for row in section["rows"]] == ["first"] and "out of time" in section[
        "ended_early"
    ]
    section = section_of(part, broken, 5.0)
    assert (section["failed"], section["ended_early"]) == (
        ["raises"],
        "RuntimeError: no such device",
    )
    assert "KeyError" in section["rows"][0]["error"] and section["rows"][1]["passed"]
    assert "raises" in gpu_check.table({"broken": section}, brief=True)


def test_end_of_time_that_a_destructor_swallows_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        def __del__(self) -> None:
            time.sleep(0.5)

    def swallows(check: Check) -> None:
        slow = Slow()
        del slow  # Python drops exceptions raised here
        check.add("swallowed", lambda: {"passed": True})
        time.sleep(20)

    dropped: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    section = section_of(tmp_path / "part.json", swallows, 0.2)
    assert len(dropped) == 1
    assert section["rows"] and "out of time" in section["ended_early"] and section["seconds"] < 5


def test_process_that_dies_or_hangs_keeps_its_rows_and_the_next_sections_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(gpu_check, "_MARGIN_S", 0.0)
    out = tmp_path / "made" / "out.json"
    known: list[list[str]] = []

    def command(name: str, family: str | None, part: Path, until_s: float) -> list[str]:
        known.append(list(json.loads(out.read_text())["sections"]) if out.exists() else [])
        return [
            sys.executable,
            "-c",
            SECTION.format(ending=ENDINGS[name]),
            str(part),
            str(until_s + 60),
        ]

    record: dict[str, Any] = {"sections": {}}
    gpu_check.run_sections(record, dict.fromkeys(ENDINGS, 5.0), out, command)
    sections = json.loads(out.read_text())["sections"]
    assert known == [list(ENDINGS)[:place] for place in range(len(ENDINGS))]
    assert {name: section["ended_early"] for name, section in sections.items()} == {
        "killed": "SIGKILL",
        "stopped": "hung and was killed",
        "left": "exit code 3: cannot go on",
        "silent": "has not ended",
        "fine": None,
    }
    rows = {name: [row["name"] for row in section["rows"]] for name, section in sections.items()}
    assert rows == {name: ["first"] for name in ENDINGS} | {"fine": ["first", "last"]}
    assert "cannot go on" in capfd.readouterr().err and list(out.parent.iterdir()) == [out]


def test_section_that_never_starts_says_so(tmp_path: Path) -> None:
    (tmp_path / "out_part.json").write_text(
        '{"rows": [{"name": "of another"}], "failed": [], "ended_early": null}'
    )
    command = [sys.executable, "-c", "raise SystemExit('no such module')"]
    record: dict[str, Any] = {"sections": {}}
    gpu_check.run_sections(record, {"speed": 30.0}, tmp_path / "out.json", lambda *_: command)
    assert record["sections"]["speed"]["ended_early"] == "exit code 1: no such module"
    assert record["sections"]["speed"]["rows"] == []


def test_family_of_kernels_that_kills_its_process_leaves_the_rows_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)

    def command(name: str, family: str | None, part: Path, until_s: float) -> list[str]:
        assert name == "numerics" and family is not None
        code = SECTION.format(ending=ENDINGS[family])
        return [sys.executable, "-c", code, str(part), str(until_s)]

    out, record = tmp_path / "out.json", {"sections": dict[str, Section]()}
    gpu_check.run_sections(record, {"numerics": 20.0}, out, command, ("killed", "fine", "left"))
    section = json.loads(out.read_text())["sections"]["numerics"]
    assert [row["name"] for row in section["rows"]] == ["first", "first", "last", "first"]
    assert section["ended_early"] == "killed: SIGKILL; left: exit code 3: cannot go on"
    assert list(tmp_path.iterdir()) == [out]


def checker(folder: Path, script: str) -> str:
    """Instead of CUDA's, a script of ours; `$@` is the command whose kernels it would watch."""
    tool = folder / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\ntool=$2\nshift 4\n{script}\n")
    tool.chmod(0o755)
    return str(tool)


RUNS = """test "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 || exit 2
"$@" || exit 3
"""


def test_a_checker_runs_the_kernels_of_a_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = checker(tmp_path, RUNS + "echo '=== ERROR SUMMARY: 0 errors'")
    row = gpu_check_sanitizer.run_tool(path, "memcheck", "elementwise", 60.0)
    assert (row["rows"], row["verdict"], row["passed"]) == (3, "passed", True)


# What the kernels' own process leaves, where it leaves the path of its part.
LEAVES = """while test "$1" != --part; do shift; done
printf '{"rows": [{"name": "a"}], "failed": [%s], "ended_early": %s}' "$failed" "$early" > "$2"
echo "=== $kind"
exit $code
"""


@pytest.mark.parametrize(
    ("failed", "early", "kind", "code", "verdict"),
    [
        ("", "null", "ERROR SUMMARY: 0 errors", 0, "passed"),
        ("", "null", "ERROR SUMMARY: 1 error", 99, "failed"),
        ("", "null", "RACECHECK SUMMARY: 0 errors", 0, "passed"),
        ("", "null", "it stopped: 0 errors", 0, "partial"),
        ('"a"', "null", "ERROR SUMMARY: 0 errors", 0, "failed"),
        ("", '"out of time"', "ERROR SUMMARY: 0 errors", 0, "partial"),
    ],
)
def test_a_checker_passes_only_what_was_seen_whole_and_was_right(
    tmp_path: Path, failed: str, early: str, kind: str, code: int, verdict: str
) -> None:
    script = f"failed='{failed}'; early='{early}'; kind='{kind}'; code={code}\n{LEAVES}"
    path = checker(tmp_path, script)
    row = gpu_check_sanitizer.run_tool(path, "memcheck", "elementwise", 5.0)
    assert (row["verdict"], row["passed"]) == (verdict, verdict == "passed")


def test_a_failed_row_says_what_the_checker_has_reported_first(tmp_path: Path) -> None:
    said = ["COMPUTE-SANITIZER", "Invalid __global__ write of size 4 bytes", "    at _kernel+0x160"]
    said += ["", "    by thread (0,0,0)", "    Address is misaligned", "    in frame 1"]
    lines = "\n".join(f"echo '========= {line}'" for line in [*said, "ERROR SUMMARY: 1 error"])
    row = gpu_check_sanitizer.run_tool(
        checker(tmp_path, f"{lines}\nexit 99"), "memcheck", "store", 5.0
    )
    assert row["verdict"] == "failed" and row["first"] == (
        "Invalid __global__ write of size 4 bytes; at _kernel+0x160; by thread (0,0,0);"
        " Address is misaligned"
    )


def test_checker_that_ran_no_kernels_has_not_passed(tmp_path: Path) -> None:
    path = checker(tmp_path, "")
    row = gpu_check_sanitizer.run_tool(path, "memcheck", "elementwise", 5.0)
    assert (row["said"], row["rows"], row["verdict"]) == ("nothing", 0, "partial")


def test_checker_that_hangs_is_killed_with_what_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check_sanitizer, "_TOOL_ENDS_S", 1.0)
    path = checker(tmp_path, f"sleep 600 & echo $! > {tmp_path}/child; wait")
    row = gpu_check_sanitizer.run_tool(path, "memcheck", "elementwise", 0.0)
    assert (row["verdict"], row["passed"]) == ("partial", False)
    stat = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    until_s = time.monotonic() + 10
    while stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_only_the_checker_of_unwritten_memory_is_given_memory_without_poison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checker(tmp_path, f'echo "$tool $(env | grep -c {UNPOISONED}) SUMMARY: 0"')
    said = {
        tool: gpu_check_sanitizer.run_tool(path, tool, "store", 5.0)["said"]
        for tool in gpu_check_sanitizer._TOOLS
    }
    assert [line.split()[1] for line in said.values()] == ["0", "0", "1"] and len(said) == 3
    monkeypatch.setenv(UNPOISONED, "1")
    with poisoned():
        assert not torch.are_deterministic_algorithms_enabled()


# Compiles one kernel for a chip that need not be here, and says whether it was in the cache.
COMPILES = """
import triton
from tests.kernels.compile_gpu import all_cases, compile_case
cached = []
triton.knobs.compilation.listener = lambda **compiled: cached.append(compiled["cache_hit"])
compile_case(next(name for name in all_cases() if "silu" in name), 90)
print(cached)
"""


def compiles() -> str:
    command = [sys.executable, "-c", COMPILES]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_compiled_kernel_is_found_again_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with kernel_cache(tmp_path / "nothing", tmp_path / "first") as cache:
        assert compiles() == "[False]\n" and cache.num_kernels == 1
        cache.pack()
        before = cache.archive.stat()
        cache.pack()  # nothing is new
        assert cache.archive.stat() == before and not list(cache.folder.glob("*/*.xz"))
    assert not cache.folder.exists()
    with kernel_cache(tmp_path / "first", tmp_path / "second") as again:
        assert again.folder != cache.folder and again.num_kernels == 1
        assert compiles() == "[True]\n"
        assert not list(again.folder.glob("*/*.ttir"))
        again.pack()
    assert not (tmp_path / "second").exists()


def test_archive_that_cannot_be_read_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ARCHIVE).write_bytes(b"not an archive")
    cache = KernelCache(folder=tmp_path / "cache", archive=tmp_path / "out" / ARCHIVE)
    cache.unpack(tmp_path / ARCHIVE)
    assert "cannot be read, so kernels are compiled" in capsys.readouterr().err
    assert cache.num_kernels == 0
