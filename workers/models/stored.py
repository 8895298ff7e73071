"""Reads matrices that a checkpoint stores as codes with scales (see `configs/formats/stored.py`).

Values are computed in float32, where those of integer codes are exact: a scale is a float16 or
bfloat16, a code a small integer. A rank may read any part of a matrix: where it ends within a
group, a word or a block, each of two ranks reads what they share.

Legend: X features in, Y features out (rows), G groups of inputs, R rows of scales.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from configs.formats.stored import INT32, StoredFormat, tensor_name
from scheduler.errors import ConfigError
from workers.models.checkpoint import StoredTensor

_DOWNLOAD_AGAIN = "Download or copy the checkpoint again"


class OpenFiles(ExitStack):
    """The files of a checkpoint, each opened once: to read the header of one that holds thousands
    of experts takes a tenth of a second.
    """

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[Path, Any] = {}

    def open_file(self, path: Path) -> Any:
        """The file at `path`. Raises as `safe_open`."""
        if path not in self._files:
            self._files[path] = self.enter_context(safe_open(path, framework="pt", device="cpu"))
        return self._files[path]


class StoredMatrix:
    """The matrix `name` (it ends in "weight"), indexed as a slice of safetensors is: `[rows,
    columns]` gives these values in float32, `codes` the codes of a part, with zero points and
    scales.
    """

    def __init__(
        self,
        stored_format: StoredFormat,
        name: str,
        shape: tuple[int, int],
        stored_tensors: dict[str, StoredTensor],
        files: OpenFiles,
    ) -> None:
        """Raises `ConfigError` when scales are not finite, or the index of groups is damaged or
        contradicts config.json; reading does when codes are not numbers.
        """
        self._format, self._name, self._shape = stored_format, name, shape
        self._stored_tensors, self._files = stored_tensors, files
        codes = stored_tensors[tensor_name(name, stored_format.codes_suffix)]
        self._codes = files.open_file(codes.path).get_slice(codes.name)
        scale = self._read(stored_format.scales_suffix).to(torch.float32)
        if not bool(scale.isfinite().all()):
            raise self._error(
                stored_format.scales_suffix, "holds scales that are not finite numbers"
            )
        self._scale_RG = scale.reshape(1, 1) if scale.ndim == 1 else self._untransposed(scale)
        self._zeros_YG = self._read_zeros()
        self._group_X = self._read_groups()

    def __getitem__(self, window: tuple[slice, slice]) -> Tensor:
        rows, columns = (range(size)[part] for size, part in zip(self._shape, window, strict=True))
        group_X = self._group_X[columns.start : columns.stop]
        values_YX = self._window([rows, columns]).to(torch.float32)
        if self._zeros_YG is not None:
            values_YX -= self._zeros_YG[rows.start : rows.stop][:, group_X]
        elif self._format.zero_offset:
            values_YX -= self._format.zero_offset
        return values_YX.mul_(self._scale(rows, group_X))

    def codes(self, rows: range, inputs: range, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """(codes, zero points, scales) of a part, where these inputs are so many groups of one
        size: [rows, inputs], uint8 [rows, groups], float32 [rows, groups]. e4m3 codes are uint8.
        """
        held_group_size = len(inputs) // num_groups
        groups = self._group_X[inputs.start : inputs.stop : held_group_size]
        zeros = torch.full((len(rows), num_groups), self._format.zero_offset, dtype=torch.uint8)
        if self._zeros_YG is not None:
            zeros = self._zeros_YG[rows.start : rows.stop][:, groups]
        codes = self._window([rows, inputs])
        codes = codes.view(torch.uint8) if self._format.is_fp8 else codes
        return codes, zeros, self._scale(rows, groups)

    def _scale(self, rows: range, groups: Tensor) -> Tensor:
        """[rows, groups]"""
        scale_row_Y = torch.zeros(len(rows), dtype=torch.int64)
        if self._format.block_rows != -1:
            scale_row_Y = torch.arange(rows.start, rows.stop) // self._format.block_rows
        return self._scale_RG[scale_row_Y][:, groups]

    def _window(self, spans: list[range]) -> Tensor:
        """The codes of these rows and columns."""
        packed_dim = 0 if self._format.words_span_rows else 1
        codes_per_word = len(self._format.code_order) or 1
        span = spans[packed_dim]
        first_word = span.start // codes_per_word
        spans[packed_dim] = range(first_word, -(-span.stop // codes_per_word))
        slices = [slice(words.start, words.stop) for words in spans]
        if self._format.is_transposed:
            slices.reverse()
        codes = self._untransposed(self._codes[tuple(slices)])
        if self._format.dtype == INT32:
            codes = unpack(codes, self._format.code_order, self._format.bits, packed_dim)
        elif self._format.is_fp8 and bool((codes.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise self._error(self._format.codes_suffix, "holds codes that are not numbers")
        return codes.narrow(packed_dim, span.start - first_word * codes_per_word, len(span))

    def _read_zeros(self) -> Tensor | None:
        """uint8 [Y, G]"""
        stored_format = self._format
        if stored_format.zeros_suffix is None:
            return None
        words = self._untransposed(self._read(stored_format.zeros_suffix))
        # The offset was subtracted from whole words, so a zero point of 0 has borrowed from the
        # next one: adding to whole words gives that back.
        ones = sum(
            1 << stored_format.bits * index for index in range(len(stored_format.code_order))
        )
        words = words + stored_format.zero_offset * ones
        return unpack(words, stored_format.code_order, stored_format.bits, 0)[: self._shape[0]]

    def _read_groups(self) -> Tensor:
        """int64 [X]: the group of each input."""
        stored_format, size_in = self._format, self._shape[1]
        if stored_format.group_index_suffix is not None:
            group_X = self._read(stored_format.group_index_suffix).long()
            num_groups = self._scale_RG.shape[1]
            if -1 not in group_X:  # otherwise it was never filled in, and inputs are in order
                if not 0 <= int(group_X.min()) <= int(group_X.max()) < num_groups:
                    raise self._error(
                        stored_format.group_index_suffix,
                        f"names groups that do not exist; there are {num_groups}",
                    )
                return group_X
        ordered_group_X = torch.arange(size_in) // (
            size_in if stored_format.group_size == -1 else stored_format.group_size
        )
        self._check_redundant_index(ordered_group_X)
        return ordered_group_X

    def _check_redundant_index(self, ordered_group_X: Tensor) -> None:
        suffix = self._format.redundant_index_suffix
        if suffix is None or tensor_name(self._name, suffix) not in self._stored_tensors:
            return
        group_X = self._read(suffix).long()
        is_filled_in = -1 not in group_X and bool(group_X.any())  # both stand for none
        if is_filled_in and not torch.equal(group_X, ordered_group_X):
            name = tensor_name(self._name, suffix)
            raise ConfigError(
                f"{self._stored_tensors[name].path}: {name} is not in order, but"
                f" {self._format.reason_for_order}, or use a checkpoint whose files belong together"
            )

    def _untransposed(self, tensor: Tensor) -> Tensor:
        return tensor.T if self._format.is_transposed else tensor

    def _read(self, suffix: str) -> Tensor:
        tensor = self._stored_tensors[tensor_name(self._name, suffix)]
        return self._files.open_file(tensor.path).get_tensor(tensor.name)  # type: ignore[no-any-return]

    def _error(self, suffix: str, fault: str) -> ConfigError:
        name = tensor_name(self._name, suffix)
        return ConfigError(f"{self._stored_tensors[name].path}: {name} {fault}. {_DOWNLOAD_AGAIN}")


def unpack(words: Tensor, order: tuple[int, ...], bits: int, dim: int) -> Tensor:
    """The codes, of 4 or 8 bits, in int32 `words` [A, B], as uint8: [A * codes per word, B] with
    `dim` 0, [A, B * codes per word] with `dim` 1. order: see `StoredFormat`.
    """
    contiguous_words = words.clone(memory_format=torch.contiguous_format)
    bytes_AB4 = contiguous_words.view(torch.uint8).unflatten(1, (-1, 4))
    shape = list(words.shape)
    shape.insert(dim + 1, len(order))
    codes = torch.empty(shape, dtype=torch.uint8)
    for place, code_index in enumerate(order):
        byte, shift = divmod(bits * place, 8)
        shifted_AB = bytes_AB4[:, :, byte] >> shift if shift else bytes_AB4[:, :, byte]
        torch.bitwise_and(shifted_AB, (1 << bits) - 1, out=codes.select(dim + 1, code_index))
    return codes.flatten(dim, dim + 1)
