"""Matrices that are held as codes: what the user asks for, or what a checkpoint stores.

- "int8": 8-bit codes with one scale per output feature, multiplied by inputs that are quantized per
  token as they come.
- "int4": 4-bit codes with a scale and a zero point per group of inputs, widened as they are
  multiplied; as a checkpoint stores them, or rounded to the nearest.
- "fp8": e4m3 numbers with a scale per group of inputs, otherwise like "int4".

How checkpoints store matrices is in `configs/formats/`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from configs.formats.stored import BFLOAT16, INT32, StoredFormat

INT8, INT4, FP8 = "int8", "int4", "fp8"
QUANTIZATIONS = (INT8, INT4, FP8)
_GROUP_SIZE = 128  # of codes that are computed while weights are loaded
_GROUP_MULTIPLES = {INT8: 1, INT4: 8, FP8: 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The matrices of the decoder layers are codes. is_stored: the checkpoint holds codes;
    otherwise they are computed as weights are loaded. includes_vocabulary: embedding and head are
    codes as well. group_size: of "int4" and "fp8", inputs that share a scale, -1 for all.
    scale_dtype: of "int4", spelled as in safetensors; "fp8" has float32.
    """

    is_stored: bool
    includes_vocabulary: bool
    name: str = INT8
    group_size: int = -1
    scale_dtype: str = BFLOAT16

    def held_group_size(self, size_in: int) -> int:
        """Inputs of a rank that share a scale. Where a rank ends within a stored group, it holds
        smaller ones, whose scales are the same.
        """
        return size_in if self.group_size == -1 else math.gcd(self.group_size, size_in)

    def fits(self, input_sizes: tuple[int, ...]) -> bool:
        """Whether matrices of so many inputs can be held: groups are whole words."""
        held_group_sizes = (self.held_group_size(size) for size in input_sizes)
        return all(size % self.group_multiple == 0 for size in held_group_sizes)

    @property
    def group_multiple(self) -> int:
        """A group is a multiple of so many inputs."""
        return _GROUP_MULTIPLES[self.name]

    @property
    def bytes_per_weight(self) -> float:
        """With the scales and zero points of groups."""
        code_bytes, group_bytes = {INT8: (1.0, 0), INT4: (0.5, 3), FP8: (1.0, 4)}[self.name]
        return code_bytes + (group_bytes / self.group_size if self.group_size > 0 else 0)


def stored_quantization(
    stored_format: StoredFormat, input_sizes: tuple[int, ...]
) -> Quantization | None:
    """The form in which codes of a checkpoint can be kept, None if they must be unpacked.
    input_sizes: numbers of inputs of the matrices of a rank.
    """
    if stored_format.is_int8:
        return Quantization(is_stored=True, includes_vocabulary=False)
    is_int4 = (
        stored_format.dtype == INT32
        and stored_format.bits == 4
        and stored_format.group_index_suffix is None
    )
    if not is_int4 and not stored_format.is_fp8:
        return None
    name = FP8 if stored_format.is_fp8 else INT4
    quantization = Quantization(
        is_stored=True, includes_vocabulary=False, name=name, group_size=stored_format.group_size
    )
    return quantization if quantization.fits(input_sizes) else None


def computed_quantization(name: str) -> Quantization:
    """The form in which matrices are held whose codes are computed while they are loaded."""
    group_size = -1 if name == INT8 else _GROUP_SIZE
    return Quantization(is_stored=False, includes_vocabulary=True, name=name, group_size=group_size)
