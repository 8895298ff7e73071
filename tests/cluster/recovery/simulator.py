"""Deterministic simulation of the control plane: `python -m tests.cluster.recovery.simulator`.

Real: scheduler, engine, engine loop, supervisor, state machine, mailboxes, the driver's record of
its frontends, the frontend and its outputs. Simulated, from one random number generator per seed:
ranks (`tests.scheduler.fake_model`), their deaths and how late these are noticed, hangs, groups
that cannot be assembled or die while they are, calls that are lost before or after they are carried
out, news and aborts that are late, drivers that die or stop, requests that kill whoever runs or
decodes them.

Laws: every request ends, exactly once; its tokens are those of an undisturbed run, and its stream
has each of them once; only poison fails, and what asks for the same, unless ranks were lost while a
request ran alone; no group begins while a process of an older one lives; when the faults stop,
everything ends within a bounded number of turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from cluster.client import driver_handle
from cluster.client import frontend as frontend_module
from cluster.client.frontend import Frontend
from cluster.client.outputs import Chunk, Generation, OutputFollower
from cluster.engine import loop as loop_module
from cluster.engine.frontends import FrontendRecords
from cluster.engine.loop import Finish, RanksLost, RanksReplaced, StepLoop, Submit
from cluster.ranks.group import GroupReport
from cluster.ray_errors import DriverDiedError, LostCallError, NoAnswerError
from cluster.recovery import supervisor as supervisor_module
from cluster.recovery.states import Recovery
from cluster.recovery.supervisor import Supervisor
from configs.engine import EngineConfig
from scheduler.engine import Engine
from scheduler.errors import EaglerayError, RequestError, RequestFailedError, WorkerError
from scheduler.messages import Request, StepMask, StepPlan, StepResult
from scheduler.scheduler import Scheduler
from scheduler.suspects import FAIL_STRIKES, FAIL_STRIKES_WITHOUT_TOKEN
from tests.scheduler.fake_model import FakeGrammars, FakeRank, Lane, generate
from tests.scheduler.scenario import draw_scenario, what_is_asked

FAULTY_TURNS = 400
CALM_TURNS = 3000  # without faults, something must have changed after this many turns
EVENT_LOOP = asyncio.new_event_loop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The classes under test."""

    scheduler: type[Scheduler] = Scheduler
    loop: type[StepLoop] = StepLoop
    supervisor: type[Supervisor] = Supervisor
    recovery: type[Recovery] = Recovery
    frontends: type[FrontendRecords] = FrontendRecords
    frontend: type[Frontend] = Frontend


class Now:
    """An executor that runs calls at once, or when the world says so."""

    def __init__(self, world: World | None = None) -> None:
        self._world = world

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if not future.done():
                try:
                    future.set_result(function(*arguments))
                except EaglerayError as error:
                    future.set_exception(error)

        if self._world is None:
            run()
        else:
            self._world.later.append(run)
        return future

    def shutdown(self, wait: bool = True) -> None:
        pass


class NoThread(threading.Thread):
    """No thread: the world itself calls what would run on it."""

    def start(self) -> None:
        pass


class Group:
    """The ranks of one epoch."""

    def __init__(self, maker: Any, epoch: int = 0, spares: Any = (), ranks: Any = ()) -> None:
        self.world: World = maker.world
        self.epoch = epoch
        self.ranks: list[Any] = []
        self.is_closed = self.is_dead = self.hangs = False
        self.is_dying = False  # it is dead once the steps before have been read
        self.lane: Lane | None = None
        # The cache that it has when it takes over.
        self.is_inherited: bool = self.world.rng.random() < 0.8
        self.world.groups.append(self)

    def start(
        self, first: GroupReport | None = None, num_kv_blocks: int | None = None
    ) -> GroupReport:
        world = self.world
        older = [group for group in world.groups if group is not self and not group.is_closed]
        assert not older, f"epoch {self.epoch} starts beside epoch {older[0].epoch}"
        if self.is_closed or world.happens("rebuild_fails"):
            raise WorkerError("rank 1 died while loading")
        limits = world.scenario.limits
        rank = FakeRank(
            limits.num_blocks, limits.block_size, limits.max_num_seqs, limits.max_model_len
        )
        rank.epoch = self.epoch
        self.lane = Lane(rank)
        return GroupReport(num_blocks=limits.num_blocks, seconds={}, log_lines=())

    def take_over(self, epoch: int, keeps_cache: bool, inherited: FakeRank) -> None:
        """A group that stood by begins, with the cache of the one that is lost if it keeps it."""
        older = [group for group in self.world.groups if group is not self and not group.is_closed]
        assert not older, f"epoch {epoch} begins beside epoch {older[0].epoch}"
        if self.is_closed or self.world.happens("rebuild_fails"):
            raise WorkerError("rank 1 died while it stood by")
        self.epoch = epoch
        inherited.restart(self.world.rng, cache_survives=self.is_inherited and keeps_cache)
        inherited.epoch = epoch
        self.lane = Lane(inherited)

    def has_cache_of(self, other: Group) -> bool:
        return self.is_inherited

    def launch(self, plan: StepPlan) -> None:
        assert not self.is_closed, "a step for ranks that the engine knows to be gone"
        if self.is_dead or self.is_dying:
            return
        guilty = self.world.scenario.poison_in(plan, self.world.driver.scheduler.running)
        for request_id in guilty:
            self.world.crashes[request_id] = self.world.crashes.get(request_id, 0) + 1
        if guilty:
            self.is_dying = True
            self.is_dead = self.world.rng.random() < 0.3
            return
        assert self.lane is not None, "a group that was not started runs a step"
        self.lane.launch(plan)

    def send_mask(self, step_mask: StepMask) -> None:
        if not (self.is_closed or self.is_dead):
            assert self.lane is not None
            self.lane.put_mask(step_mask)

    def wait(self, step_id: int, limit_s: float) -> None:
        """Steps run when they are launched."""

    def result(self, step_id: int) -> StepResult:
        if self.is_closed or self.is_dead or self.lane is None or not self.lane.results:
            self.is_dead = self.is_dead or self.is_dying
            raise WorkerError(f"step {step_id} failed: rank 1 died")
        self.lane.rank.note_read(step_id)
        return self.lane.results.popleft()

    def close(self, *, at_once: bool = False) -> None:
        self.is_closed = True


class Watch:
    """Notices the death of a group at one of the next looks, and a hang after several."""

    def __init__(self, group: Group, wake: Any, stuck_after_s: float) -> None:
        self.group = group
        self._looks = 0

    all_ranks_answer = True

    def find_fault(self, busy_since_s: float | None) -> str | None:
        group = self.group
        if group.is_dead and group.world.rng.random() < 0.5:
            return "rank 1 died"
        self._looks = self._looks + 1 if group.hangs else 0
        return "rank 0 has not moved" if self._looks > 3 else None


class Standby:
    """Sometimes a group stands by; otherwise groups are made of new processes."""

    def __init__(self, maker: Any, *_: Any) -> None:
        self._maker = maker
        self._present: Group | None = None  # whose memory the group that stands by holds

    def note_serving(self) -> None:
        pass

    def prepare(self, present: Group, first: GroupReport, makes_spares: bool) -> None:
        if makes_spares and self._maker.world.happens("stands_by"):
            self._present = present

    def take(self) -> tuple[Group | None, list[Any]]:
        present, self._present = self._present, None
        if present is None or present.lane is None:
            return None, []
        inherited, group = present.lane.rank, Group(self._maker)
        group.take_over = functools.partial(group.take_over, inherited=inherited)  # type: ignore[method-assign]
        self._maker.world.num_takeovers += 1
        return group, []


class Driver:
    """The parts that `cluster.engine.driver` puts together, without an actor."""

    loop: StepLoop

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_alive, self.is_stopped = True, False
        self.frontends = world.parts.frontends(1e9)
        self.scheduler = world.parts.scheduler(world.scenario.limits)
        options = EngineConfig(spares="off", stuck_after_s=1.0)
        config = SimpleNamespace(engine=options)
        maker: Any = SimpleNamespace(world=world, config=config, num_ranks=1)
        kind = type(
            "SimulatedSupervisor",
            (world.parts.supervisor,),
            {"make_group": Group, "make_watch": Watch, "make_standby": Standby},
        )
        self.supervisor = kind(
            maker,
            busy_since_s=lambda: self.loop.busy_since_s,
            has_work=lambda: self.loop.engine.has_work,
            on_group_ready=lambda group, cache_survives: self.loop.post(
                RanksReplaced(executor=group, cache_survives=cache_survives)
            ),
            on_lost=lambda epoch, _: self.loop.post(RanksLost()),
            on_dead=self.fail,
            clock=lambda: world.now_s,
        )
        self.supervisor.recovery = world.parts.recovery(lambda: world.now_s)
        self.supervisor._assembly_executor = Now(world)
        with world.calm():
            group, _ = self.supervisor.start()
        self.supervisor._group_watch = self.supervisor._make_watch(group)
        ahead, grammars = world.scenario.num_steps_ahead, FakeGrammars()
        engine = Engine(self.scheduler, group, num_steps_ahead=ahead, grammars=grammars)
        self.loop = world.parts.loop(
            engine,
            lambda news: world.later.append(lambda: self.frontends.deliver(news)),
            self.fail,
            on_failed_step=self.supervisor.note_failed_step,
            on_result_applied=self.supervisor.note_applied_result,
            on_conviction=self.supervisor.convictions.note,
        )

    def fail(self, error: Exception) -> None:
        raise AssertionError(f"the engine died: {error}") from error

    def turn(self) -> None:
        group = self.supervisor._group
        if not (group.hangs and not group.is_closed and self.loop._has_ranks):
            self.loop.run_once()

    def forget_frontends(self) -> None:
        """As after a long silence."""
        for frontend in self.frontends._frontends.values():
            frontend.silent_since_s = -1e10
        for request_ids in self.frontends.forget_silent_frontends().values():
            self.loop.post(Finish(request_ids=request_ids, reason="abort"))

    # Methods of the actor, as `call` runs them.

    def __getattr__(self, name: str) -> Any:
        if name not in ("submit", "poll", "finish", "wait_for_end"):
            raise AttributeError(name)
        if name == "finish":
            return SimpleNamespace(remote=lambda *arguments: self._finish(*arguments))
        if name == "wait_for_end":
            return SimpleNamespace(remote=lambda: SimpleNamespace(future=Future))
        method = getattr(self, f"_{name}")
        return SimpleNamespace(remote=lambda *arguments: (self, lambda: method(*arguments)))

    def _submit(self, frontend_id: str, requests: list[Request]) -> int:
        limits = self.world.scenario.limits
        number, fresh = self.frontends.register_requests(frontend_id, requests, limits)
        if fresh:
            self.loop.post(Submit(registration_number=number, requests=fresh))
        return number

    def _poll(self, arguments: bytes) -> bytes:
        frontend_id, acknowledged, _ = pickle.loads(arguments)
        collected = self.frontends.collect(frontend_id, acknowledged, 0.0)
        return pickle.dumps(EVENT_LOOP.run_until_complete(collected))

    def _finish(self, request_ids: list[str], reason: str, frontend_id: str, *_: Any) -> Any:
        ended: Future[None] = Future()
        if self.world.happens("call_lost"):
            ended.set_exception(LostCallError("could not finish: lost"))
        else:
            ended.set_result(None)
            self._finish_now(request_ids, reason, frontend_id)
        return SimpleNamespace(future=lambda: ended)

    def _finish_now(self, request_ids: list[str], reason: str, frontend_id: str) -> None:
        if self.is_alive:
            self.frontends.remove(frontend_id, request_ids)
            self.loop.post(Finish(request_ids=request_ids, reason=reason))


@dataclass(slots=True)
class Client:
    """One request, and the stream its caller sees."""

    request: Request
    generation: Generation
    chunks: list[Chunk] = field(default_factory=list)
    is_aborted: bool = False


class World:
    """One seed."""

    def __init__(self, seed: int, parts: Parts) -> None:
        self.rng = Random(seed)
        self.parts = parts
        self.scenario = draw_scenario(self.rng)
        self.poison = self.scenario.poison
        self.crashes: dict[str, int] = {}
        self.probabilities = {
            name: self.rng.choice((0.0, *values))
            for name, values in {
                "crash": (0.01, 0.03),
                "hang": (0.005,),
                "rebuild_fails": (0.2, 0.5),
                "driver_dies": (0.003, 0.01),
                "driver_stops": (0.003,),
                "frontend_forgotten": (0.01, 0.05),
                "call_lost": (0.05, 0.2),
                "reply_lost": (0.05, 0.2),
                "abort": (0.01,),
                "stands_by": (0.05, 0.5),
            }.items()
        }
        self.now_s = 0.0
        self.num_turns = 0
        self.num_losses = self.num_takeovers = self.num_forgotten = 0
        self.is_calm = False
        self.groups: list[Group] = []
        self.later: deque[Callable[[], None]] = deque()
        self.clients: list[Client] = []
        self.arriving = deque(self.scenario.requests)
        loop_module.MAX_HOLD_BACK_S = self.rng.choice((0.0, 1e9))
        self.driver = Driver(self)
        kind = type("SimulatedFrontend", (parts.frontend,), {"thread_class": NoThread})
        self.frontend: Frontend = kind(self.driver, replace=self.replace)
        self.frontend.driver_handle._send_executor = Now(self)

    def happens(self, name: str) -> bool:
        probability = 0.0 if self.is_calm else self.probabilities[name]
        return self.rng.random() < probability

    @contextlib.contextmanager
    def calm(self) -> Any:
        before, self.is_calm = self.is_calm, True
        yield
        self.is_calm = before

    def call(self, ref: Any, what: str, limit_s: float = 0.0) -> Any:
        """Stands in for `cluster.ray_errors.call`."""
        driver, run = ref
        if not driver.is_alive:
            raise DriverDiedError(f"could not {what}: the driver has died")
        if driver.is_stopped:
            raise NoAnswerError(f"could not {what}: no answer")
        if self.happens("call_lost"):
            raise LostCallError(f"could not {what}: lost")
        answer = run()
        if self.happens("reply_lost"):
            raise LostCallError(f"could not {what}: lost")
        return answer

    def replace(self, driver: Any, error: EaglerayError, has_been_healthy: bool) -> Driver:
        assert driver is self.driver and not (driver.is_alive and not driver.is_stopped)
        driver.is_alive = False
        for group in self.groups:
            group.close()
        self.later.clear()  # calls and replies that were on their way
        self.driver = Driver(self)
        return self.driver

    def run(self) -> None:
        bound, last_change, before = None, 0, None
        while self.arriving or not all(c.generation.done_future.done() for c in self.clients):
            self.num_turns += 1
            self.now_s += self.rng.uniform(0.0, 0.3)
            self.is_calm = self.num_turns > FAULTY_TURNS
            if self.is_calm and not self.arriving and bound is None:
                tokens = sum(self.scenario.limits.max_total_tokens for _ in self.clients)
                bound = self.num_turns + 3000 + 60 * tokens * (1 + 12 * len(self.poison))
            assert bound is None or self.num_turns < bound, "not live"
            if (now := self._progress()) != before or not self.is_calm:
                last_change, before = self.num_turns, now
            assert self.num_turns - last_change < CALM_TURNS, "not live: nothing changes"
            self._move()
        self._check()

    def _progress(self) -> tuple[int, int, int]:
        """Numbers that grow as long as there is progress: tokens, ended requests, groups."""
        tokens = sum(len(each.generation.completions[0].token_ids) for each in self.clients)
        ended = sum(each.generation.done_future.done() for each in self.clients)
        return tokens + len(self.clients), ended, len(self.groups)

    def _move(self) -> None:
        if self.arriving and self.rng.random() < 0.2:
            self._arrive(self.arriving.popleft())
        if self.happens("abort") and self.clients:
            client = self.rng.choice(self.clients)
            client.is_aborted = client.is_aborted or not client.generation.done_future.done()
            self.frontend.abort([client.generation])
        driver = self.driver
        self._harm(driver)
        if driver.is_alive and not driver.is_stopped:
            if self.rng.random() < 0.7:
                driver.turn()
            if self.rng.random() < 0.4:
                driver.supervisor.check_group()
            while self.later and self.rng.random() < 0.6:
                self.later.popleft()()
        if self.rng.random() < 0.3 and self.frontend._outstanding_requests.has_accepted_requests:
            self.frontend.poll()

    def _harm(self, driver: Driver) -> None:
        group = driver.supervisor._group
        if self.happens("crash"):
            group.is_dead = True
            self.num_losses += 1
        if self.happens("hang"):
            group.hangs = True
            self.num_losses += 1
        if self.happens("driver_dies"):
            driver.is_alive = False
        if self.happens("driver_stops"):
            driver.is_stopped = True
        if self.happens("frontend_forgotten") and driver.is_alive:
            driver.forget_frontends()
            self.num_forgotten += 1

    def _arrive(self, drawn: Request) -> None:
        prompt = drawn.token_ids[: drawn.num_prompt_tokens]
        request = Request(
            request_id=drawn.request_id,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=drawn.sampling,
            cache_salt=drawn.cache_salt,
            num_tokens_per_news=self.rng.choice((0, 1, 1, 3)),
            structural_tag=drawn.structural_tag,
        )
        chunks: list[Chunk] = []
        follower = OutputFollower(request, 0, None, chunks.append)
        client = Client(request, Generation(None, [follower]), chunks)
        fits = len(prompt) < self.scenario.limits.max_total_tokens
        try:
            self.frontend.submit([client.generation])
        except RequestError as error:
            assert not fits, f"refused: {error}"
            return
        assert fits
        self.clients.append(client)

    def _check(self) -> None:
        limits = self.scenario.limits
        asked_by_poison = [
            what_is_asked(client.request)
            for client in self.clients
            if client.request.request_id in self.poison
        ]
        for client in self.clients:
            request, done = client.request, client.generation.completions[0]
            said = [token for chunk in client.chunks for token in chunk.token_ids]
            assert said == done.token_ids, f"the stream of {request.request_id} repeats or lacks"
            expected, reason = generate(
                list(request.token_ids),
                request.num_prompt_tokens,
                request.sampling,
                limits.max_total_tokens,
            )
            expected = expected[request.num_prompt_tokens :]
            assert done.token_ids == expected[: len(done.token_ids)], f"wrong: {request}"
            error = client.generation.done_future.exception()
            if error is not None:
                guilty = what_is_asked(request) in asked_by_poison
                innocent_may = self.num_losses >= 2 and isinstance(error, RequestFailedError)
                assert guilty or innocent_may, f"{request.request_id} failed: {error}"
                assert isinstance(error, RequestFailedError), f"{type(error)}: {error}"
            elif not client.is_aborted:
                always = self.poison - self.scenario.decode_poison
                assert request.request_id not in always, "poison did not fail"
                assert (done.token_ids, done.finish_reason) == (expected, reason), "incomplete"
        num_drivers = 1 + sum(group.epoch == 0 for group in self.groups[1:])
        num_recorded = num_drivers + self.num_forgotten  # each time, without its crashes
        for request_id, count in self.crashes.items():
            most = FAIL_STRIKES_WITHOUT_TOKEN
            if request_id in self.scenario.decode_poison:
                most = FAIL_STRIKES
            assert count <= most * num_recorded, f"{request_id} crashed {count} times"


def run_seed(seed: int, parts: Parts | None = None) -> None:
    """Play one seed. Raises AssertionError naming the seed and the law."""
    levels = [(each.logger, each.logger.level) for each in (supervisor_module, frontend_module)]
    for logger, _ in levels:
        logger.setLevel("CRITICAL")
    checkpoint_s = loop_module.MAX_HOLD_BACK_S
    try:
        world = World(seed, parts or Parts())
        with patch.multiple(driver_handle, result_of=world.call, RETRY_PAUSE_S=0.0):
            world.run()
            world.frontend.close()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    finally:
        loop_module.MAX_HOLD_BACK_S = checkpoint_s
        for logger, level in levels:
            logger.setLevel(level)


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate the control plane.")
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    began = time.perf_counter()
    for seed in range(args.first, args.first + args.seeds):
        run_seed(seed)
    taken = time.perf_counter() - began
    print(f"{args.seeds} seeds, 0 violations, {1e3 * taken / args.seeds:.1f} ms per seed")


if __name__ == "__main__":
    main()
