"""What one seed draws: the sizes of an engine, its requests, and when they arrive.

Prompts are chosen to share content in the prefix cache: trees of shared segments, twins, prompts
cut next to a block boundary, conversations that continue after an earlier answer, and the same
again under another cache salt. Some requests come with tokens that were generated before.
Everything is determined by the `Random` that is passed in.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from random import Random

import xxhash

from scheduler.block_manager import HashFunction
from scheduler.limits import SchedulerLimits
from scheduler.messages import Request, StepPlan, int32_array
from scheduler.params import ResolvedSampling
from scheduler.sequence import Sequence
from tests.scheduler.fake_model import (
    SALTS,
    VOCAB_SIZE,
    generate,
    prompt_logprobs_of,
    salt_of,
    structural_tag_of,
)

BLOCK_SIZES = (1, 2, 3, 4, 4, 5, 7, 8, 8, 16, 32)
MAX_BLOCKS = 150


def _constant(data: bytes) -> int:
    return 7


def _few_values(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) % 5


def _last_token_only(data: bytes) -> int:
    return int.from_bytes(data[-4:], "little")


WEAK_HASHES: tuple[HashFunction, ...] = (_constant, _few_values, _last_token_only)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Sizes, requests in order of arrival, how often each fault occurs until `num_fault_steps`, and
    the ids of requests that end every step in which they run (`decode_poison`: or decode).
    """

    limits: SchedulerLimits
    num_steps_ahead: int
    hash_function: HashFunction
    requests: list[Request]
    loss_probability: float
    survival_probability: float  # of the cache of ranks that are lost
    finish_probability: float
    num_fault_steps: int
    poison: frozenset[str]
    late_probability: float  # of the answer when a mask is asked for

    @property
    def decode_poison(self) -> frozenset[str]:
        """Those of the poison that only decodes: they get a token from each run of their prompt."""
        return frozenset(name for name in self.poison if int(name.removeprefix("request-")) % 2)

    def poison_in(self, plan: StepPlan, running: list[Sequence]) -> frozenset[str]:
        """The requests that end the step of this plan."""
        names = {seq.slot: seq.request_id for seq in running}
        admitted = set(plan.admitted_rows.slots) if plan.admitted_rows else set[int]()
        decoding = {
            names[slot]
            for slot, num_new in zip(plan.slots, plan.num_new_tokens, strict=True)
            if num_new == 1 and slot not in admitted
        }
        return self.poison.intersection(names[slot] for slot in plan.slots) - (
            self.decode_poison - decoding
        )


def what_is_asked(request: Request) -> tuple[array[int], ResolvedSampling, bytes]:
    """The prompt and what is wanted after it: the same for all outputs of one request."""
    sampling = replace(request.sampling, seed=0, prompt_logprobs=-1)
    return request.token_ids[: request.num_prompt_tokens], sampling, request.structural_tag


def draw_scenario(rng: Random) -> Scenario:
    limits = _draw_limits(rng)
    weak = rng.random() < 0.3
    small_alphabet = weak or rng.random() < 0.2
    requests = _Requests(rng, limits, small_alphabet=small_alphabet, growing=rng.random() < 0.4)
    scenario = Scenario(
        limits=limits,
        num_steps_ahead=rng.choice((0, 1, 2, 3, 3, 8)),
        hash_function=rng.choice(WEAK_HASHES) if weak else xxhash.xxh3_128_intdigest,
        requests=requests.draw(rng.randint(3, 40)),
        loss_probability=rng.choice((0.0, 0.0, 0.01, 0.05, 0.2)),
        survival_probability=rng.choice((0.0, 0.5, 1.0, 1.0)),
        finish_probability=rng.choice((0.0, 0.02, 0.1)),
        num_fault_steps=rng.randint(5, 150),
        poison=frozenset(),
        late_probability=rng.choice((0.0, 0.0, 0.1, 0.6)),
    )
    poison = rng.sample(scenario.requests, rng.choice((0, 0, 0, 0, 1, 2)))
    return replace(scenario, poison=frozenset(request.request_id for request in poison))


def _draw_limits(rng: Random) -> SchedulerLimits:
    longest = rng.choice((8, 16, 32, 64, 64, 100, 150, 200))
    max_model_len = rng.randint(longest // 2, longest)
    block_size = rng.choice(BLOCK_SIZES)
    pool_tokens = rng.choice((0.6, 1.0, 1.2, 1.5, 2.0, 3.0)) * max_model_len
    max_num_seqs = rng.choice((1, 2, 3, 4, 6, 8, 12))
    extra = rng.choice((0, 1, rng.randrange(16), rng.randrange(100), 200))
    return SchedulerLimits(
        num_blocks=min(MAX_BLOCKS, max(2, round(pool_tokens / block_size))),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + extra,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        enable_prefix_caching=rng.random() < 0.9,
        max_decode_slowdown=(0.0, 1.5, 3.0)[extra % 3],
    )


@dataclass(slots=True)
class _Requests:
    rng: Random
    limits: SchedulerLimits
    small_alphabet: bool
    growing: bool  # short prompts, long outputs: many run at once and then run out of blocks
    segments: list[list[int]] = field(default_factory=list)
    drawn: list[Request] = field(default_factory=list)

    def draw(self, num_requests: int) -> list[Request]:
        rng = self.rng
        self.segments = [self._tokens(self._segment_length()) for _ in range(rng.randint(1, 4))]
        mean_gap_s = rng.choice((0.0, 0.0, 0.5, 3.0, 10.0))
        num_salts = rng.choice((1, 1, 2, len(SALTS)))
        arrival_s = 0.0
        for i in range(num_requests):
            if mean_gap_s:
                arrival_s += rng.expovariate(1 / mean_gap_s)
            twin = rng.choice(self.drawn) if self.drawn and rng.random() < 0.2 else None
            seed = twin.sampling.seed if twin and rng.random() < 0.5 else self._seed(num_salts)
            prompt = list(twin.token_ids[: twin.num_prompt_tokens]) if twin else self._prompt()
            self.drawn.append(
                self._request(f"request-{i}", prompt, self._sampling(seed), arrival_s)
            )
        return self.drawn

    def _request(
        self, request_id: str, prompt: list[int], sampling: ResolvedSampling, arrival_s: float
    ) -> Request:
        """A request, sometimes with part or all of its output."""
        tokens = prompt
        if self.rng.random() < 0.15:
            tokens, _ = generate(prompt, len(prompt), sampling, self.limits.max_total_tokens)
            tokens = tokens[: self.rng.randint(len(prompt), len(tokens))]
        return Request(
            request_id=request_id,
            token_ids=int32_array(tokens),
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            cache_salt=salt_of(sampling.seed),
            arrival_s=arrival_s,
            structural_tag=structural_tag_of(sampling.seed),
        )

    def _seed(self, num_salts: int) -> int:
        return self.rng.randrange(1000) * len(SALTS) + self.rng.randrange(num_salts)

    def _sampling(self, seed: int) -> ResolvedSampling:
        rng = self.rng
        short = (1, 2, rng.randint(1, 10), rng.randint(1, 40))
        return ResolvedSampling(
            seed=seed,
            max_tokens=rng.choice((rng.randint(20, 100), 1000) if self.growing else short),
            stop_token_ids=frozenset(range(rng.choice((0, 0, 20, 100)))),
            prompt_logprobs=prompt_logprobs_of(seed),
        )

    def _tokens(self, count: int) -> list[int]:
        alphabet = 2 if self.small_alphabet else VOCAB_SIZE
        return [self.rng.randrange(alphabet) for _ in range(count)]

    def _segment_length(self) -> int:
        block_size = self.limits.block_size
        return self.rng.choice(
            (block_size, 2 * block_size, self.rng.randint(1, 2 * block_size + 1))
        )

    def _prompt(self) -> list[int]:
        """A prompt, nearly always short enough; one that is too long must be refused."""
        rng, most = self.rng, self.limits.max_total_tokens
        kind = rng.random()
        if kind < 0.2 and self.drawn:
            prompt = self._conversation(rng.choice(self.drawn))
        elif kind < 0.4 and self.drawn:
            prompt = self._cut(list(rng.choice(self.drawn).token_ids))
        elif kind < 0.5:
            prompt = self._tokens(rng.randint(1, most))
        else:
            prompt = [
                token for _ in range(rng.randint(0, 5)) for token in rng.choice(self.segments)
            ]
            prompt += self._tokens(rng.choice((0, 1, rng.randint(0, 20))))
        if rng.random() < 0.03:
            return prompt + self._tokens(most)
        longest = most // 8 if self.growing else rng.choice((most - 1, most // 2, most // 4))
        return prompt[: max(1, longest)] or self._tokens(1)

    def _conversation(self, earlier: Request) -> list[int]:
        """An earlier prompt with its whole answer, and a little more."""
        prompt = list(earlier.token_ids[: earlier.num_prompt_tokens])
        most = max(len(earlier.token_ids), self.limits.max_total_tokens)
        tokens, _ = generate(prompt, len(prompt), earlier.sampling, most)
        return tokens + self._tokens(self.rng.randint(0, 3))

    def _cut(self, tokens: list[int]) -> list[int]:
        """The beginning of an earlier prompt, up to a block boundary or one token beside it."""
        blocks = self.rng.randint(0, len(tokens) // self.limits.block_size)
        return tokens[: max(1, blocks * self.limits.block_size + self.rng.choice((-1, 0, 0, 1)))]
