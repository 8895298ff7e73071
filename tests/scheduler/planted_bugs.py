"""Scheduler, block manager and engine with one bug each, which the simulation must catch.

A number of simulated seeds means nothing unless planted bugs are found. Each class here breaks one promise by the
smallest change that breaks it; its docstring says which. `PLANTED` maps its name to the parts to simulate.
"""

from __future__ import annotations

from array import array
from typing import TypeVar

from scheduler.block_manager import NO_HASH, ROOT_SERIAL, Block, BlockManager, BlockUser
from scheduler.engine import Engine
from scheduler.messages import Request, StepPlan, ints
from scheduler.scheduler import Scheduler, StepOutput, _Step
from scheduler.sequence import Sequence, SequenceStatus
from tests.scheduler.simulator import Parts

PLANTED: dict[str, Parts] = {}
Broken = TypeVar("Broken", bound=type[Scheduler] | type[BlockManager] | type[Engine])


def planted(broken: Broken) -> Broken:
    """Register a broken class under its name."""
    if issubclass(broken, Scheduler):
        PLANTED[broken.__name__] = Parts(scheduler=broken)
    elif issubclass(broken, BlockManager):
        PLANTED[broken.__name__] = Parts(block_manager=broken)
    else:
        assert issubclass(broken, Engine)
        PLANTED[broken.__name__] = Parts(engine=broken)
    return broken


# -- block manager: taking and releasing ----------------------------------------------------------------------------


@planted
class ReleaseSkipped(BlockManager):
    """The last block of a sequence is never given back."""

    def deallocate(self, seq: BlockUser) -> None:
        if len(seq.block_table) > 1:
            seq.block_table.pop()
        super().deallocate(seq)


@planted
class SharedBlockReleasedEarly(BlockManager):
    """A block that somebody else still uses goes to the free list and is handed out."""

    def deallocate(self, seq: BlockUser) -> None:
        table = list(seq.block_table)
        super().deallocate(seq)
        for block_id in table:
            block = self.blocks[block_id]
            if block.ref_count == 1:
                block.ref_count = 0
                self._push_free(block)


@planted
class UsedBlockEvicted(BlockManager):
    """With nothing free, a used block is taken."""

    def can_append(self, seq: BlockUser, num_tokens: int) -> bool:
        return True

    def _take_free(self) -> int:
        if self.num_free_blocks == 0:
            self._push_free(self.blocks[0])
        return super()._take_free()


@planted
class TableOneTooShort(BlockManager):
    """A table grows one token too late."""

    def append(self, seq: BlockUser, num_tokens: int) -> list[int]:
        return super().append(seq, num_tokens - 1)


@planted
class RevivedBlockStaysFree(BlockManager):
    """A hit on a free block leaves it in the free list, from where it is handed out again."""

    def allocate(self, seq: BlockUser) -> int:
        revived = [block for block in self._find_cached(seq) if block.ref_count == 0]
        num_cached = super().allocate(seq)
        for block in revived:
            self._push_free(block)
        return num_cached


@planted
class RevivedBlockLosesHash(BlockManager):
    """A hit on a free block removes it from the index, though a sequence counts it as published."""

    def allocate(self, seq: BlockUser) -> int:
        revived = [block for block in self._find_cached(seq) if block.ref_count == 0]
        num_cached = super().allocate(seq)
        for block in revived:
            self._index.pop(block.hash, None)
            block.hash = NO_HASH
        return num_cached


@planted
class RevivedBlocksNotCounted(BlockManager):
    """`can_allocate` forgets that cached free blocks are taken from the free ones."""

    def can_allocate(self, seq: BlockUser) -> bool:
        return self.num_blocks_for(len(seq.token_ids)) - len(self._find_cached(seq)) <= self.num_free_blocks


# -- block manager: the prefix index --------------------------------------------------------------------------------


@planted
class StaleIndexEntry(BlockManager):
    """A block given to new content stays findable by the old one."""

    def _take_free(self) -> int:
        block = self._head.next
        assert block is not None
        key, tokens, parent, salt = block.hash, block.token_ids, block.parent_serial, block.cache_salt
        block_id = super()._take_free()
        if key != NO_HASH:
            block.token_ids, block.parent_serial, block.cache_salt = tokens, parent, salt
            self._index.setdefault(key, block)
        return block_id

    def check(self, users: object) -> None:
        """Silent, so that the output has to show it."""


class _LooseManager(BlockManager):
    """A block manager whose lookup can be made to compare less."""

    def _matches(self, block: Block, seq: BlockUser, index: int, parent_serial: int) -> bool:
        return block.token_ids == self._block_tokens(seq, index) and block.parent_serial == parent_serial

    def _find_cached(self, seq: BlockUser) -> list[Block]:
        found: list[Block] = []
        parent_serial = ROOT_SERIAL
        for index in range(len(seq.token_ids) // self.block_size if self._caching else 0):
            block = self._index.get(self._block_hash(seq, index))
            if block is None or not self._matches(block, seq, index, parent_serial):
                break
            found.append(block)
            parent_serial = block.serial
        return found


@planted
class TokensNotCompared(_LooseManager):
    """Equal hashes are taken for equal tokens."""

    def _matches(self, block: Block, seq: BlockUser, index: int, parent_serial: int) -> bool:
        return block.parent_serial == parent_serial


@planted
class ParentNotCompared(_LooseManager):
    """Equal tokens are taken for an equal prefix."""

    def _matches(self, block: Block, seq: BlockUser, index: int, parent_serial: int) -> bool:
        return block.token_ids == self._block_tokens(seq, index)


@planted
class SaltNotCompared(_LooseManager):
    """Equal hashes are taken for equal cache salts."""


@planted
class HitAfterMiss(BlockManager):
    """A later block counts as cached though an earlier one is missing."""

    def _find_cached(self, seq: BlockUser) -> list[Block]:
        found = super()._find_cached(seq)
        index = len(found) + 1
        if self._caching and index < len(seq.token_ids) // self.block_size:
            block = self._index.get(self._block_hash(seq, index))
            if block is not None and block.token_ids == self._block_tokens(seq, index):
                found.append(block)
        return found


@planted
class CollisionTakesSerial(BlockManager):
    """A block whose hash collides takes the serial of the indexed one without having its content."""

    def _publish_block(self, seq: BlockUser, index: int) -> None:
        first = self._index.get(self._block_hash(seq, index))
        serial = first.serial if first is not None else None
        super()._publish_block(seq, index)
        if serial is not None:
            self.blocks[seq.block_table[index]].serial = serial


@planted
class PartialBlockPublished(BlockManager):
    """The block that is being filled is published with those that are full."""

    def publish(self, seq: BlockUser, num_tokens: int) -> None:
        super().publish(seq, min(num_tokens + self.block_size - 1, len(seq.token_ids)))


@planted
class IndexOutlivesEpoch(BlockManager):
    """A new epoch still finds what stood in the caches of the last."""

    def clear_index(self) -> None:
        pass


# -- scheduler: what is published and shared ------------------------------------------------------------------------


@planted
class PromptPublishedTooEarly(Scheduler):
    """The whole prompt is published when it is admitted, before its later chunks are submitted."""

    def _admit(self, seq: Sequence, step: _Step) -> None:
        super()._admit(seq, step)
        self.block_manager.publish(seq, len(seq.token_ids))


@planted
class OutputPublishedTooEarly(Scheduler):
    """A generated block is published when its last token is known, before the step that stores it."""

    def _take_tokens(self, sequences: list[Sequence], tokens: array[int], output: StepOutput) -> None:
        super()._take_tokens(sequences, tokens, output)
        for seq in output.sequences:
            if seq.status is SequenceStatus.RUNNING:
                self.block_manager.publish(seq, len(seq.token_ids))


@planted
class SaltIgnored(Scheduler):
    """All cache salts are one."""

    def add(self, request: Request) -> Sequence:
        seq = super().add(request)
        seq.cache_salt = ""
        return seq


@planted
class FullHitWritesSharedBlock(Scheduler):
    """The last block of a prompt that is cached to its end is written again."""

    def _admit(self, seq: Sequence, step: _Step) -> None:
        super()._admit(seq, step)
        _, num_cached = step.admitted[-1]
        if num_cached == len(seq.token_ids):
            step.admitted[-1] = (seq, num_cached - self.limits.block_size)


@planted
class FullHitHasNoQuery(Scheduler):
    """A prompt that is cached to its last token runs no token at all."""

    def _admit(self, seq: Sequence, step: _Step) -> None:
        super()._admit(seq, step)
        if step.admitted[-1][1] == len(seq.token_ids):
            step.num_new_tokens[-1] = 0


# -- scheduler: who runs --------------------------------------------------------------------------------------------


@planted
class PartialChunkSamples(Scheduler):
    """A chunk that does not reach the end of the prompt samples."""

    def _admit(self, seq: Sequence, step: _Step) -> None:
        super()._admit(seq, step)
        if not step.samples[-1]:
            step.samples[-1] = 1
            step.sampling_sequences.append(seq)
            seq.num_pending, seq.num_total = 1, seq.num_total + 1


@planted
class BudgetExceeded(Scheduler):
    """Waiting sequences get tokens beyond the budget."""

    def _schedule_waiting(self, step: _Step) -> None:
        step.budget += 3
        super()._schedule_waiting(step)


@planted
class TooManyRunning(Scheduler):
    """One more runs than `max_num_seqs`."""

    def _schedule_waiting(self, step: _Step) -> None:
        if not self._free_slots:
            self._free_slots.append(self.limits.max_num_seqs)
        super()._schedule_waiting(step)


@planted
class DecodeStarvedByPrefill(Scheduler):
    """While a prompt runs in chunks, nobody else does."""

    def _schedule_running(self, step: _Step) -> None:
        last = self.running[-1] if self.running else None
        if last is None or last.num_total - last.num_computed <= 1:
            super()._schedule_running(step)
            return
        others, self.running = self.running[:-1], [last]
        super()._schedule_running(step)
        self.running = others + self.running


@planted
class OldestPreempted(Scheduler):
    """The earliest arrival yields instead of the latest."""

    def _grow(self, seq: Sequence, num_tokens: int, step: _Step) -> bool:
        if not self.block_manager.can_append(seq, num_tokens):
            self.running.append(self.running.pop(0))
        return super()._grow(seq, num_tokens, step)


@planted
class PreemptedGoesLast(Scheduler):
    """A preempted sequence queues behind those that have never run."""

    def _preempt(self, seq: Sequence) -> None:
        super()._preempt(seq)
        self.waiting.append(self.waiting.popleft())


@planted
class SlotReusedWhileHeld(Scheduler):
    """Workers hear of a released slot one step late."""

    _late: array[int] = ints()

    def _plan(self, step: _Step) -> StepPlan:
        late, self._late = self._late, ints(self._released_slots)
        self._released_slots = list(late)
        return super()._plan(step)


# -- scheduler: tokens and ends -------------------------------------------------------------------------------------


@planted
class InFlightForgottenOnPreemption(Scheduler):
    """A preempted sequence does not wait for its token in flight, and gets it twice."""

    def _preempt(self, seq: Sequence) -> None:
        super()._preempt(seq)
        seq.num_pending, seq.num_total = 0, len(seq.token_ids)


@planted
class TokenOfEndedDelivered(Scheduler):
    """A token that arrives for a sequence that has ended is delivered."""

    def _take_tokens(self, sequences: list[Sequence], tokens: array[int], output: StepOutput) -> None:
        ended = [(s, t) for s, t in zip(sequences, tokens, strict=True) if s.status is SequenceStatus.FINISHED]
        super()._take_tokens(sequences, tokens, output)
        for seq, token in ended:
            output.sequences.append(seq)
            output.token_ids.append(token)


@planted
class FinishDropped(Scheduler):
    """A sequence that ends while preempted is not reported."""

    def _finish_from_result(self, seq: Sequence, reason: str, output: StepOutput) -> None:
        was_waiting = seq.status is SequenceStatus.WAITING
        super()._finish_from_result(seq, reason, output)
        if was_waiting:
            output.finished.pop()


@planted
class RunsBeyondLength(Scheduler):
    """A sequence ends one token after its limit."""

    def add(self, request: Request) -> Sequence:
        seq = super().add(request)
        seq.max_total += 1
        return seq


@planted
class SentAgainCountsAsPrompt(Scheduler):
    """Tokens generated before do not count against `max_tokens`."""

    def add(self, request: Request) -> Sequence:
        seq = super().add(request)
        most = len(seq.token_ids) + request.sampling.max_tokens
        seq.max_total = min(most, self.limits.max_total_tokens)
        return seq


@planted
class EpochKeepsTokensInFlight(Scheduler):
    """After a lost step, sequences wait for tokens that will never come."""

    def start_epoch(self) -> None:
        pending = {id(seq): seq.num_pending for seq in (*self.running, *self.waiting)}
        super().start_epoch()
        for seq in self.waiting:
            seq.num_pending = pending[id(seq)]
            seq.num_total += seq.num_pending


@planted
class EpochReordersArrivals(Scheduler):
    """After a lost step, later arrivals go first."""

    def start_epoch(self) -> None:
        super().start_epoch()
        self.waiting.reverse()


# -- engine ---------------------------------------------------------------------------------------------------------


@planted
class EndedOutsideStaysKnown(Engine):
    """A request that was ended from outside keeps its id."""

    def finish(self, request_id: str, reason: str) -> Sequence | None:
        seq = self._sequences.get(request_id)
        if seq is not None:
            self.scheduler.finish(seq, reason)
        return seq


@planted
class EndsOnlyAtNextStep(Engine):
    """What ends from outside goes on running."""

    def finish(self, request_id: str, reason: str) -> Sequence | None:
        seq = self._sequences.pop(request_id, None)
        if seq is not None:
            seq.finish_reason = reason
        return seq
