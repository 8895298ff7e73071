"""Sections of the GPU check that run only if asked for: Qwen3-8B with each kind of weights, and
Qwen3-30B-A3B, whose kernels no others run.

Each has a process of its own, since a fault in one kernel ends all that its process does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.gpu_check_common import Check
from benchmarks.gpu_check_engine import QWEN3_8B, TINY, outputs_per_s, prompts_of
from benchmarks.gpu_check_steps import BATCHES, add_decode_steps, add_prefill_steps
from configs.shapes import SHAPES

# Features that groups of codes divide.
_TINY = TINY | {"hidden_size": 128, "intermediate_size": 128}
_TINY_EXPERTS = _TINY | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def weights(quantization: str | None, check: Check) -> None:
    """Steps of Qwen3-8B with weights of this form, None for 16 bits, and output tokens per second
    of 256 requests of 128 tokens in and 1,024 out.
    """
    raw = _TINY if check.small else QWEN3_8B
    label = f"8B, {quantization or '16 bits'}"
    _add_steps(check, raw, label, quantization=quantization)
    num_requests, num_in, num_out = (2, 4, 3) if check.small else (256, 128, 1024)
    prompts = prompts_of(raw, [num_in] * num_requests, seed=0)
    lengths, options = [num_out] * num_requests, {"quantization": quantization}
    measure = partial(outputs_per_s, check, raw, "triton", prompts, lengths, **options)
    check.add(f"{label}, {num_requests} x {num_in} in, {num_out} out", measure)


def mixture(check: Check) -> None:
    """Steps of Qwen3-30B-A3B."""
    _add_steps(check, _TINY_EXPERTS if check.small else SHAPES["qwen3-30b-a3b"], "30B-A3B")


def _add_steps(check: Check, raw: dict[str, Any], label: str, **options: Any) -> None:
    """Decode steps through graphs, and steps of whole prompts, beside their floors."""
    eager = {} if check.on_gpu else {"enforce_eager": True}
    batches = (2,) if check.small else BATCHES
    start = partial(add_decode_steps, check, raw, label, batches, **options, **eager)
    check.add(label, start)
    name = f"{label}, prompts"
    check.add(name, partial(add_prefill_steps, check, raw, name, "triton", **options))
