"""Who waits and who runs, both in order of arrival, and in which slot.

A running sequence has a slot and blocks. It gives back both when it ends or waits again; because
every rank runs the steps in order, both can be reused at once. The next plan tells the ranks which
slots were released.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection

from scheduler.block_manager import BlockManager
from scheduler.sequence import NO_SLOT, Sequence, SequenceStatus

RUNNING = SequenceStatus.RUNNING
WAITING = SequenceStatus.WAITING
FINISHED = SequenceStatus.FINISHED


class Queues:
    """The unfinished sequences, and `num_slots` slots for those that run."""

    def __init__(self, num_slots: int, block_manager: BlockManager) -> None:
        self.block_manager = block_manager
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_slots = num_slots
        self.free_slots = list(range(num_slots))[::-1]
        self.released_slots: list[int] = []  # see `release_row`; since the last plan

    def admit(self, seq: Sequence) -> int | None:
        """Let a waiting sequence run, if there are blocks for it. Returns the number of its tokens
        that are cached, None if it must wait. Call only if there is a free slot.
        """
        num_cached_tokens = self.block_manager.allocate(seq)
        if num_cached_tokens is None:
            return None
        self.waiting.remove(seq)
        seq.status = RUNNING
        seq.slot = self.free_slots.pop()
        self.running.append(seq)
        return num_cached_tokens

    def requeue(self, seq: Sequence, last_step_id: int) -> None:
        """Put a running sequence back in line. A token in flight is not lost: `Scheduler.apply`
        will add it. `last_step_id` is the last step that it may have run in, -1 for none.
        """
        self.running.remove(seq)
        self._release_slot_and_blocks(seq)
        seq.status = WAITING
        seq.last_step_id = last_step_id
        insort(self.waiting, seq, key=_arrival)

    def end(self, seq: Sequence, reason: str, last_step_id: int) -> None:
        """End an unfinished sequence. One that runs stays in `running` until
        `drop_ended_sequences`. `last_step_id`: as in `requeue`.
        """
        if seq.status is RUNNING:
            num_computed_tokens = min(seq.num_computed_tokens, len(seq.token_ids))
            self.block_manager.publish(seq, num_computed_tokens, last_step_id)
            self._release_slot_and_blocks(seq)
        else:
            self.waiting.remove(seq)
        seq.end(reason)

    def drop_ended_sequences(self) -> None:
        """Remove ended sequences from those that run."""
        self.running = [seq for seq in self.running if seq.status is RUNNING]

    def _release_slot_and_blocks(self, seq: Sequence) -> None:
        self.block_manager.deallocate(seq)
        self.free_slots.append(seq.slot)
        self.release_row(seq)
        seq.slot = NO_SLOT
        seq.num_computed_tokens = seq.num_retracted_tokens = 0
        seq.lacks_row = seq.is_held = False

    def release_row(self, seq: Sequence) -> None:
        """Have the ranks forget the row of a running sequence, which may keep its slot, with the
        next plan.
        """
        if not seq.lacks_row:
            self.released_slots.append(seq.slot)
            seq.lacks_row = True

    def take_released_slots(self) -> list[int]:
        """The slots whose rows were released since the last call."""
        released_slots, self.released_slots = self.released_slots, []
        return released_slots

    def in_flight_sequences(self, oldest_step_id: int) -> list[Sequence]:
        """The sequences that may run in a step from `oldest_step_id` on, the first unread one."""
        return [
            *(
                seq
                for seq in self.running
                if not seq.waits_for_mask or seq.first_kept_step_id > oldest_step_id
            ),
            *(seq for seq in self.waiting if seq.last_step_id >= oldest_step_id),
        ]

    def start_epoch(self, kept_sequences: Collection[Sequence]) -> None:
        """What was in flight is forgotten, and nobody is held. Running sequences wait again, except
        those that are `kept_sequences`, which keep slots and blocks.
        """
        for seq in self.running[::-1]:
            if seq not in kept_sequences:
                self.requeue(seq, -1)
        for seq in (*self.running, *self.waiting):
            seq.num_pending_tokens = 0
            seq.num_total_tokens = len(seq.token_ids)
            seq.last_step_id = seq.admitted_step_id = -1
            seq.first_kept_step_id = seq.num_retracted_tokens = 0
        for seq in self.running:
            seq.lacks_row, seq.is_held = True, False
        self.released_slots.clear()

    def check(self) -> None:
        """Raise AssertionError, naming the law and the values, unless every invariant holds."""
        assert len(self.running) <= self.num_slots, (
            f"{len(self.running)} running, {self.num_slots} allowed"
        )
        for seq in self.running:
            self._check_running(seq)
        for seq in self.waiting:
            assert seq.status is WAITING and seq.slot == NO_SLOT, (
                f"in the waiting queue but not waiting: {seq}"
            )
            assert not seq.block_table and seq.num_computed_tokens == 0, (
                f"waiting, but holds blocks: {seq}"
            )
            assert not seq.is_held, f"held without a slot: {seq}"
        for seq in (*self.running, *self.waiting):
            assert seq.num_total_tokens == len(seq.token_ids) + seq.num_pending_tokens, (
                f"tokens in flight were miscounted: {seq}"
            )
        for arrivals in (
            [seq.arrival_index for seq in self.running],
            [seq.arrival_index for seq in self.waiting],
        ):
            assert arrivals == sorted(arrivals), f"not in order of arrival: {arrivals}"
        slots = sorted([seq.slot for seq in self.running] + self.free_slots)
        assert slots == list(range(self.num_slots)), f"slots were lost or duplicated: {slots}"
        mid_prompt_sequences = [
            seq for seq in self.running if len(seq.token_ids) - seq.num_computed_tokens > 1
        ]
        assert not mid_prompt_sequences or mid_prompt_sequences == self.running[-1:], (
            f"in the middle of its prompt, but not last: {mid_prompt_sequences}"
        )
        self.block_manager.check(self.running)

    def _check_running(self, seq: Sequence) -> None:
        assert seq.status is RUNNING and seq.slot != NO_SLOT, (
            f"in the running queue but not running: {seq}"
        )
        fewest_computed_tokens = 0 if seq.lacks_row else 1
        assert (
            fewest_computed_tokens
            <= seq.num_computed_tokens
            <= seq.num_total_tokens
            <= seq.max_total_tokens
        ), f"token counts are out of order: {seq}"
        assert len(seq.block_table) * self.block_manager.block_size >= seq.num_computed_tokens, (
            f"has computed beyond its blocks: {seq}"
        )


def _arrival(seq: Sequence) -> int:
    return seq.arrival_index
