"""What a kernel backend offers: `Kernels`, the sampling kernels among them, and what it says it can
do.

Three backends implement `Kernels`: `kernels/cpu/` (numba and oneDNN), `kernels/gpu/` (Triton, with
or without flash-attn), and `kernels/reference/` (plain PyTorch), whose functions define what each
kernel computes. This module imports neither torch nor a backend, so a client can ask what would run
without loading it.

Legend: T tokens of the step, B rows, H query heads of this rank, K its KV heads, D head dim, E or X
features in, Y features out, F features of the MLP, L positions of the rotary table, or columns of
the token table; S slots, W blocks in a row's table. In sampling, letters mean other things: R the
rows of one draw, V columns of this rank's vocabulary shard, X blocks of columns, K the largest
top-k, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from kernels.metadata import AttentionMetadata

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one backend can do, known without loading it.

    description: how the log names it.
    dtypes: the dtypes it computes in. fast_dtypes: those the processor has instructions for.
    quantizations: formats of weights it computes with, besides the dtypes.
    weight_dtypes: what weights may be held in while it computes in float32, besides float32.
    kv_cache_dtypes: what its KV cache may hold, besides numbers of the dtype it computes in.
    check_shape(head_dim, block_size): raises `ValueError` for a shape the backend cannot compute.
    """

    name: str
    description: str
    default_block_size: int
    dtypes: tuple[str, ...]
    fast_dtypes: tuple[str, ...]
    quantizations: tuple[str, ...] = ()
    weight_dtypes: tuple[str, ...] = ()
    kv_cache_dtypes: tuple[str, ...] = ()
    check_shape: Callable[[int, int], None] = lambda head_dim, block_size: None


@dataclass(frozen=True, slots=True, kw_only=True)
class GapRows:
    """R rows of logits, with what their gaps are computed from. A gap is (largest logit - logit) /
    temperature.

    logits_BV    : bfloat16 or float32, contiguous, at least one column.
    block_max_BX : float32, the largest logit of every block of columns, from `row_best`.
    rows_R       : int64, which rows of the two tensors above.
    max_R        : float32, the largest logit over all ranks; its zero is positive
        (`pack_value_and_id` makes it so).
    temperature_R: float32, above 0.
    """

    logits_BV: torch.Tensor
    block_max_BX: torch.Tensor
    rows_R: torch.Tensor
    max_R: torch.Tensor
    temperature_R: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weight:
    """A weight of 8-bit codes: `codes_YX * scale_Y` in the rows.

    codes_YX: int8 between -127 and 127; once packed, in the layout of the backend.
    scale_Y : float32.
    """

    codes_YX: torch.Tensor
    scale_Y: torch.Tensor


class Int8Kernels(Protocol):
    """Products of 8-bit codes; `kernels/reference/int8.py` defines their results, to the bit."""

    def first_step(self, dtype: torch.dtype, /) -> list[Callable[[], object]]:
        """As `Kernels.first_step`, for these kernels."""

    def pack_weight(self, weight: Int8Weight, /) -> Int8Weight:
        """The weight in the layout `linear` needs, perhaps the same object."""

    def linear(
        self, x_TX: torch.Tensor, weight: Int8Weight, bias_Y: torch.Tensor | None, /
    ) -> torch.Tensor:
        """x @ weight.T + bias, with x quantized per row: [T, Y] in the dtype of x."""


class MixedKernels(Protocol):
    """Products of float32 with bfloat16 weights, in float32."""

    panel: int  # the number of a weight's rows is a multiple of this; the last ones may be padding

    def first_step(self) -> list[Callable[[], object]]:
        """As `Kernels.first_step`, for these kernels."""

    def pack_weight(self, weight_YX: torch.Tensor, /) -> torch.Tensor:
        """The weight in the layout `linear` needs, in the memory of the argument, which is
        overwritten.
        """

    def rows(self, packed: torch.Tensor, ids_T: torch.Tensor, /) -> torch.Tensor:
        """[T, X] in float32: the rows of the weight with these numbers."""

    def linear(
        self,
        x_TX: torch.Tensor,
        packed: torch.Tensor,
        size_out: int,
        bias_Y: torch.Tensor | None,
        /,
    ) -> torch.Tensor:
        """x @ weight.T + bias, [T, Y], for the first `size_out` rows of the weight."""


class SamplingKernels(Protocol):
    """The kernels that read logits, or that would otherwise be many small operations.

    The functions of the same names in `kernels/reference/sampling.py` define shapes and results.
    """

    def row_best(
        self, logits_BV: torch.Tensor, /
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(largest logit of each row, its column, largest logit of each block)"""

    def pack_value_and_id(self, values: torch.Tensor, ids: torch.Tensor, /) -> torch.Tensor:
        """(value, token id) as one int64 whose maximum is the best token."""

    def unpack_value_and_id(self, packed: torch.Tensor, /) -> tuple[torch.Tensor, torch.Tensor]:
        """(values, ids) of `pack_value_and_id`."""

    def block_weights(
        self, gaps: GapRows, limit_R: torch.Tensor, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights within the limit, summed per block and per row."""

    def draw_index(
        self, seeds_R: torch.Tensor, positions_R: torch.Tensor, kept_NR: torch.Tensor, rank: int, /
    ) -> torch.Tensor:
        """Where each row's drawn token lies in the running sum of this rank's weights."""

    def pick_column(
        self, gaps: GapRows, limit_R: torch.Tensor, sums_RX: torch.Tensor, index_R: torch.Tensor, /
    ) -> torch.Tensor:
        """The column at that place in the running sum; -1 where another rank has it."""

    def list_nearest(self, gaps: GapRows, top_k_R: torch.Tensor, max_top_k: int, /) -> torch.Tensor:
        """The top_k smallest gaps of each row."""

    def listed_limits(
        self,
        list_NRK: torch.Tensor,
        top_k_R: torch.Tensor,
        top_p_R: torch.Tensor,
        max_gap_R: torch.Tensor,
        /,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(limit of top-k, top-p and min-p together, weight each rank keeps), from the lists of
        every rank.
        """

    def mask_columns(
        self,
        logits_BV: torch.Tensor,
        rows_R: torch.Tensor,
        mask_words_RW: torch.Tensor,
        first_bit: int,
        /,
    ) -> None:
        """Set the logits of tokens that a row may not choose to minus infinity, in place."""

    def gap_histogram(
        self,
        gaps: GapRows,
        limit_R: torch.Tensor,
        prefix_R: torch.Tensor,
        radix_pass: int,
        by_weight: bool,
        /,
    ) -> torch.Tensor:
        """Tokens, or their weights, by one digit of their gap."""


class Kernels(Protocol):
    """One backend: the same functions on every device, and the cache layout they agree on.

    The functions called `*_reference` in `kernels/reference/` define shapes and results.
    """

    capabilities: Capabilities
    sampling: SamplingKernels
    int8: Int8Kernels | None  # None: quantization "int8" is not among the capabilities
    mixed: MixedKernels | None  # None: "bfloat16" is not among the weight dtypes

    def kv_cache_shapes(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, /
    ) -> tuple[Shape, Shape]:
        """Shapes of one layer's keys and of its values, equal in their number of elements."""

    def set_num_threads(self, num_threads: int, /) -> None:
        """Number of threads for the kernels of this process from now on; the calling thread starts
        them. CPU only.
        """

    def first_step(self, dtype: torch.dtype, /) -> list[Callable[[], object]]:
        """One call per kernel of a greedy step, so that each is compiled; the slowest to compile
        come first.
        """

    def other_steps(self, dtype: torch.dtype, /) -> list[Callable[[], object]]:
        """One call per kernel that only other kinds of sampling need."""

    def pack_weight(self, weight_YE: torch.Tensor, /) -> torch.Tensor:
        """The weight in the layout `linear` needs, perhaps the same tensor."""

    def linear(
        self, x_TE: torch.Tensor, packed_YE: torch.Tensor, bias_Y: torch.Tensor | None, /
    ) -> torch.Tensor:
        """x @ weight.T + bias, [T, Y]."""

    def qk_norm_rope_store(
        self,
        qkv_TJD: torch.Tensor,
        q_weight_D: torch.Tensor,
        k_weight_D: torch.Tensor,
        eps: float,
        cos_sin_LD: torch.Tensor,
        positions_T: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        /,
    ) -> torch.Tensor:
        """Rotated queries [T, H, D]; keys and values are written to the caches."""

    def decode_places(
        self, num_rows: int, kv_heads: int, max_seq_len: int, device: torch.device, /
    ) -> int:
        """The number of places of `DecodeParts` for `num_rows` rows of up to `max_seq_len` tokens;
        0 where `paged_attention` does not use them.
        """

    def look_up(
        self,
        tokens_SL: torch.Tensor,
        block_table_SW: torch.Tensor,
        slots_T: torch.Tensor,
        positions_T: torch.Tensor,
        num_cached_T: torch.Tensor,
        block_size: int,
        /,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids of a step, where their KV goes)."""

    def write_tokens(
        self,
        tokens_SL: torch.Tensor,
        slots_R: torch.Tensor,
        positions_R: torch.Tensor,
        token_ids_R: torch.Tensor,
        /,
    ) -> None:
        """Put tokens into the table, except at position 0, which marks a row of padding."""

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        attn: AttentionMetadata,
        scale: float,
        /,
    ) -> torch.Tensor:
        """Attention output [T, H, D]."""

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, /) -> torch.Tensor:
        """The normalized rows, [T, E]."""

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual)"""

    def silu_and_mul(self, gate_up_T2F: torch.Tensor, /) -> torch.Tensor:
        """silu(gate) * up, [T, F]."""
