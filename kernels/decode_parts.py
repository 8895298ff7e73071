"""How the decode rows of a step are divided between the programs of a GPU.

A decode kernel is launched for a fixed number of parts, `max_parts`, which a CUDA graph can hold;
the tokens of a row are one or more of them (flash-decoding's splits). The host, which knows every
length, makes the parts as short as their number allows, so that hardly any program is without work
and none has much more than the others, whatever the lengths. Arithmetic alone, without torch.
Legend: B rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

# The host counts parts in multiples of it; a kernel cuts rows into no more parts, by its own tiles.
# Shorter ones would cost more to join than they save.
CHUNK_TOKENS = 64
# One program joins the parts of a row, and reads the results of all of them at once. With this many
# programs per KV head, a single row keeps enough bytes in flight for the memory of any chip.
MAX_PARTS_PER_ROW = 32
# Programs to start per multiprocessor: three run at once, and more of them balance unequal parts.
_PROGRAMS_PER_SM = 4
# Parts beyond one for each row, for rows much longer than the others: a tenth of the rows.
_ROWS_PER_SPARE_PART = 10


def max_decode_parts(num_rows: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> int:
    """How many parts to launch for `num_rows` rows of up to `max_seq_len` tokens: at least one for
    each row, and enough to fill a device of `num_sms` multiprocessors, as each part is
    `num_kv_heads` programs.
    """
    num_parts_to_fill_device = -(-_PROGRAMS_PER_SM * num_sms // num_kv_heads)
    max_parts = max(num_rows + num_rows // _ROWS_PER_SPARE_PART, num_parts_to_fill_device)
    return min(
        max_parts, num_rows * min(MAX_PARTS_PER_ROW, max(1, -(-max_seq_len // CHUNK_TOKENS)))
    )


def part_starts(seq_lens_B: Int32Array, max_parts: int) -> Int32Array:
    """[B + 1]: the first part of each row, then the number of parts of all rows.

    A row has at least one part. All parts are about equally long: the smallest multiple of
    `CHUNK_TOKENS` with which there are at most `max_parts` (at least B) in all, and at most
    `MAX_PARTS_PER_ROW` of a row.
    """
    chunks_B = -(-seq_lens_B // CHUNK_TOKENS)
    total_chunks = int(chunks_B.sum())
    longest_row_chunks = int(chunks_B.max(initial=0))
    # The parts of length n number between total / n and total / n + B.
    min_part_chunks = max(
        1, -(-total_chunks // max_parts), -(-longest_row_chunks // MAX_PARTS_PER_ROW)
    )
    max_part_chunks = max(min_part_chunks, longest_row_chunks)
    if max_parts > len(seq_lens_B):
        max_part_chunks = min(
            max_part_chunks, max(min_part_chunks, -(-total_chunks // (max_parts - len(seq_lens_B))))
        )
    while min_part_chunks < max_part_chunks:
        middle_part_chunks = (min_part_chunks + max_part_chunks) // 2
        if _num_parts(chunks_B, middle_part_chunks).sum() <= max_parts:
            max_part_chunks = middle_part_chunks
        else:
            min_part_chunks = middle_part_chunks + 1
    part_start_B1 = np.zeros(len(seq_lens_B) + 1, np.int32)
    np.cumsum(_num_parts(chunks_B, min_part_chunks), out=part_start_B1[1:])
    return part_start_B1


def _num_parts(chunks_B: Int32Array, chunks_per_part: int) -> Int32Array:
    num_parts_B: Int32Array = np.maximum(-(-chunks_B // chunks_per_part), 1)
    return num_parts_B
