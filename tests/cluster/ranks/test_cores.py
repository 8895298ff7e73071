"""How the ranks on one machine divide its cores."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.ranks.cores import CoreClaim, CoreShare, pin_to_cores, usable_cores
from configs.paths import SOURCE_ROOT
from tests.cluster.processes import cores_of_computing_threads, wait_until

CORES = tuple(range(8))
Announce = Callable[..., CoreShare]


@pytest.fixture
def announce(tmp_path: Path) -> Iterator[Announce]:
    shares: list[CoreShare] = []

    def announce(
        engine: str, rank: int = 0, of: int = 1, cores: tuple[int, ...] = CORES
    ) -> CoreShare:
        claim = CoreClaim(engine=engine, local_rank=rank, ranks_on_node=of, cores=cores)
        shares.append(CoreShare(claim, tmp_path))
        return shares[-1]

    yield announce
    for share in shares:
        end(share)


def end(share: CoreShare) -> None:
    """What the end of a rank's process does: the kernel closes its file."""
    share._file.close()


def test_ranks_divide_the_cores_whatever_order_they_come_in(announce: Announce) -> None:
    second = announce("b")
    assert second.cores_and_num_threads() == (CORES, 8)
    first = announce("a", rank=1, of=2)
    assert first.cores_and_num_threads() == ((2, 3), 2), "the other rank of its engine will come"
    assert announce("a", rank=0, of=2).cores_and_num_threads() == ((0, 1), 2)
    assert second.cores_and_num_threads() == ((4, 5), 2)
    third = announce("c")
    assert [each.cores_and_num_threads()[0] for each in (first, second, third)] == [
        (2, 3),
        (4, 5),
        (6, 7),
    ]
    end(third)
    end(first)
    assert second.cores_and_num_threads() == ((4, 5), 2), "one rank of the engine is still there"


def test_who_has_other_cores_is_no_neighbor(announce: Announce) -> None:
    left, right = announce("l", cores=(0, 1, 2, 3)), announce("r", cores=(4, 5, 6, 7))
    assert left.cores_and_num_threads() == ((0, 1, 2, 3), 4) and right.cores_and_num_threads() == (
        (4, 5, 6, 7),
        4,
    )
    both = announce("m", cores=(3, 4))
    assert both.cores_and_num_threads() == ((3, 4), 1), "three ranks meet on two cores"
    assert left.cores_and_num_threads() == ((0, 1), 2) and right.cores_and_num_threads() == (
        (6, 7),
        2,
    )


def test_more_ranks_than_cores_have_one_thread_each(announce: Announce) -> None:
    shares = [announce(str(number), cores=(0, 1)) for number in range(3)]
    assert {share.cores_and_num_threads() for share in shares} == {((0, 1), 1)}


def test_a_rank_that_is_killed_leaves_its_cores(announce: Announce, tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from cluster.ranks.cores import *;"
        f"share = CoreShare(CoreClaim(engine='b', local_rank=0, ranks_on_node=1, cores={CORES}),"
        " Path(sys.argv[1])); print('there', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=SOURCE_ROOT, stdout=subprocess.PIPE
    )
    assert other.stdout is not None and other.stdout.readline() == b"there\n"
    mine = announce("a")
    assert mine.cores_and_num_threads() == ((0, 1, 2, 3), 4)
    other.kill()
    other.wait()
    assert mine.cores_and_num_threads() == (CORES, 8)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_threads_that_compute_move_and_others_stay() -> None:
    every = usable_cores()
    first, last = every[:1], every[-1:]
    started, done = threading.Event(), threading.Event()

    def compute() -> None:
        pin_to_cores(first)
        helper = threading.Thread(target=done.wait)
        helper.start()
        wait_until(lambda: cores_of_computing_threads(os.getpid()) == [{*first}] * 2, "a helper")
        pin_to_cores(last)
        started.set()
        helper.join()

    computing = threading.Thread(target=compute)
    computing.start()
    assert started.wait(5)
    assert cores_of_computing_threads(os.getpid()) == [{*last}] * 2
    assert usable_cores() == every
    done.set()
    computing.join()


# What others may put where ranks announce themselves


def test_what_is_not_an_announcement_is_passed_over(announce: Announce, tmp_path: Path) -> None:
    """A pipe without a writer would block whoever opens it."""
    first = announce("a")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/zero")
    locked = []
    for number, text in enumerate(["", "{", "[]", '{"engine": 1}', '{"cores": 3}', "\0" * 100]):
        path = tmp_path / f"garbage{number}"
        path.write_text(text)
        locked.append(path.open())
        fcntl.flock(locked[-1], fcntl.LOCK_EX)
    assert announce("b").cores_and_num_threads() == (
        (4, 5, 6, 7),
        4,
    ) and first.cores_and_num_threads() == ((0, 1, 2, 3), 4)
    for file in locked:
        file.close()


@pytest.mark.parametrize("made_by", ["file", "link", "open to all", "pipe", "no permission"])
def test_a_folder_that_is_not_ours_alone_costs_the_division_and_not_the_start(
    made_by: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "ranks"
    if made_by == "file":
        folder.write_text("")
    elif made_by == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    elif made_by == "open to all":
        folder.mkdir()
        folder.chmod(0o777)
    elif made_by == "pipe":
        os.mkfifo(folder)
    else:
        folder = Path("/proc/eagleray-ranks")
    share = CoreShare(CoreClaim(engine="a", local_rank=0, ranks_on_node=2, cores=CORES), folder)
    assert share.cores_and_num_threads() == ((0, 1, 2, 3), 4), (
        "the ranks of its own engine are known without it"
    )
    assert "not seen" in caplog.text
