"""Memory files in huge pages: what is in them is the same, for everyone who maps them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from tests.workers.memory.holder import makes_huge_pages
from workers.memory.huge_pages import HUGE_PAGE_BYTES
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


def has_all_pages(memory: SharedMemfd) -> bool:
    """Whether all memory is taken, so that no write can end a process for a lack of it."""
    return os.fstat(memory.descriptor).st_blocks * 512 >= memory.num_bytes


def makes_huge_pages_itself() -> bool:
    """Whether this system gives memory files huge pages without being asked."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return setting.exists() and "[never]" not in setting.read_text()


def test_pieces_of_what_begins_in_a_small_page_are_huge_but_the_first() -> None:
    memory = SharedMemfd.create(NAME, 4096)
    memory.grow(70 * HUGE_PAGE_BYTES)
    got = num_huge_bytes(memory.tensor())
    if not makes_huge_pages():
        pytest.skip("this system makes no huge pages of memory files")
    assert got >= 69 * HUGE_PAGE_BYTES


@pytest.mark.parametrize("first_bytes", [4096, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 4096])
@pytest.mark.parametrize("num_pages", [0.5, 2.0, 3.3])
def test_whoever_maps_memory_has_the_same_in_huge_pages(num_pages: float, first_bytes: int) -> None:
    num_bytes = max(first_bytes, int(num_pages * HUGE_PAGE_BYTES))
    memory = SharedMemfd.create(NAME, first_bytes)
    first_contents = os.urandom(first_bytes)
    os.pwrite(memory.descriptor, first_contents, 0)
    memory.grow(num_bytes)
    assert has_all_pages(memory) and memory.num_bytes == num_bytes
    mine, theirs = memory.tensor(), SharedMemfd.open(memory.handle).tensor()
    assert mine.data_ptr() % HUGE_PAGE_BYTES == 0 and len(mine) == num_bytes
    assert bytes(mine[:first_bytes].numpy()) == first_contents and not mine[first_bytes:].any()
    memory.allow_writing()
    mine.copy_(torch.randint(256, (num_bytes,), generator=torch.Generator().manual_seed(0)))
    assert torch.equal(theirs, mine)
    num_whole = num_bytes // HUGE_PAGE_BYTES
    # What had begun in small pages stays in these.
    has_begun = first_bytes % HUGE_PAGE_BYTES > 0 and first_bytes // HUGE_PAGE_BYTES < num_whole
    expected = (num_whole - has_begun) * HUGE_PAGE_BYTES
    got = num_huge_bytes(theirs)
    if not makes_huge_pages():
        pytest.skip("this system makes no huge pages of memory files")
    assert got == num_huge_bytes(mine)
    # Some systems make huge pages of all that is written.
    assert got >= expected if makes_huge_pages_itself() else got == expected


def test_where_the_system_makes_no_huge_pages_all_memory_is_taken_in_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.memory.huge_pages._MADV_COLLAPSE", 9999)
    memory = SharedMemfd.create(NAME, 3 * HUGE_PAGE_BYTES)
    assert has_all_pages(memory)
    assert makes_huge_pages_itself() or num_huge_bytes(memory.tensor()) == 0
