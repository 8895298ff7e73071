"""Mixtures of experts: a family of kernels of the section `numerics`.

Legend: T tokens, X experts, K experts of a token, E features, F features of an expert.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu_check_common import Check, Row
from benchmarks.gpu_check_verdicts import equal, judge, poisoned
from kernels.interface import ExpertWeights
from kernels.reference.experts import expert_mlp_reference, route_reference

# Experts, of a token, features, of an expert: of Qwen3-30B-A3B on one rank and on two.
_SHAPES = ((128, 8, 2048, 768), (128, 8, 2048, 384))
_SMALL_SHAPES = ((8, 2, 64, 48),)
# The gate, what it gives, its product with up, each expert's product and their sum are rounded;
# of a row's largest number, the reference in bfloat16 is off by up to 3.3.
_ROUNDINGS = 4
# float32's, of an exponential and a quotient.
_WEIGHT_TOLERANCE = 3e-6


def experts(check: Check) -> None:
    """Few tokens and many, which have tiles of their own, and some behind which is padding."""
    for shape in _SMALL_SHAPES if check.small else _SHAPES:
        for num_tokens in (1, 150) if check.small else (1, 17, 64, 1000):
            name = f"{num_tokens} x {shape[2]}, {shape[1]} of {shape[0]} experts of {shape[3]}"
            check.add(f"route {name}", partial(_same_choices, check, *shape[:2], num_tokens))
            check.add(f"mlp {name}", partial(_same_sums, check, *shape, num_tokens))


def _same_choices(check: Check, num_experts: int, num_chosen: int, num_tokens: int) -> Row:
    """Of logits of which some are equal. A quarter of the tokens are padding."""
    logits_TX = (4 * check.normal(num_tokens, num_experts)).round(decimals=1)
    num_live_1 = torch.tensor([num_tokens - num_tokens // 4], device=check.device).int()
    with poisoned():
        weights_TK, ids_TK = check.backends["triton"].experts.route(
            logits_TX, num_chosen, True, num_live_1
        )
    want_TK, want_ids_TK = route_reference(logits_TX, num_chosen, True, num_live_1)
    row = equal((ids_TK, want_ids_TK))
    row["max_error"] = float((weights_TK - want_TK).abs().max())
    return row | {"passed": row["passed"] and row["max_error"] <= _WEIGHT_TOLERANCE}


def _same_sums(
    check: Check, num_experts: int, num_chosen: int, hidden: int, features: int, num_tokens: int
) -> Row:
    weights = ExpertWeights(
        gate_up=hidden**-0.5 * check.normal(num_experts, 2 * features, hidden),
        down=features**-0.5 * check.normal(num_experts, hidden, features),
    )
    x_TE, kernels = check.normal(num_tokens, hidden), check.backends["triton"].experts
    shares_TK, ids_TK = route_reference(check.normal(num_tokens, num_experts), num_chosen, True)
    packed = kernels.pack_weights(weights, check.dtype)
    with poisoned():
        out_TE = kernels.mlp(x_TE, shares_TK, ids_TK, packed)
    exact = ExpertWeights(gate_up=weights.gate_up.float(), down=weights.down.float())
    return judge(out_TE, expert_mlp_reference(x_TE.float(), shares_TK, ids_TK, exact), _ROUNDINGS)
