"""Block managers with one bug each: each docstring says how the class breaks its promise."""

from __future__ import annotations

from types import SimpleNamespace

from scheduler.block_manager import (
    NO_HASH,
    ROOT_SERIAL,
    Block,
    BlockManager,
    BlockUser,
)

# -- taking and releasing --------------------------------------------------------------------------


class ReleaseSkipped(BlockManager):
    """The last block of a sequence is never given back."""

    def deallocate(self, seq: BlockUser) -> None:
        if len(seq.block_table) > 1:
            seq.block_table.pop()
        super().deallocate(seq)


class SharedBlockReleasedEarly(BlockManager):
    """A block that another sequence still uses goes to the free list and is handed out."""

    def deallocate(self, seq: BlockUser) -> None:
        table = list(seq.block_table)
        super().deallocate(seq)
        for block_id in table:
            block = self.blocks[block_id]
            if block.ref_count == 1:
                block.ref_count = 0
                self._free_blocks[block_id] = block


class UsedBlockEvicted(BlockManager):
    """If no block is free, a used one is taken."""

    def can_append(self, seq: BlockUser, num_tokens: int) -> bool:
        return True

    def _take_free_block(self) -> int:
        if self.num_free_blocks == 0:
            self._free_blocks[0] = self.blocks[0]
        return super()._take_free_block()


class TableOneTooShort(BlockManager):
    """A table grows one token too late."""

    def append(self, seq: BlockUser, num_tokens: int) -> list[int]:
        return super().append(seq, num_tokens - 1)


class RevivedBlockStaysFree(BlockManager):
    """A hit on a free block leaves it in the free list, so it is handed out again."""

    def allocate(self, seq: BlockUser) -> int | None:
        revived = [block for block in self._find_cached_blocks(seq) if block.ref_count == 0]
        num_cached = super().allocate(seq)
        for block in revived:
            self._free_blocks[block.block_id] = block
        return num_cached


class RevivedBlockLosesHash(BlockManager):
    """A hit on a free block removes it from the index, though a sequence counts it as published."""

    def allocate(self, seq: BlockUser) -> int | None:
        revived = [block for block in self._find_cached_blocks(seq) if block.ref_count == 0]
        num_cached = super().allocate(seq)
        for block in revived:
            self._prefix_index.pop(block.hash, None)
            block.hash = NO_HASH
        return num_cached


class RevivedBlocksNotCounted(BlockManager):
    """Whether there is room is asked without those cached blocks that are free."""

    def allocate(self, seq: BlockUser) -> int | None:
        self.num_revived = sum(block.ref_count == 0 for block in self._find_cached_blocks(seq))
        try:
            return super().allocate(seq)
        finally:
            self.num_revived = 0

    @property
    def num_free_blocks(self) -> int:
        return super().num_free_blocks + getattr(self, "num_revived", 0)


# -- the prefix index ------------------------------------------------------------------------------


class StaleIndexEntry(BlockManager):
    """A block given to new content can still be found by its old content."""

    def _take_free_block(self) -> int:
        block = next(iter(self._free_blocks.values()))
        key, tokens, parent, salt = (
            block.hash,
            block.token_ids,
            block.parent_serial,
            block.cache_salt,
        )
        block_id = super()._take_free_block()
        if key != NO_HASH:
            block.token_ids, block.parent_serial, block.cache_salt = tokens, parent, salt
            self._prefix_index.setdefault(key, block)
        return block_id


class _LooseManager(BlockManager):
    """A block manager whose lookup can be weakened."""

    def _matches(self, block: Block, seq: BlockUser, index: int, parent_serial: int) -> bool:
        return (
            block.token_ids == self._block_tokens(seq, index)
            and block.parent_serial == parent_serial
        )

    def _find_cached_blocks(self, seq: BlockUser) -> list[Block]:
        found: list[Block] = []
        parent_serial = ROOT_SERIAL
        reads = self._caches_prefixes and seq.reads_prefix_cache
        for index in range(len(seq.token_ids) // self.block_size if reads else 0):
            block = self._prefix_index.get(self._block_hash(seq, index))
            if block is None or not self._matches(block, seq, index, parent_serial):
                break
            found.append(block)
            parent_serial = block.serial
        return found


class TokensNotCompared(_LooseManager):
    """Equal hashes are mistaken for equal tokens."""

    def _matches(self, block: Block, seq: BlockUser, index: int, parent_serial: int) -> bool:
        return block.parent_serial == parent_serial


class ParentNotCompared(_LooseManager):
    """Equal tokens are mistaken for an equal prefix."""

    def _matches(self, block: Block, seq: BlockUser, index: int, parent_serial: int) -> bool:
        return block.token_ids == self._block_tokens(seq, index)


class SaltNotCompared(_LooseManager):
    """Equal hashes are mistaken for equal cache salts."""


class HitAfterMiss(BlockManager):
    """A later block counts as cached though an earlier one is missing."""

    def _find_cached_blocks(self, seq: BlockUser) -> list[Block]:
        found = super()._find_cached_blocks(seq)
        index = len(found) + 1
        if (
            self._caches_prefixes
            and seq.reads_prefix_cache
            and index < len(seq.token_ids) // self.block_size
        ):
            block = self._prefix_index.get(self._block_hash(seq, index))
            if block is not None and block.token_ids == self._block_tokens(seq, index):
                found.append(block)
        return found


class CollisionTakesSerial(BlockManager):
    """A block whose hash collides takes the serial of the indexed one without having its
    content.
    """

    def _publish_block(self, seq: BlockUser, index: int) -> None:
        first = self._prefix_index.get(self._block_hash(seq, index))
        serial = first.serial if first is not None else None
        super()._publish_block(seq, index)
        if serial is not None:
            self.blocks[seq.block_table[index]].serial = serial


class PartialBlockPublished(BlockManager):
    """The block that is being filled is published with those that are full."""

    def publish(self, seq: BlockUser, num_tokens: int, step_id: int) -> None:
        super().publish(seq, min(num_tokens + self.block_size - 1, len(seq.token_ids)), step_id)


class IndexOutlivesEpoch(BlockManager):
    """A new epoch still finds the cache content of the previous one."""

    def clear_prefix_index(self) -> None:
        pass


class ScoredPromptReadsPrefixes(BlockManager):
    """A sequence that needs the logits of its whole prompt begins with cached blocks."""

    def _find_cached_blocks(self, seq: BlockUser) -> list[Block]:
        reader = SimpleNamespace(
            token_ids=seq.token_ids,
            cache_salt=seq.cache_salt,
            block_table=seq.block_table,
            block_hashes=seq.block_hashes,
            num_published_blocks=seq.num_published_blocks,
            reads_prefix_cache=True,
        )
        return super()._find_cached_blocks(reader)
