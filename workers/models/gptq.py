"""Reads matrices that are stored in the format of GPTQ (see configs/gptq.py).

A matrix [Y, X] is stored as codes of 4 or 8 bits, in 32-bit words with the lowest bits first:

- `qweight` [X / codes per word, Y]: the codes, packed along X;
- `qzeros` [G, Y / codes per word]: zero points of G groups of inputs, packed along Y;
- `scales` [G, Y];
- `g_idx` [X]: the group of each input, needed where they are not in order.

    weight[y, x] = (code[x, y] - zero[group[x], y]) * scale[group[x], y]

It is exact in float32: a scale is a float16 or bfloat16, a code a small integer.

Legend: X features in, Y features out (rows), G groups.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from configs.gptq import Gptq
from scheduler.errors import ConfigError
from workers.models.checkpoint import StoredTensor, gptq_part


class GptqMatrix:
    """The matrix `name` (it ends in ".weight"), indexed as a slice of safetensors is: `[rows,
    columns]` gives these values in float32. `words` is the slice of `qweight`.
    """

    def __init__(
        self, gptq: Gptq, name: str, size_in: int, stored: dict[str, StoredTensor], words: Any
    ) -> None:
        """Raises `ConfigError` when the index of groups is damaged."""

        def read(part: str) -> Tensor:
            full = gptq_part(name, part)
            with safe_open(stored[full].path, framework="pt", device="cpu") as file:
                return file.get_tensor(full)  # type: ignore[no-any-return]

        self._bits, self._words = gptq.bits, words
        self._scale_GY = read("scales").to(torch.float32)
        zeros_GY = unpack(read("qzeros"), self._bits, dim=1) + gptq.zero_offset
        # An offset of 1 means that zero point 0 was stored as -1: all bits are set.
        zeros_GY = zeros_GY & ((1 << self._bits) - 1)
        self._zeros_GY = zeros_GY[:, : self._scale_GY.shape[1]]  # the last word may have room left
        inputs = torch.arange(size_in)
        if gptq.has_index:
            self._group_X = read("g_idx").long()
            if not 0 <= int(self._group_X.min()) <= int(self._group_X.max()) < len(self._scale_GY):
                raise ConfigError(
                    f"{stored[gptq_part(name, 'g_idx')].path}: {gptq_part(name, 'g_idx')} names"
                    f" groups that do not exist; there are {len(self._scale_GY)}. Download or copy"
                    " the checkpoint again"
                )
        elif gptq.group_size == -1:
            self._group_X = torch.zeros_like(inputs)
        else:
            self._group_X = inputs // gptq.group_size

    def __getitem__(self, window: tuple[slice, slice]) -> Tensor:
        rows, columns = window
        codes_XY = unpack(self._words[:, rows], self._bits, dim=0)[: len(self._group_X)][columns]
        group_X = self._group_X[columns]
        zeros_XY, scale_XY = (
            table_GY[:, rows][group_X] for table_GY in (self._zeros_GY, self._scale_GY)
        )
        return ((codes_XY - zeros_XY) * scale_XY).T


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """The codes in int32 `words` [A, B], as int32: [A * codes per word, B] with `dim` 0, [A, B *
    codes per word] with `dim` 1.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    shifts = shifts.view(1, -1, 1) if dim == 0 else shifts
    codes = (words.unsqueeze(dim + 1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(dim, dim + 1)
