"""When kernels are compiled, and that every clone of a version finds what another clone has
compiled.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from configs.engine import ResolvedConfig
from configs.paths import SOURCE_ROOT
from kernels.interface import Kernels
from tests.cluster.processes import wait_until
from workers.compilation import compile_first_step, start_background_compilation
from workers.parallel.group import TensorParallelGroup
from workers.progress import Progress


class RecordedKernels:
    """Stands in for a backend: its calls only record that they ran."""

    def __init__(self, ran: list[int | str]) -> None:
        self.ran = ran

        self.mixed_precision = SimpleNamespace(warmup_calls=lambda: [partial(ran.append, "mixed")])

    def warmup_calls(self, dtype: torch.dtype) -> list[Callable[[], object]]:
        return [partial(self.ran.append, i) for i in range(6)]


class RecordedGroup:
    """Stands in for one rank of a group whose ranks run in turn; its barrier only records that the
    rank has reached it.
    """

    def __init__(self, rank: int, size: int, ran: list[int | str]) -> None:
        self.rank, self.size, self.ran = rank, size, ran
        self.progress = Progress()

    def claim_tasks(self, name: str, tasks: list[Any]) -> list[Any]:
        return tasks[self.rank :: self.size]

    def barrier(self) -> None:
        self.ran.append("barrier")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
def test_each_kernel_is_compiled_by_one_rank_and_then_loaded_by_all(
    size: int, weight_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {*range(6), *(["all_reduce"] if size > 1 else [])}
    wanted |= {"mixed"} if weight_dtype == "bfloat16" else set()
    compiled: list[int | str] = []
    config = SimpleNamespace(
        engine=SimpleNamespace(tensor_parallel_size=size),
        model=SimpleNamespace(experts=None),
        dtype="float32",
        weight_dtype=weight_dtype,
        quantization=None,
    )
    for rank in range(size):
        ran: list[int | str] = []
        reduce = cast(Any, ran.append)
        monkeypatch.setattr(
            "workers.compilation.compile_all_reduce", lambda reduce=reduce: reduce("all_reduce")
        )
        compile_first_step(
            cast(Kernels, RecordedKernels(ran)),
            cast(TensorParallelGroup, RecordedGroup(rank, size, ran)),
            cast(ResolvedConfig, config),
        )
        before = ran[: ran.index("barrier")]
        assert set(ran) - {"barrier"} == wanted
        assert len(before) <= -(-len(wanted) // size)
        compiled += before
    assert sorted(map(str, compiled)) == sorted(map(str, wanted))


def test_background_process_ends_with_the_rank_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLERAY_CACHE_DIR", str(tmp_path))  # empty, so there is much to compile
    process = start_background_compilation("float32")
    assert process is not None and process.stdin is not None
    pid = process.pid
    wait_until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == 19, "the lowest priority", 60.0)
    assert process.poll() is None
    process.stdin.close()  # as the end of the rank does
    assert process.wait(60) == 0
    assert not list(tmp_path.rglob("other-steps-*")), "it has compiled everything first"


def test_full_cache_needs_no_background_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.cpu.cache import version_dir

    monkeypatch.setenv("EAGLERAY_CACHE_DIR", str(tmp_path))
    version_dir().mkdir(parents=True)
    (version_dir() / "other-steps-float32").touch()
    assert start_background_compilation("float32") is None


def test_cache_that_cannot_be_written_keeps_nothing_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EAGLERAY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    process = start_background_compilation("float32")
    assert process is not None and process.stdin is not None
    process.stdin.close()
    process.wait(60)


def test_a_system_without_room_for_a_process_keeps_nothing_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setenv("EAGLERAY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", fail)
    assert start_background_compilation("float32") is None
    assert "no more processes" in caplog.text


def test_user_without_a_home_directory_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.cpu.cache import cache_dir

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("EAGLERAY_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_dir() == SOURCE_ROOT / "build" / "cache"


def _version(checkout: Path) -> str:
    """The key of a checkout's cache of compiled kernels."""
    program = "from kernels.cpu.cache import version_dir; print(version_dir())"
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


def test_cache_depends_on_the_content_of_the_sources_alone(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    for folder in ("kernels", "configs", "scheduler", "workers"):
        shutil.copytree(
            SOURCE_ROOT / folder, clone / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    assert _version(clone) == _version(SOURCE_ROOT)
    inlined = clone / "kernels" / "cpu" / "jit.py"
    inlined.write_text(inlined.read_text() + "\n# changed\n")
    assert _version(clone) != _version(SOURCE_ROOT)
