"""A rank says what it computes with."""

from __future__ import annotations

import llvmlite.binding as llvm
import pytest
import torch

from workers.processor import compute_platform_of


def test_on_a_cpu_it_is_the_chip_its_instructions_and_torch() -> None:
    platform = compute_platform_of(torch.device("cpu"))
    assert str(llvm.get_host_cpu_name()) in platform
    assert torch.backends.cpu.get_cpu_capability() in platform
    assert torch.__version__ in platform


def test_other_instructions_of_the_same_chip_are_another_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with ATEN_CPU_CAPABILITY, or where a virtual machine hides some."""
    before = compute_platform_of(torch.device("cpu"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER")
    assert compute_platform_of(torch.device("cpu")) != before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_it_is_that() -> None:
    assert torch.cuda.get_device_name(0) in compute_platform_of(torch.device("cuda", 0))
