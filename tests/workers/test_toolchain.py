"""Everything that a slim image lacks is named before anything is loaded."""

from __future__ import annotations

import ctypes
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from scheduler.errors import ConfigError
from workers import device, toolchain


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that has everything, including the driver's library."""
    for name in ("CC", "TRITON_LIBCUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    return tmp_path


def test_nothing_is_missing_on_a_complete_machine(complete: Path) -> None:
    assert toolchain.toolchain_problems() == []


def test_a_compiler_is_looked_for(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    [said] = toolchain.toolchain_problems()
    assert "no C compiler" in said and "install gcc" in said
    monkeypatch.setenv("CC", "my-cc -m64")
    [said] = toolchain.toolchain_problems()
    assert "'my-cc -m64', is not there" in said
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "my-cc" else None)
    assert toolchain.toolchain_problems() == []


def test_headers_are_looked_for(complete: Path) -> None:
    (complete / "Python.h").unlink()
    [said] = toolchain.toolchain_problems()
    assert f"{complete / 'Python.h'} is missing" in said and "python3-dev" in said


def test_the_drivers_library_is_looked_for(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", none)
    [said] = toolchain.toolchain_problems()
    assert "libcuda.so.1 is not found" in said
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(complete))
    [said] = toolchain.toolchain_problems()
    assert "which has no libcuda.so.1" in said
    (complete / "libcuda.so.1").touch()
    assert toolchain.toolchain_problems() == []


def test_a_rank_on_a_gpu_says_so_before_it_loads(
    complete: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"GPU kernels cannot be compiled.*no C compiler"):
        device.open_device("cuda")
