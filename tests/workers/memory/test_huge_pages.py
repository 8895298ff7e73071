"""Memory files in huge pages: what is in them stays the same, for everyone who maps them."""

from __future__ import annotations

import fcntl
import re
from pathlib import Path

import pytest
import torch

from workers.memory.huge_pages import HUGE_PAGE_BYTES, use_huge_pages
from workers.memory.lasting import LastingMemory

NAME = "eagleray-test-huge"


def num_huge_bytes(tensor: torch.Tensor) -> int:
    """How many bytes of the mapping that begins with this tensor are mapped as huge pages."""
    mappings = Path("/proc/self/smaps").read_text()
    own = mappings.split(f"\n{tensor.data_ptr():x}-", 1)[1]
    count = re.search(r"ShmemPmdMapped: +(\d+) kB", own)
    assert count is not None
    return int(count[1]) * 1024


@pytest.mark.parametrize("num_pages", [2.0, 2.3, 0.5])
def test_memory_is_the_same_in_huge_pages_and_whoever_maps_it_has_them(num_pages: float) -> None:
    num_bytes = int(num_pages * HUGE_PAGE_BYTES)
    memory = LastingMemory.create(NAME, num_bytes)
    mine, theirs = memory.tensor(), LastingMemory.open(memory.card).tensor()
    assert mine.data_ptr() % HUGE_PAGE_BYTES == 0
    memory.allow_writing()
    mine.copy_(torch.randint(256, (num_bytes,), generator=torch.Generator().manual_seed(0)))
    expected = mine.clone()
    most = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    got = use_huge_pages(memory.descriptor, num_bytes)
    assert torch.equal(mine, expected) and torch.equal(theirs, expected)
    mine[5], expected[5] = 9, 9
    assert torch.equal(theirs, expected)
    if got < most:
        pytest.skip(f"this system gave {got} of {most} bytes")
    assert num_huge_bytes(mine) == num_huge_bytes(theirs) == most


def test_sealed_memory_can_be_in_huge_pages_too() -> None:
    memory = LastingMemory.create(NAME, 2 * HUGE_PAGE_BYTES)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
    fcntl.fcntl(memory.descriptor, fcntl.F_ADD_SEALS, seals)
    got = use_huge_pages(memory.descriptor, memory.num_bytes)
    assert got in (0, 2 * HUGE_PAGE_BYTES)
