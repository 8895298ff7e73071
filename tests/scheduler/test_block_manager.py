"""Blocks: which sequences own them, in which order they are reused, and the laws of the pool."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler.block_manager import NO_HASH, BlockManager
from tests.scheduler.helpers import BLOCK, A, B, C, D, User, hold, make_manager, num_findable

BOUNDARIES = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1)


# -- blocks ----------------------------------------------------------------------------------------


def test_new_blocks_are_free_and_have_no_hash() -> None:
    manager = make_manager(3)
    assert [(b.block_id, b.ref_count, b.hash, b.token_ids) for b in manager.blocks] == [
        (0, 0, NO_HASH, ()),
        (1, 0, NO_HASH, ()),
        (2, 0, NO_HASH, ()),
    ]
    assert manager.num_free_blocks == 3


@pytest.mark.parametrize("length", BOUNDARIES)
def test_allocation_takes_just_the_blocks_that_the_tokens_need(length: int) -> None:
    manager = make_manager()
    user, _ = hold(manager, list(range(length)))
    assert len(user.block_table) == -(-length // BLOCK)
    assert manager.num_free_blocks == 16 - len(user.block_table)
    manager.check([user])


@pytest.mark.parametrize("length", BOUNDARIES)
def test_append_takes_a_block_only_at_a_boundary(length: int) -> None:
    manager = make_manager()
    user, _ = hold(manager, list(range(length)))
    new = manager.append(user, length + 1)
    assert len(new) == (1 if length % BLOCK == 0 else 0)
    assert user.block_table[len(user.block_table) - len(new) :] == new


def test_append_takes_as_many_blocks_as_a_chunk_needs() -> None:
    manager = make_manager()
    user, _ = hold(manager, A)
    assert len(manager.append(user, 4 * BLOCK)) == 3


def test_can_append_says_whether_the_free_blocks_suffice() -> None:
    manager = make_manager(3)
    user, _ = hold(manager, A)
    assert manager.can_append(user, 3 * BLOCK)
    assert not manager.can_append(user, 3 * BLOCK + 1)


def test_nothing_is_allocated_if_the_free_blocks_do_not_suffice() -> None:
    manager, user = make_manager(2), User(list(range(2 * BLOCK + 1)))
    assert manager.allocate(user) is None
    assert (user.block_table, manager.num_free_blocks) == ([], 2)
    assert manager.allocate(User(list(range(2 * BLOCK)))) == 0


def test_deallocation_gives_everything_back() -> None:
    manager = make_manager()
    user, _ = hold(manager, A + B + [1])
    manager.deallocate(user)
    assert (user.block_table, user.num_published_blocks, manager.num_free_blocks) == ([], 0, 16)
    manager.check([])


def test_shared_block_is_free_only_after_its_last_user() -> None:
    manager = make_manager()
    first, _ = hold(manager, [*A, 1])
    second, _ = hold(manager, [*A, 2])
    shared = manager.blocks[first.block_table[0]]
    assert shared.ref_count == 2
    manager.deallocate(first)
    assert shared.ref_count == 1
    manager.deallocate(second)
    assert shared.ref_count == 0


def test_block_released_too_often_is_an_error() -> None:
    manager = make_manager()
    user, _ = hold(manager, A)
    table = list(user.block_table)
    manager.deallocate(user)
    user.block_table = table
    with pytest.raises(AssertionError, match="was released more often than it was taken"):
        manager.deallocate(user)


def test_taking_from_an_empty_pool_is_an_error() -> None:
    manager = make_manager(1)
    user, _ = hold(manager, A)
    with pytest.raises(AssertionError, match="no free block"):
        manager.append(user, 2 * BLOCK)


# -- order of reuse --------------------------------------------------------------------------------


def test_least_recently_released_block_is_reused_first() -> None:
    manager = make_manager(3)
    users = [hold(manager, tokens)[0] for tokens in (A, B, C)]
    tables = [list(user.block_table) for user in users]
    for user in (users[1], users[2], users[0]):
        manager.deallocate(user)
    new, _ = hold(manager, D + D + D)
    assert new.block_table == tables[1] + tables[2] + tables[0]


def test_tail_of_a_prefix_is_reused_before_its_head() -> None:
    manager = make_manager(3)
    user, _ = hold(manager, A + B + C)
    table = list(user.block_table)
    manager.deallocate(user)
    new, _ = hold(manager, D)
    assert new.block_table == [table[2]]
    assert num_findable(manager, A + B + C) == 2 * BLOCK


def test_hit_on_a_free_block_takes_it_out_of_the_middle_of_the_free_list() -> None:
    manager = make_manager(3)
    users = [hold(manager, tokens)[0] for tokens in (A, B, C)]
    for user in users:
        manager.deallocate(user)
    again, found = hold(manager, B)
    assert found == BLOCK and manager.num_free_blocks == 2
    new, _ = hold(manager, D + D)
    assert sorted(new.block_table + again.block_table) == [0, 1, 2]
    manager.check([again, new])


# -- laws ------------------------------------------------------------------------------------------


def lose_reference(manager: BlockManager, user: User) -> None:
    manager.blocks[user.block_table[0]].ref_count = 2


def free_used_block(manager: BlockManager, user: User) -> None:
    block_id = user.block_table[0]
    manager._free_blocks[block_id] = manager.blocks[block_id]


def lose_free_block(manager: BlockManager, user: User) -> None:
    del manager._free_blocks[manager.blocks[-1].block_id]


def lose_hash(manager: BlockManager, user: User) -> None:
    manager.blocks[user.block_table[0]].hash = NO_HASH


def index_under_another_hash(manager: BlockManager, user: User) -> None:
    manager._prefix_index[12345] = manager.blocks[user.block_table[0]]


def index_partial_block(manager: BlockManager, user: User) -> None:
    manager.blocks[user.block_table[0]].token_ids = (1,)


@pytest.mark.parametrize(
    ("breakage", "law"),
    [
        (lose_reference, "ref_count 2, but 1 tables name it"),
        (free_used_block, r"blocks \[0, .* are in the free list"),
        (lose_free_block, "are unused"),
        (lose_hash, "hash set False, published True"),
        (index_under_another_hash, "another block's hash"),
        (index_partial_block, "not full"),
    ],
)
def test_check_names_the_broken_law(
    breakage: Callable[[BlockManager, User], None], law: str
) -> None:
    manager = make_manager()
    user, _ = hold(manager, A + B + [1])
    manager.check([user])
    breakage(manager, user)
    with pytest.raises(AssertionError, match=law):
        manager.check([user])


def test_any_salt_can_be_hashed() -> None:
    user = User(list(range(BLOCK)))
    user.cache_salt = "\ud800"
    assert make_manager(4).allocate(user) == 0
