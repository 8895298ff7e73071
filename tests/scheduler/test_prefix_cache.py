"""The prefix cache: content that is found again or must not be found, and second copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import xxhash

from scheduler.block_manager import NO_HASH, BlockManager
from tests.scheduler.helpers import BLOCK, A, B, C, D, User, hold, make_manager, num_findable

BOUNDARIES = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1)


def one_hash(data: bytes) -> int:
    """All contents have the same hash."""
    return 7


# -- hits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", BOUNDARIES)
def test_full_blocks_of_the_same_tokens_are_found(length: int) -> None:
    manager = make_manager()
    tokens = list(range(length))
    hold(manager, tokens)
    assert num_findable(manager, tokens) == length // BLOCK * BLOCK


def test_prompt_cached_to_its_last_token_shares_every_block() -> None:
    manager = make_manager()
    first, _ = hold(manager, A + B)
    second, found = hold(manager, A + B)
    assert found == 2 * BLOCK and second.block_table == first.block_table


def test_partial_block_has_no_hash_and_is_not_shared() -> None:
    manager = make_manager()
    first, _ = hold(manager, A + B[:-1])
    second, _ = hold(manager, A + B[:-1])
    assert manager.blocks[first.block_table[1]].hash == NO_HASH
    assert second.block_table[1] != first.block_table[1]


def test_first_divergent_token_goes_to_a_block_of_ones_own() -> None:
    manager = make_manager()
    first, _ = hold(manager, A + B)
    second, found = hold(manager, A + B[:-1] + [999])
    assert found == BLOCK and second.block_table[1] != first.block_table[1]


def test_nothing_hits_after_the_first_missing_block() -> None:
    manager = make_manager(5)
    hold(manager, A + B + C)
    assert num_findable(manager, D + B + C) == 0
    assert num_findable(manager, A + D + C) == BLOCK


def test_child_of_an_evicted_parent_is_not_found() -> None:
    manager = make_manager(2)
    parent, _ = hold(manager, A)
    child, found = hold(manager, A + B)
    assert found == BLOCK
    manager.deallocate(parent)
    # released head first, against the rule, so that the parent is evicted first
    child.block_table.reverse()
    manager.deallocate(child)
    hold(manager, D)
    assert child.block_table == [] and manager.num_evictions == 1
    assert num_findable(manager, A + B) == 0


def test_prefix_caching_can_be_switched_off() -> None:
    manager = make_manager(enable_prefix_caching=False)
    user, _ = hold(manager, A + B)
    assert num_findable(manager, A + B) == 0
    assert {manager.blocks[i].hash for i in user.block_table} == {NO_HASH}
    manager.check([user])


def test_unpublished_blocks_are_not_found() -> None:
    manager = make_manager()
    manager.allocate(User(A + B))
    assert num_findable(manager, A + B) == 0


def test_blocks_are_published_up_to_the_computed_tokens_only() -> None:
    manager = make_manager()
    user = User(A + B + C)
    manager.allocate(user)
    manager.publish(user, 2 * BLOCK - 1, 0)
    assert num_findable(manager, A + B + C) == BLOCK
    manager.publish(user, 2 * BLOCK, 0)
    assert num_findable(manager, A + B + C) == 2 * BLOCK


# -- revived blocks --------------------------------------------------------------------------------


def test_hit_on_a_free_block_revives_it_with_its_hash() -> None:
    manager = make_manager()
    user, _ = hold(manager, A)
    block = manager.blocks[user.block_table[0]]
    before = block.hash, block.serial, block.token_ids
    manager.deallocate(user)
    again, found = hold(manager, A)
    assert found == BLOCK and again.block_table == [block.block_id]
    assert (block.hash, block.serial, block.token_ids) == before and block.ref_count == 1
    assert num_findable(manager, A) == BLOCK


def test_revived_blocks_count_as_taken() -> None:
    manager = make_manager(2)
    user, _ = hold(manager, A)
    manager.deallocate(user)
    # one revived and two new, with only two free
    assert manager.allocate(User(A + B + [1])) is None
    assert manager.allocate(User([*A, 1])) == BLOCK  # one revived, one new


def test_shared_blocks_in_use_do_not_count_as_taken() -> None:
    manager = make_manager(2)
    hold(manager, A)
    assert manager.allocate(User([*A, 1])) == BLOCK


def test_block_given_to_new_content_leaves_the_index_at_once() -> None:
    manager = make_manager(1)
    user, _ = hold(manager, A)
    manager.deallocate(user)
    manager.allocate(User(B))  # nothing is published yet
    assert manager.blocks[0].hash == NO_HASH and manager.num_evictions == 1
    assert not manager._prefix_index


# -- hashes, serials, collisions -------------------------------------------------------------------


def test_each_full_block_of_a_sequence_is_hashed_once() -> None:
    calls: list[bytes] = []

    def counting(data: bytes) -> int:
        calls.append(data)
        return xxhash.xxh3_128_intdigest(data)

    manager = make_manager(hash_function=counting)
    user = User(A + B + C[:1])
    for _ in range(3):
        manager.allocate(user)
        manager.publish(user, len(user.token_ids), 0)
        manager.deallocate(user)
    assert len(calls) == 2


def test_hash_covers_the_parent_and_the_tokens() -> None:
    hashed: list[bytes] = []

    def noting(data: bytes) -> int:
        hashed.append(data)
        return len(hashed)

    hold(make_manager(hash_function=noting), A + B)
    assert hashed[0].endswith(b"".join(token.to_bytes(4, "little") for token in A))
    assert hashed[1] == (1).to_bytes(16, "little") + b"".join(
        token.to_bytes(4, "little") for token in B
    )


@pytest.mark.parametrize("hash_function", [xxhash.xxh3_128_intdigest, one_hash])
def test_another_cache_salt_is_a_miss(hash_function: Callable[[bytes], int]) -> None:
    manager = make_manager(hash_function=hash_function)
    hold(manager, A, "north")
    assert num_findable(manager, A, "south") == 0
    assert num_findable(manager, A) == 0
    assert num_findable(manager, A, "north") == BLOCK


def test_salts_do_not_push_each_other_out_of_the_index() -> None:
    manager = make_manager()
    hold(manager, A, "north")
    hold(manager, A, "south")
    assert num_findable(manager, A, "north") == num_findable(manager, A, "south") == BLOCK


def test_any_string_can_be_a_salt() -> None:
    manager = make_manager()
    hold(manager, A, "\ud800")  # JSON can hold half a surrogate pair
    assert num_findable(manager, A, "\ud800") == BLOCK


def test_forged_collision_of_other_tokens_is_a_miss() -> None:
    manager = make_manager(hash_function=one_hash)
    hold(manager, A)
    assert num_findable(manager, B) == 0


def test_forged_collision_after_another_parent_is_a_miss() -> None:
    def last_block_only(data: bytes) -> int:
        return xxhash.xxh3_64_intdigest(data[-4 * BLOCK :])

    manager = make_manager(hash_function=last_block_only)
    hold(manager, A + C)
    hold(manager, B)
    assert num_findable(manager, B + C) == BLOCK
    assert num_findable(manager, C) == 0


def test_colliding_block_in_use_is_not_replaced_in_the_index() -> None:
    manager = make_manager(hash_function=one_hash)
    first, _ = hold(manager, A)
    second, _ = hold(manager, B)
    assert num_findable(manager, A) == BLOCK and num_findable(manager, B) == 0
    manager.check([first, second])


def test_colliding_block_that_is_free_is_replaced_in_the_index() -> None:
    manager = make_manager(hash_function=one_hash)
    first, _ = hold(manager, A)
    old = manager.blocks[first.block_table[0]]
    manager.deallocate(first)
    second, _ = hold(manager, B)
    assert old.hash == NO_HASH
    assert num_findable(manager, B) == BLOCK
    manager.check([second])


def publish_twice(manager: BlockManager, token_ids: list[int]) -> tuple[User, User]:
    """Two copies of one content, both computed before either was published."""
    first, second = User(list(token_ids)), User(list(token_ids))
    manager.allocate(first)
    manager.allocate(second)
    manager.publish(first, len(token_ids), 0)
    manager.publish(second, len(token_ids), 0)
    return first, second


def test_second_copy_takes_the_serial_of_the_first() -> None:
    manager = make_manager()
    first, second = publish_twice(manager, A + B)
    assert first.block_table != second.block_table
    serials = [[manager.blocks[i].serial for i in user.block_table] for user in (first, second)]
    assert serials[0] == serials[1] and len(set(serials[0])) == 2


def test_child_of_a_second_copy_is_found_through_the_first() -> None:
    manager = make_manager()
    first, second = publish_twice(manager, A)
    second.token_ids.extend(B)
    manager.append(second, 2 * BLOCK)
    manager.publish(second, 2 * BLOCK, 0)
    probe, found = hold(manager, A + B)
    assert found == 2 * BLOCK
    assert probe.block_table == [first.block_table[0], second.block_table[1]]


def test_second_copy_does_not_replace_the_first_while_that_is_used() -> None:
    manager = make_manager()
    first, _ = publish_twice(manager, A)
    probe, _ = hold(manager, A)
    assert probe.block_table == first.block_table


def test_second_copy_replaces_the_first_that_is_free() -> None:
    manager = make_manager()
    first, second = User(list(A)), User(list(A))
    manager.allocate(first)
    manager.allocate(second)
    manager.publish(first, BLOCK, 0)
    manager.deallocate(first)
    manager.publish(second, BLOCK, 0)
    probe, _ = hold(manager, A)
    assert probe.block_table == second.block_table
    manager.check([second, probe])


def test_only_a_block_of_ones_own_can_be_published() -> None:
    manager = make_manager()
    hold(manager, A)
    second, _ = hold(manager, A)
    second.num_published_blocks = 0
    with pytest.raises(AssertionError, match="published once, by its only owner"):
        manager.publish(second, BLOCK, 0)


def test_new_epoch_finds_nothing() -> None:
    manager = make_manager()
    user, _ = hold(manager, A + B)
    manager.deallocate(user)
    manager.clear_prefix_index()
    assert num_findable(manager, A + B) == 0
    assert {block.hash for block in manager.blocks} == {NO_HASH}


def test_new_epoch_with_used_blocks_is_an_error() -> None:
    manager = make_manager()
    hold(manager, A)
    with pytest.raises(AssertionError, match="every block free"):
        manager.clear_prefix_index()
