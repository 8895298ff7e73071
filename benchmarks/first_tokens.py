"""First tokens and gaps under a rising load, simulated in seconds: the real engine and scheduler
over ranks that only take time, under a virtual clock.

    python -m benchmarks.first_tokens [--requests 600] [--slowdowns 4,6] [--plan-lead-ms 8]

Requests as in `benchmarks.serving_load`: Poisson arrivals, prompts of 64 to 192 tokens, outputs of
32 to 96, at the shares of saturation that were measured there. A step takes

    seconds = base + row * rows that decode + max(0, token * prompt tokens - hidden)

times a random factor around 1; now and then another program has the processor for a while. Plans
are made as late as `StepLoop` makes them. The policies are ours with several values of
`max_decode_slowdown`, and `peer`, which runs all decodes and whole prompts in each step, up to
2,048 tokens, and plans a step when the one before has ended. Writes milliseconds per shape, share
and policy: what happens in processes around the ranks is not part of them.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common import write_result
from benchmarks.http_load import quantile
from cluster.engine.loop import PLAN_LEAD_S, PLAN_LEAD_SHARE
from configs.engine import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS, DEFAULT_STEPS_AHEAD
from scheduler.engine import Engine
from scheduler.limits import SchedulerLimits
from scheduler.messages import Request, StepMask, StepPlan, StepResult, int32_array
from scheduler.params import ResolvedSampling
from scheduler.scheduler import Scheduler

PLANNING_S = 0.0005  # of the driver, per step
LAUNCH_S = 0.0015  # from a plan to the beginning of its step on idle ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What steps of a model cost, in seconds, and the requests per second that saturate it."""

    name: str
    base_s: float
    row_s: float
    token_s: float
    hidden_s: float  # of prompts, behind reading the weights
    saturation: float

    def seconds(self, num_decoding: int, num_prompt_tokens: int) -> float:
        """Of a step with so many rows that decode and prompt tokens."""
        prompt_s = max(0.0, self.token_s * num_prompt_tokens - self.hidden_s)
        return self.base_s + self.row_s * num_decoding + prompt_s


# Two cores of an AMD EPYC (Zen 4) at tp 2, from steps on one of them and from `serving_load`.
SHAPES = (
    Shape(
        name="60M", base_s=0.0070, row_s=0.00045, token_s=0.00015, hidden_s=0.0, saturation=15.97
    ),
    Shape(name="0.6B", base_s=0.041, row_s=0.0024, token_s=0.0022, hidden_s=0.017, saturation=1.55),
)
SHARES = (12, 25, 50, 75, 100)
SEEDS = (11, 12, 13)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How prompts share steps with sequences that decode."""

    name: str
    max_decode_slowdown: float
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS["cpu"]
    num_steps_ahead: int = DEFAULT_STEPS_AHEAD["cpu"]


PEER = Policy(name="peer", max_decode_slowdown=0.0, max_num_batched_tokens=2048, num_steps_ahead=0)


class VirtualRanks:
    """Ranks under a virtual clock: steps run one after the other, and sample the token 9."""

    def __init__(self, shape: Shape, noise: random.Random) -> None:
        self.shape = shape
        self.noise = noise
        self.now_s = 0.0
        self.free_at_s = 0.0
        self._results: dict[int, tuple[float, StepResult]] = {}  # with the time when it is there

    def launch(self, plan: StepPlan) -> None:
        self.now_s += PLANNING_S
        num_decoding = plan.num_new_tokens.count(1)
        num_prompt_tokens = sum(plan.num_new_tokens) - num_decoding
        seconds = self.shape.seconds(num_decoding, num_prompt_tokens) * self._factor()
        self.free_at_s = max(self.now_s + LAUNCH_S, self.free_at_s) + seconds
        result = StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            token_ids=int32_array([9] * sum(plan.sampling_flags)),
            seconds={"forward": seconds},
        )
        self._results[plan.step_id] = self.free_at_s, result

    def _factor(self) -> float:
        factor = self.noise.lognormvariate(0.0, 0.05)
        return factor * self.noise.uniform(1.2, 1.8) if self.noise.random() < 0.005 else factor

    def send_mask(self, step_mask: StepMask) -> None:
        raise AssertionError("no request here has a grammar")

    def wait(self, step_id: int, limit_s: float) -> None:
        self.now_s = min(self.now_s + limit_s, max(self.now_s, self._results[step_id][0]))

    def result(self, step_id: int) -> StepResult:
        done_s, result = self._results.pop(step_id)
        self.now_s = max(self.now_s, done_s)
        return result


@dataclass(slots=True)
class Times:
    """Seconds of requests: to their first tokens, and between tokens."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """Figures for a table, in milliseconds."""
        first_positions = {f"ttft_ms_p{q}": quantile(self.first_s, q / 100) for q in (50, 90, 99)}
        gaps = {f"inter_token_ms_p{q}": quantile(self.gaps_s, q / 100) for q in (50, 99, 99.9)}
        return {name: round(1e3 * seconds, 1) for name, seconds in (first_positions | gaps).items()}


def drawn_requests(num_requests: int, rate: float, seed: int) -> deque[Request]:
    """In order of arrival; `rate` is in requests per second."""
    rng = random.Random(seed)
    arrival_s, requests = 0.0, deque[Request]()
    for i in range(num_requests):
        arrival_s += rng.expovariate(rate)
        num_prompt_tokens = rng.randint(64, 192)
        requests.append(
            Request(
                request_id=str(i),
                token_ids=int32_array([i + 10] * num_prompt_tokens),
                num_prompt_tokens=num_prompt_tokens,
                sampling=ResolvedSampling(seed=0, max_tokens=rng.randint(32, 96)),
                arrival_s=arrival_s,
            )
        )
    return requests


def limits_of(policy: Policy) -> SchedulerLimits:
    """Sizes that leave the policy alone to decide."""
    return SchedulerLimits(
        num_blocks=1024,
        block_size=64,
        max_num_seqs=DEFAULT_MAX_NUM_SEQS["cpu"],
        max_num_batched_tokens=policy.max_num_batched_tokens,
        max_model_len=4096,
        vocab_size=10**9,
        enable_prefix_caching=False,
        max_decode_slowdown=policy.max_decode_slowdown,
    )


class Simulation:
    """One engine from the first request to the end of the last one."""

    def __init__(
        self, policy: Policy, shape: Shape, arriving: deque[Request], plan_lead_s: float, seed: int
    ) -> None:
        self.ranks = VirtualRanks(shape, random.Random(seed))
        scheduler = Scheduler(limits_of(policy), clock=lambda: self.ranks.now_s)
        self.engine = Engine(scheduler, self.ranks, num_steps_ahead=policy.num_steps_ahead)
        self.arriving = arriving
        self.plan_lead_s = plan_lead_s

    def run(self, times: Times) -> None:
        """Add the times of all requests."""
        last_s = dict[str, float]()
        while self.arriving or self.engine.has_work:
            if not self.engine.has_work:
                self.ranks.now_s = max(self.ranks.now_s, self.arriving[0].arrival_s)
            self._take_arrived()
            self._wait_for_requests()
            output = self.engine.step()
            assert output is not None
            now_s = self.ranks.now_s
            for seq in output.sequences:
                if seq.request_id in last_s:
                    times.gaps_s.append(now_s - last_s[seq.request_id])
                else:
                    times.first_s.append(now_s - seq.arrival_s)
                last_s[seq.request_id] = now_s

    def _take_arrived(self) -> None:
        while self.arriving and self.arriving[0].arrival_s <= self.ranks.now_s:
            self.engine.add(self.arriving.popleft())

    def _wait_for_requests(self) -> None:
        """As `StepLoop` does."""
        began_s = self.ranks.now_s
        self.engine.ensure_step_submitted()
        slack_s = self.engine.slack_s
        plan_at_s = began_s + slack_s - max(self.plan_lead_s, PLAN_LEAD_SHARE * slack_s)
        if (wait_s := plan_at_s - self.ranks.now_s) > 0:
            self.engine.wait(wait_s)
            self._take_arrived()


def simulated(
    policy: Policy, shape: Shape, share: int, num_requests: int, plan_lead_s: float
) -> dict[str, Any]:
    """The row of a policy at a share of saturation, in percent."""
    times = Times()
    for seed in SEEDS:
        requests = drawn_requests(num_requests, shape.saturation * share / 100, seed)
        Simulation(policy, shape, requests, plan_lead_s, seed).run(times)
    return {"shape": shape.name, "share": share, "policy": policy.name} | times.row()


def main() -> None:
    """Simulate and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=600, help="for each of three seeds")
    parser.add_argument("--slowdowns", default="3,4,6,0", help="max_decode_slowdown of ours")
    parser.add_argument("--plan-lead-ms", type=float, default=1e3 * PLAN_LEAD_S)
    args = parser.parse_args()
    slowdowns = [float(slowdown) for slowdown in args.slowdowns.split(",")]
    ours = [Policy(name=f"slowdown {s:g}", max_decode_slowdown=s) for s in slowdowns]
    rows = []
    for shape, share in itertools.product(SHAPES, SHARES):
        for policy in (*ours, PEER):
            rows.append(simulated(policy, shape, share, args.requests, args.plan_lead_ms / 1e3))
            print(rows[-1], file=sys.stderr, flush=True)
    write_result("first_tokens", "the policies, compared with each other", {"rows": rows})


if __name__ == "__main__":
    main()
