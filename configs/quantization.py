"""Matrices that are held as 8-bit codes: what the user asks for, or what a checkpoint stores.

The one such form is "int8": codes with one scale per output feature, multiplied by inputs that are
quantized per token as they come. How checkpoints store matrices is in `configs/formats/`.
"""

from __future__ import annotations

from dataclasses import dataclass

QUANTIZATIONS = ("int8",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The matrices of the decoder layers are codes. stored: the checkpoint holds codes; otherwise
    they are computed as weights are loaded. vocabulary: embedding and head are codes as well.
    """

    stored: bool
    vocabulary: bool
