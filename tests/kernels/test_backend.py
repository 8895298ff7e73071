"""Choosing a backend."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from configs.engine import ATTENTION_BACKENDS, EngineConfig
from kernels import select
from kernels.cpu.capabilities import has_bfloat16
from kernels.interface import Capabilities
from kernels.reference.backend import REFERENCE_KERNELS as REFERENCE
from kernels.select import choose_capabilities, select_backend

ROOT = Path(__file__).parents[2]
CPU = select_backend("cpu", "cpu")


def refuse(head_dim: int, block_size: int) -> None:
    if head_dim > 256:
        raise ValueError(f"head_dim {head_dim} is above 256")
    if block_size % 256:
        raise ValueError(f"block_size {block_size} must be a multiple of 256")


FLASH_ATTN = Capabilities(
    name="flash_attn",
    description="flash-attn",
    default_block_size=256,
    dtypes=("bfloat16",),
    fast_dtypes=("bfloat16",),
    check_shape=refuse,
)


def absent() -> Capabilities:
    raise ValueError("flash-attn is not installed")


def have(monkeypatch: pytest.MonkeyPatch, describe: Callable[[], Capabilities]) -> None:
    backend = dataclasses.replace(select.BACKENDS["cuda"]["flash_attn"], describe=describe)
    monkeypatch.setitem(select.BACKENDS["cuda"], "flash_attn", backend)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that flash-attn is installed."""
    have(monkeypatch, lambda: FLASH_ATTN)


def test_auto_takes_the_best_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, absent)
    assert select_backend("cpu") is CPU
    assert choose_capabilities("cuda:1").name == "triton"


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
    assert (
        choose_capabilities("cuda", dtype=dtype, head_dim=head_dim, block_size=block_size).name
        == name
    )


def test_every_backend_is_a_choice_of_the_option_and_its_help_names_it() -> None:
    names = {name for backends in select.BACKENDS.values() for name in backends}
    assert set(ATTENTION_BACKENDS) == {"auto", *names}
    [option] = [
        each for each in dataclasses.fields(EngineConfig) if each.name == "attention_backend"
    ]
    named = set(re.findall(r"\w+", option.metadata["help"]))
    assert names <= named


def test_kernels_have_the_products_that_their_capabilities_name() -> None:
    described = set()
    for backends in select.BACKENDS.values():
        for name, backend in backends.items():
            try:
                capabilities = backend.describe()
            except ValueError:
                continue  # not installed here
            kernels = backend.load()
            assert set(capabilities.quantizations) <= set(kernels.quantized), name
            assert ("bfloat16" in capabilities.weight_dtypes) == bool(kernels.mixed_precision), name
            described.add(name)
    assert {"cpu", "reference", "triton"} <= described


def test_named_backend_is_taken(installed: None) -> None:
    assert select_backend("cpu", "reference") is REFERENCE
    assert select_backend("cpu", "cpu") is CPU
    assert choose_capabilities("cuda", "flash_attn", dtype="float32") is FLASH_ATTN, (
        "its dtypes are checked with the model's"
    )
    with pytest.raises(ValueError, match="block_size 16 must be a multiple of 256"):
        choose_capabilities("cuda", "flash_attn", block_size=16)


def test_triton_on_a_cpu_wants_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_capabilities("cpu", "triton").name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=r"only in Triton's interpreter.*set TRITON_INTERPRET=1"):
        select_backend("cpu", "triton")


@pytest.mark.parametrize(("device", "name"), [("cuda", "cpu"), ("cpu", "warp")])
def test_backend_that_cannot_run_is_refused_with_the_possible_ones(device: str, name: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"'{name}' cannot run on device '{device}'; possible are auto, .*reference",
    ):
        select_backend(device, name)


def test_unknown_device_is_refused_with_the_possible_ones() -> None:
    with pytest.raises(ValueError, match="'tpu'; possible are cpu, cuda"):
        select_backend("tpu")


def test_capabilities_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CPU.capabilities.name = "other"  # type: ignore[misc]


def test_bfloat16_is_told_from_the_processor_as_onednn_tells_it() -> None:
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert has_bfloat16() is supported


def test_choosing_loads_neither_torch_nor_numba() -> None:
    program = (
        "import sys; from kernels.select import choose_capabilities as choose; "
        "choose('cpu'); choose('cuda', 'triton'); "
        "print(sorted({'torch', 'numba', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
