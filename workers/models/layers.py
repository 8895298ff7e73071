"""Layers that split a matrix over the ranks of a tensor-parallel group; each class says how it is
cut.

A layer owns its contiguous parameter, this rank's shard, which is uninitialized until the loader
has filled every slice that the layer declares in `slices`. A layer never reads files and does not
know which model it belongs to, only its name in the checkpoint. Legend: T tokens, B rows, E hidden
size, H query heads of this rank, K its KV heads, D head dim, F its MLP features, V its vocabulary
shard, X features in, Y features out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from configs.model import ModelConfig
from workers.models.weights import WeightFormat, WeightSlice


class Part(Protocol):
    """A part of a model that is loaded and packed before the next one is begun."""

    def slices(self) -> Iterator[WeightSlice]:
        """Where its parameters come from."""

    def pack(self) -> None:
        """Convert what products need into the layout in which they are fastest. Call once, after
        every slice is filled.
        """


class ReplicatedVector:
    """A parameter every rank holds whole: the weight of a norm."""

    def __init__(self, name: str, size: int, weight_format: WeightFormat) -> None:
        self.name = name
        self.weight = weight_format.vector(size)

    def slices(self) -> Iterator[WeightSlice]:
        yield WeightSlice(f"{self.name}.weight", tuple(self.weight.shape), self.weight)

    def pack(self) -> None:
        """Products do not read it."""


class _Matrix:
    """A weight [Y, X] and perhaps a bias."""

    def __init__(
        self, size_out: int, size_in: int, has_bias: bool, weight_format: WeightFormat
    ) -> None:
        self.size_in = size_in
        self.weight = weight_format.matrix(size_out, size_in)
        self.bias_Y = weight_format.vector(size_out) if has_bias else None

    def pack(self) -> None:
        """Call once, after every slice is filled: from then on only the product can read the
        weight.
        """
        self.weight = self.weight.packed()


class ReplicatedLinear(_Matrix):
    """A matrix every rank holds whole: a router."""

    def __init__(self, name: str, size_in: int, size_out: int, weight_format: WeightFormat) -> None:
        self.name = name
        super().__init__(size_out, size_in, False, weight_format)

    def __call__(self, x_TX: Tensor) -> Tensor:
        """[T, Y], the same on every rank if the input is."""
        return self.weight.product(x_TX, None)

    def slices(self) -> Iterator[WeightSlice]:
        num_rows = self.weight.num_rows
        yield from self.weight.slices(self.name, (num_rows, self.size_in), 0, num_rows, 0, 0)


class _ColumnParallelMatrix(_Matrix):
    """Matrices of the checkpoint side by side in one parameter, each cut along its output
    features.
    """

    def _matrix_slices(
        self, name: str, full_size: int, start: int, offset: int, length: int
    ) -> Iterator[WeightSlice]:
        """Copy `length` of the `full_size` rows of the matrix `name`, from row `start` on, to our
        rows from `offset` on.
        """
        yield from self.weight.slices(name, (full_size, self.size_in), offset, length, 0, start)
        if self.bias_Y is not None:
            yield WeightSlice(
                f"{name}.bias", (full_size,), self.bias_Y[offset : offset + length], 0, start
            )


class QKVParallelLinear(_ColumnParallelMatrix):
    """Query, key and value projections in one product. A rank holds whole heads: its part of the
    query heads, and the KV heads that those attend to. With more ranks than KV heads, neighboring
    ranks hold the same KV head.
    """

    def __init__(self, name: str, model: ModelConfig, weight_format: WeightFormat) -> None:
        group = weight_format.group
        self.name = name
        self.model = model
        self.rank = group.rank
        self.num_heads = model.num_attention_heads // group.size
        self.num_kv_heads = max(1, model.num_key_value_heads // group.size)
        self.first_kv_head = group.rank * model.num_key_value_heads // group.size
        heads = self.num_heads + 2 * self.num_kv_heads
        super().__init__(
            heads * model.head_dim, model.hidden_size, model.attention_bias, weight_format
        )

    def __call__(self, x_TE: Tensor) -> Tensor:
        """[T, H + 2K, D]: the queries, then the keys, then the values."""
        return self.weight.product(x_TE, self.bias_Y).view(len(x_TE), -1, self.model.head_dim)

    def slices(self) -> Iterator[WeightSlice]:
        heads = self.model.num_attention_heads
        kv_heads = self.model.num_key_value_heads
        first = self.rank * self.num_heads
        offset = 0
        for letter, total, start, count in (
            ("q", heads, first, self.num_heads),
            ("k", kv_heads, self.first_kv_head, self.num_kv_heads),
            ("v", kv_heads, self.first_kv_head, self.num_kv_heads),
        ):
            full_size, start, length = (n * self.model.head_dim for n in (total, start, count))
            yield from self._matrix_slices(
                f"{self.name}.{letter}_proj", full_size, start, offset, length
            )
            offset += length


class MergedColumnParallelLinear(_ColumnParallelMatrix):
    """Matrices of the same shape in one product, of which each rank has the same part: the gate and
    up projections.
    """

    def __init__(
        self, names: tuple[str, ...], size_in: int, size_out: int, weight_format: WeightFormat
    ) -> None:
        """`size_out`: output features of each matrix in the checkpoint."""
        self.names = names
        self.full_size = size_out
        self.rank = weight_format.group.rank
        self.shard_size = size_out // weight_format.group.size
        super().__init__(len(names) * self.shard_size, size_in, False, weight_format)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """[T, len(names) * F]: the parts of this rank, one matrix after the other."""
        return self.weight.product(x_TE, None)

    def slices(self) -> Iterator[WeightSlice]:
        size = self.shard_size
        start = self.rank * size
        for index, name in enumerate(self.names):
            yield from self._matrix_slices(name, self.full_size, start, index * size, size)


class RowParallelLinear(_Matrix):
    """A matrix cut along its input features, which are the output of a column-parallel layer on
    this rank. The sum over the ranks completes the product; the bias, whole on every rank, is added
    once after it.
    """

    def __init__(
        self, name: str, size_in: int, size_out: int, has_bias: bool, weight_format: WeightFormat
    ) -> None:
        self.name = name
        self.group = weight_format.group
        self.kernels = weight_format.kernels
        self.full_size = size_in
        self.shard_size = size_in // self.group.size
        super().__init__(size_out, self.shard_size, has_bias, weight_format)

    def __call__(self, x_TX: Tensor) -> Tensor:
        """[T, Y], the same on every rank."""
        if self.group.size == 1:
            return self.weight.product(x_TX, self.bias_Y)
        out_TY = self.weight.product(x_TX, None)
        self.kernels.call(self._complete, out_TY)
        return out_TY

    def _complete(self, out_TY: Tensor) -> None:
        self.group.all_reduce(out_TY)
        if self.bias_Y is not None:
            out_TY.add_(self.bias_Y)

    def slices(self) -> Iterator[WeightSlice]:
        size_out, start = self.weight.num_rows, self.group.rank * self.shard_size
        yield from self.weight.slices(self.name, (size_out, self.full_size), 0, size_out, 1, start)
        if self.bias_Y is not None:
            yield WeightSlice(f"{self.name}.bias", (size_out,), self.bias_Y)


class _VocabParallelMatrix:
    """One row per token id, cut along the ids. The vocabulary is padded to a multiple of the number
    of ranks: rank r holds ids r * V to (r + 1) * V, where V = ceil(vocab_size / ranks). Rows of ids
    beyond the vocabulary are zero; a rank may have only such rows.
    """

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, weight_format: WeightFormat
    ) -> None:
        self.name = name
        self.group = weight_format.group
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.shard_size = -(-vocab_size // self.group.size)
        self.first_id = self.group.rank * self.shard_size
        # Without the padding.
        self.num_ids = max(0, min(self.shard_size, vocab_size - self.first_id))
        self.weight = weight_format.matrix(self.shard_size, hidden_size, is_vocabulary=True)
        self.weight.zero(self.num_ids)

    def slices(self) -> Iterator[WeightSlice]:
        shape = (self.vocab_size, self.hidden_size)
        start = min(self.first_id, self.vocab_size)
        yield from self.weight.slices(self.name, shape, 0, self.num_ids, 0, start)


class VocabParallelEmbedding(_VocabParallelMatrix):
    """Token embeddings; the rank that holds an id contributes its row, the others zeros, and the
    sum is the embedding.
    """

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """[T, E], the same on every rank."""
        if self.group.size == 1:
            return self.weight.rows(token_ids_T)
        local_ids_T = token_ids_T - self.first_id
        is_outside_T = (local_ids_T < 0) | (local_ids_T >= self.shard_size)
        hidden_TE = self.weight.rows(local_ids_T.masked_fill(is_outside_T, 0))
        return self.group.all_reduce(hidden_TE.masked_fill_(is_outside_T.unsqueeze(1), 0))

    def pack(self) -> None:
        """Products do not read it; a tied one is the head's."""


class ParallelLMHead(_VocabParallelMatrix):
    """Hidden states to logits of this rank's ids. Logits are never gathered. With tied embeddings
    the parameter is the embedding's, which is loaded and packed with the head; a head stored in the
    checkpoint is not read.
    """

    def __init__(
        self,
        name: str,
        embedding: VocabParallelEmbedding,
        is_tied: bool,
        weight_format: WeightFormat,
    ) -> None:
        self.tied_embedding = embedding if is_tied else None
        if is_tied:
            self.first_id, self.shard_size = embedding.first_id, embedding.shard_size
            self.weight = embedding.weight
        else:
            super().__init__(name, embedding.vocab_size, embedding.hidden_size, weight_format)

    @property
    def is_tied(self) -> bool:
        """Whether the weight is the embedding's."""
        return self.tied_embedding is not None

    def __call__(self, hidden_BE: Tensor) -> Tensor:
        """[B, V] in the dtype of the hidden states; columns of padding hold 0: the sampler leaves
        them out.
        """
        return self.weight.product(hidden_BE, None)

    def pack(self) -> None:
        """Call once, after every slice is filled. A tied embedding keeps its rows: its weight is
        held twice where packing makes a copy.
        """
        self.weight = self.weight.packed()

    def slices(self) -> Iterator[WeightSlice]:
        return super().slices() if self.tied_embedding is None else self.tied_embedding.slices()
