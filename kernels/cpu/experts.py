"""Mixtures of experts on a CPU: each expert that has tokens is multiplied once with all of them.

A decode step is bound by the bytes of the experts that it touches, so every panel of their weights
is a task (`panel.py`), whichever expert it is of. Pairs of a token and one of its experts lie
sorted by expert, so a task's rows follow one another. Weights are in panels of our own, in the
memory that they were loaded to: bfloat16 in pairs or float32, 64 output features each, or, where
float32 is multiplied by bfloat16, 16, as in `mixed.py`. A row's sums are taken in one order, along
its features and then along its experts, so they do not depend on the other rows.

Legend: T tokens, X experts (in x_PX: features in), K experts of a token, P = T * K pairs, E
features, F features of an expert, Y output features, A experts that have tokens, N panels, S steps
of a panel, C elements of a step in a panel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor
from torch.nn import functional

from kernels.cpu import mixed, packed
from kernels.cpu.elementwise import silu_and_mul_token
from kernels.cpu.jit import (
    Array,
    as_array,
    exact_entry_jit,
    exact_jit,
    exp_nonpositive,
    narrow,
    widen,
)
from kernels.cpu.panel import CACHED_ROWS, multiply_unwidened_panel, multiply_widened_panel
from kernels.cpu.parallel import parallel_for
from kernels.cpu.pool import put_helpers_to_sleep
from kernels.cpu.recording import refuse_recording
from kernels.cpu.tile import STEP_BYTES, has_dot_products
from kernels.interface import ExpertWeights
from kernels.reference.experts import expert_mlp_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts(ExpertWeights):
    """Both weights in panels: [X, Y / panel, steps, panel * elements of a step], Y padded to whole
    panels with zeros. num_features: F.
    """

    num_features: int


class CpuExperts:
    """`ExpertKernels` in numba."""

    def warmup_calls(
        self, dtype: torch.dtype, weight_dtype: torch.dtype, /
    ) -> list[Callable[[], object]]:
        """A choice, and the MLP of one expert."""
        weight = torch.zeros(1, 4, 2, dtype=weight_dtype)
        weights = ExpertWeights(gate_up=weight, down=weight[:, :2].clone())
        experts, zero_logit = self.pack_weights(weights, dtype), torch.zeros(1, 1)
        x, ids = torch.zeros(1, 2, dtype=dtype), torch.zeros(1, 1, dtype=torch.int32)
        return [
            partial(self.mlp, x, zero_logit, ids, experts),
            partial(self.route, zero_logit.to(dtype), 1, True, None),
        ]

    def route(
        self,
        logits_TX: Tensor,
        num_experts_per_token: int,
        normalizes_weights: bool,
        num_live_tokens_1: Tensor | None,
        /,
    ) -> tuple[Tensor, Tensor]:
        """As `route_reference`, except that where logits are NaN other experts may be chosen: still
        `num_experts_per_token` different ones, all of them below X.
        """
        assert num_live_tokens_1 is None, "without graphs there is no padding"
        weights_TK = torch.empty(len(logits_TX), num_experts_per_token)
        ids_TK = torch.empty(len(logits_TX), num_experts_per_token, dtype=torch.int32)
        _route(as_array(logits_TX), normalizes_weights, as_array(weights_TK), as_array(ids_TK))
        return weights_TK, ids_TK

    def pack_weights(self, weights: ExpertWeights, dtype: torch.dtype, /) -> ExpertWeights:
        """The weights in panels for products with rows of `dtype`, or as they are where only
        PyTorch can multiply by them.
        """
        gate_up, down = weights.gate_up, weights.down
        is_mixed = gate_up.dtype is not dtype
        is_bfloat16 = dtype is torch.bfloat16
        step_elements = 1 if is_mixed else STEP_BYTES // gate_up.itemsize
        if gate_up.shape[2] % step_elements or down.shape[2] % step_elements:
            return weights
        if is_bfloat16 and (is_mixed or not has_dot_products()):
            return weights
        panel_features = mixed.PANEL_FEATURES if is_mixed else packed.PANEL_FEATURES
        return PackedExperts(
            gate_up=_pack(gate_up, panel_features, step_elements),
            down=_pack(down, panel_features, step_elements),
            num_features=down.shape[2],
        )

    def mlp(
        self, x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: ExpertWeights, /
    ) -> Tensor:
        """As `expert_mlp_reference`."""
        refuse_recording()
        if not isinstance(experts, PackedExperts):
            put_helpers_to_sleep()
            return expert_mlp_reference(x_TE, weights_TK, ids_TK, experts)
        num_pairs, num_features = ids_TK.numel(), experts.num_features
        out_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype)
        rows_PE = torch.empty(num_pairs, x_TE.shape[1], dtype=x_TE.dtype)
        gate_up_P2F = torch.empty(num_pairs, 2 * num_features, dtype=x_TE.dtype)
        hidden_PF = torch.empty(num_pairs, num_features, dtype=x_TE.dtype)
        buffers = tuple(map(as_array, (rows_PE, gate_up_P2F, hidden_PF)))
        input_arrays = map(as_array, (x_TE.contiguous(), weights_TK, ids_TK))
        _mlp(
            *input_arrays,
            as_array(experts.gate_up),
            as_array(experts.down),
            buffers,
            as_array(out_TE),
        )
        return out_TE


def _pack(weight_XYE: Tensor, panel_features: int, step_elements: int) -> Tensor:
    """The panels of `PackedExperts`, in the memory of the weight if there are only whole ones.
    Otherwise in a copy: the weight is held twice until the caller lets go of it.
    """
    padding = -weight_XYE.shape[1] % panel_features
    if padding:
        weight_XYE = functional.pad(weight_XYE, (0, 0, 0, padding))
    num_experts, size_out, size_in = weight_XYE.shape
    # A step is moved whole: two numbers of bfloat16 as one of 32 bits, which a float32 is too.
    steps = weight_XYE.view(torch.int32) if step_elements * weight_XYE.itemsize == 4 else weight_XYE
    mixed.transpose_panels(as_array(steps.view(-1, size_in // step_elements, panel_features)))
    panels_XNSC = weight_XYE.view(
        num_experts,
        size_out // panel_features,
        size_in // step_elements,
        panel_features * step_elements,
    )
    return panels_XNSC.data  # a view would keep the memory of its base when it moves to another


# -- which experts ---------------------------------------------------------------------------------


@exact_jit
def _route_token(
    t: int, logits_TX: Array, normalizes_weights: bool, weights_TK: Array, ids_TK: Array
) -> None:
    num_experts, num_experts_per_token = logits_TX.shape[1], ids_TK.shape[1]
    logits_X = np.empty(num_experts, np.float32)
    is_chosen_X = np.zeros(num_experts, np.bool_)
    for x in range(num_experts):
        logits_X[x] = widen(logits_TX[t, x])
    for k in range(num_experts_per_token):
        best_expert = -1
        for x in range(num_experts):  # the first of equal ones stays
            if not is_chosen_X[x] and (best_expert < 0 or logits_X[x] > logits_X[best_expert]):
                best_expert = x
        is_chosen_X[best_expert] = True
        ids_TK[t, k] = best_expert
    max_logit = logits_X[ids_TK[t, 0]]
    total, chosen_weight_sum = np.float32(0), np.float32(0)
    for x in range(num_experts):
        total += exp_nonpositive(logits_X[x] - max_logit)
    for k in range(num_experts_per_token):
        weights_TK[t, k] = exp_nonpositive(logits_X[ids_TK[t, k]] - max_logit) / total
        chosen_weight_sum += weights_TK[t, k]
    if normalizes_weights:
        for k in range(num_experts_per_token):
            weights_TK[t, k] /= chosen_weight_sum


@exact_entry_jit
def _route(logits_TX: Array, normalizes_weights: bool, weights_TK: Array, ids_TK: Array) -> None:
    arguments = (logits_TX, normalizes_weights, weights_TK, ids_TK)
    parallel_for(len(logits_TX), _route_token, arguments)


# -- their MLPs ------------------------------------------------------------------------------------


def _multiply_panel(
    panel: int, x_PX: Array, weight: tuple[int, int, Any], no_bias: Array, out_PY: Array
) -> None:
    """out = x @ weight.T for one panel."""
    raise NotImplementedError("for compiled code")


@overload(_multiply_panel)  # the signatures must match exactly, so none is annotated
def _choose_multiply_panel(panel, x_PX, weight, no_bias, out_PY):  # type: ignore[no-untyped-def]
    if x_PX.dtype == types.float32 and weight.types[2] == types.uint16:
        return lambda panel, x_PX, weight, no_bias, out_PY: multiply_widened_panel(
            panel, x_PX, weight, no_bias, (), out_PY
        )
    # It multiplies rows and weights of one dtype: bfloat16 in pairs, or float32.
    return lambda panel, x_PX, weight, no_bias, out_PY: multiply_unwidened_panel(
        panel, x_PX, weight, no_bias, (), out_PY
    )


@exact_jit
def _multiply_rows(
    task: int, x_PX: Array, weight_XNSC: Array, experts_A: Array, starts_X1: Array, out_PY: Array
) -> None:
    """One panel of one expert, with all rows of that expert. C: a step of a panel."""
    num_panels = weight_XNSC.shape[1]
    expert, panel = experts_A[task // num_panels], task % num_panels
    panel_bytes = weight_XNSC.itemsize * weight_XNSC.shape[2] * weight_XNSC.shape[3]
    address = weight_XNSC.ctypes.data + expert * num_panels * panel_bytes
    weight = address, panel_bytes, weight_XNSC[0, 0, 0, 0]
    no_bias = x_PX[0, :0]
    end = starts_X1[expert + 1]
    for first_row in range(starts_X1[expert], end, CACHED_ROWS):
        end_row = min(first_row + CACHED_ROWS, end)
        _multiply_panel(panel, x_PX[first_row:end_row], weight, no_bias, out_PY[first_row:end_row])


@exact_jit
def _sort_pairs(ids_TK: Array, starts_X1: Array, places_TK: Array) -> Array:
    """Where each expert's pairs start, and the place of each pair; of one expert, pairs follow the
    order of the tokens. Returns the experts that have tokens.
    """
    num_experts = len(starts_X1) - 1
    starts_X1[:] = 0
    for t in range(len(ids_TK)):
        for k in range(ids_TK.shape[1]):
            starts_X1[ids_TK[t, k] + 1] += 1
    experts_A = np.flatnonzero(starts_X1[1:])
    for x in range(num_experts):
        starts_X1[x + 1] += starts_X1[x]
    next_place_X = starts_X1[:num_experts].copy()
    for t in range(len(ids_TK)):
        for k in range(ids_TK.shape[1]):
            places_TK[t, k] = next_place_X[ids_TK[t, k]]
            next_place_X[ids_TK[t, k]] += 1
    return experts_A


@exact_jit
def _copy_row(t: int, x_TE: Array, places_TK: Array, rows_PE: Array) -> None:
    for k in range(places_TK.shape[1]):
        rows_PE[places_TK[t, k]] = x_TE[t]


@exact_jit
def _combine_products(
    t: int, product_PE: Array, places_TK: Array, weights_TK: Array, out_TE: Array
) -> None:
    """The weighted sum of a token's products, in the order of k."""
    total_E = np.zeros(out_TE.shape[1], np.float32)
    for k in range(places_TK.shape[1]):
        product_E, weight = product_PE[places_TK[t, k]], weights_TK[t, k]
        for e in range(len(total_E)):
            total_E[e] += weight * widen(product_E[e])
    for e in range(len(total_E)):
        out_TE[t, e] = narrow(total_E[e], out_TE[0, 0])


@exact_entry_jit
def _mlp(
    x_TE: Array,
    weights_TK: Array,
    ids_TK: Array,
    gate_up_XNSC: Array,
    down_XNSC: Array,
    buffers: tuple[Array, Array, Array],
    out_TE: Array,
) -> None:
    rows_PE, gate_up_P2F, hidden_PF = buffers
    product_PE = rows_PE  # in the same memory: after gate and up, nothing reads the rows
    starts_X1 = np.empty(len(gate_up_XNSC) + 1, np.int64)
    places_TK = np.empty(ids_TK.shape, np.int64)
    experts_A = _sort_pairs(ids_TK, starts_X1, places_TK)
    parallel_for(len(x_TE), _copy_row, (x_TE, places_TK, rows_PE))
    num_tasks = len(experts_A) * gate_up_XNSC.shape[1]
    arguments = (rows_PE, gate_up_XNSC, experts_A, starts_X1, gate_up_P2F)
    parallel_for(num_tasks, _multiply_rows, arguments)
    parallel_for(len(hidden_PF), silu_and_mul_token, (gate_up_P2F, hidden_PF))
    num_tasks = len(experts_A) * down_XNSC.shape[1]
    arguments = (hidden_PF, down_XNSC, experts_A, starts_X1, product_PE)
    parallel_for(num_tasks, _multiply_rows, arguments)
    parallel_for(len(x_TE), _combine_products, (product_PE, places_TK, weights_TK, out_TE))
