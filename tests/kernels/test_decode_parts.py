"""How decode rows are divided: within their number, as evenly as these allow."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kernels.decode_parts import CHUNK_TOKENS, MAX_PARTS_PER_ROW, max_decode_parts, part_starts

H200 = 132


def parts_of(seq_lens: list[int], max_parts: int) -> list[int]:
    parts: list[int] = np.diff(part_starts(np.array(seq_lens, np.int32), max_parts)).tolist()
    return parts


def longest_part(seq_lens: list[int], parts: list[int]) -> int:
    return max(-(-length // n) for length, n in zip(seq_lens, parts, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_parts_fit_and_none_could_be_shorter(seed: int) -> None:
    rng = random.Random(seed)
    num_rows, longest = rng.choice((1, 2, 7, 64, 300)), rng.choice((40, 600, 5000, 40960))
    seq_lens = [rng.randint(0, longest) for _ in range(num_rows)]
    max_parts = max_decode_parts(num_rows, rng.choice((1, 4, 8)), longest, rng.choice((1, H200)))
    parts = parts_of(seq_lens, max_parts)
    assert all(1 <= n <= MAX_PARTS_PER_ROW for n in parts) and sum(parts) <= max_parts
    length = CHUNK_TOKENS * -(-longest_part(seq_lens, parts) // CHUNK_TOKENS)
    if length > CHUNK_TOKENS:  # with parts one step shorter, a row or the batch would not fit
        shorter = [max(1, -(-n // (length - CHUNK_TOKENS))) for n in seq_lens]
        assert sum(shorter) > max_parts or max(shorter) > MAX_PARTS_PER_ROW


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("num_rows", [8, 16, 64, 256])
def test_at_most_a_tenth_of_the_parts_are_empty(num_rows: int, kv_heads: int) -> None:
    """Unless the tokens are so few that parts cannot be shorter."""
    max_parts = max_decode_parts(num_rows, kv_heads, 40960, H200)
    parts = parts_of([512] * num_rows, max_parts)
    assert sum(parts) >= 0.9 * max_parts or parts[0] == -(-512 // CHUNK_TOKENS)


def test_a_long_row_beside_short_ones_is_divided() -> None:
    seq_lens = [512] * 255 + [32768]
    parts = parts_of(seq_lens, max_decode_parts(256, 8, 40960, H200))
    assert parts[:-1] == [1] * 255 and longest_part(seq_lens, parts) < 2000


def test_few_rows_fill_the_device() -> None:
    assert max_decode_parts(1, 8, 40960, H200) == MAX_PARTS_PER_ROW
    assert max_decode_parts(3, 8, 40960, H200) == 66
    assert parts_of([4096, 4096, 100], 66) == [32, 32, 1]


def test_short_rows_do_not_ask_for_parts_they_cannot_fill() -> None:
    assert max_decode_parts(1, 8, 512, H200) == 8
    assert max_decode_parts(4, 8, 512, H200) == 32
    assert max_decode_parts(3, 8, 1, H200) == 3


def test_without_rows_there_are_no_parts() -> None:
    assert max_decode_parts(0, 8, 512, H200) == 0
