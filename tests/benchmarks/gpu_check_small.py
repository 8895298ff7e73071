"""The GPU check with small shapes, in this process."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu_check_common import Check
from kernels.gpu.backend import TRITON_KERNELS
from kernels.interface import Kernels
from tests.kernels.gpu_device import DEVICE
from tests.kernels.replaced import Replaced


def small(kernels: Kernels = TRITON_KERNELS, **others: Kernels) -> Check:
    """A check of `kernels` as the backend "triton", and of `others` by their names."""
    torch.manual_seed(0)
    return Check(device=DEVICE, small=True, backends={"triton": kernels, **others})


def refusing(kernels: Kernels, reason: str) -> Any:
    """The backend, as if it took no shape at all."""

    def refuse(head_dim: int, block_size: int) -> None:
        raise ValueError(reason)

    return Replaced(
        kernels, capabilities=Replaced(kernels.capabilities, check_shape=refuse, name="refusing")
    )
