"""Memory that outlives the process that made it."""

from __future__ import annotations

import dataclasses
import faulthandler
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from tests.cluster.processes import open_files
from workers.memory.inheritance import InheritedMemory, RankMemoryHandles
from workers.memory.lasting import MemoryHandle, SharedMemfd, has_memfds
from workers.progress import Progress

pytestmark = pytest.mark.skipif(not has_memfds(), reason="memory files need Linux")
NUM_BYTES = 3 * 4096


def test_who_opens_memory_reads_what_its_maker_writes() -> None:
    memory = SharedMemfd.create("eagleray-test", NUM_BYTES)
    mine, theirs = memory.tensor(), SharedMemfd.open(memory.handle).tensor()
    assert len(mine) == NUM_BYTES and not mine.any()
    memory.allow_writing()
    mine[5000] = 7
    assert theirs[5000] == 7


def _write(handle: MemoryHandle, *, may_write: bool) -> None:
    faulthandler.disable()
    memory = SharedMemfd.open(handle)
    tensor = memory.tensor()
    if may_write:
        memory.allow_writing()
    tensor[0] = 9


@pytest.mark.parametrize(("may_write", "exit_code"), [(True, 0), (False, -signal.SIGSEGV)])
def test_a_write_before_it_is_allowed_ends_the_process_and_changes_nothing(
    may_write: bool, exit_code: int
) -> None:
    memory = SharedMemfd.create("eagleray-test", NUM_BYTES)
    writer = multiprocessing.get_context("fork").Process(
        target=_write, args=(memory.handle,), kwargs={"may_write": may_write}
    )
    writer.start()
    writer.join(20.0)
    assert writer.exitcode == exit_code
    assert memory.tensor()[0] == (9 if may_write else 0)


def test_another_memory_with_the_same_path_is_refused() -> None:
    """As if another process had its number and descriptor by now."""
    memory, other = (SharedMemfd.create("eagleray-test", NUM_BYTES) for _ in range(2))
    handle = dataclasses.replace(memory.handle, path=other.handle.path)
    with pytest.raises(OSError, match="not MemoryHandle"):
        SharedMemfd.open(handle)


def test_a_lack_of_memory_is_an_error_when_it_is_made() -> None:
    with pytest.raises(OSError, match=r"only \d+ bytes of memory are available"):
        SharedMemfd.create("eagleray-test", 2**62)


def test_ranks_that_take_memory_together_learn_of_its_lack_and_give_back_what_they_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is enough for each, but not for both: the kernel would end one of them."""
    available = 11 * 4096
    allocate = os.posix_fallocate

    def allocate_beside_another_rank(descriptor: int, offset: int, num_bytes: int) -> None:
        nonlocal available
        available -= 2 * num_bytes
        assert available >= 0, "the kernel has ended a process"
        allocate(descriptor, offset, num_bytes)

    monkeypatch.setattr("workers.memory.lasting.available_bytes", lambda: available)
    monkeypatch.setattr("workers.memory.lasting._PIECE_BYTES", 4096)
    monkeypatch.setattr(os, "posix_fallocate", allocate_beside_another_rank)
    memory = SharedMemfd.create("eagleray-test", 4096)
    with pytest.raises(OSError, match="only 4096 bytes of memory are available, not 8192"):
        memory.grow(7 * 4096)
    assert os.fstat(memory.descriptor).st_size == memory.num_bytes == 4096


def test_memory_that_is_taken_counts_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking a large cache may last longer than a rank without progress is waited for."""
    progress, counts = Progress(), []

    def available() -> int:
        counts.append(progress.allocated_bytes)
        return 2**30

    monkeypatch.setattr("workers.memory.lasting.available_bytes", available)
    monkeypatch.setattr("workers.memory.lasting._PIECE_BYTES", 4096)
    SharedMemfd.create("eagleray-test", NUM_BYTES - 5, progress)
    assert [*counts, progress.allocated_bytes] == [0, 4096, 8192, NUM_BYTES - 5]


@pytest.mark.parametrize(
    ("limit", "used", "prefix"),
    [
        ("memory.max", "memory.current", ""),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_"),
    ],
)
def test_the_limit_of_a_container_counts(
    limit: str, used: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it, the kernel would end the process."""
    monkeypatch.setattr("workers.memory.lasting._CGROUP_DIR", tmp_path)
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / limit).write_text("10000\n")
    (tmp_path / used).write_text("7000\n")
    statistics = f"cache 1\n{prefix}inactive_file 500\n{prefix}active_file 400\n"
    (tmp_path / used).with_name("memory.stat").write_text(statistics)
    with pytest.raises(OSError, match="only 3900 bytes of memory are available"):
        SharedMemfd.create("eagleray-test", 4000)
    assert SharedMemfd.create("eagleray-test", 3000).num_bytes == 3000
    (tmp_path / limit).write_text("max\n" if not prefix else str(2**63 - 4096))
    assert SharedMemfd.create("eagleray-test", 4000).num_bytes == 4000


def test_what_is_out_of_reach_is_not_inherited_in_part(caplog: pytest.LogCaptureFixture) -> None:
    weights, cache = (SharedMemfd.create("eagleray-test", NUM_BYTES) for _ in range(2))
    gone = dataclasses.replace(cache.handle, path="/proc/1/fd/999")
    before = open_files()
    inherited = InheritedMemory.open(
        RankMemoryHandles(weights=weights.handle, cache=gone, weights_hash="a")
    )
    assert inherited == InheritedMemory()
    assert "the memory of a rank cannot be shared" in caplog.text
    assert not open_files() - before, "a descriptor was left open"


def test_it_is_gone_when_nobody_has_it_open() -> None:
    memory = SharedMemfd.create("eagleray-test", NUM_BYTES)
    path = Path(memory.handle.path)
    assert path.exists()
    memory.close()
    assert not path.exists()


def test_memory_that_nobody_refers_to_is_not_kept() -> None:
    before = open_files()
    tensor = SharedMemfd.create("eagleray-test-forgotten", NUM_BYTES).tensor()
    assert not open_files() - before
    assert "/memfd:eagleray-test-forgotten" in Path("/proc/self/maps").read_text()
    del tensor
    assert "/memfd:eagleray-test-forgotten" not in Path("/proc/self/maps").read_text()
