"""A section of the GPU check: steps in which rows decode while a prompt comes in, as graphs and
launched kernel by kernel.

What counts is whether the host keeps up: `launch_ms` is its time per step, `busy` the share of the
time in which the GPU ran anything.
"""

from __future__ import annotations

import itertools
import statistics
import time
from functools import partial
from typing import Any

from benchmarks.common import QWEN3_0_6B
from benchmarks.gpu_check_common import Check, Row, rounded
from benchmarks.gpu_check_engine import (
    NO_GRAPHS,
    QWEN3_8B,
    TINY,
    Parts,
    add,
    add_rows,
    busy_and_total,
    end_batch,
    near_zero,
    open_engine,
    prompts_of,
    spans_on_device,
    start_batch,
)
from workers.roofline import layer_parameters

# Rows that decode, and tokens of the prompt beside them.
_STEPS = ((16, 48), (64, 192), (64, 960), (256, 256))
_SMALL_STEPS = ((2, 12),)
_CONTEXT = 512


def mixed_steps(check: Check) -> None:
    """The 0.6B shape with every backend, the 8B shape with the last one."""
    shapes = {"tiny": TINY} if check.small else {"0.6B": QWEN3_0_6B, "8B": QWEN3_8B}
    for name, raw in shapes.items():
        for backend in check.backends if name != "8B" else [*check.backends][-1:]:
            for eager in (False, True):
                label = f"{name} {backend} {'eager' if eager else 'graph'}"
                if eager or check.on_gpu:
                    check.add(label, partial(_start, check, label, raw, backend, eager))
                else:
                    check.add(label, lambda: NO_GRAPHS)


def _start(check: Check, label: str, raw: dict[str, Any], backend: str, eager: bool) -> Row:
    """Adds a row per kind of step; returns the row of the start."""
    kinds = _SMALL_STEPS if check.small else _STEPS
    context, num_steps = (8, 2) if check.small else (_CONTEXT, 40)
    most = max(batch + chunk for batch, chunk in kinds)
    open_one = partial(
        open_engine,
        check,
        raw,
        backend,
        near_zero,
        enforce_eager=eager,
        enable_prefix_caching=False,
        max_num_seqs=max(batch for batch, _ in kinds) + 8,
        max_num_batched_tokens=max(most, 64 if check.small else 16384),
        max_model_len=64 if check.small else 4096,
    )
    rows = [
        (
            f"{label}, {batch} + {chunk}",
            partial(_mixed_step, check, batch, chunk, context, num_steps),
        )
        for batch, chunk in kinds
    ]
    return {"start_s": rounded(add_rows(check, open_one, rows)[0], 3)}


def _mixed_step(
    check: Check, batch: int, chunk: int, context: int, num_steps: int, parts: Parts
) -> Row:
    """The median time of a step in which `batch` rows of about `context` tokens decode and a prompt
    of `chunk` tokens comes in.
    """
    engine, executor, config = parts
    model, warming = config.model, 2 + config.num_steps_ahead
    numbers = itertools.count(batch)
    [prompt] = prompts_of({"vocab_size": model.vocab_size}, [chunk], seed=chunk)

    def step() -> None:
        add(engine, next(numbers), prompt, 1, temperature=0.6)
        engine.step()

    start_batch(engine, model, batch, context, 2 * (num_steps + warming))
    for _ in range(warming):
        step()
    executor.launch_s.clear()
    moments = [time.perf_counter()]
    for _ in range(num_steps):
        step()
        moments.append(time.perf_counter())
    launch_ms = 1000 * statistics.median(executor.launch_s)
    busy: Row = {}
    if check.on_gpu:
        busy_us, total_us = busy_and_total(spans_on_device(check, [step] * 10))
        busy = {"busy": rounded(busy_us / total_us, 3)}
    end_batch(engine, batch)
    ms = 1000 * statistics.median(b - a for a, b in itertools.pairwise(moments))
    layers = layer_parameters(model)
    head = model.vocab_size * model.hidden_size
    kv_row = 2 * model.num_key_value_heads * model.head_dim * model.num_hidden_layers
    floor_ms = (
        check.floor_us(
            2 * (layers + head + batch * context * kv_row),
            2 * layers * (batch + chunk) + 2 * head * (batch + 1),
        )
        / 1000
    )
    return {
        "ms": rounded(ms),
        "launch_ms": rounded(launch_ms),
        **busy,
        "floor_ms": rounded(floor_ms),
        "share": rounded(floor_ms / ms, 3),
        "passed": not engine.has_work,
    }
