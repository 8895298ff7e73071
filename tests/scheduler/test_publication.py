"""When the blocks of running sequences can be found, and how the scheduler uses those it finds."""

from __future__ import annotations

import pytest

from scheduler.scheduler import Scheduler
from tests.scheduler.helpers import (
    BLOCK,
    block_ids_of,
    give,
    make_limits,
    make_request,
    must_schedule,
    num_findable,
    rows,
    run_step,
    stored_of,
)


def make_scheduler(**sizes: int | bool) -> Scheduler:
    return Scheduler(make_limits(**sizes))


def test_prompt_blocks_are_findable_when_their_step_is_submitted() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(9)))
    assert num_findable(scheduler.block_manager, list(range(9))) == 0
    must_schedule(scheduler)
    assert num_findable(scheduler.block_manager, list(range(9))) == 2 * BLOCK


def test_prompt_blocks_are_findable_chunk_by_chunk() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add(make_request("a", range(35)))
    found = []
    for _ in range(4):
        run_step(scheduler)
        found.append(num_findable(scheduler.block_manager, list(range(35))) // BLOCK)
    assert found == [2, 5, 7, 8]


def test_generated_block_is_findable_when_its_tokens_are_computed() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3]))
    run_step(scheduler, 4)
    tokens = [1, 2, 3, 4]
    assert num_findable(scheduler.block_manager, tokens) == 0, (
        "its last token is known, but not yet in the cache"
    )
    must_schedule(scheduler)
    assert num_findable(scheduler.block_manager, tokens) == BLOCK


@pytest.mark.parametrize("num_ahead", [1, 2])
def test_generated_block_is_findable_when_its_tokens_are_known(num_ahead: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3]))
    for _ in range(1 + num_ahead):
        must_schedule(scheduler)
    assert num_findable(scheduler.block_manager, [1, 2, 3, 4]) == 0, (
        "computed, but the last token is not known"
    )
    give(scheduler, 4)
    assert num_findable(scheduler.block_manager, [1, 2, 3, 4]) == BLOCK


def test_sequence_that_ends_publishes_what_is_computed() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], stop=[4]))
    must_schedule(scheduler)
    must_schedule(scheduler)
    give(scheduler, 4)
    assert num_findable(scheduler.block_manager, [1, 2, 3, 4]) == BLOCK


def test_sequence_that_ends_does_not_publish_what_is_not_computed() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], stop=[4]))
    run_step(scheduler, 4)
    assert num_findable(scheduler.block_manager, [1, 2, 3, 4]) == 0


def test_twins_admitted_in_one_step_share_their_blocks() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(make_request(name, range(10)))
    plan = must_schedule(scheduler)
    first, second = block_ids_of(plan)
    assert first[:2] == second[:2] and first[2] != second[2]
    assert stored_of(plan) == [0, 2 * BLOCK]
    assert [count for _, count, _ in rows(plan)] == [10, 2]


def test_twin_does_not_share_blocks_of_a_later_chunk() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    first = scheduler.add(make_request("a", range(20)))
    run_step(scheduler)
    scheduler.add(make_request("b", range(20)))
    scheduler.finish(first, "abort")
    assert stored_of(must_schedule(scheduler)) == [2 * BLOCK]


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_prompt_cached_to_its_last_token_runs_that_one_as_a_query(blocks: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(blocks * BLOCK)))
    run_step(scheduler)
    hit = scheduler.add(make_request("b", range(blocks * BLOCK)))
    plan = must_schedule(scheduler)
    assert rows(plan)[1] == (hit.slot, 1, True)
    assert stored_of(plan) == [blocks * BLOCK]
    assert hit.num_cached_tokens == blocks * BLOCK - 1


def test_full_hit_grows_into_a_block_of_its_own() -> None:
    scheduler = make_scheduler()
    first = scheduler.add(make_request("a", range(BLOCK)))
    run_step(scheduler)
    hit = scheduler.add(make_request("b", range(BLOCK)))
    run_step(scheduler)
    run_step(scheduler)
    assert hit.block_table[0] == first.block_table[0]
    assert hit.block_table[1] != first.block_table[1]


def test_only_the_first_admission_counts_as_cached_for_the_caller() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add(make_request("a", range(3 * BLOCK)))
    run_step(scheduler)
    scheduler.queues.requeue(seq, last_step_id=0)
    assert stored_of(must_schedule(scheduler)) == [3 * BLOCK]
    assert seq.num_cached_tokens == 0
    assert scheduler.stats.num_cached_tokens == 0 and scheduler.stats.num_prompt_tokens == 3 * BLOCK


def test_blocks_that_are_taken_from_the_prefix_cache_are_counted() -> None:
    scheduler = make_scheduler(num_blocks=2)
    counts = []
    for first_token in (0, 10, 20, 30):
        tokens = range(first_token, first_token + BLOCK)
        scheduler.add(make_request(str(first_token), tokens, max_tokens=1))
        run_step(scheduler)
        counts.append(scheduler.snapshot().num_evictions)
    assert counts == [0, 0, 1, 2]


def test_another_salt_shares_nothing() -> None:
    scheduler = make_scheduler()
    for seed in (0, 1):
        scheduler.add(make_request(f"r{seed}", range(8), seed=seed))
    assert stored_of(must_schedule(scheduler)) == [0, 0]


def test_nothing_is_cached_without_prefix_caching() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    for name in "ab":
        scheduler.add(make_request(name, range(8)))
    assert stored_of(must_schedule(scheduler)) == [0, 0]
