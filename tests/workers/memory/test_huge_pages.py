"""Memory files in huge pages: all who map them have them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from workers.memory.huge_pages import HUGE_PAGE_BYTES
from workers.memory.lasting import LastingMemory

NAME = "eagleray-test-huge"


def num_huge_bytes(tensor: torch.Tensor) -> int:
    """How many bytes of the mapping that begins with this tensor are mapped as huge pages."""
    mappings = Path("/proc/self/smaps").read_text()
    own = mappings.split(f"\n{tensor.data_ptr():x}-", 1)[1]
    count = re.search(r"ShmemPmdMapped: +(\d+) kB", own)
    assert count is not None
    return int(count[1]) * 1024


@pytest.mark.parametrize("num_pages", [(2.0,), (2.3,), (0.5,), (1.0, 20.0, 20.3)])
def test_memory_has_huge_pages_and_whoever_maps_it_has_them(num_pages: tuple[float, ...]) -> None:
    """Also if it grows."""
    lengths = [int(count * HUGE_PAGE_BYTES) for count in num_pages]
    memory = LastingMemory.create(NAME, lengths[0])
    for num_bytes in lengths[1:]:
        memory.grow(num_bytes)
    mine, theirs = memory.tensor(), LastingMemory.open(memory.card).tensor()
    assert mine.data_ptr() % HUGE_PAGE_BYTES == 0 and len(mine) == lengths[-1]
    assert not mine.any()
    memory.allow_writing()
    values = torch.randint(256, mine.shape, generator=torch.Generator().manual_seed(0))
    mine.copy_(values)
    assert torch.equal(theirs, values.to(torch.uint8))
    num_blocks = Path(memory.card.path).stat().st_blocks
    assert 512 * num_blocks >= len(mine), "some of it is not taken yet"
    got, most = num_huge_bytes(mine), len(mine) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if most and not got:
        pytest.skip("this system makes no huge pages of memory files")
    assert got == num_huge_bytes(theirs) == most
