"""What attention needs to know about one step: built once per step, passed as an argument, shared
by all layers.

Legend: T tokens of the step, B rows, W blocks in a row's table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """The rows of a step are consecutive in its T tokens; each attends causally to its own
    sequence.

    query_start_B1 : int32 [B+1], first token of each row, then T.
    seq_start_B1   : int32 [B+1], 0, then the running sum of `seq_lens_B`.
    seq_lens_B     : int32 [B], tokens of the sequence up to the end of this step's chunk (what the
        last query sees).
    block_table_BW : int32 [B, W], block ids of each sequence; entries past its length are arbitrary
        valid ids.
    slot_mapping_T : int64 [T], block_id * block_size + offset where the token's KV is written; -1
        writes nothing.
    max_query_len, max_seq_len : bounds, not necessarily reached.
    """

    query_start_B1: torch.Tensor
    seq_start_B1: torch.Tensor
    seq_lens_B: torch.Tensor
    block_table_BW: torch.Tensor
    slot_mapping_T: torch.Tensor
    max_query_len: int
    max_seq_len: int

    @property
    def is_decode(self) -> bool:
        """Every row has exactly one query token."""
        return self.max_query_len == 1
