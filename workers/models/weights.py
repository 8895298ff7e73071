"""A matrix of one rank: how it is filled from a checkpoint, and how products with it are computed.

Three forms: values in the engine's dtype, bfloat16 values in an engine that computes in float32,
and codes with scales of groups of inputs. A layer asks `WeightFormat` for its matrices and does not
know which form it got. Memory is uninitialized until the loader has filled every slice; then
`packed` gives the form with which products are fastest.

Legend: T tokens, X features in, Y features out (rows), G groups of inputs.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from configs.formats.stored import BFLOAT16, FLOAT16
from configs.quantization import FP8, INT4, INT8, Quantization
from kernels.interface import GroupedCodes, Kernels, MixedPrecisionKernels, QuantizedKernels
from kernels.reference.grouped import INT4_CODES_PER_WORD, dequantize
from workers.parallel.group import TensorParallelGroup

_CODE_DTYPES = {INT8: torch.int8, INT4: torch.int32, FP8: torch.uint8}
_SCALE_DTYPES = {FLOAT16: torch.float16, BFLOAT16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """`target` is filled from the tensor that a checkpoint without codes or merged experts calls
    `name`, of the full `shape`: elements `start` to `start + target.shape[dim]` along `dim`,
    everything along the others.

    With `scale`, `target` gets codes, `scale` and `zeros` those of groups of inputs, one group per
    column, as in `GroupedCodes`. `start` counts rows or inputs. The codes are the checkpoint's or,
    with `group_size`, computed for so many inputs of the whole matrix at a time, so that they are
    the same however it is cut.
    """

    name: str
    shape: tuple[int, ...]
    target: Tensor
    dim: int = 0
    start: int = 0
    scale: Tensor | None = None
    zeros: Tensor | None = None
    group_size: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are filled."""
        tensors = (self.target, self.scale, self.zeros)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class Weight(Protocol):
    """A matrix [Y, X] of this rank."""

    @property
    def num_rows(self) -> int:
        """Y"""

    def slices(
        self, name: str, shape: tuple[int, int], first: int, count: int, dim: int, start: int
    ) -> Iterator[WeightSlice]:
        """The slices that fill `count` rows, from row `first` on, with the part of the checkpoint's
        matrix `name`, of the full `shape`, that begins at `start` along `dim`.
        """

    def zero(self, first: int) -> None:
        """Set the rows from `first` on to zero."""

    def rows(self, ids_T: Tensor) -> Tensor:
        """[T, X]: the rows with these numbers. Not possible for a packed copy."""

    def packed(self) -> Weight:
        """This weight in the layout that `product` needs, which may be the same object. Call it
        once, after all slices are filled.
        """

    def product(self, x_TX: Tensor, bias_Y: Tensor | None) -> Tensor:
        """x @ weight.T + bias, [T, Y]. The weight must be packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainWeight:
    """`Weight` in the engine's dtype."""

    kernels: Kernels
    values_YX: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.values_YX)

    def slices(
        self, name: str, shape: tuple[int, int], first: int, count: int, dim: int, start: int
    ) -> Iterator[WeightSlice]:
        yield WeightSlice(
            f"{name}.weight", shape, self.values_YX[first : first + count], dim, start
        )

    def zero(self, first: int) -> None:
        self.values_YX[first:].zero_()

    def rows(self, ids_T: Tensor) -> Tensor:
        return functional.embedding(ids_T, self.values_YX)

    @property
    def is_copied_by_packing(self) -> bool:
        """Whether `packed` takes memory of its own."""
        sample = torch.zeros(1, 1, dtype=self.values_YX.dtype)
        return self.kernels.pack_weight(sample) is not sample

    def packed(self) -> Weight:
        packed_YX = self.kernels.pack_weight(self.values_YX)
        if packed_YX is self.values_YX:
            return self
        return PlainWeight(kernels=self.kernels, values_YX=packed_YX)

    def product(self, x_TX: Tensor, bias_Y: Tensor | None) -> Tensor:
        return self.kernels.linear(x_TX, self.values_YX, bias_Y)


class MixedPrecisionWeight:
    """`Weight` of bfloat16 values, for products in float32. Packed in its own memory, so a tied
    embedding is held once.
    """

    def __init__(
        self, kernels: MixedPrecisionKernels, num_rows: int, size_in: int, device: torch.device
    ) -> None:
        self.num_rows = num_rows
        self._kernels = kernels
        num_padded_rows = -(-num_rows // kernels.panel_features) * kernels.panel_features
        self._values_YX = torch.empty(num_padded_rows, size_in, dtype=torch.bfloat16, device=device)
        self._values_YX[num_rows:] = 0
        self._packed_values: Tensor | None = None

    def slices(
        self, name: str, shape: tuple[int, int], first: int, count: int, dim: int, start: int
    ) -> Iterator[WeightSlice]:
        target = self._values_YX[first : first + count]
        yield WeightSlice(f"{name}.weight", shape, target, dim, start)

    def zero(self, first: int) -> None:
        self._values_YX[first:].zero_()

    def rows(self, ids_T: Tensor) -> Tensor:
        if self._packed_values is not None:
            return self._kernels.rows(self._packed_values, ids_T)
        return functional.embedding(ids_T, self._values_YX).to(torch.float32)

    def packed(self) -> Weight:
        self._packed_values = self._kernels.pack_weight(self._values_YX)
        return self

    def product(self, x_TX: Tensor, bias_Y: Tensor | None) -> Tensor:
        assert self._packed_values is not None
        return self._kernels.linear(x_TX, self._packed_values, self.num_rows, bias_Y)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """`Weight` of codes with scales, and perhaps zero points, of groups of inputs. quantization:
    its `is_stored` says whether the checkpoint has them. dtype: that of the result of `rows`.
    """

    kernels: QuantizedKernels
    weight: GroupedCodes
    quantization: Quantization
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        return self.weight.num_rows

    def slices(
        self, name: str, shape: tuple[int, int], first: int, count: int, dim: int, start: int
    ) -> Iterator[WeightSlice]:
        rows, zeros_YG = slice(first, first + count), self.weight.zeros
        yield WeightSlice(
            f"{name}.weight",
            shape,
            self.weight.words[rows],
            dim,
            start,
            self.weight.scale[rows],
            None if zeros_YG is None else zeros_YG[rows],
            0 if self.quantization.is_stored else self.quantization.held_group_size(shape[1]),
        )

    def zero(self, first: int) -> None:
        self.weight.words[first:].zero_()
        self.weight.scale[first:].zero_()
        if self.weight.zeros is not None:
            self.weight.zeros[first:].zero_()

    def rows(self, ids_T: Tensor) -> Tensor:
        zeros_YG = self.weight.zeros
        rows = GroupedCodes(
            words=self.weight.words[ids_T],
            zeros=None if zeros_YG is None else zeros_YG[ids_T],
            scale=self.weight.scale[ids_T],
            num_rows=len(ids_T),
        )
        return dequantize(rows).to(self.dtype)

    def packed(self) -> Weight:
        weight = self.kernels.pack_weight(self.weight)
        return self if weight is self.weight else dataclasses.replace(self, weight=weight)

    def product(self, x_TX: Tensor, bias_Y: Tensor | None) -> Tensor:
        return self.kernels.linear(x_TX, self.weight, bias_Y)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How the matrices of a model are held. group: the ranks that they are cut over. dtype: that of
    activations and vectors. weight_dtype: that of matrices that are not quantized: `dtype`, or
    bfloat16 where the kernels are `mixed_precision`.
    """

    kernels: Kernels
    group: TensorParallelGroup
    dtype: torch.dtype
    weight_dtype: torch.dtype
    quantization: Quantization | None = None

    def vector(self, size: int) -> Tensor:
        """The weight of a norm, or a bias."""
        return torch.empty(size, dtype=self.dtype, device=self.group.device)

    def matrix(self, num_rows: int, size_in: int, *, is_vocabulary: bool = False) -> Weight:
        """A matrix of a decoder layer; with `is_vocabulary`, an embedding or the head."""
        quantization = self.quantization
        if quantization is not None and is_vocabulary and not quantization.includes_vocabulary:
            quantization = None
        if quantization is None and self.weight_dtype is not self.dtype:
            mixed_precision = self.kernels.mixed_precision
            assert mixed_precision is not None, "the configuration was checked against the kernels"
            return MixedPrecisionWeight(mixed_precision, num_rows, size_in, self.group.device)
        if quantization is None:
            values_YX = torch.empty(num_rows, size_in, dtype=self.dtype, device=self.group.device)
            return PlainWeight(kernels=self.kernels, values_YX=values_YX)
        return self._codes(num_rows, size_in, quantization)

    def _codes(self, num_rows: int, size_in: int, quantization: Quantization) -> GroupedWeight:
        num_groups = size_in // quantization.held_group_size(size_in)
        is_int4 = quantization.name == INT4
        num_words = size_in // INT4_CODES_PER_WORD if is_int4 else size_in
        scale_dtype = _SCALE_DTYPES[quantization.scale_dtype] if is_int4 else torch.float32

        def empty(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(num_rows, columns, dtype=dtype, device=self.group.device)

        weight = GroupedCodes(
            words=empty(num_words, _CODE_DTYPES[quantization.name]),
            zeros=empty(num_groups, torch.uint8) if is_int4 else None,
            scale=empty(num_groups, scale_dtype),
            num_rows=num_rows,
        )
        return GroupedWeight(
            kernels=self.kernels.quantized[quantization.name],
            weight=weight,
            quantization=quantization,
            dtype=self.dtype,
        )


def release_freed_memory() -> None:
    """Return what this process has freed to the operating system.

    glibc keeps freed blocks below 32 MiB in its heap, and a packed copy, which is aligned
    differently, often does not fit where the last matrix was: without this a rank keeps up to a
    seventh more than its weights. Other C libraries do not have this call, or do not need it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
