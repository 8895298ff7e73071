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

from benchmarks.gpu_check_common import Check, Row, rounded
from benchmarks.gpu_check_engine import (
    NO_GRAPHS,
    Parts,
    add,
    add_rows,
    blocks_for,
    near_zero,
    open_engine,
    prompts_of,
)
from benchmarks.gpu_check_steps import (
    busy_and_total,
    end_batch,
    shapes_of,
    spans_on_device,
    start_batch,
)
from workers.roofline import active_layer_parameters

# Rows that decode, and tokens of the prompt beside them: together as many as a graph has, and once
# more than half as many again.
_STEPS = ((16, 48), (64, 192), (64, 500), (64, 960), (256, 256))
_SMALL_STEPS = ((2, 12),)
_CONTEXT = 512


def mixed_steps(check: Check) -> None:
    """The 8B shape with the last backend, the 0.6B shape with every one; eager steps last."""
    for eager in (False, True):
        if not (eager or check.on_gpu):
            check.add("graphs", lambda: NO_GRAPHS)
            continue
        for name, raw in shapes_of(check).items():
            for backend in [*check.backends][-1:] if name == "8B" else reversed(check.backends):
                label = f"{name} {backend} {'eager' if eager else 'graph'}"
                check.add(label, partial(_start, check, label, raw, backend, eager))


def _start(check: Check, label: str, raw: dict[str, Any], backend: str, eager: bool) -> Row:
    """Adds a row per kind of step; returns the row of the start."""
    kinds = _SMALL_STEPS if check.small else _STEPS
    context, num_steps = (8, 2) if check.small else (_CONTEXT, 40)
    most, most_rows = max(map(sum, kinds)), max(batch for batch, _ in kinds)
    # A row that decodes grows meanwhile, and some prompts are in flight.
    lengths = [context + 128] * most_rows + [max(chunk for _, chunk in kinds)] * 8
    open_one = partial(
        open_engine,
        check,
        raw,
        backend,
        near_zero,
        enforce_eager=eager,
        enable_prefix_caching=False,
        max_num_seqs=most_rows + 8,
        max_num_batched_tokens=max(most, 64 if check.small else 16384),
        max_model_len=64 if check.small else 4096,
        num_kv_blocks=blocks_for(check, backend, lengths),
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
    layers = active_layer_parameters(model)
    head = model.vocab_size * model.hidden_size
    kv_elements_per_token = 2 * model.num_key_value_heads * model.head_dim * model.num_hidden_layers
    floor_ms = (
        check.floor_us(
            2 * (layers + head + batch * context * kv_elements_per_token),
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
