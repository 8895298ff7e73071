"""SiLU-and-multiply, the gate of the MLP (Shazeer 2020, arXiv:2002.05202). Legend: T tokens, F
features.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_and_mul_reference(gate_up_T2F: Tensor) -> Tensor:
    """`silu(gate) * up` as [T, F]; the gate is the first half of the last dimension. On any
    device.
    """
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return functional.silu(gate_TF) * up_TF
