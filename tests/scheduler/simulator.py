"""Deterministic simulation of the real scheduler and engine over a fake rank, under a virtual
clock.

`run_seed` draws a scenario and plays it: requests arrive, are aborted, ended from outside, and sent
again; steps are lost, which ends their epoch; results arrive up to two steps late. Every token that
comes out is compared with an undisturbed run of its request (`fake_model.generate`), and the laws
below are checked on the way. A violation raises AssertionError with the seed in its message. When
arrivals and faults are over, everything must finish within a number of steps that follows from the
sizes. Some requests are poison: every step in which they run is lost, or every one in which they
decode.

Laws, besides `Engine.check` and those of `FakeRank`: every running sequence makes progress in every
step, unless its last token is in flight or its mask is late; no step has more tokens than the
budget, or more rows than `max_num_seqs`; no more steps are unread than allowed; a row is admitted
with exactly the tokens delivered so far, and reports correctly how many were cached; tokens are
delivered once, in order, until the expected end, with the expected reason; so are the scores of
prompts, all of them before the first token; nothing is delivered after an end from outside;
whatever the prefix index names is in the cache; when ranks are lost and their cache is not, nothing
is computed again that was computed in a step whose result was read; poison fails after at most four
crashes, or six if it gets tokens between them, but fewer than `CLEARING_TOKENS`, or two more if it
has a grammar, and no other request fails unless steps were lost twice while it ran alone, or it
asks for the same as one that fails.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field, fields
from random import Random

from scheduler.block_manager import ROOT_SERIAL, Block, BlockManager
from scheduler.engine import Engine
from scheduler.errors import RequestError
from scheduler.messages import PromptLogprobs, Request, StepMask, StepPlan, StepResult, int32_array
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.steps import StepOutput
from scheduler.suspects import (
    CLEARING_TOKENS,
    FAIL_STRIKES,
    FAIL_STRIKES_WITHOUT_TOKEN,
    KEEP_TURN_STRIKES,
    Suspects,
)
from tests.scheduler.fake_model import (
    DIGEST_BYTES,
    SALTS,
    FakeGrammars,
    FakeRank,
    Lane,
    extend_digests,
    generate,
    prompt_scores,
)
from tests.scheduler.helpers import num_unfinished
from tests.scheduler.scenario import draw_scenario, what_is_asked

INDEX_CHECK_INTERVAL = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The classes under test."""

    scheduler: type[Scheduler] = Scheduler
    block_manager: type[BlockManager] = BlockManager
    suspects: type[Suspects] = Suspects
    engine: type[Engine] = Engine


@dataclass(slots=True, kw_only=True)
class SimulationReport:
    """Counts of one or many seeds; `worst_*` are maxima, the others sums."""

    seeds: int = 0
    steps: int = 0
    tokens_computed: int = 0
    tokens_cached: int = 0
    preemptions: int = 0
    evictions: int = 0
    lost_steps: int = 0
    epochs_lost: int = 0
    rolled_back: int = 0
    finished: int = 0
    ended_outside: int = 0
    sent_again: int = 0
    refused: int = 0
    convicted: int = 0
    late_masks: int = 0
    worst_percent_of_bound: int = 0

    def add(self, other: SimulationReport) -> None:
        for count in fields(self):
            mine, others = getattr(self, count.name), getattr(other, count.name)
            setattr(
                self,
                count.name,
                max(mine, others) if count.name.startswith("worst_") else mine + others,
            )


class StepLostError(Exception):
    """The error that the executor raises when a rank is lost."""


class PoisonError(StepLostError):
    """The error that it raises when a request kills a rank."""


@dataclass(slots=True)
class Client:
    """One request as its frontend sees it. `expected` is the prompt followed by the whole
    output.
    """

    request: Request
    sequence: Sequence
    tokens: list[int]
    expected: list[int]
    expected_reason: str
    ended: bool = False
    num_cached_tokens: int | None = None  # from the first admission
    num_crashes: int = 0  # that it caused without `CLEARING_TOKENS` tokens in between
    num_tokens_at_crash: int = 0
    # Steps lost while it ran alone, without its fault, since it got a few tokens without any.
    num_losses_alone: int = 0
    num_tokens_at_loss: int = 0
    scores: list[int] = field(default_factory=list)  # of the prompt, from its second token on

    def take_scores(self, part: PromptLogprobs) -> None:
        """Each token of the prompt is scored once, in order, from all that comes before it."""
        assert not self.ended, f"scores after the end: {self.sequence}"
        assert part.first_position == 1 + len(self.scores), (
            f"scores from {part.first_position} on, expected those from {1 + len(self.scores)} on:"
            f" {self.sequence}"
        )
        self.scores += part.token_ranks

    def check_scores(self) -> None:
        """A token comes after all scores of the prompt."""
        request = self.request
        if request.sampling.prompt_logprobs < 0:
            assert not self.scores, f"scores that nobody asked for: {self.sequence}"
            return
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        assert self.scores == prompt_scores(prompt, request.sampling.seed), (
            f"the scores of the prompt are wrong, or too late: {self.sequence}"
        )


def run_seed(
    seed: int, parts: Parts | None = None, *, look_inside: bool = True
) -> SimulationReport:
    """Play one seed to its end. Raises AssertionError naming the seed and the law.

    With `look_inside=False`, only what can be seen from outside is checked: plans and tokens.
    """
    try:
        return Simulation(seed, parts or Parts(), look_inside).run()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error


class Simulation:
    """One world: an engine, a fake rank behind it (this is the engine's executor), and the
    clients.
    """

    def __init__(self, seed: int, parts: Parts, look_inside: bool) -> None:
        self.rng = Random(seed)
        self.look_inside = look_inside
        self.scenario = draw_scenario(self.rng)
        limits = self.scenario.limits
        self.manager = parts.block_manager(
            limits.num_blocks,
            limits.block_size,
            enable_prefix_caching=limits.enable_prefix_caching,
            hash_function=self.scenario.hash_function,
        )
        self.scheduler = parts.scheduler(limits, self.manager)
        self.scheduler.suspects = parts.suspects()
        self.grammars = FakeGrammars(self.rng, self.scenario.late_probability)
        self.engine = parts.engine(
            self.scheduler,
            self,
            num_steps_ahead=self.scenario.num_steps_ahead,
            grammars=self.grammars,
        )
        self.rank = FakeRank(
            limits.num_blocks, limits.block_size, limits.max_num_seqs, limits.max_model_len
        )
        self.lane = Lane(self.rank)
        self.is_poisoned = False  # a rank has died in a step that was launched
        self.guilty_clients: list[Client] = []  # of the next loss
        # Plans whose results are unread, each with the request ids by slot.
        self.unread_plans: deque[tuple[StepPlan, dict[int, str]]] = deque()
        self.num_read: dict[str, int] = {}  # by request: tokens that are stored for certain
        self.arriving = deque(self.scenario.requests)
        self.clients: dict[str, Client] = {}
        self.report = SimulationReport(seeds=1)
        self.clock_s = 0.0
        self.num_turns = 0
        self.last_turn: int | None = None  # the step by which everything must have finished
        self.calm_since = 0

    def run(self) -> SimulationReport:
        while self.arriving or self.engine.has_work:
            self.num_turns += 1
            self._watch_progress()
            if not self._faulty:
                self.grammars.late_probability = 0.0
            self._arrive()
            self._interfere()
            self._turn()
            if self.look_inside:
                self.engine.check()
                # A step that waits for its mask has not yet stored what is published, and a dead
                # rank stores nothing.
                has_stored = not (self.lane.waiting or self.is_poisoned)
                if self.num_turns % INDEX_CHECK_INTERVAL == 0 and has_stored:
                    self._check_index()
        self._check_end()
        return self.report

    # -- the executor ------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> None:
        self._audit(plan)
        names = {seq.slot: seq.request_id for seq in self.scheduler.running}
        self.unread_plans.append((plan, names))
        self._maybe_lose()
        if not self.is_poisoned:
            self._lose_to_poison(plan)
        if not self.is_poisoned:
            self.lane.launch(plan)

    def send_mask(self, step_mask: StepMask) -> None:
        assert step_mask.epoch == self.scheduler.epoch
        assert all(step.step_id >= step_mask.step_id for step in self.scheduler.submitted_steps), (
            f"the mask of step {step_mask.step_id} came before the result of an earlier one"
        )
        if self.lane.waiting:  # otherwise the step is launched next, and may be lost then
            self._maybe_lose()
        self.lane.put_mask(step_mask)

    def wait(self, step_id: int, limit_s: float) -> None:
        """Steps run when they are launched."""

    def result(self, step_id: int) -> StepResult:
        self._maybe_lose()
        results = self.lane.results
        if self.is_poisoned and not results:
            raise PoisonError
        assert results and results[0].step_id == step_id, (
            f"result of step {step_id} is not the oldest"
        )
        self._note_read(*self.unread_plans.popleft())
        return results.popleft()

    def _note_read(self, plan: StepPlan, names: dict[int, str]) -> None:
        """The result of a plan is read: what it stores is there."""
        self.rank.note_read(plan.step_id)
        if plan.admitted_rows is not None:
            for slot, num_tokens, num_stored in zip(
                plan.admitted_rows.slots,
                plan.admitted_rows.num_tokens,
                plan.admitted_rows.num_stored_tokens,
                strict=True,
            ):
                self.num_read[names[slot]] = min(num_stored, num_tokens - 1)
        for slot, num_new in zip(plan.slots, plan.num_new_tokens, strict=True):
            self.num_read[names[slot]] += num_new

    def _maybe_lose(self) -> None:
        if self._faulty and self.rng.random() < self.scenario.loss_probability:
            raise StepLostError

    def _lose_to_poison(self, plan: StepPlan) -> None:
        poison = self.scenario.poison_in(plan, self.scheduler.running)
        for request_id in sorted(poison):
            client = self.clients[request_id]  # when that ends, another may take its id
            if not any(client is guilty for guilty in self.guilty_clients):
                self.guilty_clients.append(client)
        if poison and self.rng.random() < 0.3:
            raise PoisonError
        self.is_poisoned = bool(poison)  # the results of the steps before can still be read

    @property
    def _faulty(self) -> bool:
        return self.num_turns <= self.scenario.num_fault_steps

    # -- what happens ------------------------------------------------------------------------------

    def _turn(self) -> None:
        self.clock_s += self.rng.uniform(0.5, 1.5)
        try:
            output = self.engine.step()
        except StepLostError as error:
            self._start_epoch(by_poison=isinstance(error, PoisonError))
            return
        if output is None:
            assert not self.scheduler.has_unfinished_sequences or self.grammars.late_probability, (
                "stuck: sequences are unfinished, but there is no step"
            )
            if self.arriving:
                self.clock_s = max(self.clock_s, self.arriving[0].arrival_s)
            return
        self.report.steps += 1
        self._deliver(output)

    def _start_epoch(self, *, by_poison: bool) -> None:
        """The ranks start again, while clients come and go."""
        lost_sequences = [*self.scheduler.running, *self._waiting_in_flight()]
        is_alone = len(lost_sequences) == 1 and all(
            len(plan.slots) == 1 for plan, _ in self.unread_plans
        )
        for sequence in lost_sequences:
            client = self.clients[sequence.request_id]
            client.num_losses_alone += is_alone and not by_poison
            client.num_tokens_at_loss = len(client.tokens)
        self.report.lost_steps += len(self.scheduler.submitted_steps)
        self.report.epochs_lost += 1
        self.lane.clear()
        self.is_poisoned = False
        survives = self.rng.random() < self.scenario.survival_probability
        self.rank.restart(self.rng, cache_survives=survives)
        self._arrive()
        self._interfere()
        running = list(self.scheduler.running)
        convicted = self.engine.start_epoch(cache_survives=survives)
        self._count_crashes({sequence.request_id for sequence in convicted})
        if survives and not self.scheduler.suspects.sequences:
            self._check_rollback(running)
        self.unread_plans.clear()
        blamed_requests = []
        for sequence in convicted:
            client = self.clients[sequence.request_id]
            if sequence.request_id in self.scenario.poison or client.num_losses_alone >= 2:
                blamed_requests.append(what_is_asked(client.request))
        for sequence in convicted:
            client = self.clients[sequence.request_id]
            assert what_is_asked(client.request) in blamed_requests, (
                f"convicted without guilt: {sequence}"
            )
            assert sequence.finish_reason == "error"
            client.ended = True
            self.report.convicted += 1

    def _count_crashes(self, convicted: set[str]) -> None:
        """Poison must be convicted in time."""
        for client in self.guilty_clients:
            request_id = client.request.request_id
            is_cleared = len(client.tokens) - client.num_tokens_at_crash >= CLEARING_TOKENS
            client.num_crashes = 1 if is_cleared else client.num_crashes + 1
            client.num_tokens_at_crash = len(client.tokens)
            is_decode_poison = request_id in self.scenario.decode_poison
            most = FAIL_STRIKES if is_decode_poison else FAIL_STRIKES_WITHOUT_TOKEN
            if (
                client.request.structural_tag
            ):  # its mask may be late, and then it runs beside others
                most += KEEP_TURN_STRIKES
            is_in_time = client.num_crashes < most or client.ended or request_id in convicted
            assert is_in_time, f"crashed too often: {client}"
        self.guilty_clients.clear()

    def _check_rollback(self, running: list[Sequence]) -> None:
        """Sequences that ran go on where the last step that was read has left them, unless they
        were admitted after it.
        """
        admitted = {
            names[slot]
            for plan, names in self.unread_plans
            for slot in (plan.admitted_rows.slots if plan.admitted_rows else ())
        }
        for sequence in running:
            if sequence.status is SequenceStatus.RUNNING:
                stored = self.num_read.get(sequence.request_id, -1)
                assert sequence.num_computed_tokens == min(stored, len(sequence.token_ids) - 1), (
                    f"{sequence.num_computed_tokens} computed, {stored} stored for certain:"
                    f" {sequence}"
                )
                self.num_read[sequence.request_id] = sequence.num_computed_tokens
                self.report.rolled_back += 1
            elif sequence.status is SequenceStatus.WAITING:
                assert sequence.request_id in admitted, f"starts again: {sequence}"

    def _waiting_in_flight(self) -> list[Sequence]:
        """Those that wait again, preempted or held, while a step of theirs is in flight."""
        if not self.scheduler.submitted_steps:
            return []
        oldest_step_id = self.scheduler.submitted_steps[0].step_id
        return [seq for seq in self.scheduler.waiting if seq.last_step_id >= oldest_step_id]

    def _arrive(self) -> None:
        while self.arriving and self.arriving[0].arrival_s <= self.clock_s:
            self._add(self.arriving.popleft())

    def _add(self, request: Request) -> None:
        limits = self.scenario.limits
        fits = request.num_prompt_tokens < limits.max_total_tokens
        try:
            sequence = self.engine.add(request)
        except RequestError as error:
            assert not fits and str(request.num_prompt_tokens) in str(error), f"refused: {error}"
            self.report.refused += 1
            return
        assert fits, f"accepted with {request.num_prompt_tokens} prompt tokens"
        tokens = list(request.token_ids)
        expected, reason = generate(
            tokens, request.num_prompt_tokens, request.sampling, limits.max_total_tokens
        )
        client = Client(request, sequence, tokens, expected, reason)
        self.clients[request.request_id] = client
        self.report.sent_again += len(tokens) > request.num_prompt_tokens
        if sequence.status is SequenceStatus.FINISHED:
            self._end(client)

    def _interfere(self) -> None:
        """End a request from outside, or resend one that was ended that way."""
        rng = self.rng
        if not self._faulty or not self.clients or rng.random() >= self.scenario.finish_probability:
            return
        client = rng.choice(list(self.clients.values()))
        request = client.request
        if not client.ended:
            reason = rng.choice(("abort", "stop", "error"))
            assert self.engine.finish(request.request_id, reason) is client.sequence, (
                "not known to the engine"
            )
            assert client.sequence.finish_reason == reason
            client.ended = True
            self.report.ended_outside += 1
        else:
            assert self.engine.finish(request.request_id, "abort") is None, "finished twice"
            again = Request(
                request_id=request.request_id,
                token_ids=int32_array(client.tokens),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                cache_salt=request.cache_salt,
                arrival_s=self.clock_s,
                structural_tag=request.structural_tag,
            )
            self._add(again)

    # -- what comes out ----------------------------------------------------------------------------

    def _deliver(self, output: StepOutput) -> None:
        complete: list[Sequence] = []
        for sequence, part in output.prompt_logprobs:
            self.clients[sequence.request_id].take_scores(part)
        for sequence, token in zip(output.sequences, output.token_ids, strict=True):
            client = self.clients[sequence.request_id]
            assert client.sequence is sequence and not client.ended, (
                f"a token after the end: {sequence}"
            )
            client.check_scores()
            index = len(client.tokens)
            assert index < len(client.expected) and token == client.expected[index], (
                f"token {index} is {token}, expected {client.expected[index : index + 1]}:"
                f" {sequence}"
            )
            client.tokens.append(token)
            if len(client.tokens) - client.num_tokens_at_loss >= CLEARING_TOKENS:
                client.num_losses_alone = 0
            if len(client.tokens) == len(client.expected):
                complete.append(sequence)
        assert complete == output.finished_sequences, (
            f"{complete} have all tokens, {output.finished_sequences} finished"
        )
        for sequence in output.finished_sequences:
            self._end(self.clients[sequence.request_id])

    def _end(self, client: Client) -> None:
        sequence = client.sequence
        assert sequence.token_ids.tolist() == client.tokens == client.expected, (
            f"ended early: {sequence}"
        )
        assert sequence.finish_reason == client.expected_reason, (
            f"{sequence.finish_reason}: {client.expected_reason}"
        )
        client.ended = True
        self.report.finished += 1

    # -- laws --------------------------------------------------------------------------------------

    def _audit(self, plan: StepPlan) -> None:
        """Check a plan from the clients' point of view, when it is launched."""
        limits = self.scenario.limits
        num_unread = len(self.scheduler.submitted_steps)
        assert num_unread <= self.scenario.num_steps_ahead + 1, f"{num_unread} steps unread"
        num_tokens, num_rows = sum(plan.num_new_tokens), len(plan.slots)
        assert num_tokens <= limits.max_num_batched_tokens, f"{num_tokens} tokens in a step"
        assert num_rows <= len(self.scheduler.running) <= limits.max_num_seqs, (
            f"{num_rows} rows in a step"
        )
        moving = set(plan.slots)
        by_slot = {}
        for sequence in self.scheduler.running:
            by_slot[sequence.slot] = self.clients[sequence.request_id]
            last_in_flight = sequence.num_total_tokens >= len(self._limit_of(sequence))
            assert sequence.slot in moving or last_in_flight or sequence.is_held, (
                f"does not move: {sequence}"
            )
        if plan.admitted_rows is not None:
            rows = plan.admitted_rows
            for slot, count, stored in zip(
                rows.slots, rows.num_tokens, rows.num_stored_tokens, strict=True
            ):
                self._audit_admitted(by_slot[slot], count, stored)

    def _limit_of(self, sequence: Sequence) -> range:
        """Positions a sequence may fill, prompt included."""
        most = sequence.num_prompt_tokens + sequence.sampling.max_tokens
        return range(min(most, self.scenario.limits.max_total_tokens))

    def _audit_admitted(self, client: Client, num_tokens: int, num_stored: int) -> None:
        assert num_tokens == len(client.tokens), (
            f"{num_tokens} of {len(client.tokens)} tokens: {client.sequence}"
        )
        if client.num_cached_tokens is None:
            client.num_cached_tokens = min(
                num_stored, num_tokens - 1, client.request.num_prompt_tokens
            )
        told = client.sequence.num_cached_tokens
        assert told == client.num_cached_tokens, (
            f"{told} told, {client.num_cached_tokens} cached: {client.sequence}"
        )

    def _check_index(self) -> None:
        """Whatever can be found is in the cache: each indexed block holds its tokens after the
        prefix it names.
        """
        by_serial: dict[int, Block] = {}
        for block in self.manager.blocks:
            if block.serial != ROOT_SERIAL:
                by_serial[block.serial] = block
        for block in self.manager._prefix_index.values():
            prefix: list[int] = []
            link: Block | None = block
            while link is not None and link.parent_serial != ROOT_SERIAL:
                link = by_serial.get(link.parent_serial)
                prefix = [*(link.token_ids if link else ()), *prefix]
                assert len(prefix) <= self.scenario.limits.max_model_len, "prefixes form a circle"
            if link is not None:  # otherwise its prefix is gone, and so is the block's use
                self._check_content(block, prefix)

    def _check_content(self, block: Block, prefix: list[int]) -> None:
        digests = array("Q")
        extend_digests(digests, [*prefix, *block.token_ids], SALTS.index(block.cache_salt))
        cells = digests[len(prefix) :].tobytes()
        assert len(cells) == self.scenario.limits.block_size * DIGEST_BYTES
        assert self.rank.blocks[block.block_id] == cells, (
            f"block {block.block_id} does not hold what it is found by"
        )

    def _watch_progress(self) -> None:
        """Once arrivals and faults stop, everything must finish within a number of steps computed
        from the sizes.

        The earliest sequence is never preempted and makes progress in every step. So even if
        sequences ran one after the other, they would be done after the sum of their chunks, their
        tokens, and the results that they wait for after a preemption.
        """
        if self.last_turn is None and not self.arriving and not self._faulty:
            budget = self.scenario.limits.max_num_batched_tokens
            bound = 2 + self.scenario.num_steps_ahead  # steps in flight are read
            for client in self.clients.values():
                if not client.ended:
                    num_chunks = -(-len(self._limit_of(client.sequence)) // budget)
                    num_tokens = len(self._limit_of(client.sequence)) - len(client.tokens)
                    bound += num_chunks + num_tokens + self.scenario.num_steps_ahead + 2
            # Each crash starts everything again, and each suspect runs alone.
            bound *= 1 + 2 * FAIL_STRIKES * len(self.scenario.poison)
            self.calm_since, self.last_turn = self.num_turns, self.num_turns + bound
        assert self.last_turn is None or self.num_turns <= self.last_turn, (
            "not live: unfinished after the last turn"
        )

    def _check_end(self) -> None:
        if self.look_inside:
            self._check_index()
        assert all(client.ended for client in self.clients.values()), "a request was forgotten"
        limits = self.scenario.limits
        assert self.manager.num_free_blocks == limits.num_blocks, "blocks were not given back"
        assert not self.grammars.known, f"grammars were not forgotten: {self.grammars.known}"
        assert num_unfinished(self.engine) == 0 and not self.scheduler.submitted_steps, (
            "a result was not read"
        )
        report = self.report
        report.tokens_computed, report.tokens_cached = (
            self.rank.num_written_tokens,
            self.rank.num_stored_tokens,
        )
        report.preemptions = self.scheduler.stats.num_preemptions
        report.evictions = self.manager.num_evictions
        report.late_masks = self.grammars.num_late
        if self.last_turn is not None:
            used = self.num_turns - self.calm_since
            report.worst_percent_of_bound = 100 * used // (self.last_turn - self.calm_since)
