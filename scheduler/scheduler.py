"""Decides which sequences run next, and how many tokens of each. One loop for prefill chunks and
decodes.

    schedule(): running sequences first, then waiting ones, both in order of arrival, each gets as
    many tokens as it has not computed yet, until `max_num_batched_tokens` are planned. When a
    running sequence needs a block and none is free, the latest arrival is preempted: it gives back
    its blocks and slot and goes to the head of the waiting queue. Beside sequences that decode,
    prompts get what `pace.py` allows. After two losses in a row, suspects run alone
    (`suspects.py`).

A step is accounted for when it is submitted, not when its result is read, so the next one can be
planned right away (running ahead). `apply` gives the tokens of a result to the *sequences* of the
submitted plan: a sequence that has finished meanwhile drops its token, a preempted one keeps it. An
end by length is known in advance, so no step runs past it.

A sequence whose mask is not there in time is held (`hold`): it keeps its slot and blocks, but no
step runs it until the mask has come, so the others do not wait. If a step that needs the mask was
submitted before, the token of that step is void (`retract`).

At most one running sequence is in the middle of its prompt, and it is the last one, so every other
sequence that is not held makes progress in every step. Owns sequences and the `BlockManager`. Never
touches tensors or Ray; its clock serves statistics only, no decision. One thread.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections import deque
from collections.abc import Callable

from scheduler import records
from scheduler.block_manager import BlockManager
from scheduler.limits import SchedulerLimits, check_lengths
from scheduler.messages import EngineStats, Request, StepPlan, StepResult
from scheduler.pace import Pace
from scheduler.prompt_scores import take_scores
from scheduler.queues import FINISHED, RUNNING, WAITING, Queues
from scheduler.records import SchedulerStats, StepRecords
from scheduler.rollback import roll_back
from scheduler.sequence import Sequence
from scheduler.steps import StepDraft, StepOutput, SubmittedStep, step_of
from scheduler.suspects import Suspects

# Of admitted sequences, in a step: the host looks up each block and sends every token to the ranks,
# which takes a few ms for so many. With so many, a step admits no more; the last may bring more.
MAX_CACHED_TOKENS = 65_536


class Scheduler:
    """Sequences from arrival to end: `schedule` plans a step, `apply` takes the oldest result."""

    def __init__(
        self,
        limits: SchedulerLimits,
        block_manager: BlockManager | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`clock` must be the clock of `Request.arrival_s`. Only the time in the queue and the
        times of `records` depend on it.
        """
        assert limits.max_num_batched_tokens >= limits.max_num_seqs, "EngineConfig checks this"
        self.limits = limits
        self.block_manager = block_manager or BlockManager(
            limits.num_blocks, limits.block_size, enable_prefix_caching=limits.enable_prefix_caching
        )
        self._clock = clock
        self.queues = Queues(limits.max_num_seqs, self.block_manager)
        self.suspects = Suspects()
        self.submitted_steps: deque[SubmittedStep] = deque()  # steps whose result is unread
        self.stats = SchedulerStats()
        self.records = StepRecords()
        self.pace = Pace(limits.max_decode_slowdown, limits.max_num_batched_tokens)
        self.epoch = 0  # number of the set of ranks that runs the plans
        self._last_step_id = -1  # of this epoch
        self._num_arrived = 0

    @property
    def running(self) -> list[Sequence]:
        """In order of arrival."""
        return self.queues.running

    @property
    def waiting(self) -> deque[Sequence]:
        """In order of arrival."""
        return self.queues.waiting

    @property
    def has_unfinished_sequences(self) -> bool:
        return bool(self.running or self.waiting)

    # -- requests ----------------------------------------------------------------------------------

    def add(self, request: Request) -> Sequence:
        """Queue a request whose tokens are in the vocabulary; one with all its tokens, or that ends
        in a stop token, comes back finished. Raises `RequestError`.
        """
        check_lengths(request, self.limits)
        max_total_tokens = min(
            request.num_prompt_tokens + request.sampling.max_tokens, self.limits.max_total_tokens
        )
        seq = Sequence(request, arrival_index=self._num_arrived, max_total_tokens=max_total_tokens)
        self._num_arrived += 1
        if seq.num_output_tokens and seq.token_ids[-1] in seq.stop_token_ids:
            seq.end("stop")
        elif len(seq.token_ids) >= max_total_tokens:
            seq.end("length")
        else:
            self.waiting.append(seq)
        return seq

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence now; its tokens in flight are dropped. Does nothing if it has ended."""
        if seq.status is FINISHED:
            return
        self.queues.end(seq, reason, self._last_step_id)
        self.queues.drop_ended_sequences()
        self.suspects.drop(seq)

    def hold(self, seq: Sequence) -> None:
        """Leave a sequence out of the steps planned from now on, until `resume`, the loss of its
        slot, or the next epoch.
        """
        seq.is_held = True

    def resume(self, seq: Sequence) -> None:
        """Let steps run a sequence again."""
        seq.is_held = False

    def retract(self, seq: Sequence) -> None:
        """Hold a sequence if it runs, and drop what the steps in flight sample for it. It continues
        after its known tokens, whose KV is in its blocks by then: its row is released, and admitted
        again in place.
        """
        seq.first_kept_step_id = self._last_step_id + 1
        seq.num_pending_tokens = 0
        seq.num_total_tokens = len(seq.token_ids)
        if seq.status is RUNNING:
            seq.num_retracted_tokens += seq.num_computed_tokens - (seq.num_total_tokens - 1)
            seq.num_computed_tokens = seq.num_total_tokens - 1
            seq.is_held = True
            self.queues.release_row(seq)

    # -- planning ----------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step and count it as submitted; None if nothing can run before a result."""
        if not self.submitted_steps and (idle_suspect := self.suspects.pop_idle()):
            self.queues.requeue(idle_suspect, self._last_step_id)
        draft = StepDraft(budget=self.limits.max_num_batched_tokens)
        suspect = self.suspects.first
        if suspect is not None and suspect.status is WAITING:  # no sequence has a slot
            if self.submitted_steps:
                return None  # if steps of the one before kill a rank, this one is not to blame
            num_cached_tokens = self.queues.admit(suspect)
            assert num_cached_tokens is not None, "every block is free"
            self._begin(suspect, num_cached_tokens, draft)
        else:
            self._schedule_running(draft)
            if draft.num_preempted:
                draft.head_wait_reason = records.WAITS_FOR_BLOCKS
            elif suspect is None:
                self._schedule_waiting(draft)
        if suspect is not None and self.waiting:
            draft.head_wait_reason = records.WAITS_FOR_SUSPECT
        if not draft.slots:
            return None
        self._last_step_id += 1
        plan = draft.plan(self._last_step_id, self.epoch, self.queues.take_released_slots())
        submitted_step = draft.to_submitted_step(plan, self.queues, self._clock())
        self.submitted_steps.append(submitted_step)
        record = submitted_step.record
        self.records.add(record)
        self.pace.account_for_step(record.num_decoding, record.num_prompt_tokens)
        self.stats.num_steps += 1
        return plan

    def _schedule_running(self, draft: StepDraft) -> None:
        """Plan every running sequence with tokens to compute. Hot: once per sequence and step."""
        block_manager = self.block_manager
        block_size = self.limits.block_size
        step_id = self._last_step_id + 1
        slots, num_new_tokens = draft.slots, draft.num_new_tokens
        sampling_flags, sampling_sequences = draft.sampling_flags, draft.sampling_sequences
        running, budget, index = self.running, draft.budget, 0
        while index < len(running) and budget > 0:
            seq = running[index]
            num_total_tokens = seq.num_total_tokens
            if (
                num_total_tokens >= seq.max_total_tokens or seq.is_held
            ):  # the token that ends it is in flight
                index += 1
                continue
            num_planned_tokens = num_total_tokens - seq.num_computed_tokens
            if num_planned_tokens > 1 and slots and draft.is_paced is None:
                budget = draft.paced_budget(self.pace, budget)
            if num_planned_tokens > budget:
                num_planned_tokens = budget
            num_computed_tokens = seq.num_computed_tokens + num_planned_tokens
            if num_computed_tokens > len(
                seq.block_table
            ) * block_size and not self._grow_block_table(seq, num_computed_tokens, draft):
                break  # it was the latest arrival and was itself preempted
            index += 1
            budget -= num_planned_tokens
            if seq.lacks_row:
                seq.lacks_row = False
                # What is published may be shared, and is not written again.
                num_published_tokens = seq.num_published_blocks * block_size
                draft.admitted_sequences.append(
                    (seq, max(seq.num_computed_tokens, num_published_tokens))
                )
            if (
                num_planned_tokens > 1 or num_computed_tokens < num_total_tokens
            ):  # otherwise no prompt token follows
                draft.request_scoring(seq)
            slots.append(seq.slot)
            num_new_tokens.append(num_planned_tokens)
            seq.num_computed_tokens = num_computed_tokens
            if num_computed_tokens == num_total_tokens:
                sampling_flags.append(1)
                sampling_sequences.append(seq)
                seq.num_pending_tokens += 1
                seq.num_total_tokens = num_total_tokens + 1
            else:
                sampling_flags.append(0)
            if num_planned_tokens > 1 or num_computed_tokens % block_size == 0:
                block_manager.publish(seq, min(num_computed_tokens, len(seq.token_ids)), step_id)
        draft.budget = budget

    def _grow_block_table(self, seq: Sequence, num_tokens: int, draft: StepDraft) -> bool:
        """Give a running sequence the blocks for `num_tokens`; False if it was itself preempted."""
        block_manager = self.block_manager
        while not block_manager.can_append(seq, num_tokens):
            latest_sequence = self.running[-1]
            self.queues.requeue(latest_sequence, self._last_step_id)
            self.stats.num_preemptions += 1
            draft.num_preempted += 1
            if latest_sequence is seq:
                return False
        new_block_ids = block_manager.append(seq, num_tokens)
        if not seq.lacks_row:  # otherwise they come with its row
            for block_id in new_block_ids:
                draft.appended_slots.append(seq.slot)
                draft.appended_block_ids.append(block_id)
        return True

    def _schedule_waiting(self, draft: StepDraft) -> None:
        """Admit waiting sequences in order, while there are slots, blocks and budget."""
        if draft.slots and draft.is_paced is None and self.waiting:
            draft.budget = draft.paced_budget(self.pace, draft.budget)
        while self.waiting:
            seq = self.waiting[0]
            if not self.queues.free_slots:
                draft.head_wait_reason = records.WAITS_FOR_SLOT
            elif draft.budget <= 0:
                draft.head_wait_reason = (
                    records.WAITS_FOR_PACE if draft.is_paced else records.WAITS_FOR_TOKEN_BUDGET
                )
            elif draft.num_cached_tokens >= MAX_CACHED_TOKENS:
                draft.head_wait_reason = records.WAITS_FOR_CACHED_TOKENS
            elif seq.num_pending_tokens:
                draft.head_wait_reason = records.WAITS_FOR_LAST_TOKEN
            elif (num_cached_tokens := self.queues.admit(seq)) is None:
                draft.head_wait_reason = records.WAITS_FOR_BLOCKS
            else:
                self._begin(seq, num_cached_tokens, draft)
                continue
            return

    def _begin(self, seq: Sequence, num_cached_tokens: int, draft: StepDraft) -> None:
        """Plan the first tokens of a sequence that was admitted."""
        num_tokens = len(seq.token_ids)
        # Cached to the end: the last token runs as a query only.
        seq.num_computed_tokens = min(num_cached_tokens, num_tokens - 1)
        if seq.num_cached_tokens is None:
            # Of a request that comes back with its output, that may be found, too.
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            self.stats.add_admission(
                num_tokens, seq.num_computed_tokens, max(0.0, self._clock() - seq.arrival_s)
            )
        if seq.num_lost_tokens:
            num_recomputed_tokens = max(0, seq.num_lost_tokens - seq.num_computed_tokens)
            draft.num_recomputed_tokens += num_recomputed_tokens
            self.stats.num_recomputed_tokens += num_recomputed_tokens
            seq.num_lost_tokens = 0
        seq.admitted_step_id = self._last_step_id + 1
        draft.admitted_sequences.append((seq, num_cached_tokens))
        draft.num_cached_tokens += num_cached_tokens
        num_planned_tokens = min(num_tokens - seq.num_computed_tokens, draft.budget)
        draft.budget -= num_planned_tokens
        draft.request_scoring(seq)
        draft.slots.append(seq.slot)
        draft.num_new_tokens.append(num_planned_tokens)
        seq.num_computed_tokens += num_planned_tokens
        samples_token = seq.num_computed_tokens == num_tokens
        draft.sampling_flags.append(samples_token)
        if samples_token:
            draft.sampling_sequences.append(seq)
            seq.num_pending_tokens = 1
            seq.num_total_tokens = num_tokens + 1
        self.block_manager.publish(seq, seq.num_computed_tokens, seq.admitted_step_id)

    # -- results -----------------------------------------------------------------------------------

    def apply(self, result: StepResult) -> StepOutput:
        """Take the result of the oldest unread step. Raises `EngineError` for any other."""
        step = step_of(result, self.submitted_steps)
        output = StepOutput([], [], prompt_logprobs=take_scores(step.scored_sequences, result))
        self.submitted_steps.popleft()
        record = step.record
        record.done_s, record.seconds = self._clock(), result.seconds
        self.pace.observe(record.num_decoding, record.num_prompt_tokens, result.step_s)
        self.stats.add_seconds(result.seconds, result.rank_seconds)
        self._take_tokens(step, result.token_ids, output)
        self.block_manager.confirm(step.step_id)
        if result.logprobs is not None:
            logprobs_by_sequence = dict(zip(step.sampling_sequences, result.logprobs, strict=True))
            output.logprobs = [logprobs_by_sequence[seq] for seq in output.sequences]
        if output.finished_sequences:
            self.queues.drop_ended_sequences()
        cleared_suspect = self.suspects.pop_cleared()
        if cleared_suspect is not None and cleared_suspect.status is RUNNING:
            self.queues.requeue(cleared_suspect, self._last_step_id)
        return output

    def _take_tokens(
        self, step: SubmittedStep, sampled_token_ids: array[int], output: StepOutput
    ) -> None:
        """Append each token to its sequence and end those that are done. Hot: once per token."""
        block_size, step_id = self.limits.block_size, step.step_id
        output_sequences = output.sequences
        output_token_ids = output.token_ids
        for seq, token_id in zip(step.sampling_sequences, sampled_token_ids, strict=True):
            if seq.status is FINISHED or step_id < seq.first_kept_step_id:
                continue  # it ran one step too many, or without its mask
            token_ids = seq.token_ids
            token_ids.append(token_id)
            seq.num_pending_tokens -= 1
            output_sequences.append(seq)
            output_token_ids.append(token_id)
            length = len(token_ids)
            if token_id in seq.stop_token_ids:
                self.queues.end(seq, "stop", self._last_step_id)
                output.finished_sequences.append(seq)
            elif length >= seq.max_total_tokens:
                self.queues.end(seq, "length", self._last_step_id)
                output.finished_sequences.append(seq)
            elif length % block_size == 0 and seq.num_computed_tokens >= length:
                self.block_manager.publish(seq, length, self._last_step_id)

    def min_duration_s(self) -> float:
        """Seconds that the submitted steps take at the least; 0 if that is not known."""
        step_times_s = [
            self.pace.min_duration_s(step.record.num_decoding, step.record.num_prompt_tokens)
            for step in self.submitted_steps
        ]
        return sum(step_times_s) if all(step_times_s) else 0.0

    def start_epoch(self, *, cache_survives: bool = False) -> list[Sequence]:
        """All submitted steps are lost. Returns the sequences that this ends, with the reason
        "error".

        Tokens whose result was not read are forgotten; they will be sampled again. If the caches of
        the ranks are lost too, every sequence starts again, in order. Otherwise (`cache_survives`)
        those that ran keep their blocks and go on after the last step whose result was read
        (`rollback.py`). After two losses in a row, nothing is kept: suspects run alone, and what
        is in the cache might be to blame.
        """
        failed_sequences: list[Sequence] = []
        last_read_step_id = self._last_step_id
        if self.submitted_steps:
            last_read_step_id = self.submitted_steps[0].step_id - 1
            in_flight_sequences = self.queues.in_flight_sequences(last_read_step_id + 1)
            failed_sequences = self.suspects.strike(in_flight_sequences)
        for seq in failed_sequences:
            self.finish(seq, "error")
        self.suspects.start_epoch((*self.running, *self.waiting))
        # Also where the cache is lost: `num_lost_tokens` must not count what was in flight.
        roll_back(self.running, self.submitted_steps)
        kept_sequences: set[Sequence] = set()
        is_cache_kept = cache_survives and not self.suspects.sequences
        if is_cache_kept:
            self.block_manager.withdraw_unconfirmed(last_read_step_id, self.running)
            kept_sequences = {s for s in self.running if s.admitted_step_id <= last_read_step_id}
        for seq in self.running:
            seq.num_lost_tokens = 0 if seq in kept_sequences else seq.num_computed_tokens
        self.queues.start_epoch(kept_sequences)
        if not is_cache_kept:
            self.block_manager.clear_prefix_index()
        self.submitted_steps.clear()
        self._last_step_id = -1
        self.epoch += 1
        return failed_sequences

    # -- state -------------------------------------------------------------------------------------

    def snapshot(self) -> EngineStats:
        """The current numbers of sequences and blocks, and the counters."""
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_free_blocks=self.block_manager.num_free_blocks,
            num_blocks=self.limits.num_blocks,
            num_evictions=self.block_manager.num_evictions,
            **dataclasses.asdict(self.stats),
        )

    def check(self) -> None:
        """Raise AssertionError, naming the law and the values, unless every invariant holds."""
        self.queues.check()
        if suspects := self.suspects.sequences:
            in_flight = {seq for step in self.submitted_steps for seq in step.sampling_sequences}
            assert not self.running or {*self.running, *in_flight} == {suspects[0]}, (
                f"a suspect does not run alone: {self.running}, {in_flight}, suspects {suspects}"
            )
        elif self.running and self.waiting:
            last_running, first_waiting = self.running[-1], self.waiting[0]
            assert last_running.arrival_index < first_waiting.arrival_index, (
                f"not in order of arrival: {last_running} runs, {first_waiting} waits"
            )
