"""Fills the parameters of one rank from safetensors files, slice by slice.

A rank reads only the slices that its layers declare and copies each to its own memory: safetensors
slices are lazy views of the mapped file, which would keep it mapped, be read only in the first
step, and crash the process if the file were rewritten. Conversion to the engine's dtype, or to
codes, happens in that copy, so nothing is held twice. Never imports transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from configs.formats.stored import I8, tensor_name
from configs.model import ModelConfig
from configs.quantization import Quantization
from kernels.reference.grouped import (
    FP8_SCALE_BLOCK_ROWS,
    INT4_CODES_PER_WORD,
    pack_codes,
    quantize_blocks,
    quantize_groups,
)
from kernels.reference.int8 import quantize_rows
from scheduler.errors import ConfigError, UnreadableError
from workers.models.checkpoint import (
    StoredTensor,
    check_checkpoint,
    is_layer_tensor,
    is_quantized,
    merged_place,
)
from workers.models.fingerprint import LoadedWeightsHash
from workers.models.layers import Part
from workers.models.stored import OpenFiles, StoredMatrix
from workers.models.weights import WeightSlice
from workers.progress import Progress

_ROWS_AT_ONCE = 256  # quantized or unpacked at a time


def load_weights(
    parts: Iterable[Part],
    model_dir: Path,
    model: ModelConfig,
    finish: Callable[[Part], None],
    progress: Progress | None = None,
    weights_hash: LoadedWeightsHash | None = None,
) -> None:
    """Fill every slice of each part, which is given to `finish` then, before the next one is begun.
    Raises `ConfigError` (see `check_checkpoint`), of which `UnreadableError` may pass.

    `progress` counts the bytes filled. `weights_hash` gets all values, and has read those of a part
    before that is finished.
    """
    stored_tensors = check_checkpoint(model_dir, model)
    with OpenFiles() as files:
        for part in parts:
            # A call of its own, because `finish` may free the memory that its variables refer to.
            _fill_slices(part, files, model, stored_tensors, progress, weights_hash)
            if weights_hash is not None:
                weights_hash.wait()
            finish(part)


def _fill_slices(
    part: Part,
    files: OpenFiles,
    model: ModelConfig,
    stored_tensors: dict[str, StoredTensor],
    progress: Progress | None,
    weights_hash: LoadedWeightsHash | None,
) -> None:
    for piece in part.slices():
        path = stored_tensors[_stored_name(piece.name, model, stored_tensors)].path
        try:
            _fill(piece, _values(piece, files, model, stored_tensors), weights_hash)
        except OSError as error:  # also of a file that is missing, which the check has found
            raise UnreadableError(f"{path} cannot be read: {error}") from None
        except SafetensorError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        if progress is not None:
            progress.loaded_bytes += piece.nbytes


def held_dtype(
    model_dir: Path,
    model: ModelConfig,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    quantization: Quantization | None = None,
) -> torch.dtype:
    """The dtype in which matrices that are not quantized can be held without loss: `weight_dtype`,
    bfloat16 or the engine's `dtype`, if the checkpoint stores them all in it; otherwise `dtype`.
    Raises `ConfigError` (see `check_checkpoint`).
    """
    if weight_dtype is dtype:
        return dtype
    matrix_dtypes = {
        tensor.dtype
        for name, tensor in check_checkpoint(model_dir, model).items()
        if len(tensor.shape) > 1
        and not name.endswith("_scale")
        and (quantization is None or not is_layer_tensor(name))
    }
    return weight_dtype if matrix_dtypes <= {"BF16", I8} else dtype


class _MergedMatrix:
    """The matrix of one expert, `num_rows` rows from `first_row` on in the tensor of all of them,
    indexed as a slice of safetensors is.
    """

    def __init__(self, values: Any, expert: int, num_rows: int, first_row: int) -> None:
        self._values, self._expert = values, expert
        self._num_rows, self._first_row = num_rows, first_row

    def __getitem__(self, window: tuple[slice, slice]) -> Tensor:
        rows, columns = window
        start, stop, _ = rows.indices(self._num_rows)
        rows = slice(self._first_row + start, self._first_row + stop)
        return self._values[self._expert, rows, columns]  # type: ignore[no-any-return]


def _stored_name(name: str, model: ModelConfig, stored_tensors: Mapping[str, StoredTensor]) -> str:
    """The tensor that holds the values, or the codes, of what a layer calls `name`."""
    if model.stored_format is not None and is_quantized(model, name, stored_tensors):
        return tensor_name(name, model.stored_format.codes_suffix)
    location = merged_place(name)
    return name if name in stored_tensors or location is None else location[0]


def _values(
    piece: WeightSlice,
    files: OpenFiles,
    model: ModelConfig,
    stored_tensors: dict[str, StoredTensor],
) -> Any:
    """All values that `piece` is a part of, to be indexed like a slice of safetensors."""
    if model.stored_format is not None and is_quantized(model, piece.name, stored_tensors):
        rows, columns = piece.shape
        return StoredMatrix(model.stored_format, piece.name, (rows, columns), stored_tensors, files)
    name = _stored_name(piece.name, model, stored_tensors)
    values = files.open_file(stored_tensors[name].path).get_slice(stored_tensors[name].name)
    if name != piece.name and (location := merged_place(piece.name)) is not None:
        _, expert, is_second_half = location
        return _MergedMatrix(
            values, expert, piece.shape[0], piece.shape[0] if is_second_half else 0
        )
    assert stored_tensors[name].shape == piece.shape, (
        f"{name}: layer declares {piece.shape}, checkpoint check {stored_tensors[name].shape}"
    )
    return values


def _fill(piece: WeightSlice, values: Any, weights_hash: LoadedWeightsHash | None) -> None:
    if piece.target.numel() == 0:  # a rank that has only padding of the vocabulary
        return
    window = [slice(None)] * len(piece.shape)
    window[piece.dim] = slice(piece.start, piece.start + piece.target.shape[piece.dim])
    if piece.scale is not None:
        _fill_codes(piece, values, weights_hash)
    elif isinstance(values, StoredMatrix):
        _unpack(piece, values, window, weights_hash)
    else:
        _copy(piece.target, values[tuple(window)], weights_hash)


def _fill_codes(piece: WeightSlice, values: Any, weights_hash: LoadedWeightsHash | None) -> None:
    """Codes of groups of inputs, as they are stored or computed, some rows at a time; those of 4
    bits in words of the kernels' own order.
    """
    assert piece.scale is not None
    num_rows, num_words = piece.target.shape
    num_inputs = num_words if piece.zeros is None else num_words * INT4_CODES_PER_WORD
    first_row, first_input = (piece.start, 0) if piece.dim == 0 else (0, piece.start)
    inputs = range(first_input, first_input + num_inputs)
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        chunk = slice(first, min(first + _ROWS_AT_ONCE, num_rows))
        rows = range(first_row + chunk.start, first_row + chunk.stop)
        if piece.group_size == 0:
            codes, zeros, scale = values.codes(rows, inputs, piece.scale.shape[1])
        else:
            codes, zeros, scale = _computed_codes(piece, values, rows, inputs)
        if piece.zeros is not None:
            assert zeros is not None
            codes = pack_codes(codes)
            _copy(piece.zeros[chunk], zeros, weights_hash)
        _copy(piece.target[chunk], codes, weights_hash)
        _copy(piece.scale[chunk], scale, weights_hash)


def _computed_codes(
    piece: WeightSlice, values: Any, rows: range, inputs: range
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(codes, zero points, scales) of a part, from whole rows and blocks of rows, because the
    largest number may be in another rank's part.
    """
    assert piece.scale is not None
    if piece.target.dtype is torch.int8:
        whole_rows = values[rows.start : rows.stop, :]
        max_magnitude_M = whole_rows.abs().amax(dim=1)
        codes, scale_M = quantize_rows(whole_rows[:, inputs.start : inputs.stop], max_magnitude_M)
        return codes, None, scale_M.unsqueeze(1)
    first_block_start, last_block_start = (
        edge // FP8_SCALE_BLOCK_ROWS * FP8_SCALE_BLOCK_ROWS for edge in (rows.start, rows.stop - 1)
    )
    whole_rows = values[
        first_block_start : min(last_block_start + FP8_SCALE_BLOCK_ROWS, piece.shape[0]), :
    ]
    zeros = None
    if piece.zeros is None:
        codes, scale = quantize_blocks(whole_rows, piece.group_size)
    else:
        codes, zeros, scale = quantize_groups(whole_rows, piece.group_size)
    own_rows = slice(rows.start - first_block_start, rows.stop - first_block_start)
    held_group_size = len(inputs) // piece.scale.shape[1]
    groups = torch.arange(inputs.start, inputs.stop, held_group_size) // piece.group_size
    return (
        codes[own_rows, inputs.start : inputs.stop],
        None if zeros is None else zeros[own_rows][:, groups],
        scale[own_rows][:, groups],
    )


def _unpack(
    piece: WeightSlice,
    values: StoredMatrix,
    window: list[slice],
    weights_hash: LoadedWeightsHash | None,
) -> None:
    """The values of stored codes, some rows at a time."""
    rows, columns = window
    first_row = rows.start or 0
    for first in range(0, len(piece.target), _ROWS_AT_ONCE):
        end_row = min(first + _ROWS_AT_ONCE, len(piece.target))
        chunk = slice(first_row + first, first_row + end_row)
        _copy(piece.target[first:end_row], values[chunk, columns], weights_hash)


def _copy(target: Tensor, values: Tensor, weights_hash: LoadedWeightsHash | None) -> None:
    """Fill the target, and hash what it got: on a GPU the values that were copied to it."""
    target.copy_(values)
    if weights_hash is not None:
        weights_hash.add(target if target.device.type == "cpu" else values)
