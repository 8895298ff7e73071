"""Block managers and schedulers that go back to the last step that was read with one bug each."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scheduler.block_manager import BlockManager, BlockUser
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence

# -- what is published -----------------------------------------------------------------------------


class LostPublicationsAreKept(BlockManager):
    """What was published for steps that are lost can still be found."""

    def withdraw_unconfirmed(self, step_id: int, users: Iterable[BlockUser]) -> None:
        self._unconfirmed_blocks.clear()


class LostBlockIsKept(BlockManager):
    """One of the blocks that were published for lost steps can still be found."""

    def withdraw_unconfirmed(self, step_id: int, users: Iterable[BlockUser]) -> None:
        if self._unconfirmed_blocks:
            self._unconfirmed_blocks.pop()
        super().withdraw_unconfirmed(step_id, users)


class WithdrawnBlockStaysInTheIndex(BlockManager):
    """A block is forgotten, but not its entry in the index."""

    def withdraw_unconfirmed(self, step_id: int, users: Iterable[BlockUser]) -> None:
        index = dict(self._prefix_index)
        super().withdraw_unconfirmed(step_id, users)
        self._prefix_index = index


class WithdrawnBlockCountsAsPublished(BlockManager):
    """Sequences do not hear that their blocks were withdrawn."""

    def withdraw_unconfirmed(self, step_id: int, users: Iterable[BlockUser]) -> None:
        super().withdraw_unconfirmed(step_id, ())


class ConfirmedOneStepEarly(BlockManager):
    """A step counts as read when the one before it is."""

    def confirm(self, step_id: int) -> None:
        super().confirm(step_id + 1)


class PublishedAfterAnEarlierStep(BlockManager):
    """Blocks are noted with the step before the one that fills them."""

    def publish(self, seq: BlockUser, num_tokens: int, step_id: int) -> None:
        super().publish(seq, num_tokens, step_id - 1)


# -- what was computed -----------------------------------------------------------------------------


class _RollsBack(Scheduler):
    """Does something to each sequence that goes on, after or before the scheduler does its part."""

    def start_epoch(self, *, cache_survives: bool = False) -> list[Sequence]:
        undo = [self._before(seq) for seq in self.running]
        failed_sequences = super().start_epoch(cache_survives=cache_survives)
        for sequence, change in zip(list(self.running), undo, strict=False):
            change()
            self._after(sequence)
        return failed_sequences

    def _before(self, seq: Sequence) -> Callable[[], None]:
        return lambda: None

    def _after(self, seq: Sequence) -> None:
        pass


class OneTokenAhead(_RollsBack):
    """A sequence skips one token."""

    def _after(self, seq: Sequence) -> None:
        seq.num_computed_tokens += 1


class OneTokenBehind(_RollsBack):
    """A sequence computes one token again that was computed."""

    def _after(self, seq: Sequence) -> None:
        seq.num_computed_tokens = max(1, seq.num_computed_tokens - 1)


class NothingIsUndone(_RollsBack):
    """A sequence goes on after the steps that are lost."""

    def _before(self, seq: Sequence) -> Callable[[], None]:
        num_computed_tokens = seq.num_computed_tokens

        def restore() -> None:
            seq.num_computed_tokens = min(num_computed_tokens, len(seq.token_ids) - 1)

        return restore


class LateArrivalsAreKept(_RollsBack):
    """Sequences that were admitted in lost steps keep the blocks that they share."""

    def _before(self, seq: Sequence) -> Callable[[], None]:
        seq.admitted_step_id = -1
        return super()._before(seq)


class RowsAreNotSentAgain(_RollsBack):
    """New ranks are expected to know the rows of the old ones."""

    def _after(self, seq: Sequence) -> None:
        seq.lacks_row = False


class OldStepsStayValid(_RollsBack):
    """A sequence drops the tokens of the new epoch up to the step where it was retracted."""

    def _before(self, seq: Sequence) -> Callable[[], None]:
        first_kept_step_id = seq.first_kept_step_id

        def restore() -> None:
            seq.first_kept_step_id = first_kept_step_id

        return restore


class RetractedTokensAreNotCounted(Scheduler):
    """What retracted steps compute is taken off although it was not added."""

    def retract(self, seq: Sequence) -> None:
        super().retract(seq)
        seq.num_retracted_tokens = 0


class BlockIsGivenAwayTwice(Scheduler):
    """The last block of a sequence that goes on is free, too."""

    def start_epoch(self, *, cache_survives: bool = False) -> list[Sequence]:
        failed_sequences = super().start_epoch(cache_survives=cache_survives)
        for seq in self.running[:1]:
            block = self.block_manager.blocks[seq.block_table[-1]]
            self.block_manager._free_blocks[block.block_id] = block
        return failed_sequences


class ReleasedSlotsAreSentAgain(Scheduler):
    """New ranks are told to release the slots that old ranks had to."""

    def start_epoch(self, *, cache_survives: bool = False) -> list[Sequence]:
        released_slots = list(self.queues.released_slots)
        failed_sequences = super().start_epoch(cache_survives=cache_survives)
        self.queues.released_slots += released_slots
        return failed_sequences


class SpoiledCacheIsTrusted(Scheduler):
    """The cache is trusted although the ranks died of a fault that may have written anywhere."""

    def start_epoch(self, *, cache_survives: bool = False) -> list[Sequence]:
        return super().start_epoch(cache_survives=True)


class CacheIsNeverTrusted(Scheduler):
    """Everything is computed again although the cache has survived."""

    def start_epoch(self, *, cache_survives: bool = False) -> list[Sequence]:
        return super().start_epoch()
