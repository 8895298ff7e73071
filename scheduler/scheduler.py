"""Decides which sequences run next, and how many tokens of each. One loop for prefill chunks and
decodes.

    schedule(): running sequences first, then waiting ones, both in order of arrival, each gets as
    many tokens as it has not computed yet, until `max_num_batched_tokens` are planned. When a
    running sequence needs a block and none is free, the latest arrival is preempted: it gives back
    its blocks and slot and goes to the head of the waiting queue. Beside sequences that decode,
    prompts get what `pace.py` allows.

A step is accounted for when it is submitted, not when its result is read, so the next one can be
planned right away (running ahead). `apply` gives the tokens of a result to the *sequences* of the
submitted plan: a sequence that has finished meanwhile drops its token, a preempted one keeps it.
Because every rank runs the steps in order, blocks and slots can be reused as soon as they are given
back here. An end by length is known in advance, so no step runs past it.

A crash is a strike for the sequences that ran (`start_epoch`); `CLEARING_TOKENS` tokens without a
crash clear a sequence. With two strikes it is a suspect: it runs alone until it is cleared. Two
more crashes alone without a token convict it, so a request that kills a rank whenever it runs
fails alone, after four crashes. If it gets tokens between its crashes (its prompt runs, its decodes
kill), four more convict it: a rank that dies by chance hits a sequence again before its next few
tokens far more often than before its next one.

A sequence whose mask is not there in time is held (`hold`): it keeps its slot and blocks, but no
step runs it until the mask has come, so the others do not wait. If a step that needs the mask was
submitted before, the token of that step is void (`retract`).

At most one running sequence is in the middle of its prompt, and it is the last one, so every other
sequence that is not held makes progress in every step. Owns sequences and the `BlockManager`. Never
touches tensors, time or Ray. One thread.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from operator import add

from scheduler import records
from scheduler.block_manager import BlockManager
from scheduler.errors import EngineError
from scheduler.limits import SchedulerLimits, check_request
from scheduler.messages import (
    AdmittedRows,
    EngineStats,
    Request,
    StepPlan,
    StepResult,
    TokenLogprobs,
    ints,
)
from scheduler.pace import Pace
from scheduler.prompt_scores import Scores, has_scores, scored_rows, take_scores
from scheduler.records import StepRecord, StepRecords
from scheduler.sequence import NO_SLOT, Sequence, SequenceStatus

CLEARING_TOKENS = 4
# Crashes in a row, with fewer than `CLEARING_TOKENS` tokens from one to the next; without any.
SUSPECT_STRIKES, CONVICTED_WITH_TOKENS, CONVICTED_STRIKES = 2, 6, 4
RUNNING, WAITING, FINISHED = SequenceStatus.RUNNING, SequenceStatus.WAITING, SequenceStatus.FINISHED


@dataclass(slots=True)
class StepOutput:
    """The content of a result: one token for each of `sequences`, and which sequences ended."""

    sequences: list[Sequence]
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: Scores = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start; see `EngineStats`."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_admitted: int = 0
    queue_s: float = 0.0
    step_seconds: dict[str, float] = field(default_factory=dict)
    rank_seconds: tuple[float, ...] = ()


@dataclass(slots=True)
class _Step:
    """A plan under construction."""

    budget: int
    slots: list[int] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    samples: bytearray = field(default_factory=bytearray)
    sampling_sequences: list[Sequence] = field(default_factory=list)
    scored_by_row: dict[int, Sequence] = field(default_factory=dict)
    appended_slots: list[int] = field(default_factory=list)
    appended_block_ids: list[int] = field(default_factory=list)
    # Each with its number of cached tokens.
    admitted: list[tuple[Sequence, int]] = field(default_factory=list)
    num_preempted: int = 0
    is_paced: bool | None = None  # whether decodes limit the budget; None until that is computed
    head_waits_for: str = ""  # why the first sequence in line was not admitted

    def score(self, seq: Sequence) -> None:
        """Before a row is added: have its prompt tokens scored, if that is wanted."""
        if has_scores(seq):
            self.scored_by_row[len(self.slots)] = seq


@dataclass(slots=True)
class SubmittedStep:
    """A step whose result is unread. `has_mask`: its `StepMask` was sent, or none is needed."""

    step_id: int
    epoch: int
    sampling_sequences: list[Sequence]
    record: StepRecord
    has_mask: bool
    scored_sequences: list[Sequence] = field(default_factory=list)  # in the order of their rows


class Scheduler:
    """Sequences between arrival and end. `schedule` gives the next plan, `apply` takes the oldest
    unread result.
    """

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
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.submitted: deque[SubmittedStep] = deque()  # steps whose result is unread
        self.suspects: list[Sequence] = []  # in order of arrival; the first one runs alone
        self.stats = SchedulerStats()
        self.records = StepRecords()
        self.pace = Pace(limits.max_decode_slowdown, limits.max_num_batched_tokens)
        self.epoch = 0
        self._next_step_id = 0
        self._next_arrival = 0
        self._free_slots = list(range(limits.max_num_seqs))[::-1]
        self._released_slots: list[int] = []  # since the last plan

    # -- requests ----------------------------------------------------------------------------------

    def add(self, request: Request) -> Sequence:
        """Queue a request; if it was sent again with all its tokens, the sequence comes back
        finished. Raises `RequestError`.
        """
        check_request(request, self.limits)
        max_total = min(
            request.num_prompt_tokens + request.sampling.max_tokens, self.limits.max_total_tokens
        )
        seq = Sequence(request, arrival=self._next_arrival, max_total=max_total)
        self._next_arrival += 1
        if seq.num_output_tokens and seq.token_ids[-1] in seq.stop_token_ids:
            self._end(seq, "stop")
        elif len(seq.token_ids) >= max_total:
            self._end(seq, "length")
        else:
            self.waiting.append(seq)
        return seq

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence now; its tokens in flight are dropped. Does nothing if it has ended."""
        if seq.status is FINISHED:
            return
        if seq.status is RUNNING:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        self._end(seq, reason)
        if seq in self.suspects:
            self.suspects.remove(seq)

    def hold(self, seq: Sequence) -> None:
        """Leave a sequence out of the steps that are planned from now on, until `resume`, or until
        it gives up its slot.
        """
        seq.is_held = True

    def resume(self, seq: Sequence) -> None:
        """Let steps run a sequence again."""
        seq.is_held = False

    def retract(self, seq: Sequence) -> None:
        """Hold a sequence, and drop what the steps in flight sample for it. It continues after its
        known tokens, whose KV is in its blocks by then: its row is released and admitted again in
        place, as one that is cached to its end.
        """
        seq.valid_from_step = self._next_step_id
        seq.num_pending = 0
        seq.num_total = len(seq.token_ids)
        if seq.status is RUNNING:
            seq.num_computed = seq.num_total - 1
            seq.must_restart = seq.is_held = True

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    # -- steps -------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step and account for it as submitted; None if nothing can run until a
        result is read.
        """
        if self.suspects and _waits_for_mask(self.suspects[0]):
            self._line_up_again(self.suspects.pop(0))  # nobody waits for it
        step = _Step(budget=self.limits.max_num_batched_tokens)
        if self.suspects and self.suspects[0].status is WAITING:
            self.waiting.remove(self.suspects[0])  # no other sequence has a slot
            self._admit(self.suspects[0], step)
        else:
            self._schedule_running(step)
            if self.suspects:
                step.head_waits_for = records.WAITS_FOR_SUSPECT
            elif step.num_preempted:
                step.head_waits_for = records.WAITS_FOR_BLOCKS
            else:
                self._schedule_waiting(step)
        if not step.slots:
            return None
        plan = self._plan(step)
        record = self._record(plan, step)
        self.records.add(record)
        self.submitted.append(
            SubmittedStep(
                plan.step_id,
                plan.epoch,
                step.sampling_sequences,
                record,
                not plan.masked,
                list(step.scored_by_row.values()),
            )
        )
        self.stats.num_steps += 1
        return plan

    def apply(self, result: StepResult) -> StepOutput:
        """Take the result of the oldest unread step. Raises `EngineError` for the result of any
        other step.
        """
        oldest_step = self.submitted[0] if self.submitted else None
        if oldest_step is None or (result.step_id, result.epoch) != (
            oldest_step.step_id,
            oldest_step.epoch,
        ):
            expected = (
                f"step {oldest_step.step_id} of epoch {oldest_step.epoch}"
                if oldest_step
                else "no step"
            )
            raise EngineError(
                f"got the result of step {result.step_id} of epoch {result.epoch}, expected"
                f" {expected}"
            )
        sequences, token_ids = oldest_step.sampling_sequences, result.token_ids
        if len(sequences) != len(token_ids):
            raise EngineError(
                f"step {result.step_id} sampled {len(token_ids)} tokens for {len(sequences)} rows"
            )
        if result.logprobs is not None and len(result.logprobs) != len(token_ids):
            raise EngineError(
                f"step {result.step_id} has {len(result.logprobs)} logprobs for {len(token_ids)}"
                " tokens"
            )
        scores = take_scores(oldest_step.scored_sequences, result)
        self.submitted.popleft()
        record = oldest_step.record
        record.done_s, record.seconds = self._clock(), result.seconds
        self.pace.observe(
            record.num_decoding,
            record.num_tokens - record.num_decoding,
            result.step_s,
        )
        step_seconds = dict(self.stats.step_seconds)  # another thread may be copying `stats`
        for part, seconds in result.seconds.items():
            step_seconds[part] = step_seconds.get(part, 0.0) + seconds
        self.stats.step_seconds = step_seconds
        rank_seconds_before = self.stats.rank_seconds or (0.0,) * len(result.rank_seconds)
        self.stats.rank_seconds = tuple(map(add, rank_seconds_before, result.rank_seconds))
        output = StepOutput([], [], prompt_logprobs=scores)
        self._take_tokens(oldest_step.step_id, sequences, token_ids, output)
        if result.logprobs is not None:
            logprobs_by_sequence = dict(zip(sequences, result.logprobs, strict=True))
            output.logprobs = [logprobs_by_sequence[seq] for seq in output.sequences]
        if output.finished:
            self.running = [seq for seq in self.running if seq.status is RUNNING]
        if self.suspects:
            self._clear_suspects()
        return output

    def shortest_s(self) -> float:
        """Seconds that the submitted steps take at the least; 0 if that is not known."""
        step_times_s = [
            self.pace.shortest_s(record.num_decoding, record.num_tokens - record.num_decoding)
            for record in (step.record for step in self.submitted)
        ]
        return sum(step_times_s) if all(step_times_s) else 0.0

    def start_epoch(self) -> list[Sequence]:
        """All submitted steps are lost and the workers' caches are empty: every sequence starts
        again, in order. Returns the sequences that this ends, with the reason "error".

        Tokens whose result was not read are forgotten; they will be sampled again.
        """
        convicted = self._strike(self._in_flight())
        for seq in convicted:
            self.finish(seq, "error")
        self.submitted.clear()
        for seq in reversed(self.running):
            self._give_back(seq)
            seq.status = WAITING
            self.waiting.appendleft(seq)
        self.running.clear()
        self.waiting = deque(sorted(self.waiting, key=_arrival))  # a suspect may be out of order
        for seq in self.waiting:
            seq.num_pending = 0
            seq.num_total = len(seq.token_ids)
            seq.last_step_id = -1
            seq.valid_from_step = 0
        self.suspects = [seq for seq in self.waiting if seq.strikes >= SUSPECT_STRIKES]
        self.block_manager.clear_index()
        self._released_slots.clear()
        self._next_step_id = 0
        self.epoch += 1
        return convicted

    def snapshot(self) -> EngineStats:
        """The current numbers of sequences and blocks, and the counters."""
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_free_blocks=self.block_manager.num_free_blocks,
            num_blocks=self.limits.num_blocks,
            **asdict(self.stats),
        )

    # -- suspects ----------------------------------------------------------------------------------

    def _in_flight(self) -> list[Sequence]:
        """The sequences that may run in a step whose result is unread."""
        if not self.submitted:
            return []
        oldest_step_id = self.submitted[0].step_id
        return [
            *(seq for seq in self.running if not _is_idle(seq, oldest_step_id)),
            *(seq for seq in self.waiting if seq.last_step_id >= oldest_step_id),
        ]

    def _strike(self, blamed: list[Sequence]) -> list[Sequence]:
        """Count a strike for sequences whose steps were lost. Returns those that this convicts."""
        for seq in blamed:
            has_new_token = len(seq.token_ids) > seq.tokens_at_strike
            seq.strikes = 1 if _is_cleared(seq) else seq.strikes + 1
            seq.strikes_without_token = 1 if has_new_token else seq.strikes_without_token + 1
            seq.tokens_at_strike = len(seq.token_ids)
        return [
            seq
            for seq in blamed
            if seq.strikes_without_token >= CONVICTED_STRIKES
            or seq.strikes >= CONVICTED_WITH_TOKENS
        ]

    def _clear_suspects(self) -> None:
        """A sequence that has ended or got enough tokens is no longer suspect; it waits in line
        again.
        """
        seq = self.suspects[0]
        if seq.status is not FINISHED and not _is_cleared(seq):
            return
        del self.suspects[0]
        seq.strikes = seq.strikes_without_token = 0
        self._line_up_again(seq)

    def _line_up_again(self, seq: Sequence) -> None:
        """After it ran alone, a sequence waits among the others."""
        if seq.status is RUNNING:
            self.running.remove(seq)
            self._give_back(seq)
            seq.status = WAITING
            self.waiting = deque(sorted((*self.waiting, seq), key=_arrival))

    # -- planning ----------------------------------------------------------------------------------

    def _schedule_running(self, step: _Step) -> None:
        """Plan every running sequence that has tokens to compute. Hot: runs once per sequence
        and step.
        """
        block_manager, running, block_size = (
            self.block_manager,
            self.running,
            self.limits.block_size,
        )
        slots, num_new_tokens, samples, sampling_sequences = (
            step.slots,
            step.num_new_tokens,
            step.samples,
            step.sampling_sequences,
        )
        budget, index = step.budget, 0
        while index < len(running) and budget > 0:
            seq = running[index]
            num_total = seq.num_total
            if num_total >= seq.max_total or seq.is_held:  # the token that ends it is in flight
                index += 1
                continue
            num_new = num_total - seq.num_computed
            if num_new > 1 and slots and step.is_paced is None:
                budget = self._pace(step, budget)
            if num_new > budget:
                num_new = budget
            num_computed = seq.num_computed + num_new
            if num_computed > len(seq.block_table) * block_size and not self._grow(
                seq, num_computed, step
            ):
                break  # it was the latest arrival and was itself preempted
            index += 1
            budget -= num_new
            if seq.must_restart:
                self._restart(seq, step)
            if num_new > 1 or num_computed < num_total:  # otherwise no prompt token follows
                step.score(seq)
            slots.append(seq.slot)
            num_new_tokens.append(num_new)
            seq.num_computed = num_computed
            if num_computed == num_total:
                samples.append(1)
                sampling_sequences.append(seq)
                seq.num_pending += 1
                seq.num_total = num_total + 1
            else:
                samples.append(0)
            if num_new > 1 or num_computed % block_size == 0:
                block_manager.publish(seq, min(num_computed, len(seq.token_ids)))
        step.budget = budget

    def _restart(self, seq: Sequence, step: _Step) -> None:
        """Release the row of a running sequence and admit it again in its slot and blocks, so that
        the ranks forget what was retracted.
        """
        seq.must_restart = False
        self._released_slots.append(seq.slot)
        step.admitted.append((seq, seq.num_total))

    def _pace(self, step: _Step, budget: int) -> int:
        """The budget that is left for prompts beside the rows planned so far."""
        prompt_budget = self.pace.budget(len(step.slots))
        step.is_paced = prompt_budget < budget
        return min(budget, prompt_budget)

    def _grow(self, seq: Sequence, num_tokens: int, step: _Step) -> bool:
        """Give a running sequence the blocks for `num_tokens`; False if it was itself preempted."""
        block_manager = self.block_manager
        while not block_manager.can_append(seq, num_tokens):
            latest_arrival = self.running.pop()
            self._preempt(latest_arrival)
            step.num_preempted += 1
            if latest_arrival is seq:
                return False
        for block_id in block_manager.append(seq, num_tokens):
            step.appended_slots.append(seq.slot)
            step.appended_block_ids.append(block_id)
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Put a running sequence back at the head of the queue. A token in flight is not lost:
        `apply` will add it.
        """
        self._give_back(seq)
        seq.status = WAITING
        seq.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.appendleft(seq)

    def _schedule_waiting(self, step: _Step) -> None:
        """Admit waiting sequences in order, while there are slots, blocks and budget."""
        if step.slots and step.is_paced is None and self.waiting:
            step.budget = self._pace(step, step.budget)
        while self.waiting:
            seq = self.waiting[0]
            if not self._free_slots:
                step.head_waits_for = records.WAITS_FOR_SLOT
            elif step.budget <= 0:
                step.head_waits_for = (
                    records.WAITS_FOR_PACE if step.is_paced else records.WAITS_FOR_TOKEN_BUDGET
                )
            elif seq.num_pending:
                step.head_waits_for = records.WAITS_FOR_LAST_TOKEN
            elif not self.block_manager.can_allocate(seq):
                step.head_waits_for = records.WAITS_FOR_BLOCKS
            else:
                self.waiting.popleft()
                self._admit(seq, step)
                continue
            return

    def _admit(self, seq: Sequence, step: _Step) -> None:
        num_tokens = len(seq.token_ids)
        num_cached = self.block_manager.allocate(seq)
        seq.status = RUNNING
        seq.slot = self._free_slots.pop()
        # Cached to the end: the last token runs as a query only.
        seq.num_computed = min(num_cached, num_tokens - 1)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed
            self.stats.num_cached_tokens += seq.num_computed
            self.stats.num_prompt_tokens += num_tokens
            self.stats.num_admitted += 1
            self.stats.queue_s += max(0.0, self._clock() - seq.arrival_s)
        self.running.append(seq)
        step.admitted.append((seq, num_cached))
        num_new = min(num_tokens - seq.num_computed, step.budget)
        step.budget -= num_new
        step.score(seq)
        step.slots.append(seq.slot)
        step.num_new_tokens.append(num_new)
        seq.num_computed += num_new
        samples_token = seq.num_computed == num_tokens
        step.samples.append(samples_token)
        if samples_token:
            step.sampling_sequences.append(seq)
            seq.num_pending = 1
            seq.num_total = num_tokens + 1
        self.block_manager.publish(seq, seq.num_computed)

    def _record(self, plan: StepPlan, step: _Step) -> StepRecord:
        return StepRecord(
            step_id=plan.step_id,
            epoch=plan.epoch,
            launched_s=self._clock(),
            num_rows=len(step.slots),
            num_tokens=sum(step.num_new_tokens),
            num_decoding=step.num_new_tokens.count(1),
            num_admitted=len(step.admitted),
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_free_blocks=self.block_manager.num_free_blocks,
            num_preempted=step.num_preempted,
            num_evicted=self.block_manager.num_evictions,
            head_waits_for=step.head_waits_for,
        )

    def _plan(self, step: _Step) -> StepPlan:
        released_slots, self._released_slots = self._released_slots, []
        step_id = self._next_step_id
        self._next_step_id += 1
        return StepPlan(
            step_id=step_id,
            epoch=self.epoch,
            released=ints(released_slots),
            admitted=_admitted_rows(step.admitted) if step.admitted else None,
            appended_slots=ints(step.appended_slots),
            appended_block_ids=ints(step.appended_block_ids),
            slots=ints(step.slots),
            num_new_tokens=ints(step.num_new_tokens),
            samples=bytes(step.samples),
            masked=_masked(step),
            scored=scored_rows(step.scored_by_row, len(step.slots)),
        )

    # -- results -----------------------------------------------------------------------------------

    def _take_tokens(
        self,
        step_id: int,
        sequences: list[Sequence],
        sampled_token_ids: array[int],
        output: StepOutput,
    ) -> None:
        """Append each token to its sequence and end those that are done. Hot: runs once per sampled
        token.
        """
        block_size = self.limits.block_size
        output_sequences, output_token_ids = output.sequences, output.token_ids
        for seq, token_id in zip(sequences, sampled_token_ids, strict=True):
            if seq.status is FINISHED or step_id < seq.valid_from_step:
                continue  # it ran one step too many, or without its mask
            token_ids = seq.token_ids
            token_ids.append(token_id)
            seq.num_pending -= 1
            output_sequences.append(seq)
            output_token_ids.append(token_id)
            length = len(token_ids)
            if token_id in seq.stop_token_ids:
                self._finish_from_result(seq, "stop", output)
            elif length >= seq.max_total:
                self._finish_from_result(seq, "length", output)
            elif length % block_size == 0 and seq.num_computed >= length:
                self.block_manager.publish(seq, length)

    def _finish_from_result(self, seq: Sequence, reason: str, output: StepOutput) -> None:
        if seq.status is WAITING:  # preempted with this token in flight
            self.waiting.remove(seq)
        self._end(seq, reason)
        output.finished.append(seq)

    def _end(self, seq: Sequence, reason: str) -> None:
        if seq.slot != NO_SLOT:
            self.block_manager.publish(seq, min(seq.num_computed, len(seq.token_ids)))
            self._give_back(seq)
        seq.status = FINISHED
        seq.finish_reason = reason

    def _give_back(self, seq: Sequence) -> None:
        """Release the blocks and the slot of a running sequence."""
        self.block_manager.deallocate(seq)
        seq.last_step_id = self._next_step_id - 1
        self._free_slots.append(seq.slot)
        self._released_slots.append(seq.slot)
        seq.slot = NO_SLOT
        seq.num_computed = 0
        seq.must_restart = seq.is_held = False

    # -- laws --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError, naming the law and the values, unless every invariant holds."""
        limits = self.limits
        assert len(self.running) <= limits.max_num_seqs, (
            f"{len(self.running)} running, {limits.max_num_seqs} allowed"
        )
        for seq in self.running:
            assert seq.status is RUNNING and seq.slot != NO_SLOT, (
                f"in the running queue but not running: {seq}"
            )
            fewest_computed = 0 if seq.must_restart else 1
            assert fewest_computed <= seq.num_computed <= seq.num_total <= seq.max_total, (
                f"token counts are out of order: {seq}"
            )
            assert len(seq.block_table) * limits.block_size >= seq.num_computed, (
                f"has computed beyond its blocks: {seq}"
            )
        for seq in self.waiting:
            assert seq.status is WAITING and seq.slot == NO_SLOT, (
                f"in the waiting queue but not waiting: {seq}"
            )
            assert not seq.block_table and seq.num_computed == 0, (
                f"waiting, but holds blocks: {seq}"
            )
        for seq in (*self.running, *self.waiting):
            assert seq.num_total == len(seq.token_ids) + seq.num_pending, (
                f"tokens in flight were miscounted: {seq}"
            )
        assert not self.suspects or self.running in ([], self.suspects[:1]), (
            f"a suspect does not run alone: {self.running}, suspects {self.suspects}"
        )
        sequences_in_line = self.waiting if self.suspects else (*self.running, *self.waiting)
        arrivals = [seq.arrival for seq in sequences_in_line]
        assert arrivals == sorted(arrivals), f"not in order of arrival: {arrivals}"
        slots = sorted([seq.slot for seq in self.running] + self._free_slots)
        assert slots == list(range(limits.max_num_seqs)), f"slots were lost or duplicated: {slots}"
        mid_prompt_sequences = [
            seq for seq in self.running if len(seq.token_ids) - seq.num_computed > 1
        ]
        assert not mid_prompt_sequences or mid_prompt_sequences == self.running[-1:], (
            f"in the middle of its prompt, but not last: {mid_prompt_sequences}"
        )
        self.block_manager.check(self.running)


def _is_idle(seq: Sequence, oldest_step_id: int) -> bool:
    """Whether a running sequence is in no step from `oldest_step_id` on, the oldest unread one."""
    return _waits_for_mask(seq) and seq.valid_from_step <= oldest_step_id


def _waits_for_mask(seq: Sequence) -> bool:
    return seq.is_held and not seq.num_pending


def _arrival(seq: Sequence) -> int:
    return seq.arrival


def _is_cleared(seq: Sequence) -> bool:
    """Whether it has come far enough since its last strike for that to count no more."""
    return len(seq.token_ids) - seq.tokens_at_strike >= CLEARING_TOKENS


def _masked(step: _Step) -> bytes:
    """See `StepPlan.masked`."""
    if not any(seq.grammar for seq in step.sampling_sequences):
        return b""
    sampling_sequences = iter(step.sampling_sequences)
    return bytes(
        1 if samples_token and next(sampling_sequences).grammar else 0
        for samples_token in step.samples
    )


def _admitted_rows(admitted: list[tuple[Sequence, int]]) -> AdmittedRows:
    sequences = [seq for seq, _ in admitted]
    token_ids, block_ids = ints(), ints()
    for seq in sequences:
        token_ids.extend(seq.token_ids)
        block_ids.extend(seq.block_table)
    return AdmittedRows(
        slots=ints(seq.slot for seq in sequences),
        num_tokens=ints(len(seq.token_ids) for seq in sequences),
        num_prompt_tokens=ints(seq.num_prompt_tokens for seq in sequences),
        num_cached_tokens=ints(num_cached for _, num_cached in admitted),
        num_blocks=ints(len(seq.block_table) for seq in sequences),
        token_ids=token_ids,
        block_ids=block_ids,
        sampling=tuple(seq.sampling for seq in sequences),
    )
