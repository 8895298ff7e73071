"""The engine in this process on one device: how it is opened, and a whole workload.

Weights are random and made on the device. No Ray: an in-process executor below scheduler and
engine.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.common import QWEN3_0_6B
from benchmarks.gpu_check_common import Check, Row, free_memory, rounded
from benchmarks.in_process import InProcessExecutor
from configs.engine import EngineConfig, ResolvedConfig
from configs.model import ModelConfig
from configs.shapes import SHAPES
from kernels.reference.fp8 import MAX_FP8, to_fp8
from kernels.reference.grouped import MIDDLE_INT4_CODE
from scheduler.engine import Engine
from scheduler.limits import SchedulerLimits
from scheduler.messages import Request, StepMask, StepPlan, StepResult, int32_array
from scheduler.params import ResolvedSampling
from scheduler.scheduler import Scheduler
from workers.configuration import resolve_config
from workers.models.layers import Part
from workers.models.weights import WeightSlice
from workers.roofline import floor_s, make_workload

QWEN3_8B = SHAPES["qwen3-8b"]
# Small enough to be quick, with a head dim that every backend takes.
COMPARED = QWEN3_0_6B | {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY = QWEN3_0_6B | {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
_PUBLISHED = {"nano-vLLM, RTX 4070 Laptop": 1434.13, "vLLM, RTX 4070 Laptop": 1361.84}
NO_GRAPHS = {"note": "graphs are not available"}

Fill = Callable[[WeightSlice], object]
Parts = tuple[Engine, "RecordingExecutor", ResolvedConfig]


# Engines


class RecordingExecutor:
    """An in-process executor that notes how long the host took to launch each step.

    With `forbid_waits`, torch refuses any operation that makes `launch` wait for the GPU.
    """

    def __init__(self, inner: InProcessExecutor) -> None:
        self.inner = inner
        self.launch_s: list[float] = []
        self.forbid_waits = False

    def launch(self, plan: StepPlan) -> None:
        if self.forbid_waits:
            torch.cuda.set_sync_debug_mode("error")
        began = time.perf_counter()
        try:
            self.inner.launch(plan)
        finally:
            self.launch_s.append(time.perf_counter() - began)
            if self.forbid_waits:
                torch.cuda.set_sync_debug_mode("default")

    def send_mask(self, step_mask: StepMask) -> None:
        self.inner.send_mask(step_mask)

    def wait(self, step_id: int, limit_s: float) -> None:
        self.inner.wait(step_id, limit_s)

    def result(self, step_id: int) -> StepResult:
        return self.inner.result(step_id)


@contextmanager
def open_engine(
    check: Check,
    raw: dict[str, Any],
    backend: str,
    fill: Fill,
    make_executor: Callable[[ResolvedConfig], InProcessExecutor] = InProcessExecutor,
    **options: Any,
) -> Iterator[Parts]:
    """An engine over a model of this shape, which runs as many steps ahead as the product does on
    this device. `options` are those of `EngineConfig`.
    """
    free_memory(check)  # memory of an engine whose error was still referenced when it closed
    torch.manual_seed(0)
    asked = EngineConfig(
        model="random weights", device=check.device.type, attention_backend=backend, **options
    )
    config = resolve_config(asked, ModelConfig.from_dict(raw), Path(asked.model), check.device.type)

    def fill_all(
        parts: Iterable[Part],
        model_dir: Path,
        model: ModelConfig,
        finish: Callable[[Part], None],
        *_: object,
    ) -> None:
        for part in parts:
            for piece in part.slices():
                fill(piece)
            finish(part)

    with (
        mock.patch("workers.loading.local_checkpoint", lambda *_: Path(asked.model)),
        mock.patch("workers.loading.load_weights", fill_all),
        mock.patch("workers.loading.held_dtype", lambda model_dir, model, dtype, *_: dtype),
    ):
        executor = RecordingExecutor(make_executor(config))
    limits = SchedulerLimits(
        num_blocks=executor.inner.num_kv_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        vocab_size=config.model.vocab_size,
        enable_prefix_caching=asked.enable_prefix_caching,
    )
    try:
        engine = Engine(Scheduler(limits), executor, num_steps_ahead=config.num_steps_ahead)
        yield engine, executor, config
    finally:
        executor.inner.close()
        free_memory(check)


def add_rows(
    check: Check,
    open_one: Callable[[], AbstractContextManager[Parts]],
    rows: Sequence[tuple[str, Callable[[Parts], Row]]],
) -> list[float]:
    """Add the rows, all measured with one engine; after a row that raises, which leaves requests in
    its engine, the next ones with another. Returns the seconds that each engine took to start.
    """
    left, start_s = deque(rows), []
    while left:
        began = time.perf_counter()
        with open_one() as parts:
            start_s.append(time.perf_counter() - began)
            while left:
                name, measure = left.popleft()
                if not check.add(name, partial(measure, parts)):
                    break
    return start_s


def blocks_for(check: Check, backend: str, lengths: Iterable[int]) -> int:
    """Blocks for rows of these many tokens at the same time. Given a number, an engine neither
    measures what memory allows nor captures graphs a second time after that.
    """
    block_size = check.backends[backend].capabilities.default_block_size
    return sum(-(-length // block_size) for length in lengths)


def near_zero(piece: WeightSlice) -> None:
    """Weights for measuring time: logits are nearly flat, so that sampling skips nothing."""
    if piece.scale is None:
        piece.target.uniform_(-0.05, 0.05)
    elif piece.zeros is None:  # FP8, of which not every code is a number
        values = torch.empty(piece.target.shape, device=piece.target.device)
        piece.target.copy_(to_fp8(values.uniform_(-MAX_FP8, MAX_FP8)))
        piece.scale.fill_(0.05 / MAX_FP8)
    else:
        piece.target.random_()
        piece.zeros.fill_(MIDDLE_INT4_CODE)
        piece.scale.fill_(0.05 / MIDDLE_INT4_CODE)


def wide(piece: WeightSlice) -> None:
    """Weights for comparing tokens: greedy outputs vary, and every parameter affects them."""
    noise = torch.randn_like(piece.target)
    if piece.target.dim() == 1:
        piece.target.copy_(1 + 0.3 * noise)
    else:
        rows_or_heads = "embed_tokens" in piece.name or "lm_head" in piece.name
        piece.target.copy_(noise * (0.5 if rows_or_heads else 2.0 * piece.shape[1] ** -0.5))


def add(engine: Engine, number: int, tokens: list[int], max_tokens: int, **parameters: Any) -> None:
    """Queue the request of `request_of`."""
    engine.add(request_of(number, tokens, max_tokens, **parameters))


def request_of(number: int, tokens: list[int], max_tokens: int, **parameters: Any) -> Request:
    """A request whose id and seed are its number. It ends by length alone unless `parameters` have
    stop ids.
    """
    return Request(
        request_id=str(number),
        token_ids=int32_array(tokens),
        num_prompt_tokens=len(tokens),
        sampling=ResolvedSampling(seed=number, max_tokens=max_tokens, **parameters),
    )


def run_all(engine: Engine) -> dict[str, array[int]]:
    """Step until nothing is left; the output of each request by its id."""
    outputs: dict[str, array[int]] = {}
    while engine.has_work:
        output = engine.step()
        for seq in output.finished_sequences if output is not None else ():
            outputs[seq.request_id] = seq.token_ids[seq.num_prompt_tokens :]
    return outputs


def prompts_of(raw: dict[str, Any], lengths: Iterable[int], seed: int) -> list[list[int]]:
    rng, last = random.Random(seed), min(10000, raw["vocab_size"] - 1)
    return [[rng.randint(0, last) for _ in range(length)] for length in lengths]


# A workload


def throughput(check: Check) -> None:
    """Output tokens per second: inputs and outputs uniform in 100 to 1024 tokens, all submitted at
    the start. The same draw as nano-vLLM's benchmark, 133,966 output tokens; the published figures
    are those of its README.
    """
    for name, tokens_per_s in _PUBLISHED.items():
        check.add(f"published: {name}", partial(dict, tokens_per_s=tokens_per_s))
    for backend in check.backends:
        check.add(
            f"{'tiny' if check.small else '0.6B'} {backend}", partial(_throughput, check, backend)
        )


def _throughput(check: Check, backend: str) -> Row:
    raw, num_seqs, low, high = (TINY, 2, 3, 6) if check.small else (QWEN3_0_6B, 256, 100, 1024)
    rng = random.Random(0)
    last = min(10000, raw["vocab_size"] - 1)
    prompts = [
        [rng.randint(0, last) for _ in range(rng.randint(low, high))] for _ in range(num_seqs)
    ]
    lengths = [rng.randint(low, high) for _ in range(num_seqs)]
    return outputs_per_s(check, raw, backend, prompts, lengths)


def outputs_per_s(
    check: Check,
    raw: dict[str, Any],
    backend: str,
    prompts: list[list[int]],
    lengths: list[int],
    **options: Any,
) -> Row:
    """Output tokens per second of requests with these prompts and numbers of output tokens, all
    submitted at the start. `options` are those of the engine.
    """
    num_seqs, longest = len(prompts), max(map(len, prompts))
    # All requests at once, so nothing is preempted: for `throughput`, 276,793 tokens, 17,422 blocks
    # of 16.
    totals = [len(tokens) + length for tokens, length in zip(prompts, lengths, strict=True)]
    with open_engine(
        check,
        raw,
        backend,
        near_zero,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=64 if check.small else 16384,
        max_model_len=24 if check.small else 4096,
        num_kv_blocks=blocks_for(check, backend, totals),
        **options,
    ) as (engine, executor, config):
        for lengths_before in (
            [longest] * min(64, num_seqs),
            [3],
        ):  # compiles whatever is compiled at its first use
            for number, tokens in enumerate(prompts_of(raw, lengths_before, seed=1)):
                add(engine, -1 - number, tokens, 8, temperature=0.6)
            run_all(engine)
        gc.collect()
        num_steps = engine.scheduler.stats.num_steps
        executor.launch_s.clear()
        began = time.perf_counter()
        for number, (tokens, length) in enumerate(zip(prompts, lengths, strict=True)):
            add(engine, number, tokens, length, temperature=0.6)
        outputs = run_all(engine)
        total_s = time.perf_counter() - began
        stats = engine.scheduler.stats
        work = make_workload(prompts, lengths)
        floor = floor_s(config.model, 2, work, check.ceilings, config.quantization)
        return {
            "tokens_per_s": rounded(sum(lengths) / total_s, 5),
            "total_s": rounded(total_s),
            "floor_s": rounded(floor),
            "share": rounded(floor / total_s, 3),
            "steps": stats.num_steps - num_steps,
            "launch_ms": rounded(1000 * statistics.median(executor.launch_s)),
            "preempted": stats.num_preemptions,
            "passed": [len(outputs[str(number)]) for number in range(num_seqs)] == lengths,
        }
