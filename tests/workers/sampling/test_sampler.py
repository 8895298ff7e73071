"""The sampler: its draws against slow references, and its independence of shards, batches and
neighbors.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import random
import sys
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from kernels.reference import sampling as kernels
from kernels.select import select_backend
from scheduler.messages import StepMask, TokenLogprobs, int32_array
from scheduler.params import ResolvedSampling, SamplingParams
from tests.kernels import sampling_reference as reference
from tests.scheduler.fake_model import mask_bytes
from workers.parallel.backend import open_rendezvous
from workers.parallel.group import TensorParallelGroup
from workers.sampling.sampler import Sampler, _gap_rows, to_logprobs
from workers.sampling.shard import Group

BACKENDS = ("reference", "cpu")
KERNELS = select_backend("cpu").sampling
select_backend("cpu").set_num_threads(1)

ALONE = TensorParallelGroup(0, 1, torch.device("cpu"))
CLEAR = 1e-5  # float32 rounding cannot change a decision whose margin is above this
Floats = reference.Floats


@pytest.fixture(autouse=True, params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs on every backend."""
    name: str = request.param
    monkeypatch.setattr(sys.modules[__name__], "KERNELS", select_backend("cpu", name).sampling)
    return name


def make(**options: Any) -> ResolvedSampling:
    return ResolvedSampling(**({"seed": 1, "max_tokens": 100} | options))


def make_sampler(
    vocab_size: int, num_slots: int = 8, group: Group = ALONE, shard: int | None = None
) -> Sampler:
    """`shard`: columns of each rank, padding included."""
    shard = vocab_size if shard is None else shard
    return Sampler(
        group, KERNELS, vocab_size, group.rank * shard, (group.rank + 1) * shard, num_slots, "cpu"
    )


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sample(
    logits: torch.Tensor,
    rows: list[ResolvedSampling],
    position: int = 1,
    vocab_size: int | None = None,
) -> list[int]:
    """One token per row, each a fresh request whose prompt is token 0."""
    sampler = make_sampler(vocab_size or logits.shape[1], len(rows), shard=logits.shape[1])
    for slot, sampling in enumerate(rows):
        sampler.admit(slot, sampling, [0], 1)
    batch = sampler.state.batch(range(len(rows)), [position] * len(rows))
    return sampler.sample(logits, batch).token_ids_B.tolist()


def draw(logits_V: torch.Tensor, sampling: ResolvedSampling, num_draws: int, rows: int) -> Floats:
    """Draws `num_draws` tokens, each with the uniform number of a different position; the counts by
    token.
    """
    sampler = make_sampler(len(logits_V))
    sampler.admit(0, sampling, [0], 1)
    counts = np.zeros(len(logits_V))
    for start in range(0, num_draws, rows):
        batch = sampler.state.batch([0] * rows, range(start + 1, start + rows + 1))
        counts += np.bincount(
            sampler.sample(logits_V.expand(rows, -1), batch).token_ids_B, minlength=len(counts)
        )
    return counts


def random_sampling(rng: random.Random, vocab_size: int) -> ResolvedSampling:
    """A random mix of parameters, each often at its neutral value."""
    some_ids = rng.sample(range(vocab_size), 5)
    return make(
        seed=rng.getrandbits(63),
        temperature=rng.choice([0, 0.3, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 1, 5, 40, 300, vocab_size, vocab_size + 1]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.5, 0.01]),
        min_p=rng.choice([0, 0, 0.02, 0.3]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
        logit_bias=rng.choice(
            [(), tuple(sorted((token, rng.uniform(-3, 3)) for token in some_ids))]
        ),
        stop_token_ids=frozenset(some_ids[:3]),
        min_tokens=rng.choice([0, 4]),
        logprobs=rng.choice([-1, 0, 3, 20]),
    )


# Greedy


def test_greedy_takes_the_best_and_the_lowest_of_equals() -> None:
    logits = torch.tensor([[1.0, 5, 5, 2], [-1, -2, -1, -1], [0.0, -0.0, -3, 0]])
    assert sample(logits, [make(temperature=0)] * 3) == [1, 0, 0]


def test_greedy_batch_has_nothing_to_draw() -> None:
    sampler = make_sampler(50)
    sampler.admit(0, make(temperature=0, top_k=5, top_p=0.5), [0], 1)
    batch = sampler.state.batch([0, 0], [1, 2])
    assert batch.draws == ()
    assert (batch.penalties, batch.bias, batch.masked_N, batch.logprobs) == (None, None, None, None)


# The distribution drawn from


def assert_drawn_from(counts: Floats, probabilities: Floats) -> None:
    """Chi-square at 1e-4 over the tokens expected 5 times or more, with the others as one more
    class.
    """
    assert counts[probabilities == 0].sum() == 0
    common = probabilities * counts.sum() >= 5
    classes, expected = counts[common], probabilities[common]
    if (rest := probabilities[~common].sum()) * counts.sum() >= 5:
        classes, expected = np.append(classes, counts[~common].sum()), np.append(expected, rest)
    statistic = reference.chi_square(classes, expected)
    assert statistic < reference.chi_square_limit(len(classes) - 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.03},
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(options: dict[str, Any]) -> None:
    logits = normal(60) * 1.5
    sampling = make(**options)
    counts = draw(logits, sampling, 40_000, rows=500)
    probabilities, margin = reference.distribution(logits.double().numpy(), sampling)
    assert margin > CLEAR
    assert_drawn_from(counts, probabilities)


@pytest.mark.parametrize(
    "others", [{}, {"top_k": 5}, {"top_k": 400}, {"temperature": 2.0}], ids=str
)
def test_a_top_p_of_zero_keeps_only_the_most_probable_token(others: dict[str, Any]) -> None:
    logits = normal(1000)
    sampling = SamplingParams(top_p=0, **others).resolve(seed=1)
    counts = draw(logits, sampling, 2_000, rows=500)
    assert counts[int(logits.argmax())] == 2_000


def test_seeds_draw_independently_at_one_position() -> None:
    logits = normal(40)
    sampler = make_sampler(40, num_slots=20_000)
    for slot in range(20_000):
        sampler.admit(slot, make(seed=slot), [0], 1)
    tokens = sampler.sample(
        logits.expand(20_000, -1), sampler.state.batch(range(20_000), [1] * 20_000)
    ).token_ids_B
    assert_drawn_from(
        np.bincount(tokens, minlength=40).astype(float), logits.double().softmax(0).numpy()
    )


@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
@pytest.mark.parametrize(
    ("options", "least"), [({"top_p": 0.95}, 10_000), ({"top_k": 12_000}, 12_000), ({}, 151_000)]
)
def test_large_nucleus_is_drawn_from_exactly(options: dict[str, Any], least: int) -> None:
    """A vocabulary of 151,936 of which thousands are likely. Tokens are counted in 40 classes of
    equal probability.
    """
    logits = normal(151_936) * 0.5
    logits[20_000:] -= 14.0 if options else 1.0
    logits = logits[torch.randperm(151_936, generator=torch.Generator().manual_seed(2))]
    sampling = make(**options)
    counts = draw(logits, sampling, 1_200, rows=8)
    probabilities, _ = reference.distribution(logits.double().numpy(), sampling)
    assert (probabilities > 0).sum() >= least
    # Float32 rounding may decide about one token at the limit: its probability is 2**-15.
    assert len(kept_tokens(logits, sampling) ^ set(probabilities.nonzero()[0].tolist())) <= 1
    assert counts[probabilities == 0].sum() == 0
    classes = (probabilities.cumsum() * 40).astype(int).clip(0, 39)
    seen, expected = (
        np.bincount(classes, weights=w, minlength=40).astype(float) for w in (counts, probabilities)
    )
    assert reference.chi_square(seen, expected) < reference.chi_square_limit(39)


@pytest.mark.parametrize("spread", [0.5, 4.0])
@pytest.mark.parametrize("vocab_size", [30, 3000])
def test_kept_tokens_are_those_of_a_sort(vocab_size: int, spread: float) -> None:
    """Which tokens have any weight, row by row; rounded logits produce ties, which are kept at
    every limit.
    """
    rng = random.Random(5)
    rows = [
        dataclasses.replace(random_sampling(rng, vocab_size), temperature=rng.choice([0.5, 1, 2]))
        for _ in range(60)
    ]
    logits = normal(60, vocab_size) * spread
    logits[::2] = logits[::2].mul(4).round().div(4)
    num_clear = 0
    for row, sampling in enumerate(rows):
        want, margin = reference.distribution(logits[row].double().numpy(), sampling)
        if margin > CLEAR:
            num_clear += 1
            assert kept_tokens(logits[row], sampling) == set(want.nonzero()[0].tolist()), sampling
    assert num_clear > 50


def kept_tokens(logits_V: torch.Tensor, sampling: ResolvedSampling) -> set[int]:
    """All tokens to which the sampler gives any weight. Without filters there is no such set, and
    none is needed.
    """
    sampler = make_sampler(len(logits_V))
    sampler.admit(0, sampling, [0], 1)
    (rows,) = sampler.state.batch([0], [1]).draws
    if rows.filters is None:
        return set(range(len(logits_V)))
    best_1, _, block_max_1X = KERNELS.row_best(logits_V[None])
    gap_limit_1, _ = sampler._gap_limits(
        _gap_rows(logits_V[None], block_max_1X, best_1, rows), rows.filters
    )
    gaps_1V = kernels.token_gaps(logits_V[None], best_1, rows.temperature_R)
    return set((kernels.token_weights(gaps_1V, gap_limit_1)[0] > 0).nonzero()[:, 0].tolist())


def test_temperature_so_small_that_logits_overflow_is_greedy() -> None:
    logits = normal(5, 100) * 30
    for temperature in (1e-4, 1e-38, 1e-45, 1e-300):
        assert sample(logits, [make(temperature=temperature)] * 5) == logits.argmax(dim=1).tolist()


# Every stage, in order


@pytest.mark.parametrize("seed", range(12))
def test_rows_of_any_mix_sample_what_the_slow_reference_samples(seed: int) -> None:
    """Four steps of eight rows; penalties follow the tokens sampled before. Each row alone yields
    the same tokens.
    """
    rng = random.Random(seed)
    vocab_size = rng.choice([20, 200, 1500])
    rows = [random_sampling(rng, vocab_size) for _ in range(8)]
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 30))] for _ in rows]
    outputs = [[rng.randrange(vocab_size) for _ in range(rng.choice([0, 0, 3]))] for _ in rows]
    together, alone = make_sampler(vocab_size), make_sampler(vocab_size)
    for slot, sampling in enumerate(rows):
        for sampler in (together, alone):
            sampler.admit(slot, sampling, prompts[slot] + outputs[slot], len(prompts[slot]))
    num_clear = 0
    for step in range(4):
        logits = normal(8, vocab_size, seed=100 * seed + step) * 2
        positions = [len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)]
        order = rng.sample(range(8), 8)
        batch = together.state.batch(order, [positions[slot] for slot in order])
        tokens = dict(
            zip(order, together.sample(logits[order], batch).token_ids_B.tolist(), strict=True)
        )
        for slot, sampling in enumerate(rows):
            single = alone.sample(
                logits[slot : slot + 1], alone.state.batch([slot], [positions[slot]])
            ).token_ids_B
            assert tokens[slot] == int(single)
            adjusted = reference.adjust(
                logits[slot].double().numpy(), sampling, prompts[slot], outputs[slot]
            )
            want, margin = reference.sample(adjusted, sampling, positions[slot])
            if margin > CLEAR:
                num_clear += 1
                assert tokens[slot] == want, (step, sampling)
            outputs[slot].append(tokens[slot])
        together.state.check()
    assert num_clear >= 29


def test_repetition_covers_the_prompt_and_the_other_penalties_only_the_output() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, 1.5]])
    for option, want in (
        ("repetition_penalty", 3),
        ("presence_penalty", 0),
        ("frequency_penalty", 0),
    ):
        sampler = make_sampler(4)
        sampler.admit(0, make(temperature=0, **{option: 1.5}), [0, 1, 1], 2)
        assert sampler.sample(logits, sampler.state.batch([0], [3])).token_ids_B.tolist() == [
            want
        ], option


def test_sampled_tokens_count_for_the_next_step_without_the_host() -> None:
    sampler = make_sampler(4)
    sampler.admit(0, make(temperature=0, frequency_penalty=2.0), [0], 1)
    logits = torch.tensor([[0.0, 5.0, 4.0, 0.5]])
    batches = [sampler.state.batch([0], [position]) for position in range(1, 6)]
    assert [int(sampler.sample(logits, batch).token_ids_B) for batch in batches] == [1, 2, 1, 2, 1]


def test_min_tokens_masks_stop_ids_until_enough_were_generated() -> None:
    sampler = make_sampler(4)
    sampler.admit(
        0, make(temperature=0, min_tokens=2, stop_token_ids=frozenset({3})), [0, 1, 2, 0], 3
    )
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0]])
    tokens = [
        int(sampler.sample(logits, sampler.state.batch([0], [position])).token_ids_B)
        for position in (4, 5, 6)
    ]
    assert tokens == [2, 3, 3]  # one token was already there on admission, so one more is needed


def test_mask_of_min_tokens_wins_over_bias() -> None:
    row = make(
        temperature=0,
        min_tokens=1,
        stop_token_ids=frozenset({1}),
        logit_bias=((1, 100.0), (2, 1.0)),
    )
    assert sample(torch.zeros(1, 4), [row]) == [2]


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize(
    "penalties", [{}, {"presence_penalty": 1.5}, {"repetition_penalty": 2.0}], ids=str
)
def test_slot_given_to_a_new_row_forgets_the_old_one(
    penalties: dict[str, Any], released: bool
) -> None:
    sampler = make_sampler(4)
    old = make(
        temperature=0,
        presence_penalty=1.0,
        logit_bias=((3, 50.0),),
        min_tokens=9,
        stop_token_ids=frozenset({0}),
    )
    sampler.admit(0, old, [0, 1, 1], 1)
    logits = torch.tensor([[2.0, 1.9, 1.0, 0.0]])
    assert sampler.sample(logits, sampler.state.batch([0], [3])).token_ids_B.tolist() == [3]
    if released:
        sampler.state.release(0)
        sampler.state.check()
    sampler.admit(0, make(temperature=0, **penalties), [2], 1)
    assert sampler.sample(logits, sampler.state.batch([0], [1])).token_ids_B.tolist() == [0]
    sampler.admit(0, make(temperature=0, **penalties), [2], 1)
    swapped = logits[:, [1, 0, 2, 3]]
    assert sampler.sample(swapped, sampler.state.batch([0], [1])).token_ids_B.tolist() == [1]


def test_token_counts_take_memory_only_when_a_row_has_penalties() -> None:
    sampler = make_sampler(1000)
    sampler.admit(0, make(temperature=0.5, top_k=3), [0], 1)
    sampler.sample(normal(1, 1000), sampler.state.batch([0], [1]))
    assert sampler._counts._tables is None


def test_counts_made_in_inference_mode_can_be_used_outside() -> None:
    sampler = make_sampler(10)
    with torch.inference_mode():
        sampler.admit(0, make(presence_penalty=1.0), [0], 1)
    sampler.sample(normal(1, 10), sampler.state.batch([0], [1]))


def test_logits_stay_unchanged() -> None:
    rng = random.Random(9)
    logits = normal(8, 300)
    before = logits.clone()
    sample(
        logits,
        [dataclasses.replace(random_sampling(rng, 300), logit_bias=((0, 5.0),)) for _ in range(8)],
    )
    assert torch.equal(logits, before)


def test_bfloat16_logits_sample_as_their_float32_values() -> None:
    logits = normal(8, 300).bfloat16()
    rng = random.Random(3)
    rows = [random_sampling(rng, 300) for _ in range(8)]
    assert sample(logits, rows) == sample(logits.float(), rows)


def test_row_whose_logits_are_not_numbers_gets_some_token_and_disturbs_no_other() -> None:
    logits = normal(6, 300)
    rows = [
        make(temperature=t, top_k=k, logprobs=2)
        for t, k in ((0, 0), (0, 0), (1, 0), (1, 0), (1, 5), (1, 5))
    ]
    clean = sample(logits, rows)
    for bad in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        broken = logits.clone()
        broken[::2] = bad
        tokens = sample(broken, rows)
        assert tokens[1::2] == clean[1::2]
        assert all(0 <= token < 300 for token in tokens)


# Padding and shards


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.5}], ids=str
)
def test_padding_is_never_sampled_however_large_its_logits(options: dict[str, Any]) -> None:
    logits = normal(50, 64)
    logits[:, 50:] = 100.0
    tokens = sample(logits, [make(seed=seed, **options) for seed in range(50)], vocab_size=50)
    assert max(tokens) < 50
    assert tokens == sample(logits[:, :50], [make(seed=seed, **options) for seed in range(50)])


def test_ids_beyond_the_vocabulary_bias_and_mask_nothing() -> None:
    logits = normal(2, 64)
    row = make(
        temperature=0,
        logit_bias=((55, 100.0), (9999, 100.0)),
        min_tokens=5,
        stop_token_ids=frozenset({60, 7777}),
    )
    assert sample(logits, [row] * 2, vocab_size=50) == logits[:, :50].argmax(dim=1).tolist()


def random_mask(rng: random.Random, vocab_size: int, rows: range) -> StepMask:
    """Masks for some of the rows; each allows a few tokens, or one."""
    masked = [row for row in rows if rng.random() < 0.4]
    masks = []
    for _ in masked:
        bits = np.zeros(8 * mask_bytes(vocab_size), np.uint8)
        bits[rng.sample(range(vocab_size), rng.choice((1, 2, vocab_size // 2)))] = 1
        masks.append(np.packbits(bits, bitorder="little").tobytes())
    return StepMask(step_id=0, epoch=0, rows=int32_array(masked), masks=tuple(masks))


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("vocab_size", [5, 64, 1003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_are_cut_at_the_edges_of_shards(
    vocab_size: int, size: int, dtype: torch.dtype
) -> None:
    step_mask = random_mask(random.Random(size), vocab_size, range(40))
    whole = [np.unpackbits(np.frombuffer(m, np.uint8), bitorder="little") for m in step_mask.masks]
    shard, allowed = -(-vocab_size // size), []
    for rank in range(size):
        group = cast(Group, SimpleNamespace(rank=rank, size=size))
        sampler = make_sampler(vocab_size, 1, group, shard)
        width = max(0, min(shard, vocab_size - rank * shard))
        logits = torch.zeros(40, width, dtype=dtype)
        masks = sampler.row_masks(step_mask)
        assert (masks is None) == (width == 0)
        if masks is not None:
            KERNELS.mask_columns(logits, masks.rows_R, masks.words_RW, masks.first_bit)
        assert bool(((logits == 0) | (logits == -torch.inf)).all())
        allowed.append(logits == 0)
    together = torch.cat(allowed, dim=1)
    for row in range(40):
        want = torch.ones(vocab_size, dtype=torch.bool)
        if row in step_mask.rows:
            want = torch.from_numpy(whole[list(step_mask.rows).index(row)][:vocab_size]).bool()
        assert torch.equal(together[row], want)


def test_masked_rows_get_the_same_tokens_from_bfloat16_as_from_the_same_numbers_in_float32() -> (
    None
):
    logits = (normal(16, 3001) * 3).to(torch.bfloat16)
    before, tokens = logits.clone(), []
    step_mask = random_mask(random.Random(4), 3001, range(16))
    for each in (logits, logits.float()):
        sampler = make_sampler(3001, 16)
        for slot in range(16):
            ended = {"min_tokens": 5, "stop_token_ids": frozenset(range(2000))} if slot % 3 else {}
            sampler.admit(slot, make(seed=slot, temperature=slot / 8, top_k=slot, **ended), [0], 1)
        batch = sampler.state.batch(range(16), [1] * 16)
        assert batch.penalties is None and batch.bias is None
        out = sampler.sample(each, batch, sampler.row_masks(step_mask))
        tokens.append(out.token_ids_B.tolist())
    assert tokens[0] == tokens[1] and torch.equal(logits, before)


def run_case(
    seed: int, group: Group
) -> list[tuple[list[int], tuple[TokenLogprobs | None, ...] | None]]:
    """Two steps of sixteen random rows on this rank's shard. Case 0 leaves ranks without a
    token.
    """
    rng = random.Random(1000 + seed)
    vocab_size = (9, 50, 3001)[seed % 3]
    shard = (vocab_size + 15) // 16 * 16 // group.size
    rows = [random_sampling(rng, vocab_size) for _ in range(16)]
    sampler = make_sampler(vocab_size, 16, group, shard)
    lengths = [rng.randint(1, 20) for _ in rows]
    for slot, sampling in enumerate(rows):
        sampler.admit(slot, sampling, [rng.randrange(vocab_size) for _ in range(lengths[slot])], 1)
    answers = []
    for step in range(2):
        logits = normal(16, shard * group.size, seed=seed * 10 + step) * rng.choice([0.3, 2, 8])
        if rng.random() < 0.5:
            logits = logits.round()  # ties, even between shards
        mine = logits[:, group.rank * shard : (group.rank + 1) * shard]
        step_mask = random_mask(rng, vocab_size, range(16))
        batch = sampler.state.batch(range(16), [length + step for length in lengths])
        out = sampler.sample(mine, batch, sampler.row_masks(step_mask))
        tokens = out.token_ids_B.tolist()
        for row, of_row in zip(step_mask.rows, step_mask.masks, strict=True):
            # A row whose only token is a stop id may have none left.
            if rows[row].min_tokens == 0:
                assert of_row[tokens[row] // 8] >> tokens[row] % 8 & 1, "a token that is masked"
        answers.append((out.token_ids_B.tolist(), to_logprobs(out.logprobs, 16)))
    return answers


NUM_CASES = 18


def run_cases(backend: str, group: TensorParallelGroup) -> list[Any]:
    global KERNELS
    select_backend("cpu", backend).set_num_threads(1)
    KERNELS = select_backend("cpu", backend).sampling
    return [run_case(seed, group) for seed in range(NUM_CASES)]


def run_rank(rank: int, addresses: dict[int, tuple[str, int]], answers: Any) -> None:
    """Every case with every backend in a group of each size this process has a rank in."""
    for size, address in addresses.items():
        if rank < size:
            group = TensorParallelGroup(rank, size, torch.device("cpu"))
            group.join(address, 60.0)
            answers.put((rank, size, {name: run_cases(name, group) for name in BACKENDS}))
            group.close()


@pytest.mark.parametrize("backend", ["every"])  # in place of the fixture
def test_one_two_and_four_shards_give_the_same_tokens_and_logprobs_bit_by_bit(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes over gloo; all backends in the same processes, which take long to start."""
    monkeypatch.setattr(sys.modules[__name__], "KERNELS", KERNELS)  # puts it back afterwards
    meetings = {size: open_rendezvous("127.0.0.1", 60.0) for size in (2, 4)}
    addresses = {size: meeting.address for size, meeting in meetings.items()}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    answers = context.Queue()
    ranks = [
        context.Process(target=run_rank, args=(rank, addresses, answers), daemon=True)
        for rank in range(4)
    ]
    for process in ranks:
        process.start()
    want = {name: run_cases(name, ALONE) for name in BACKENDS}
    got = [answers.get(timeout=60) for _ in range(6)]
    for process in ranks:
        process.join(20)
    assert sorted((rank, size) for rank, size, _ in got) == [
        (0, 2),
        (0, 4),
        (1, 2),
        (1, 4),
        (2, 4),
        (3, 4),
    ]
    for rank, size, answers_of in got:
        for name, cases in want.items():
            for seed, case in enumerate(cases):
                assert answers_of[name][seed] == case, f"{name}, case {seed}, rank {rank} of {size}"


# Logprobs


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = normal(4, 5000) * 3
    rows = [
        make(logprobs=20, temperature=0.3, top_k=5, logit_bias=((7, 50.0),)),
        make(),
        make(logprobs=0, min_tokens=1, stop_token_ids=frozenset({int(logits[2].argmax())})),
        make(logprobs=3, temperature=0),
    ]
    sampler = make_sampler(5000)
    for slot, sampling in enumerate(rows):
        sampler.admit(slot, sampling, [0], 1)
    out = sampler.sample(logits, sampler.state.batch(range(4), [1] * 4))
    reported = to_logprobs(out.logprobs, 4)
    assert reported is not None
    assert reported[1] is None
    exact = logits.double().log_softmax(dim=1)
    for row, num_top_logprobs in ((0, 20), (2, 0), (3, 3)):
        entry = reported[row]
        assert entry is not None
        token = int(out.token_ids_B[row])
        assert math.isclose(entry.logprob, float(exact[row, token]), abs_tol=2e-6)
        best = exact[row].topk(num_top_logprobs)
        assert list(entry.top_token_ids) == best.indices.tolist()
        np.testing.assert_allclose(entry.top_logprobs, best.values, atol=2e-6)
    assert int(out.token_ids_B[0]) == 7


def test_no_logprobs_are_computed_when_no_row_asks() -> None:
    sampler = make_sampler(10)
    sampler.admit(0, make(), [0], 1)
    out = sampler.sample(normal(1, 10), sampler.state.batch([0], [1]))
    assert to_logprobs(out.logprobs, 1) is None


def test_alternatives_are_at_most_the_vocabulary_and_equals_come_lowest_id_first() -> None:
    sampler = make_sampler(5)
    sampler.admit(0, make(logprobs=20, temperature=0), [0], 1)
    out = sampler.sample(torch.tensor([[1.0, 2.0, 2.0, 1.0, 1.0]]), sampler.state.batch([0], [1]))
    reported = to_logprobs(out.logprobs, 1)
    assert reported is not None and reported[0] is not None
    assert reported[0].top_token_ids == (1, 2, 0, 3, 4)
    assert reported[0].logprob == reported[0].top_logprobs[0]
    assert math.isclose(sum(map(math.exp, reported[0].top_logprobs)), 1, abs_tol=1e-6)
