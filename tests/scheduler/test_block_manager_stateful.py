"""The block manager compared with a naive model: lists instead of links, whole prefixes instead of
hashes.
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from scheduler.block_manager import BlockManager
from tests.scheduler.helpers import User
from tests.scheduler.scenario import WEAK_HASHES

Prefix = tuple[str, tuple[int, ...]]  # salt, and all tokens up to the end of a block
HASHES: tuple[Callable[[bytes], int], ...] = (xxhash.xxh3_128_intdigest, *WEAK_HASHES)


def repeat(pattern: list[int], length: int) -> list[int]:
    return (pattern * length)[:length]


# Few patterns, so that prefixes often coincide.
TOKENS = st.builds(repeat, st.sampled_from(([0], [1], [0, 0, 1])), st.integers(1, 12))


class BlockManagerMachine(RuleBasedStateMachine):
    """The model keeps the free list in order of reuse, and what each block holds since it was last
    published.

    It predicts every block id that is handed out; which blocks are hits is the manager's choice,
    but each must hold the prefix it is used for.
    """

    users: Bundle[User] = Bundle("users")

    @initialize(
        num_blocks=st.integers(1, 8),
        block_size=st.integers(1, 3),
        hash_function=st.sampled_from(HASHES),
    )
    def make(self, num_blocks: int, block_size: int, hash_function: Callable[[bytes], int]) -> None:
        self.manager = BlockManager(num_blocks, block_size, hash_function=hash_function)
        self.free = list(range(num_blocks))
        self.content: dict[int, Prefix] = {}
        self.active: list[User] = []

    def prefix(self, user: User, index: int) -> Prefix:
        return user.cache_salt, tuple(user.token_ids[: (index + 1) * self.manager.block_size])

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for block_id in taken:
            self.content.pop(block_id, None)
        return taken

    @rule(
        target=users, token_ids=TOKENS, salt=st.sampled_from(["", "north"]), published=st.booleans()
    )
    def allocate(self, token_ids: list[int], salt: str, published: bool) -> User:
        user = User(token_ids, salt)
        num_blocks = self.manager.num_blocks_for(len(token_ids))
        num_cached = self.manager.allocate(user)
        if num_cached is None:
            assert num_blocks > len(self.free), (
                "refused, though everything would fit without a single hit"
            )
            return user
        num_hits = num_cached // self.manager.block_size
        hits = user.block_table[:num_hits]
        for index, block_id in enumerate(hits):
            assert self.content.get(block_id) == self.prefix(user, index), "a hit on other content"
        self.free = [block_id for block_id in self.free if block_id not in hits]
        assert user.block_table == hits + self.take(num_blocks - num_hits)
        self.active.append(user)
        if published:
            self.publish_up_to(user, len(token_ids))
        return user

    @rule(user=users, more=TOKENS)
    def append(self, user: User, more: list[int]) -> None:
        num_tokens = len(user.token_ids) + len(more)
        count = self.manager.num_blocks_for(num_tokens) - len(user.block_table)
        if user not in self.active:
            return
        assert self.manager.can_append(user, num_tokens) == (count <= len(self.free))
        if count <= len(self.free):
            user.token_ids.extend(more)
            assert self.manager.append(user, num_tokens) == self.take(count)

    @rule(user=users, share=st.floats(0, 1))
    def publish(self, user: User, share: float) -> None:
        if user in self.active:
            self.publish_up_to(user, round(share * len(user.token_ids)))

    def publish_up_to(self, user: User, num_tokens: int) -> None:
        num_before, num_full = user.num_published_blocks, num_tokens // self.manager.block_size
        for index in range(num_before, num_full):
            self.content[user.block_table[index]] = self.prefix(user, index)
        self.manager.publish(user, num_tokens, 0)
        assert user.num_published_blocks == max(num_before, num_full)

    @rule(user=consumes(users))
    def deallocate(self, user: User) -> None:
        if user in self.active:
            self.active.remove(user)
            held = {block_id for other in self.active for block_id in other.block_table}
            self.free += [
                block_id for block_id in reversed(user.block_table) if block_id not in held
            ]
            self.manager.deallocate(user)

    @precondition(lambda self: not self.active)
    @rule()
    def start_epoch(self) -> None:
        self.manager.clear_prefix_index()
        self.content.clear()

    @invariant()
    def laws_hold(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check(self.active)
            assert self.manager.num_free_blocks == len(self.free)


BlockManagerMachine.TestCase.settings = settings(
    deadline=None, max_examples=150, stateful_step_count=40
)
TestBlockManagerBesideANaiveModel = BlockManagerMachine.TestCase
