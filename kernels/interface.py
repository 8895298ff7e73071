"""What a kernel backend offers: `Kernels`, the sampling kernels among them, and what it says it can
do.

Three folders implement `Kernels`: `kernels/cpu/` (numba and oneDNN), `kernels/gpu/` (Triton; the
backends `triton`, `flash_attn` and `hybrid`, which differ in attention), and `kernels/reference/`
(plain PyTorch), whose functions define what each kernel computes. This module imports neither torch
nor a backend, so a client can ask what would run without loading it.

Legend: T tokens of the step, B rows, H query heads of this rank, K its KV heads, D head dim, E or X
features in, Y features out, F features of the MLP, L positions of the rotary table, or columns of
the token table; J = H + 2 K heads of queries, keys and values; S slots, R sampling rows, W blocks
in a row's table. `ExpertKernels` and `SamplingKernels` have legends of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kernels.metadata import AttentionMetadata

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one backend can do, known without loading it.

    name: its key in `BACKENDS` (`kernels/select.py`), by which `select_backend` loads it.
    description: how logs, reports and `doctor` name it.
    default_block_size: tokens per KV block where the option does not say.
    dtypes: the dtypes it computes in. fast_dtypes: those the processor has instructions for; for a
        checkpoint of another, dtype "auto" computes in float32.
    quantizations: formats of weights it computes with, besides the dtypes.
    weight_dtypes: what weights may be held in while it computes in float32, besides float32.
    kv_cache_dtypes: what its KV cache may hold, besides numbers of the dtype it computes in.
    fits_graphs: whether a CUDA graph can hold its kernels: none waits for the device.
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
    fits_graphs: bool = True
    check_shape: Callable[[int, int], None] = lambda head_dim, block_size: None


@dataclass(frozen=True, slots=True, kw_only=True)
class GapRows:
    """R rows of logits, with what their gaps are computed from. A gap is (largest logit - logit) /
    temperature. Legend: see `SamplingKernels`.

    logits_BV    : bfloat16 or float32, contiguous, at least one column.
    block_max_BX : float32, the largest logit of every block of columns, from `row_best`.
    rows_R       : int64, which rows of the two tensors above.
    max_R        : float32, the largest logit over all ranks; its zero is positive
        (`pack_value_and_id` makes it so).
    temperature_R: float32, above 0.
    """

    logits_BV: Tensor
    block_max_BX: Tensor
    rows_R: Tensor
    max_R: Tensor
    temperature_R: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedCodes:
    """A weight of codes of which groups of consecutive inputs, all of one size, share a scale.
    "int8": whole numbers of 8 bits, in one group: code * scale. "int4": whole numbers of 4 bits,
    which also share a zero point: (code - zero) * scale. "fp8": e4m3 numbers of 8 bits: code *
    scale. Once packed, types and shapes are the backend's own: its `pack_weight` says which.
    Before, with W words and G groups in a row:

    words: [Y, W], int8 between -127 and 127; int32, eight codes of 4 bits in a word, in the order
        of `kernels/reference/grouped.py`; or uint8, an e4m3 number each.
    zeros: [Y, G], uint8 between 0 and 15; None but with codes of 4 bits, and perhaps once packed.
    scale: [Y, G], float32; float16 or bfloat16 with codes of 4 bits.
    num_rows: Y, without what packing adds.
    """

    words: Tensor
    zeros: Tensor | None
    scale: Tensor
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The MLPs of X experts with E inputs, of each the F features of this rank. Once packed, both
    are in the layout of the backend, the experts still along the first dimension.

    gate_up: [X, 2F, E], of each expert the gate, then up. down: [X, E, F].
    """

    gate_up: Tensor
    down: Tensor


class QuantizedKernels(Protocol):
    """Products with quantized weights, codes of one form. Those of "int8" quantize x too, per row;
    `kernels/reference/int8.py` defines their results, to the bit, and `grouped.py` beside it those
    of "int4" and "fp8".
    """

    def warmup_calls(self, dtype: torch.dtype, /) -> list[Callable[[], object]]:
        """As `Kernels.warmup_calls`, for these kernels."""

    def pack_weight(self, weight: GroupedCodes, /) -> GroupedCodes:
        """The weight in the layout `linear` needs, perhaps the same object."""

    def linear(self, x_TX: Tensor, weight: GroupedCodes, bias_Y: Tensor | None, /) -> Tensor:
        """x @ weight.T + bias, [T, Y] in the dtype of x. Sums are in float32, of 8-bit products
        exact.
        """


class MixedPrecisionKernels(Protocol):
    """Products of float32 with bfloat16 weights, in float32."""

    # The number of a weight's rows is a multiple of this; the last ones may be padding.
    panel_features: int

    def warmup_calls(self) -> list[Callable[[], object]]:
        """As `Kernels.warmup_calls`, for these kernels."""

    def pack_weight(self, weight_YX: Tensor, /) -> Tensor:
        """The weight in the layout `linear` needs, in the memory of the argument, which is
        overwritten.
        """

    def rows(self, packed: Tensor, ids_T: Tensor, /) -> Tensor:
        """[T, X] in float32: the rows of the weight with these numbers."""

    def linear(
        self, x_TX: Tensor, packed: Tensor, size_out: int, bias_Y: Tensor | None, /
    ) -> Tensor:
        """x @ weight.T + bias, [T, Y], for the first `size_out` rows of the weight."""


class ExpertKernels(Protocol):
    """Mixtures of experts; `kernels/reference/experts.py` defines shapes and results.

    Legend: T tokens, E features in and out, X experts, K experts of a token.
    """

    def warmup_calls(
        self, dtype: torch.dtype, weight_dtype: torch.dtype, /
    ) -> list[Callable[[], object]]:
        """As `Kernels.warmup_calls`, for these kernels."""

    def route(
        self,
        logits_TX: Tensor,
        num_experts_per_token: int,
        normalizes_weights: bool,
        num_live_tokens_1: Tensor | None,
        /,
    ) -> tuple[Tensor, Tensor]:
        """(weights [T, K], experts [T, K]) of each token. Behind the first `num_live_tokens_1`
        tokens (None: all) is a graph's padding, for which a backend with graphs chooses expert X:
        none.
        """

    def pack_weights(self, weights: ExpertWeights, dtype: torch.dtype, /) -> ExpertWeights:
        """The weights in the layout that `mlp` needs for inputs of `dtype`, perhaps in the memory
        of the argument, which is overwritten then.
        """

    def mlp(
        self, x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: ExpertWeights, /
    ) -> Tensor:
        """[T, E]: each token's weighted sum of the MLPs of its experts."""


class SamplingKernels(Protocol):
    """The kernels that read logits, or that would otherwise be many small operations.

    The functions of the same names in `kernels/reference/sampling.py` define shapes and results.

    Legend: B rows, R rows of one draw or with a mask, V columns of this rank's shard of the
    vocabulary, X blocks of columns or bins of a histogram, K the largest top-k, N ranks, W words of
    a mask. What a gap is, `GapRows` says.
    """

    def row_best(self, logits_BV: Tensor, /) -> tuple[Tensor, Tensor, Tensor]:
        """(largest logit of each row, its column, largest logit of each block)"""

    def pack_value_and_id(self, values: Tensor, ids: Tensor, /) -> Tensor:
        """(value, token id) as one int64 whose maximum is the best token."""

    def unpack_value_and_id(self, packed: Tensor, /) -> tuple[Tensor, Tensor]:
        """(values, ids) of `pack_value_and_id`."""

    def block_weights(self, gap_rows: GapRows, gap_limit_R: Tensor, /) -> tuple[Tensor, Tensor]:
        """Sums, per block and per row, of the weights of tokens whose gap is at most the limit."""

    def target_weight(
        self, seeds_R: Tensor, positions_R: Tensor, kept_weight_NR: Tensor, rank: int, /
    ) -> Tensor:
        """Which weight each row draws, by its seed and the position of the token to be sampled:
        where that token lies in the running sum of this rank's weights.
        """

    def pick_column(
        self, gap_rows: GapRows, gap_limit_R: Tensor, sums_RX: Tensor, target_weight_R: Tensor, /
    ) -> Tensor:
        """The column that the target weight lies in; -1 where another rank has it."""

    def list_nearest(self, gap_rows: GapRows, top_k_R: Tensor, max_top_k: int, /) -> Tensor:
        """The top_k smallest gaps of each row's shard, with how many tokens each stands for."""

    def gap_limits_from_lists(
        self, lists_NRK: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_gap_limit_R: Tensor, /
    ) -> tuple[Tensor, Tensor]:
        """(gap limit of top-k, top-p and min-p together, weight each rank keeps), from the lists
        of every rank; `top_p_R` is in units of 2**-30.
        """

    def mask_columns(
        self, logits_BV: Tensor, rows_R: Tensor, mask_words_RW: Tensor, first_bit: int, /
    ) -> None:
        """Set logits whose bit is 0 to minus infinity, in place; column 0 has bit `first_bit`."""

    def gap_histogram(
        self,
        gap_rows: GapRows,
        gap_limit_R: Tensor,
        prefix_R: Tensor,
        radix_pass: int,
        by_weight: bool,
        /,
    ) -> Tensor:
        """Tokens, or their weights, by one digit of their gap, of gaps that begin with `prefix_R`,
        the digits of earlier passes.
        """


class Recorder(Protocol):
    """As a context, records the kernels that are called meanwhile, and `Kernels.call`; nothing else
    may compute anything.

    is_complete: whether every kernel could be recorded; otherwise it must not be replayed.
    """

    is_complete: bool

    def __enter__(self) -> Recorder: ...

    def __exit__(self, *_: object) -> None: ...

    def replay(self) -> None:
        """Do it all again, in the same tensors."""


class Kernels(Protocol):
    """One backend: the same functions on every device, and the cache layout they agree on.

    The functions called `*_reference` in `kernels/reference/` define shapes and results.
    """

    capabilities: Capabilities
    sampling: SamplingKernels
    quantized: Mapping[str, QuantizedKernels]  # by quantization, those of the capabilities
    mixed_precision: MixedPrecisionKernels | None  # None: "bfloat16" is not among the weight dtypes
    experts: ExpertKernels
    recorder: type[Recorder] | None  # None: no recordings; a GPU has graphs

    def call(self, function: Callable[..., object], /, *tensors: Tensor) -> None:
        """Call the function, which calls no kernels, with these tensors, and again whenever this
        point of a recording is replayed.
        """

    def kv_cache_shapes(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, /
    ) -> tuple[Shape, Shape]:
        """Shapes of one layer's keys and of its values, equal in their number of elements."""

    def set_num_threads(self, num_threads: int, /) -> None:
        """Number of threads for the kernels of this process from now on; the calling thread starts
        them. CPU only.
        """

    def warmup_calls(self, dtype: torch.dtype, /) -> list[Callable[[], object]]:
        """One call per kernel of a greedy step, so that each is compiled; the slowest to compile
        come first.
        """

    def pack_weight(self, weight_YE: Tensor, /) -> Tensor:
        """The weight in the layout `linear` needs, perhaps the same tensor."""

    def linear(self, x_TE: Tensor, packed_YE: Tensor, bias_Y: Tensor | None, /) -> Tensor:
        """x @ weight.T + bias, [T, Y]."""

    def qk_norm_rope_store(
        self,
        qkv_TJD: Tensor,
        q_weight_D: Tensor,
        k_weight_D: Tensor,
        eps: float,
        cos_sin_LD: Tensor,
        positions_T: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_places_T: Tensor,
        /,
    ) -> Tensor:
        """Rotated queries [T, H, D]; keys and values are written to the caches."""

    def max_decode_parts(
        self, num_rows: int, num_kv_heads: int, max_seq_len: int, device: torch.device, /
    ) -> int:
        """`DecodeParts.max_parts` for `num_rows` rows of up to `max_seq_len` tokens; 0 where
        `paged_attention` does not use them.
        """

    def look_up_tokens(
        self,
        tokens_SL: Tensor,
        block_table_SW: Tensor,
        slots_T: Tensor,
        positions_T: Tensor,
        num_stored_tokens_T: Tensor,
        block_size: int,
        /,
    ) -> tuple[Tensor, Tensor]:
        """(token ids of a step, where their KV goes: -1 for positions below `num_stored_tokens_T`,
        what was in the cache when the row was admitted).
        """

    def write_tokens(
        self, tokens_SL: Tensor, slots_R: Tensor, positions_R: Tensor, token_ids_R: Tensor, /
    ) -> None:
        """Put tokens into the table, except at position 0, which marks a row of padding."""

    def paged_attention(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        attn: AttentionMetadata,
        scale: float,
        /,
    ) -> Tensor:
        """Attention output [T, H, D]."""

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float, /) -> Tensor:
        """The normalized rows, [T, E]."""

    def add_rms_norm(
        self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, /
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)"""

    def silu_and_mul(self, gate_up_T2F: Tensor, /) -> Tensor:
        """silu(gate) * up, [T, F]."""
