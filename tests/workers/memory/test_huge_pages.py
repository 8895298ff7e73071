"""Memory files in huge pages: what is in them is the same, for everyone who maps them."""

from __future__ import annotations

import fcntl
import math
import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.workers.memory.holder import makes_huge_pages
from workers.memory.huge_pages import HUGE_PAGE_BYTES, collapse_when_idle
from workers.memory.lasting import SharedMemfd

NAME = "eagleray-test-huge"


@pytest.fixture(autouse=True)
def takes_huge_pages_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.memory.huge_pages._SLOW_PAGE_S", math.inf)


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


@pytest.mark.parametrize("seals", [0, 0x2 | 0x4 | 0x10])  # F_SEAL_SHRINK, _GROW, _FUTURE_WRITE
def test_where_huge_pages_take_long_small_ones_become_huge_when_nothing_else_is_to_be_done(
    seals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.memory.huge_pages._SLOW_PAGE_S", 0.0)
    num_pages = 9
    memory = SharedMemfd.create(NAME, num_pages * HUGE_PAGE_BYTES + 4096)
    assert has_all_pages(memory)
    mine, theirs = memory.tensor(), SharedMemfd.open(memory.handle).tensor()
    if makes_huge_pages_itself():
        pytest.skip("this system makes huge pages of memory files itself")
    assert num_huge_bytes(mine) <= HUGE_PAGE_BYTES  # the first was tried
    memory.allow_writing()
    mine.copy_(torch.randint(256, (len(mine),), generator=torch.Generator().manual_seed(0)))
    expected = mine.clone()
    if seals:
        fcntl.fcntl(memory.descriptor, fcntl.F_ADD_SEALS, seals)
    began_s = time.monotonic()
    collapse_when_idle(memory.descriptor, memory.num_bytes, lambda: True, threading.Event())
    assert time.monotonic() - began_s > 3 * 0.2, "with a pause before each four pages"
    assert torch.equal(mine, expected) and torch.equal(theirs, expected)
    if not makes_huge_pages():
        pytest.skip("this system makes no huge pages of memory files")
    for tensor in (theirs, mine, SharedMemfd.open(memory.handle).tensor()):
        assert num_huge_bytes(tensor) == num_pages * HUGE_PAGE_BYTES


def test_what_grows_tries_a_huge_page_in_each_64_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes what grows before the next such piece as it found it best."""
    monkeypatch.setattr("workers.memory.huge_pages._SLOW_PAGE_S", 0.0)
    memory = SharedMemfd.create(NAME, HUGE_PAGE_BYTES)
    for num_pages in range(2, 67):
        memory.grow(num_pages * HUGE_PAGE_BYTES)
    got = num_huge_bytes(memory.tensor())
    if makes_huge_pages_itself() or not makes_huge_pages():
        pytest.skip("this system does not make huge pages of memory files when it is asked to")
    assert got == 3 * HUGE_PAGE_BYTES


def test_pages_stay_as_they_are_while_a_step_runs_and_after_the_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.memory.huge_pages._CHECK_PERIOD_S", 0.01)
    monkeypatch.setattr("workers.memory.huge_pages._SLOW_PAGE_S", 0.0)
    memory = SharedMemfd.create(NAME, 9 * HUGE_PAGE_BYTES)
    stop_event = threading.Event()
    arguments = memory.descriptor, memory.num_bytes, lambda: False, stop_event
    thread = threading.Thread(target=collapse_when_idle, args=arguments, daemon=True)
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()
    stop_event.set()
    thread.join(20.0)
    assert not thread.is_alive()
    if not makes_huge_pages_itself():
        assert num_huge_bytes(memory.tensor()) <= HUGE_PAGE_BYTES
