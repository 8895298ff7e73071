"""The least time that any engine can take for a workload on this machine, to compare measured times
with.

    floor_s = max(total_flops / flops_per_s, total_bytes / memory_bytes_per_s)

    total_flops = 2 * active_layer_parameters * T + 2 * head_parameters * S
                  + 4 * heads * head_dim * layers * (sum of contexts)
    total_bytes = weight_bytes * D
                  + 2 * num_kv_heads * head_dim * itemsize * layers
                  * (sum of contexts of decoded tokens)

T counts the tokens that must run: per request, the prompt (a prefix that it shares with another
prompt counts once) and all output tokens but the last. S counts the tokens sampled, D the steps
that cannot be avoided: the longest output. A token at position p has context p + 1. `weight_bytes`
counts each parameter once and leaves out the embedding: looking up a row is neither a product nor a
significant read. A tied embedding is counted as the head. Of the experts of a layer, those of one
token are counted, which are active for it: each token is multiplied by as many, and no step reads
fewer. Steps of many rows read several times as many, because rows choose different experts, so for
such models this bound is far below what any engine can reach with many rows.

Weights that fit into the processor's caches are not read from memory in each step: for such models
this is not a lower bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from configs.model import ModelConfig
from configs.quantization import INT8, Quantization
from workers.batch.kv_cache import torch_dtype
from workers.models.size import count_parameters

PROBE_BYTES = 256 * 2**20
PROBE_MATRIX_DIM = 2048
PROBE_SECONDS = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Sustained speeds of this machine's processors."""

    memory_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputWork:
    """One output: the tokens in its prompt, how many of the first of those are counted with another
    output, and the tokens sampled.
    """

    num_prompt_tokens: int
    num_shared_tokens: int
    num_output_tokens: int


def probe_cpu(dtype: str, quantization: Quantization | None = None) -> Machine:
    """Measure this machine in about a second: the best of a few reads of 256 MiB, and of a few
    square products in `dtype`, or of 8-bit numbers if the weights are, both with all threads of
    torch.
    """
    data = torch.ones(PROBE_BYTES // 4)
    read_s = _fastest_run_s(data.sum)
    del data
    square = torch.randn(PROBE_MATRIX_DIM, PROBE_MATRIX_DIM)
    if quantization is None or quantization.name != INT8:
        square = square.to(torch_dtype(dtype))
        product_s = _fastest_run_s(lambda: square @ square)
    else:
        square = square.to(torch.int8)
        product_s = _fastest_run_s(lambda: torch._int_mm(square, square))
    return Machine(
        memory_bytes_per_s=PROBE_BYTES / read_s, flops_per_s=2 * PROBE_MATRIX_DIM**3 / product_s
    )


def make_workload(prompts: Sequence[list[int]], output_lens: Sequence[int]) -> list[OutputWork]:
    """The work for each output, from its prompt's token ids and its number of tokens, in sorted
    order.

    In sorted order, a prompt shares its longest prefix with the prompt just before it.
    """
    workload, previous_prompt = [], list[int]()
    for prompt, num_output_tokens in sorted(zip(prompts, output_lens, strict=True)):
        pairs = enumerate(zip(prompt, previous_prompt, strict=False))
        shared_len = next(
            (i for i, (a, b) in pairs if a != b), min(len(prompt), len(previous_prompt))
        )
        workload.append(
            OutputWork(
                num_prompt_tokens=len(prompt),
                num_shared_tokens=min(shared_len, len(prompt) - 1),
                num_output_tokens=num_output_tokens,
            )
        )
        previous_prompt = prompt
    return workload


def floor_s(
    model: ModelConfig,
    itemsize: int,
    workload: Sequence[OutputWork],
    machine: Machine,
    quantization: Quantization | None = None,
    weight_itemsize: int | None = None,
) -> float:
    """Lower bound in seconds on the time of `workload`, with `itemsize` bytes per number in the
    cache and `weight_itemsize` (None: the same) in the weights that are not quantized; see the top.
    """
    weight_itemsize = weight_itemsize or itemsize
    num_computed_tokens = sum(
        w.num_prompt_tokens - w.num_shared_tokens + w.num_output_tokens - 1 for w in workload
    )
    num_sampled_tokens = sum(w.num_output_tokens for w in workload)
    decode_context_sum = sum(
        _sum_of_contexts(w.num_prompt_tokens, w.num_prompt_tokens + w.num_output_tokens - 1)
        for w in workload
    )
    prefill_context_sum = sum(
        _sum_of_contexts(w.num_shared_tokens, w.num_prompt_tokens) for w in workload
    )
    attended_elements_per_head = (
        model.num_hidden_layers * model.head_dim * (decode_context_sum + prefill_context_sum)
    )
    layer_parameters = active_layer_parameters(model)
    head_parameters = model.vocab_size * model.hidden_size
    flops = (
        2 * layer_parameters * num_computed_tokens
        + 2 * head_parameters * num_sampled_tokens
        + 4 * model.num_attention_heads * attended_elements_per_head
    )
    num_steps = max((w.num_output_tokens for w in workload), default=0)
    kv_elements_per_token = 2 * model.num_key_value_heads * model.head_dim * model.num_hidden_layers
    bytes_per_layer_weight = bytes_per_head_weight = float(weight_itemsize)
    if quantization is not None:
        bytes_per_layer_weight = quantization.bytes_per_weight
        if quantization.includes_vocabulary:
            bytes_per_head_weight = quantization.bytes_per_weight
    num_bytes = (
        layer_parameters * bytes_per_layer_weight + head_parameters * bytes_per_head_weight
    ) * num_steps + itemsize * kv_elements_per_token * decode_context_sum
    return max(flops / machine.flops_per_s, num_bytes / machine.memory_bytes_per_s)


def active_layer_parameters(model: ModelConfig) -> int:
    """Parameters of all layers and the last norm that are active for one token, without embedding
    and head: of the experts of a layer, those that one token chooses.
    """
    parameters = count_parameters(model)
    return parameters.active - parameters.vocabulary


def roofline_entry(
    model: ModelConfig,
    dtype: str,
    workload: Sequence[OutputWork],
    total_s: float,
    machine: Machine | None,
    quantization: Quantization | None = None,
    weight_dtype: str | None = None,
) -> dict[str, Any]:
    """The roofline's entry in a benchmark result: what the machine sustains, the floor, and its
    share of `total_s`; nulls and a reason if `machine` was not probed.
    """
    if machine is None:
        names = ("memory_bytes_per_s", "flops_per_s", "floor_s", "share")
        return dict.fromkeys(names) | {"reason": "only CPUs are probed"}
    itemsize, weight_itemsize = (
        torch_dtype(name).itemsize for name in (dtype, weight_dtype or dtype)
    )
    least_s = floor_s(model, itemsize, workload, machine, quantization, weight_itemsize)
    return {
        "memory_bytes_per_s": round(machine.memory_bytes_per_s),
        "flops_per_s": round(machine.flops_per_s),
        "floor_s": round(least_s, 4),
        "share": round(least_s / total_s, 4),
    }


def _sum_of_contexts(start: int, end: int) -> int:
    """Sum over the tokens at positions `start` to `end - 1`."""
    return max(0, (end * (end + 1) - start * (start + 1)) // 2)


def _fastest_run_s(action: Callable[[], object]) -> float:
    """Seconds of the fastest of at least three runs that fit into `PROBE_SECONDS`, after a warm-up
    run.
    """
    action()
    times: list[float] = []
    while len(times) < 3 or sum(times) < PROBE_SECONDS:
        began_s = time.perf_counter()
        action()
        times.append(time.perf_counter() - began_s)
    return min(times)
