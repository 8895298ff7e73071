"""Mixtures of experts: which experts a token goes to, and the weighted sum of their MLPs (Shazeer
et al. 2017, arXiv:1701.06538; as in transformers' `modeling_qwen3_moe`).

Legend: T tokens, X experts, K experts of a token, P = T * K pairs of a token and one of its
experts, E features, F features of an expert's MLP on this rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kernels.interface import ExpertWeights
from kernels.reference.activation import silu_and_mul_reference


def route_reference(
    logits_TX: Tensor,
    num_experts_per_token: int,
    normalizes_weights: bool,
    num_live_tokens_1: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(weights, float32 [T, K]; experts, int32 [T, K]): for each token the experts with the
    `num_experts_per_token` largest logits, the largest first, of equal ones that with the smaller
    number.

    A weight is the expert's share in the softmax over all X logits, in float32; with
    `normalizes_weights`, a token's weights are divided by their sum. Tokens of padding, behind the
    first `num_live_tokens_1`, have weights of 0 and choose expert X, which does not exist. On any
    device.
    """
    float_logits_TX = logits_TX.to(torch.float32)
    ids_TK = float_logits_TX.sort(dim=1, descending=True, stable=True).indices[
        :, :num_experts_per_token
    ]
    weights_TK = float_logits_TX.softmax(dim=1).gather(1, ids_TK)
    if normalizes_weights:
        weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True)
    if num_live_tokens_1 is not None:
        is_padding_T1 = (
            torch.arange(len(ids_TK), device=ids_TK.device)[:, None] >= num_live_tokens_1
        )
        weights_TK = weights_TK.masked_fill(is_padding_T1, 0)
        ids_TK = ids_TK.masked_fill(is_padding_T1, logits_TX.shape[1])
    return weights_TK, ids_TK.to(torch.int32)


def expert_mlp_reference(
    x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: ExpertWeights
) -> Tensor:
    """[T, E] in the dtype of x: the sum over k of weight * down(silu(gate(x)) * up(x)) of expert
    `ids_TK[:, k]`; where that is X, nothing.

    Each expert is computed once, for all of its tokens. Products are rounded to the dtype of x, as
    those of a dense MLP are; the sum is taken in float32, in the order of k, and rounded once: a
    token's result depends on the other tokens no more than dense products do. `experts` are not
    packed; the dtype of their weights may be another one. On any device, whose values the host
    waits for.
    """
    num_tokens, num_experts_per_token = ids_TK.shape
    ids_P = ids_TK.flatten().long()
    pairs_P = ids_P.sort(stable=True).indices
    num_experts = len(experts.gate_up)
    num_pairs_per_expert = ids_P.bincount(minlength=num_experts + 1).tolist()
    product_PE = torch.zeros(len(ids_P), x_TE.shape[1], dtype=x_TE.dtype, device=x_TE.device)
    for expert, pairs in enumerate(pairs_P.split(num_pairs_per_expert)):
        if not len(pairs) or expert == num_experts:
            continue
        gate_up, down = (
            weight[expert].to(x_TE.dtype) for weight in (experts.gate_up, experts.down)
        )
        hidden = silu_and_mul_reference(
            functional.linear(x_TE[pairs // num_experts_per_token], gate_up)
        )
        product_PE[pairs] = functional.linear(hidden, down)
    total_TE = torch.zeros_like(x_TE, dtype=torch.float32)
    product_TKE = product_PE.view(num_tokens, num_experts_per_token, x_TE.shape[1])
    for k in range(num_experts_per_token):
        total_TE += weights_TK[:, k, None] * product_TKE[:, k].to(torch.float32)
    return total_TE.to(x_TE.dtype)


class ReferenceExperts:
    """`ExpertKernels` in plain PyTorch."""

    route = staticmethod(route_reference)
    mlp = staticmethod(expert_mlp_reference)

    def warmup_calls(
        self, dtype: torch.dtype, weight_dtype: torch.dtype, /
    ) -> list[Callable[[], object]]:
        """Nothing to compile."""
        return []

    def pack_weights(self, weights: ExpertWeights, dtype: torch.dtype, /) -> ExpertWeights:
        """The weights, unchanged."""
        return weights
