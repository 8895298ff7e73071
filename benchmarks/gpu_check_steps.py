"""Sections of the GPU check: steps that decode, and steps of whole prompts.

`decode`: a step of a batch whose rows are about 512 tokens long, through graphs and eager, beside
the floor: reading the weights and the rows' keys and values once; and what it consists of.
`prefill`: steps of 2,048 and of 8,192 tokens with every backend, which are always eager.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.common import QWEN3_0_6B
from benchmarks.gpu_check_common import Check, Row, rounded
from benchmarks.gpu_check_engine import (
    NO_GRAPHS,
    QWEN3_8B,
    TINY,
    Parts,
    add,
    add_rows,
    blocks_for,
    near_zero,
    open_engine,
    prompts_of,
    run_all,
)
from configs.model import ModelConfig
from configs.quantization import INT4, Quantization
from scheduler.engine import Engine
from workers.models.size import count_parameters
from workers.roofline import active_layer_parameters, floor_s, make_workload

Span = tuple[str, float, float]  # name, begin and end in microseconds of what a GPU ran
# Rows that decode, and about how many tokens each has.
BATCHES = (1, 16, 64, 256)
CONTEXT = 512
FP8 = "fp8_e4m3"
# With a cache of 8-bit numbers; with few rows the weights are nearly all that is read.
FP8_BATCHES = (64, 256)
# Tokens of a prefill step: prompts, and the length of each.
PREFILLS = ((1, 2048), (4, 2048))


def shapes_of(check: Check) -> dict[str, dict[str, Any]]:
    """The larger one first: it is the one that time must not run out for."""
    return {"tiny": TINY} if check.small else {"8B": QWEN3_8B, "0.6B": QWEN3_0_6B}


# Decode steps


def decode_steps(check: Check) -> None:
    """Run the section: graphs first, and then, for 0.6B, over a cache of 8-bit numbers; eager steps
    last.
    """
    shapes, batches = shapes_of(check), (2,) if check.small else BATCHES
    if check.on_gpu:
        for name, raw in shapes.items():
            label = f"{name} graph"
            check.add(label, partial(add_decode_steps, check, raw, label, batches))
        smaller, raw = [*shapes.items()][-1]
        label = f"{smaller} graph, {FP8} cache"
        of_fp8 = batches if check.small else FP8_BATCHES
        start = partial(add_decode_steps, check, raw, label, of_fp8, kv_cache_dtype=FP8)
        check.add(label, start)
    else:
        check.add("graphs", lambda: NO_GRAPHS)
    for name, raw in shapes.items():
        label = f"{name} eager"
        check.add(label, partial(add_decode_steps, check, raw, label, batches, enforce_eager=True))


def add_decode_steps(
    check: Check, raw: dict[str, Any], label: str, batches: Sequence[int], **options: Any
) -> Row:
    """Adds a row per batch; returns the row of the start. `options` are those of the engine."""
    context, steps = (8, 2) if check.small else (CONTEXT, 40)
    open_one = partial(
        open_engine,
        check,
        raw,
        "triton",
        near_zero,
        enable_prefix_caching=False,
        max_num_seqs=batches[-1],
        max_num_batched_tokens=16384,
        # The default, so that decode graphs are captured for rows of this length.
        max_model_len=64 if check.small else None,
        num_kv_blocks=blocks_for(check, "triton", [context + 128] * batches[-1]),
        **options,
    )
    rows: list[tuple[str, Callable[[Parts], Row]]] = []
    for batch in batches:
        measure = partial(decode_step, check, batch, context, steps)
        rows.append((f"{label}, batch {batch}", measure))
    if not options.get("enforce_eager"):
        for batch in batches:
            measure = partial(_parts_of_step, check, batch, context)
            rows.append((f"{label}, parts of a step, batch {batch}", measure))
    return {"start_s": rounded(add_rows(check, open_one, rows)[0], 3)}


def start_batch(engine: Engine, model: ModelConfig, batch: int, context: int, steps: int) -> None:
    """Rows that decode, and reach `context` tokens halfway through the steps."""
    prompts = prompts_of(
        {"vocab_size": model.vocab_size}, [context - steps // 2] * batch, seed=batch
    )
    for number, tokens in enumerate(prompts):
        add(engine, number, tokens, steps + 40, temperature=0.6)  # some start earlier than others
    while any(
        seq.num_output_tokens < 2 for seq in (*engine.scheduler.running, *engine.scheduler.waiting)
    ):
        engine.step()


def end_batch(engine: Engine, batch: int) -> None:
    for number in range(batch):
        engine.finish(str(number), "measured")
    run_all(engine)


def _parts_of_step(check: Check, batch: int, context: int, parts: Parts) -> Row:
    """Device time per step by kind of kernel, and time in which none ran."""
    engine, _, config = parts
    steps = 10
    start_batch(engine, config.model, batch, context, 2 * steps)
    spans = spans_on_device(check, [engine.step] * steps)
    end_batch(engine, batch)
    return parts_of(spans, steps)


def spans_on_device(check: Check, calls: Sequence[Callable[[], object]]) -> list[Span]:
    """What the GPU ran during the calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for call in calls:
            call()
        torch.cuda.synchronize(check.device)
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if "CUDA" in str(event.device_type)
    ]


# What the names of kernels contain, the first that fits.
_KINDS = {
    "attention": ("decode_kernel", "prefill_kernel", "flash"),
    "experts": ("_route", "_sort_pairs", "_multiply_tile", "_combine_products"),
    "sampling": (
        *(
            "_block_",
            "_row_best",
            "_pack",
            "_unpack",
            "_near_gaps",
            "_make_list",
            "_gap_limits_from_lists",
        ),
        *("_target_weight", "_pick_column", "_gap_histogram", "topk", "TopK", "sort"),
    ),
    "elementwise": ("_rms_norm", "_qk_norm_rope_store", "_silu_and_mul"),
    "products": (
        *("gemm", "gemv", "cutlass", "nvjet", "xmma", "cublas", "splitK"),
        *("_multiply_codes", "_add_parts", "_widen_codes"),
    ),
}


def parts_of(spans: list[Span], steps: int) -> Row:
    """Milliseconds per step."""
    sums = dict.fromkeys((*_KINDS, "others"), 0.0)
    for name, begin, end in spans:
        kinds = (kind for kind, parts in _KINDS.items() if any(part in name for part in parts))
        sums[next(kinds, "others")] += end - begin
    busy_us, total_us = busy_and_total(spans)
    sums["gaps"] = total_us - busy_us
    return {f"{kind}_ms": rounded(us / steps / 1000, 3) for kind, us in sums.items()}


def busy_and_total(spans: list[Span]) -> tuple[float, float]:
    """Microseconds in which anything ran, and from the first begin to the last end."""
    busy_us, reached = 0.0, -math.inf
    for _, begin, end in sorted(spans, key=lambda span: span[1]):
        busy_us += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return busy_us, reached - min((begin for _, begin, _ in spans), default=reached)


def decode_step(
    check: Check, batch: int, context: int, steps: int, parts: Parts, size: int = 1
) -> Row:
    """The median time of a step of this rank, one of `size`."""
    engine, executor, config = parts
    model = config.model
    start_batch(engine, model, batch, context, steps)
    executor.launch_s.clear()
    moments = [time.perf_counter()]
    for _ in range(steps):
        engine.step()
        moments.append(time.perf_counter())
    launch_ms = 1000 * statistics.median(executor.launch_s)
    end_batch(engine, batch)
    ms = 1000 * statistics.median(b - a for a, b in itertools.pairwise(moments))
    floor_ms = floor_of_step_ms(
        check, model, config.kv_cache_dtype, batch, context, config.quantization
    )
    floor_ms /= size
    return {
        "ms": rounded(ms),
        "launch_ms": rounded(launch_ms),
        "floor_ms": rounded(floor_ms),
        "share": rounded(floor_ms / ms, 3),
    }


def floor_of_step_ms(
    check: Check,
    model: ModelConfig,
    kv_cache_dtype: str,
    batch: int,
    context: int,
    quantization: Quantization | None = None,
) -> float:
    """Of one rank: reading the weights, and the keys and values of all rows, once. Of experts,
    those are read that some row has if all rows choose independently.
    """
    parameters, head = count_parameters(model), model.vocab_size * model.hidden_size
    active_weights = active_layer_parameters(model) + head
    weights = parameters.total - parameters.vocabulary - parameters.expert_parameters + head
    if model.experts is not None:
        share_chosen = model.experts.num_experts_per_token / model.experts.num_experts
        weights += round(parameters.expert_parameters * (1 - (1 - share_chosen) ** batch))
    kv_elements_per_token = 2 * model.num_key_value_heads * model.head_dim * model.num_hidden_layers
    kv_elements_per_token *= 1 if kv_cache_dtype == FP8 else 2  # bytes
    bytes_per_weight = 2.0
    if quantization is not None:  # a GPU holds a word per group
        bytes_per_weight = 1 / 2 if quantization.name == INT4 else 1
        bytes_per_weight += 4 / quantization.group_size
    weight_bytes = weights * bytes_per_weight
    return (
        check.floor_us(
            weight_bytes + batch * context * kv_elements_per_token, 2 * active_weights * batch
        )
        / 1000
    )


# Prefill steps


def prefill_steps(check: Check) -> None:
    """Run the section."""
    for name, raw in shapes_of(check).items():
        for backend in check.backends:
            label = f"{name} {backend}"
            check.add(label, partial(add_prefill_steps, check, raw, label, backend))


def add_prefill_steps(
    check: Check, raw: dict[str, Any], label: str, backend: str, **options: Any
) -> Row:
    """Adds a row per size of step; returns the row of the start. `options` are those of the
    engine.
    """
    sizes = ((1, 12), (2, 12)) if check.small else PREFILLS
    lengths = [length for num, length in sizes for _ in range(num)]
    open_one = partial(
        open_engine,
        check,
        raw,
        backend,
        near_zero,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=8,
        max_num_batched_tokens=16384,
        max_model_len=64 if check.small else 4096,
        # Twice, since a step may be prepared while the blocks of the one before are still taken.
        num_kv_blocks=blocks_for(check, backend, [length + 128 for length in 2 * lengths]),
        **options,
    )
    rows = [
        (f"{label}, {num * length} tokens", partial(_prefill_step, check, num, length))
        for num, length in sizes
    ]
    return {"start_s": rounded(add_rows(check, open_one, rows)[0], 3)}


def _prefill_step(check: Check, num_prompts: int, prompt_len: int, parts: Parts) -> Row:
    """The median time of equal steps, without the first, which compiles kernels."""
    engine, executor, config = parts
    model = config.model
    repeats = 2 if check.small else 6
    prompts = prompts_of(
        {"vocab_size": model.vocab_size}, [prompt_len] * num_prompts, seed=num_prompts
    )
    seconds: list[float] = []
    executor.launch_s.clear()
    for _ in range(repeats):
        for number, prompt in enumerate(prompts):
            add(engine, number, prompt, 1, temperature=0.6)
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    ms, launch_ms = (1000 * statistics.median(each[1:]) for each in (seconds, executor.launch_s))
    work = make_workload(prompts, [1] * num_prompts)
    floor_ms = 1000 * floor_s(model, 2, work, check.ceilings, config.quantization)
    return {
        "ms": rounded(ms),
        "launch_ms": rounded(launch_ms),
        "floor_ms": rounded(floor_ms),
        "share": rounded(floor_ms / ms, 3),
        "passed": len(executor.launch_s) == repeats and not engine.has_work,
    }
