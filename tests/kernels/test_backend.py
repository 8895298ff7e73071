"""Choosing a backend."""

from __future__ import annotations

import dataclasses

import pytest

from kernels import backend
from kernels.backend import REFERENCE, Kernels, select_backend

CPU = select_backend("cpu", "cpu")


FLASH_ATTN = dataclasses.replace(
    REFERENCE,
    name="flash_attn",
    default_block_size=256,
    dtypes=("bfloat16",),
    check=lambda head_dim, size: refuse(head_dim, size),
)


def refuse(head_dim: int, block_size: int) -> None:
    if head_dim > 256:
        raise ValueError(f"head_dim {head_dim} is above 256")
    if block_size % 256:
        raise ValueError(f"block_size {block_size} must be a multiple of 256")


def absent() -> Kernels:
    raise ValueError("flash-attn is not installed")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has flash-attn."""
    monkeypatch.setitem(backend._POSSIBLE["cuda"], "flash_attn", lambda: FLASH_ATTN)


def test_auto_takes_the_best_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backend._POSSIBLE["cuda"], "flash_attn", absent)
    assert select_backend("cpu") is CPU
    assert select_backend("cuda:1").name == "triton"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "name"),
    [
        (None, 64, None, "flash_attn"),
        ("bfloat16", 256, 512, "flash_attn"),
        ("bfloat16", 64, 16, "triton"),
        ("bfloat16", 512, 256, "triton"),
        ("float32", 64, None, "triton"),
    ],
)
def test_auto_passes_over_what_cannot_do_what_is_asked(
    installed: None, dtype: str | None, head_dim: int, block_size: int | None, name: str
) -> None:
    assert select_backend("cuda", dtype=dtype, head_dim=head_dim, block_size=block_size).name == name


def test_named_backend_is_taken(installed: None) -> None:
    assert select_backend("cpu", "reference") is REFERENCE
    assert select_backend("cpu", "cpu") is CPU
    assert select_backend("cuda", "flash_attn", dtype="float32") is FLASH_ATTN, (
        "its dtypes are checked with the model's"
    )
    with pytest.raises(ValueError, match="block_size 16 must be a multiple of 256"):
        select_backend("cuda", "flash_attn", block_size=16)


def test_triton_on_a_cpu_wants_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select_backend("cpu", "triton").name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=r"Triton's interpreter alone.*set TRITON_INTERPRET=1"):
        select_backend("cpu", "triton")


@pytest.mark.parametrize(("device", "name"), [("cuda", "cpu"), ("cpu", "warp")])
def test_backend_that_cannot_run_is_refused_with_the_possible_ones(device: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}' cannot run on device '{device}'; possible are auto, .*reference"):
        select_backend(device, name)


def test_unknown_device_is_refused_with_the_possible_ones() -> None:
    with pytest.raises(ValueError, match="'tpu'; possible are cpu, cuda"):
        select_backend("tpu")


def test_backends_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CPU.name = "other"  # type: ignore[misc]
