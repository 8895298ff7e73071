"""How the decode rows of a step are divided between the programs of a GPU.

A decode kernel has a fixed number of places, which a CUDA graph can hold; a row takes one or more
of them, one for each part of its tokens. The host, which knows every length, makes the parts as
short as the places allow, so that hardly any program is without work and none has much more than
the others, whatever the lengths. Arithmetic alone, without torch. Legend: B rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

# Parts are multiples of it. Shorter ones would cost more to join than they save.
PART_TOKENS = 64
# One program joins the parts of a row, and reads the results of all of them at once. With this many
# programs per KV head, a single row keeps enough bytes in flight for the memory of any chip.
MAX_PARTS = 32
# Programs to start per multiprocessor: three run at once, and more of them balance unequal parts.
_PROGRAMS_PER_SM = 4
# Places beyond one for each row, for rows much longer than the others: a tenth of the rows.
_ROWS_PER_SPARE_PLACE = 10


def decode_places(num_rows: int, kv_heads: int, max_seq_len: int, num_sms: int) -> int:
    """Places for `num_rows` rows of up to `max_seq_len` tokens: at least one for each row, and
    enough to fill a device of `num_sms` multiprocessors, as each place is `kv_heads` programs.
    """
    filling = -(-_PROGRAMS_PER_SM * num_sms // kv_heads)
    wanted = max(num_rows + num_rows // _ROWS_PER_SPARE_PLACE, filling)
    return min(wanted, num_rows * min(MAX_PARTS, max(1, -(-max_seq_len // PART_TOKENS))))


def part_starts(seq_lens_B: Ints, num_places: int) -> Ints:
    """[B + 1]: the first place of each row, then the number of places that are taken.

    A row takes one place for each part of its tokens, at least one. All rows have parts of about
    the same length, the smallest multiple of `PART_TOKENS` with which they fit into `num_places`,
    which is at least B.
    """
    chunks_B = -(-seq_lens_B // PART_TOKENS)
    total, longest = int(chunks_B.sum()), int(chunks_B.max(initial=0))
    # The parts of length n number between total / n and total / n + B.
    low = max(1, -(-total // num_places), -(-longest // MAX_PARTS))
    high = max(low, longest)
    if num_places > len(seq_lens_B):
        high = min(high, max(low, -(-total // (num_places - len(seq_lens_B)))))
    while low < high:
        middle = (low + high) // 2
        if _num_parts(chunks_B, middle).sum() <= num_places:
            high = middle
        else:
            low = middle + 1
    starts_B1 = np.zeros(len(seq_lens_B) + 1, np.int32)
    np.cumsum(_num_parts(chunks_B, low), out=starts_B1[1:])
    return starts_B1


def _num_parts(chunks_B: Ints, length: int) -> Ints:
    parts_B: Ints = np.maximum(-(-chunks_B // length), 1)
    return parts_B
