"""A section of the GPU check: the same tokens from every backend, and launches that never wait.

In float32 a token may differ from that of the reference only at a near tie, where rounding decides:
a batch that is padded to the size of a graph, or another order of summation, rounds its products
differently. Whether a token is at a near tie is asked of the reference, see `near_ties`.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu_check_common import Check, Row, rounded
from benchmarks.gpu_check_engine import (
    COMPARED,
    NO_GRAPHS,
    TINY,
    open_engine,
    prompts_of,
    request_of,
    run_all,
    wide,
)
from kernels.reference.sampling import MAX_LISTED_TOP_K
from scheduler.engine import Engine
from scheduler.messages import Request, int32_array
from workers.sampling.sampler import RowMasks, SampledTokens, Sampler
from workers.sampling.state import SamplingBatch

# Between two correct backends, 0.33 to 0.38 of the tokens came before the first difference
# (bfloat16, on a CPU). With attention that returns zeros it was 0.002, and 0.02 with attention that
# scales by 0.8 of what it should.
_EQUAL_IN_16_BITS = 0.15
# Logits this close are a near tie: their difference may come from rounding alone.
_NEAR = 1e-4
# Of the requests, at most this many may differ, and only at near ties.
_MOST_NEAR_TIES = 2
# How often the reference samples a token anew, with other noise. If only half of the noise moves
# the token, all of these miss it once in 4 billion.
_COPIES = 32


def tokens(check: Check) -> None:
    """Outputs of every backend, through graphs and without, against the reference backend's; and
    launches while torch watches for waits. The requests use every parameter of sampling.

    In float32 outputs must be equal, but for a few near ties. In 16 bits there are many near ties:
    what counts is the fraction of tokens before the first difference.
    """
    for dtype in ("float32", "bfloat16") if check.on_gpu else ("float32",):
        outputs: dict[str, list[list[int]]] = {}
        for backend in ("reference", *check.backends):
            if backend not in ("reference", "triton") and dtype == "float32":
                continue  # flash-attn has no float32
            for eager in (True, False):
                name = f"{dtype} {backend} {'eager' if eager else 'graph'}"
                if eager or (
                    check.on_gpu and backend != "reference"
                ):  # its attention waits for the GPU
                    check.add(name, partial(_compare, check, outputs, name, dtype, backend, eager))
                else:
                    check.add(name, lambda: NO_GRAPHS)
    for backend in check.backends:
        for eager in (True, False):
            name = f"launch never waits, {backend} {'eager' if eager else 'graph'}"
            if check.on_gpu:
                check.add(name, partial(_never_waits, check, backend, eager))
            else:
                check.add(name, lambda: {"note": "a CPU has nothing to wait for"})


def _tokens_engine(check: Check, dtype: str, backend: str, eager: bool) -> Any:
    # A block size that every backend takes; prompts in chunks; batches below, at and above sizes of
    # graphs.
    max_num_seqs, max_num_batched_tokens, max_model_len = (
        (4, 64, 64) if check.small else (20, 512, 1024)
    )
    return open_engine(
        check,
        TINY if check.small else COMPARED,
        backend,
        wide,
        dtype=dtype,
        enforce_eager=eager,
        block_size=256,
        num_kv_blocks=60,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )


def add_ragged(check: Check, engine: Engine) -> int:
    """Submit the requests; returns how many."""
    requests = _ragged(check)
    for request in requests:
        engine.add(request)
    return len(requests)


def _ragged(check: Check) -> list[Request]:
    """Prompts and outputs of different lengths, sampled in every way in turn; ids count from 0."""
    raw, count, longest, steps = (TINY, 10, 9, 6) if check.small else (COMPARED, 20, 700, 48)
    rng, ways = random.Random(3), _ways_of_sampling(raw["vocab_size"])
    prompts = prompts_of(raw, [rng.randint(1, longest) for _ in range(count)], seed=4)
    return [
        request_of(number, prompt, rng.randint(4, steps), **ways[number % len(ways)])
        for number, prompt in enumerate(prompts)
    ]


def _ways_of_sampling(vocab_size: int) -> list[dict[str, Any]]:
    """Temperatures at which filters cut off tokens that would be drawn often."""
    greedy, drawn = {"temperature": 0.0}, {"temperature": 2.0}
    return [
        greedy,
        {"temperature": 0.8},
        drawn | {"top_k": 20, "top_p": 0.9},
        drawn | {"top_p": 0.7},
        drawn | {"min_p": 0.05},
        drawn | {"top_k": MAX_LISTED_TOP_K + 1},  # more than a list of nearest tokens holds
        greedy | {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        greedy | {"logit_bias": ((3, 5.0), (vocab_size - 1, -100.0))},
        greedy | {"min_tokens": 4, "stop_token_ids": frozenset(range(0, vocab_size, 2))},
        greedy | {"logprobs": 5},
    ]


def _compare(
    check: Check,
    outputs: dict[str, list[list[int]]],
    key: str,
    dtype: str,
    backend: str,
    eager: bool,
) -> Row:
    with _tokens_engine(check, dtype, backend, eager) as (engine, _, _):
        count = add_ragged(check, engine)
        ended = run_all(engine)
    outputs[key] = [list(ended[str(number)]) for number in range(count)]
    return verdict_on(check, outputs[key], next(iter(outputs.values())), dtype)


def verdict_on(check: Check, got: list[list[int]], want: list[list[int]], dtype: str) -> Row:
    """How the outputs of a backend differ from those of the reference, and whether they may."""
    pairs = list(zip(got, want, strict=True))
    differ = {number: pair for number, pair in enumerate(pairs) if pair[0] != pair[1]}
    equal = sum(_begun_alike(*pair) for pair in pairs) / sum(map(len, want))
    row: Row = {
        "requests": len(want),
        "differ": len(differ),
        "first": sorted(_begun_alike(*pair) for pair in differ.values())[:5],
        "equal": rounded(equal),
    }
    if dtype == "float32":
        few = len(differ) <= _MOST_NEAR_TIES
        row["near_ties"] = len(near_ties(check, differ)) if differ and few else 0
        alike = row["near_ties"] == len(differ)
    else:
        alike = equal >= _EQUAL_IN_16_BITS
    # Outputs that do not vary would be the same with any model.
    varied = len({token for output in want for token in output}) > len(want)
    return row | {"passed": varied and alike}


def near_ties(check: Check, differ: dict[int, tuple[list[int], list[int]]]) -> list[int]:
    """Which of the requests, given with their output and the reference's, first differ where the
    reference samples both tokens, each some of the time, if noise moves each logit by up to half of
    `_NEAR`. Two logits less than `_NEAR` apart may then change places, and so may a draw and its
    boundary, of whatever way of sampling.
    """
    requests, copies = _ragged(check), range(_COPIES)
    with _tokens_engine(check, "float32", "reference", True) as (engine, _, _), noisy_logits():
        for number, (output, wanted) in differ.items():
            place, request = _begun_alike(output, wanted), requests[number]
            one_more = dataclasses.replace(request.sampling, max_tokens=place + 1)
            for copy in copies:
                engine.add(
                    dataclasses.replace(
                        request,
                        request_id=f"{number}, {copy}",
                        token_ids=request.token_ids + int32_array(wanted[:place]),
                        sampling=one_more,
                    )
                )
        ended = run_all(engine)
    return [
        number
        for number, (output, wanted) in differ.items()
        if (place := _begun_alike(output, wanted)) < min(len(output), len(wanted))
        and {output[place], wanted[place]} <= {ended[f"{number}, {copy}"][place] for copy in copies}
    ]


@contextmanager
def noisy_logits() -> Iterator[None]:
    """Every row of every sampler gets noise of its own, uniform, in all `_NEAR` wide."""
    exact = Sampler.sample

    def noisy(
        self: Sampler, logits_BV: torch.Tensor, batch: SamplingBatch, masks: RowMasks | None = None
    ) -> SampledTokens:
        noise_BV = torch.rand_like(logits_BV, dtype=torch.float32) - 0.5
        return exact(self, logits_BV + _NEAR * noise_BV, batch, masks)

    with mock.patch.object(Sampler, "sample", noisy):
        yield


def _begun_alike(output: list[int], wanted: list[int]) -> int:
    """How many tokens come before the first that differs."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(output, wanted, strict=False))
    return sum(1 for _ in alike)


def _never_waits(check: Check, backend: str, eager: bool) -> Row:
    """Everything is compiled first. A step that waits raises an error."""
    with _tokens_engine(check, "bfloat16", backend, eager) as (engine, executor, _):
        add_ragged(check, engine)
        run_all(engine)
        executor.launch_s.clear()
        executor.forbid_waits = True
        add_ragged(check, engine)
        run_all(engine)
        return {"launches": len(executor.launch_s), "passed": True}
