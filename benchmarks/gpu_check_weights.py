"""A section of the GPU check, which runs only if asked for: experts, and weights in 4 bits and FP8.

Decode steps and prompts of Qwen3-8B with each kind of weights and of Qwen3-30B-A3B; 8B's outputs
per second of 256 requests of 128 tokens in and 1,024 out; and each product with codes by itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.gpu_check_common import Check
from benchmarks.gpu_check_engine import QWEN3_8B, TINY, outputs_per_s, prompts_of
from benchmarks.gpu_check_grouped import grouped_speed
from benchmarks.gpu_check_steps import BATCHES, add_decode_steps, add_prefill_steps
from configs.quantization import FP8, INT4
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
Options = dict[str, Any]  # of an engine


def weights(check: Check) -> None:
    """Run the section."""
    dense, experts = (_TINY, _TINY_EXPERTS) if check.small else (QWEN3_8B, SHAPES["qwen3-30b-a3b"])
    forms: dict[str, Options] = {
        "16 bits": {},
        INT4: {"quantization": INT4},
        FP8: {"quantization": FP8},
    }
    models = [(f"8B, {form}", dense, options) for form, options in forms.items()]
    models.insert(1, ("30B-A3B", experts, {}))
    batches = (2,) if check.small else BATCHES
    eager = {} if check.on_gpu else {"enforce_eager": True}
    for label, raw, options in models:
        start = partial(add_decode_steps, check, raw, label, batches, **options, **eager)
        check.add(label, start)
    for label, raw, options in models:
        name = f"{label}, prompts"
        check.add(name, partial(add_prefill_steps, check, raw, name, "triton", **options))
    num_in, num_out = (4, 3) if check.small else (128, 1024)
    prompts = prompts_of(dense, [num_in] * (2 if check.small else 256), seed=0)
    for form, options in forms.items():
        name = f"8B, {form}, {len(prompts)} x {num_in} in, {num_out} out"
        lengths = [num_out] * len(prompts)
        check.add(name, partial(outputs_per_s, check, dense, "triton", prompts, lengths, **options))
    grouped_speed(check)
