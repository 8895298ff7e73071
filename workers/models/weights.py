"""A matrix of one rank: how it is filled from a checkpoint, and how products with it are computed.

Five forms: values in the engine's dtype, bfloat16 values in an engine that computes in float32,
8-bit codes with a scale per row, and 4-bit codes or e4m3 numbers with scales of groups of inputs. A
layer asks `WeightFormat` for its matrices and does not know which form it got. Memory is
uninitialized until the loader has filled every slice; then `packed` gives the form with which
products are fastest.

Legend: T tokens, X features in, Y features out (rows).
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
from configs.quantization import FP8, INT8, Quantization
from kernels.interface import (
    GroupedCodes,
    GroupedKernels,
    Int8Kernels,
    Int8Weight,
    Kernels,
    MixedKernels,
)
from kernels.reference.grouped import CODES_PER_WORD, dequantize

_SCALE_DTYPES = {FLOAT16: torch.float16, BFLOAT16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """`target` is filled from the checkpoint tensor `name` of the full `shape`: elements `start` to
    `start + target.shape[dim]` along `dim`, everything along the others.

    With `scale`, float32 with one element per row of `target`, the values are quantized: `target`
    gets codes and `scale` the scales of whole rows of the tensor, so both are the same however the
    tensor is cut.

    With a `scale` of two dimensions, the checkpoint's codes are kept: `target` gets words of
    eight codes each, `scale` and `zeros` those of groups of inputs, one group per column; without
    `zeros`, `target` gets e4m3 numbers, uint8. `start` counts inputs. With `group_size` too, codes
    are computed, for so many inputs of the whole matrix at a time.
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
    def has_groups(self) -> bool:
        """Whether `target` gets codes of groups of inputs."""
        return self.scale is not None and self.scale.ndim == 2

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

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""

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

    @property
    def nbytes(self) -> int:
        return self.values_YX.numel() * self.values_YX.itemsize

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

    def packed(self) -> Weight:
        packed_YX = self.kernels.pack_weight(self.values_YX)
        if packed_YX is self.values_YX:
            return self
        return PlainWeight(kernels=self.kernels, values_YX=packed_YX)

    def product(self, x_TX: Tensor, bias_Y: Tensor | None) -> Tensor:
        return self.kernels.linear(x_TX, self.values_YX, bias_Y)


class MixedWeight:
    """`Weight` of bfloat16 values, for products in float32. Packed in its own memory, so a tied
    embedding is held once.
    """

    def __init__(
        self, kernels: MixedKernels, num_rows: int, size_in: int, device: torch.device
    ) -> None:
        self.num_rows = num_rows
        self._kernels = kernels
        padded = -(-num_rows // kernels.panel_features) * kernels.panel_features
        self._values_YX = torch.empty(padded, size_in, dtype=torch.bfloat16, device=device)
        self._values_YX[num_rows:] = 0
        self._packed_values: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self._values_YX.nbytes

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
class RowQuantizedWeight:
    """`Weight` of 8-bit codes. is_stored: the checkpoint has codes and scales. dtype: that of the
    result of `rows`.
    """

    kernels: Int8Kernels
    weight: Int8Weight
    is_stored: bool
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        return len(self.weight.scale_Y)

    @property
    def nbytes(self) -> int:
        return self.weight.codes_YX.numel() + self.weight.scale_Y.nbytes

    def slices(
        self, name: str, shape: tuple[int, int], first: int, count: int, dim: int, start: int
    ) -> Iterator[WeightSlice]:
        codes = self.weight.codes_YX[first : first + count]
        scale = self.weight.scale_Y[first : first + count]
        if not self.is_stored:
            yield WeightSlice(f"{name}.weight", shape, codes, dim, start, scale)
            return
        first_row = start if dim == 0 else 0
        yield WeightSlice(f"{name}.weight", shape, codes, dim, start)
        yield WeightSlice(f"{name}.weight_scale", (shape[0], 1), scale.unsqueeze(1), 0, first_row)

    def zero(self, first: int) -> None:
        self.weight.codes_YX[first:].zero_()
        self.weight.scale_Y[first:].zero_()

    def rows(self, ids_T: Tensor) -> Tensor:
        codes_TX = functional.embedding(ids_T, self.weight.codes_YX)
        scale_T1 = self.weight.scale_Y[ids_T].unsqueeze(1)
        return (codes_TX.to(torch.float32) * scale_T1).to(self.dtype)

    def packed(self) -> Weight:
        weight = self.kernels.pack_weight(self.weight)
        if weight is self.weight:
            return self
        return RowQuantizedWeight(
            kernels=self.kernels, weight=weight, is_stored=self.is_stored, dtype=self.dtype
        )

    def product(self, x_TX: Tensor, bias_Y: Tensor | None) -> Tensor:
        return self.kernels.linear(x_TX, self.weight, bias_Y)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """`Weight` of codes with scales, and perhaps zero points, of groups of inputs. quantization:
    says whether the checkpoint has them. dtype: that of the result of `rows`.
    """

    kernels: GroupedKernels
    weight: GroupedCodes
    quantization: Quantization
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        return self.weight.num_rows

    @property
    def nbytes(self) -> int:
        weight = self.weight
        zeros = weight.zeros_YG.nbytes if weight.zeros_YG is not None else 0
        return weight.words_YW.nbytes + zeros + weight.scale_YG.nbytes

    def slices(
        self, name: str, shape: tuple[int, int], first: int, count: int, dim: int, start: int
    ) -> Iterator[WeightSlice]:
        rows, zeros_YG = slice(first, first + count), self.weight.zeros_YG
        yield WeightSlice(
            f"{name}.weight",
            shape,
            self.weight.words_YW[rows],
            dim,
            start,
            self.weight.scale_YG[rows],
            None if zeros_YG is None else zeros_YG[rows],
            0 if self.quantization.is_stored else self.quantization.held_group_size(shape[1]),
        )

    def zero(self, first: int) -> None:
        self.weight.words_YW[first:].zero_()
        self.weight.scale_YG[first:].zero_()
        if self.weight.zeros_YG is not None:
            self.weight.zeros_YG[first:].zero_()

    def rows(self, ids_T: Tensor) -> Tensor:
        zeros_YG = self.weight.zeros_YG
        rows = GroupedCodes(
            words_YW=self.weight.words_YW[ids_T],
            zeros_YG=None if zeros_YG is None else zeros_YG[ids_T],
            scale_YG=self.weight.scale_YG[ids_T],
            num_rows=len(ids_T),
        )
        return dequantize(rows).to(self.dtype)

    def packed(self) -> Weight:
        return dataclasses.replace(self, weight=self.kernels.pack_weight(self.weight))

    def product(self, x_TX: Tensor, bias_Y: Tensor | None) -> Tensor:
        return self.kernels.linear(x_TX, self.weight, bias_Y)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How the matrices of a model are held. dtype: that of activations and vectors. weight_dtype:
    that of matrices that are not quantized: `dtype`, or bfloat16 where the kernels are `mixed`.
    """

    kernels: Kernels
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device
    quantization: Quantization | None = None

    def layer_matrix(self, num_rows: int, size_in: int) -> Weight:
        """A matrix of a decoder layer."""
        return self._matrix(num_rows, size_in, self.quantization)

    def vocabulary_matrix(self, num_rows: int, size_in: int) -> Weight:
        """An embedding, or the head."""
        quantization = self.quantization
        return self._matrix(
            num_rows,
            size_in,
            quantization if quantization and quantization.includes_vocabulary else None,
        )

    def vector(self, size: int) -> Tensor:
        """The weight of a norm, or a bias."""
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def _matrix(self, num_rows: int, size_in: int, quantization: Quantization | None) -> Weight:
        if quantization is None and self.weight_dtype is not self.dtype:
            mixed = self.kernels.mixed
            assert mixed is not None, "the configuration was checked against the kernels"
            return MixedWeight(mixed, num_rows, size_in, self.device)
        if quantization is None:
            values_YX = torch.empty(num_rows, size_in, dtype=self.dtype, device=self.device)
            return PlainWeight(kernels=self.kernels, values_YX=values_YX)
        if quantization.name != INT8:
            return self._grouped(num_rows, size_in, quantization)
        kernels = self.kernels.int8
        assert kernels is not None, "the configuration was checked against the kernels"
        codes_YX = torch.empty(num_rows, size_in, dtype=torch.int8, device=self.device)
        scale_Y = torch.empty(num_rows, dtype=torch.float32, device=self.device)
        return RowQuantizedWeight(
            kernels=kernels,
            weight=Int8Weight(codes_YX=codes_YX, scale_Y=scale_Y),
            is_stored=quantization.is_stored,
            dtype=self.dtype,
        )

    def _grouped(self, num_rows: int, size_in: int, quantization: Quantization) -> GroupedWeight:
        is_fp8 = quantization.name == FP8
        kernels = self.kernels.fp8 if is_fp8 else self.kernels.int4
        assert kernels is not None, "the configuration was checked against the kernels"
        groups = size_in // quantization.held_group_size(size_in)

        def empty(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(num_rows, columns, dtype=dtype, device=self.device)

        words_YW = (
            empty(size_in, torch.uint8) if is_fp8 else empty(size_in // CODES_PER_WORD, torch.int32)
        )
        scale_dtype = torch.float32 if is_fp8 else _SCALE_DTYPES[quantization.scale_dtype]
        weight = GroupedCodes(
            words_YW=words_YW,
            zeros_YG=None if is_fp8 else empty(groups, torch.uint8),
            scale_YG=empty(groups, scale_dtype),
            num_rows=num_rows,
        )
        return GroupedWeight(
            kernels=kernels, weight=weight, quantization=quantization, dtype=self.dtype
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
