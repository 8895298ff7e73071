"""Requests, sizes and small steps for the tests in this folder."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field
from typing import Any

from scheduler.block_manager import BlockManager
from scheduler.engine import Engine
from scheduler.limits import SchedulerLimits
from scheduler.messages import Request, StepMask, StepPlan, StepResult, int32_array
from scheduler.params import ResolvedSampling
from scheduler.scheduler import Scheduler
from scheduler.steps import StepOutput
from tests.scheduler.fake_model import VOCAB_SIZE, FakeRank, salt_of

BLOCK = 4


@dataclass(slots=True, eq=False)
class User:
    """The minimum that a block manager needs from a sequence."""

    tokens: InitVar[Iterable[int]]
    cache_salt: str = ""
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[int] = field(default_factory=list)
    reads_prefix_cache: bool = True
    num_published_blocks: int = 0
    token_ids: array[int] = field(init=False)

    def __post_init__(self, tokens: Iterable[int]) -> None:
        self.token_ids = int32_array(tokens)


# Each entry holds the tokens of one block.
A, B, C, D = ([digit * 100 + i for i in range(BLOCK)] for digit in (1, 2, 3, 4))


def make_manager(num_blocks: int = 16, **options: Any) -> BlockManager:
    return BlockManager(num_blocks, BLOCK, **options)


def hold(manager: BlockManager, token_ids: list[int], salt: str = "") -> tuple[User, int]:
    """Allocate and publish as for a prompt that runs in one step; returns the user and its cached
    tokens.
    """
    user = User(token_ids, salt)
    num_cached = manager.allocate(user)
    assert num_cached is not None
    manager.publish(user, len(token_ids), 0)
    return user, num_cached


def num_findable(manager: BlockManager, token_ids: list[int], salt: str = "") -> int:
    """How many leading tokens would be found; changes nothing."""
    return len(manager._find_cached_blocks(User(token_ids, salt))) * manager.block_size


def make_limits(**changes: Any) -> SchedulerLimits:
    sizes: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": BLOCK,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "vocab_size": VOCAB_SIZE,
    }
    return SchedulerLimits(**(sizes | changes))


def make_request(
    request_id: str,
    token_ids: Iterable[int],
    *,
    num_prompt_tokens: int | None = None,
    max_tokens: int = 16,
    stop: Iterable[int] = (),
    seed: int = 0,
    temperature: float = 1.0,
) -> Request:
    tokens = int32_array(token_ids)
    return Request(
        request_id=request_id,
        token_ids=tokens,
        num_prompt_tokens=len(tokens) if num_prompt_tokens is None else num_prompt_tokens,
        sampling=ResolvedSampling(
            seed=seed,
            max_tokens=max_tokens,
            temperature=temperature,
            stop_token_ids=frozenset(stop),
        ),
        cache_salt=salt_of(seed),
    )


def must_schedule(scheduler: Scheduler) -> StepPlan:
    """The next plan; there must be one."""
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.check()
    return plan


def give(scheduler: Scheduler, *tokens: int) -> StepOutput:
    """Apply these tokens as the result of the oldest unread step."""
    oldest = scheduler.submitted_steps[0]
    output = scheduler.apply(
        StepResult(step_id=oldest.step_id, epoch=oldest.epoch, token_ids=int32_array(tokens))
    )
    scheduler.check()
    return output


def run_step(scheduler: Scheduler, *tokens: int) -> StepPlan:
    """Plan one step and give it these tokens, or 9 for each row that samples."""
    plan = must_schedule(scheduler)
    give(scheduler, *(tokens or [9] * sum(plan.sampling_flags)))
    return plan


def rows(plan: StepPlan) -> list[tuple[int, int, bool]]:
    """Slot, number of new tokens and whether it samples, for each row of a plan."""
    return [
        (s, n, bool(p))
        for s, n, p in zip(plan.slots, plan.num_new_tokens, plan.sampling_flags, strict=True)
    ]


def stored_of(plan: StepPlan) -> list[int]:
    """Stored tokens of each admitted row of a plan."""
    return list(plan.admitted_rows.num_stored_tokens) if plan.admitted_rows else []


class FakeExecutor:
    """A fake rank as an executor: steps run when they are launched, and results wait until they are
    read.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.rank = FakeRank(
            limits.num_blocks, limits.block_size, limits.max_num_seqs, limits.max_model_len
        )
        self.plans: list[StepPlan] = []
        self.results: dict[int, StepResult] = {}
        self.events: list[str] = []

    def launch(self, plan: StepPlan) -> None:
        self.events.append(f"launch {plan.step_id}")
        self.plans.append(plan)
        self.results[plan.step_id] = self.rank.run(plan)

    def send_mask(self, step_mask: StepMask) -> None:
        raise AssertionError("no request here has a grammar")

    def wait(self, step_id: int, limit_s: float) -> None:
        """Steps run when they are launched."""

    def result(self, step_id: int) -> StepResult:
        self.events.append(f"result {step_id}")
        return self.results.pop(step_id)


def block_ids_of(plan: StepPlan) -> list[list[int]]:
    """Block table of each admitted row of a plan."""
    tables: list[list[int]] = []
    if plan.admitted_rows is not None:
        first = 0
        for count in plan.admitted_rows.num_blocks:
            tables.append(list(plan.admitted_rows.block_ids[first : first + count]))
            first += count
    return tables


def num_unfinished(engine: Engine) -> int:
    return len(engine._sequences)
