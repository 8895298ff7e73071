"""What a rank computes with, as far as it decides the last bits of results."""

from __future__ import annotations

import torch


def compute_platform_of(device: torch.device) -> str:
    """The kind of this machine's processor or GPU, and torch's version. Ranks for which this is the
    same get the same bits from the same numbers.
    """
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    # A rank on a GPU does not need it.
    import llvmlite.binding as llvm

    instructions = torch.backends.cpu.get_cpu_capability()
    return f"{llvm.get_host_cpu_name()} with {instructions}, torch {torch.__version__}"
