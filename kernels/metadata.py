"""What kernels need to know about one step: built once per step, passed as an argument, shared
by all layers.

Legend: T tokens of the step, B rows, K KV heads of this rank, W blocks in a row's table.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeParts:
    """The first rows of a step, with one query each (those of a graph's padding may have none, and
    then no part), and the programs they are divided between (`kernels/decode_parts.py`).

    num_rows             : how many rows, padding included.
    max_parts            : how many parts the launch has programs for; those past the last part end
        at once.
    part_start_B1        : int32, first part of each of these rows, then the number of parts of all.
    num_arrived_parts_BK : int32, contiguous, at least [num_rows, K]: how many parts of a row are
        done, for each KV head. Zeros before and after the launch.
    """

    num_rows: int
    max_parts: int
    part_start_B1: Tensor
    num_arrived_parts_BK: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """The rows of a step are consecutive in its T tokens; each attends causally to its own
    sequence.

    query_start_B1    : int32 [B+1], first token of each row, then T.
    seq_start_B1      : int32 [B+1], 0, then the running sum of `seq_lens_B`; arbitrary where
        `is_decode`, since nobody reads it then.
    seq_lens_B        : int32 [B], tokens of the sequence up to the end of this step's chunk (what
        the last query sees); 0 for a graph's padding.
    block_table_BW    : int32 [B, W], block ids of each sequence; entries past its length are
        arbitrary valid ids.
    kv_places_T       : int64 [T], block_id * block_size + offset where the token's KV is written;
        -1 writes nothing.
    max_query_len, max_seq_len : bounds, not necessarily reached.
    decode_parts      : for backends that ask for it with `Kernels.max_decode_parts`; others ignore
        it.
    num_live_tokens_1 : int32 [1], the number of tokens before those of a graph's padding; None:
        all T.
    """

    query_start_B1: Tensor
    seq_start_B1: Tensor
    seq_lens_B: Tensor
    block_table_BW: Tensor
    kv_places_T: Tensor
    max_query_len: int
    max_seq_len: int
    decode_parts: DecodeParts | None = None
    num_live_tokens_1: Tensor | None = None

    @property
    def is_decode(self) -> bool:
        """Every row has exactly one query token."""
        return self.max_query_len == 1
