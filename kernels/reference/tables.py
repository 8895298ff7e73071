"""What a step reads from, and writes to, the tables of a batch on the device.

Legend: S slots, L token columns, W blocks in a row's table, T tokens of the step, R sampling rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def look_up_tokens_reference(
    tokens_SL: Tensor,
    block_table_SW: Tensor,
    slots_T: Tensor,
    positions_T: Tensor,
    num_stored_tokens_T: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """(token ids, int32 [T]; where each token's KV goes, int64 [T]: -1 for positions below
    `num_stored_tokens_T`, whose KV was there when the row was admitted and is not written again).

    The other tensors are int32, on any device.
    """
    blocks_T = block_table_SW[slots_T, positions_T // block_size].to(torch.int64)
    places_T = blocks_T * block_size + positions_T % block_size
    return tokens_SL[slots_T, positions_T], torch.where(
        positions_T < num_stored_tokens_T, -1, places_T
    )


def write_tokens_reference(
    tokens_SL: Tensor, slots_R: Tensor, positions_R: Tensor, token_ids_R: Tensor
) -> None:
    """Put each token at its slot and position. At position 0, which no sampled token has, nothing
    is written: it marks a row of padding. `token_ids_R` is int64, the others int32.
    """
    old_token_id_R = tokens_SL[slots_R, positions_R]
    new_token_id_R = torch.where(positions_R > 0, token_ids_R.to(torch.int32), old_token_id_R)
    tokens_SL[slots_R, positions_R] = new_token_id_R
