"""Paged KV-cache accounting: what each block holds, who uses it, and what may be reused.

Owns block ids, reference counts and the prefix index. Never touches tensors, time or Ray. Laws
(`BlockManager.check`): a block is free or used, never both; `ref_count` equals the number of tables
that name it; the index finds only full, published blocks, by the hash, tokens, parent and salt they
were published with. Called by the scheduler, from one thread.

A block is *published* when its content is known and every step that fills it has been submitted:
steps run in order and a layer stores KV before it attends, so every step planned later may read it.
Publishing gives a *serial*; a second copy of the same content takes the serial of the first. So a
block's tokens, the serial of its parent and the salt name a whole prefix exactly: a match is
compared by these, and the hash only has to be fast. The salt is the request's `cache_salt`:
requests with different salts share nothing, so nobody can tell by a faster answer what others have
asked. Every block stores and compares the salt; strictly only first blocks need to, because a
parent's serial implies it. The index has one block per hash, so the first block's hash covers the
salt too: equal prompts with different salts do not take each other's place. A free block keeps its
content and stays findable until it is taken for something new.

If ranks are lost and their cache is not, what was published for steps whose result is unread is
withdrawn (`withdraw_unconfirmed`): nobody knows whether those steps have filled it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import xxhash

HashFunction = Callable[[bytes], int]  # a number of at most 128 bits
NO_HASH = -1
ROOT_SERIAL = 0  # of the parent of first blocks, and of blocks that are not published


@dataclass(slots=True, eq=False)
class Block:
    """A block. `ref_count` 0: free, 1: owned, more: shared; `hash`: `NO_HASH` until published."""

    block_id: int
    ref_count: int = 0
    hash: int = NO_HASH
    token_ids: Seq[int] = ()
    cache_salt: str = ""
    serial: int = ROOT_SERIAL
    parent_serial: int = ROOT_SERIAL


class BlockUser(Protocol):
    """What the block manager reads and writes in a sequence."""

    token_ids: array[int]
    cache_salt: str
    block_table: list[int]
    block_hashes: list[int]  # chained hashes of the first full blocks, as far as needed so far
    num_published_blocks: int  # the first ones of `block_table`, those found in the cache included

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether it may share blocks that hold its beginning."""


class BlockManager:
    """`num_blocks` blocks of `block_size` tokens, with a prefix index over the published ones."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hash_function: HashFunction = xxhash.xxh3_128_intdigest,
    ) -> None:
        assert num_blocks >= 1 and block_size >= 1
        self.block_size = block_size
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.num_evictions = 0  # blocks that were taken for new content while the index had them
        # By block id, the least recently used first.
        self._free_blocks = OrderedDict((block.block_id, block) for block in self.blocks)
        self._caches_prefixes = enable_prefix_caching
        self._hash_function = hash_function
        self._prefix_index: dict[int, Block] = {}
        self._last_serial = ROOT_SERIAL
        # (id of that step or of a later one, block) of published blocks whose last filling step is
        # unread.
        self._unconfirmed_blocks: deque[tuple[int, Block]] = deque()

    @property
    def num_free_blocks(self) -> int:
        return len(self._free_blocks)

    # -- sequences ---------------------------------------------------------------------------------

    def allocate(self, seq: BlockUser) -> int | None:
        """Give a sequence blocks for all its tokens, shared blocks first; returns the number of
        cached tokens. None, and nothing changes, if there are too few free blocks; cached blocks
        that are free count as taken.
        """
        assert not seq.block_table, "a sequence is allocated once"
        cached_blocks = self._find_cached_blocks(seq)
        num_free_cached_blocks = sum(block.ref_count == 0 for block in cached_blocks)
        num_new_blocks = self.num_blocks_for(len(seq.token_ids)) - len(cached_blocks)
        if num_new_blocks + num_free_cached_blocks > self.num_free_blocks:
            return None
        for block in cached_blocks:
            if block.ref_count == 0:
                del self._free_blocks[block.block_id]
            block.ref_count += 1
        block_table = seq.block_table
        block_table.extend(block.block_id for block in cached_blocks)
        block_table.extend(self._take_free_block() for _ in range(num_new_blocks))
        seq.num_published_blocks = len(cached_blocks)
        return len(cached_blocks) * self.block_size

    def can_append(self, seq: BlockUser, num_tokens: int) -> bool:
        """Whether the table of a sequence can grow to hold `num_tokens`."""
        return self.num_blocks_for(num_tokens) - len(seq.block_table) <= self.num_free_blocks

    def append(self, seq: BlockUser, num_tokens: int) -> list[int]:
        """Grow a table to hold `num_tokens`; returns the new ids. Call only if `can_append`."""
        num_new_blocks = self.num_blocks_for(num_tokens) - len(seq.block_table)
        new_block_ids = [self._take_free_block() for _ in range(num_new_blocks)]
        seq.block_table.extend(new_block_ids)
        return new_block_ids

    def deallocate(self, seq: BlockUser) -> None:
        """Release the blocks of a sequence, tail first, so that heads of prefixes outlive tails."""
        blocks = self.blocks
        for block_id in reversed(seq.block_table):
            block = blocks[block_id]
            block.ref_count -= 1
            assert block.ref_count >= 0, (
                f"block {block_id} was released more often than it was taken"
            )
            if block.ref_count == 0:
                self._free_blocks[block_id] = block
        seq.block_table.clear()
        seq.num_published_blocks = 0

    def publish(self, seq: BlockUser, num_tokens: int, step_id: int) -> None:
        """Make the full blocks among the first `num_tokens` tokens findable.

        Call when their tokens are known and every step that fills them has been submitted.
        `step_id`: the last of these steps, or a later one.
        """
        if not self._caches_prefixes:
            return
        for index in range(seq.num_published_blocks, num_tokens // self.block_size):
            self._publish_block(seq, index)
            self._unconfirmed_blocks.append((step_id, self.blocks[seq.block_table[index]]))
            seq.num_published_blocks = index + 1

    def confirm(self, step_id: int) -> None:
        """The result of a step was read: everything up to it is in the cache."""
        unconfirmed_blocks = self._unconfirmed_blocks
        while unconfirmed_blocks and unconfirmed_blocks[0][0] <= step_id:
            unconfirmed_blocks.popleft()

    def withdraw_unconfirmed(self, step_id: int, users: Iterable[BlockUser]) -> None:
        """Withdraw what was published after the step with this id, the last whose result was read;
        the steps of the next epoch are counted anew. `users`: of all blocks.
        """
        for filling_step_id, block in self._unconfirmed_blocks:
            if filling_step_id > step_id and block.hash != NO_HASH:
                if self._prefix_index.get(block.hash) is block:
                    del self._prefix_index[block.hash]
                _forget(block)
        self._unconfirmed_blocks.clear()
        for user in users:
            while (last_index := user.num_published_blocks - 1) >= 0 and self.blocks[
                user.block_table[last_index]
            ].hash == NO_HASH:
                user.num_published_blocks = last_index

    def clear_prefix_index(self) -> None:
        """Forget all content: the caches of a new epoch are empty. No sequence may hold blocks."""
        assert self.num_free_blocks == len(self.blocks), "a new epoch starts with every block free"
        self._prefix_index.clear()
        self._unconfirmed_blocks.clear()
        for block in self.blocks:
            _forget(block)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- prefix index ------------------------------------------------------------------------------

    def _find_cached_blocks(self, seq: BlockUser) -> list[Block]:
        """The published blocks that hold the beginning of a sequence, up to the first miss."""
        cached_blocks: list[Block] = []
        if not self._caches_prefixes or not seq.reads_prefix_cache:
            return cached_blocks
        parent_serial = ROOT_SERIAL
        for index in range(len(seq.token_ids) // self.block_size):
            block = self._prefix_index.get(self._block_hash(seq, index))
            if block is None or not _has_content(
                block, self._block_tokens(seq, index), parent_serial, seq.cache_salt
            ):
                break
            cached_blocks.append(block)
            parent_serial = block.serial
        return cached_blocks

    def _publish_block(self, seq: BlockUser, index: int) -> None:
        block = self.blocks[seq.block_table[index]]
        assert block.ref_count == 1 and block.hash == NO_HASH, (
            "a block is published once, by its only owner"
        )
        block.hash = self._block_hash(seq, index)
        block.token_ids = self._block_tokens(seq, index)
        block.cache_salt = seq.cache_salt
        block.parent_serial = (
            self.blocks[seq.block_table[index - 1]].serial if index else ROOT_SERIAL
        )
        indexed_block = self._prefix_index.get(block.hash)
        if indexed_block is not None and _has_content(
            indexed_block, block.token_ids, block.parent_serial, block.cache_salt
        ):
            block.serial = indexed_block.serial
        else:
            self._last_serial += 1
            block.serial = self._last_serial
        if indexed_block is None or indexed_block.ref_count == 0:
            if indexed_block is not None:
                _forget(indexed_block)
            self._prefix_index[block.hash] = block

    def _block_hash(self, seq: BlockUser, index: int) -> int:
        """Chained hash of block `index`: of its tokens and the parent's hash; the first block has
        the salt in place of that.
        """
        block_hashes = seq.block_hashes
        while len(block_hashes) <= index:
            parent_bytes = (
                block_hashes[-1].to_bytes(16, "little")
                if block_hashes
                else seq.cache_salt.encode("utf-8", "surrogatepass")
            )
            token_bytes = self._block_tokens(seq, len(block_hashes)).tobytes()
            block_hashes.append(self._hash_function(parent_bytes + token_bytes))
        return block_hashes[index]

    def _block_tokens(self, seq: BlockUser, index: int) -> array[int]:
        start = index * self.block_size
        return seq.token_ids[start : start + self.block_size]

    def _take_free_block(self) -> int:
        """Take the least recently used free block for new content: it leaves the index at once."""
        assert self._free_blocks, "no free block; ask can_append first"
        block_id, block = self._free_blocks.popitem(last=False)
        if block.hash != NO_HASH:
            if self._prefix_index.get(block.hash) is block:
                del self._prefix_index[block.hash]
                self.num_evictions += 1
            _forget(block)
        block.ref_count = 1
        return block_id

    # -- laws --------------------------------------------------------------------------------------

    def check(self, users: Iterable[BlockUser]) -> None:
        """Raise AssertionError, naming law and values, unless all laws hold over all `users`."""
        num_users = [0] * len(self.blocks)
        for user in users:
            for index, block_id in enumerate(user.block_table):
                num_users[block_id] += 1
                is_published = index < user.num_published_blocks
                has_hash = self.blocks[block_id].hash != NO_HASH
                assert has_hash == is_published, (
                    f"block {block_id}: hash set {has_hash}, published {is_published}"
                )
        for block in self.blocks:
            assert block.ref_count == num_users[block.block_id], (
                f"block {block.block_id}: ref_count {block.ref_count}, but"
                f" {num_users[block.block_id]} tables name it"
            )
        unused_ids = {block.block_id for block in self.blocks if block.ref_count == 0}
        assert self._free_blocks.keys() == unused_ids, (
            f"blocks {sorted(self._free_blocks)} are in the free list, {sorted(unused_ids)} are"
            " unused"
        )
        for indexed_hash, block in self._prefix_index.items():
            assert indexed_hash == block.hash != NO_HASH, (
                f"index entry of block {block.block_id} has another block's hash"
            )
            assert len(block.token_ids) == self.block_size, (
                f"block {block.block_id} is indexed, but not full"
            )


def _has_content(block: Block, token_ids: Seq[int], parent_serial: int, cache_salt: str) -> bool:
    return (
        block.token_ids == token_ids
        and block.parent_serial == parent_serial
        and block.cache_salt == cache_salt
    )


def _forget(block: Block) -> None:
    block.hash = NO_HASH
    block.token_ids = ()
    block.cache_salt = ""
    block.serial = block.parent_serial = ROOT_SERIAL
