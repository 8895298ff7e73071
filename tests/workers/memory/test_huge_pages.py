"""Memory files in huge pages: what is in them stays the same, for everyone who maps them."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest
import torch

from workers.memory.huge_pages import HUGE_PAGE_BYTES, use_huge_pages
from workers.memory.lasting import SharedMemfd

NAME = "eagleray-test-huge"


def num_huge_bytes(tensor: torch.Tensor) -> int:
    """How many bytes of the mapping that begins with this tensor are mapped as huge pages."""
    tensor[:: HUGE_PAGE_BYTES // 2].sum()
    mappings = Path("/proc/self/smaps").read_text()
    own = mappings.split(f"\n{tensor.data_ptr():x}-", 1)[1]
    count = re.search(r"ShmemPmdMapped: +(\d+) kB", own)
    assert count is not None
    return int(count[1]) * 1024


@pytest.mark.parametrize("num_pages", [2.0, 2.3, 0.5])
def test_memory_is_the_same_in_huge_pages_and_whoever_maps_it_has_them(num_pages: float) -> None:
    num_bytes = int(num_pages * HUGE_PAGE_BYTES)
    memory = SharedMemfd.create(NAME, 4096)
    memory.grow(num_bytes)
    mine, theirs = memory.tensor(), SharedMemfd.open(memory.handle).tensor()
    assert mine.data_ptr() % HUGE_PAGE_BYTES == 0 and len(mine) == num_bytes
    memory.allow_writing()
    mine.copy_(torch.randint(256, (num_bytes,), generator=torch.Generator().manual_seed(0)))
    expected = mine.clone()
    use_huge_pages(memory.descriptor, num_bytes, threading.Event(), 0.0)
    assert torch.equal(mine, expected) and torch.equal(theirs, expected)
    mine[5], expected[5] = 9, 9
    assert torch.equal(theirs, expected)
    most = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    got = num_huge_bytes(theirs)
    if most and not got:
        pytest.skip("this system makes no huge pages of memory files")
    assert got == num_huge_bytes(mine) == most


def test_it_stops_when_it_is_told_to() -> None:
    memory = SharedMemfd.create(NAME, 20 * HUGE_PAGE_BYTES)
    stop_event = threading.Event()
    thread = threading.Thread(
        target=use_huge_pages, args=(memory.descriptor, memory.num_bytes, stop_event, 60.0)
    )
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    stop_event.set()
    thread.join(20.0)
    assert not thread.is_alive()
