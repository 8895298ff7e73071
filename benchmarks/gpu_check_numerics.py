"""Every kernel of the GPU backends against its reference, which computes in float32 from the same
16-bit inputs.

How near it must be: `benchmarks.gpu_check_verdicts`. Outputs are filled with NaN before a kernel
writes them, and the parts of a cache that it must not read are NaN.
Legend: T tokens, E features, H query heads, K KV heads, X = H + 2K, D head dim, N blocks, P block
size, B rows, R rows of one draw, V tokens of the vocabulary, C columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial

import torch

from benchmarks.gpu_check_attention import attention
from benchmarks.gpu_check_common import Check, Row
from benchmarks.gpu_check_experts import experts
from benchmarks.gpu_check_grouped import grouped_numerics
from benchmarks.gpu_check_verdicts import equal, judge, near, poisoned, worst_of
from configs.quantization import FP8, INT4
from kernels.interface import GapRows, Kernels, SamplingKernels
from kernels.reference import sampling as SAMPLING_REFERENCE
from kernels.reference.activation import silu_and_mul_reference
from kernels.reference.norm import rms_norm_reference
from kernels.reference.rope import qk_norm_rope_reference
from kernels.reference.sampling import RADIX_PASSES, TOP_P_ONE

EPS = 1e-6


def numerics(check: Check) -> None:
    """Run the section, or the family of kernels that is asked for."""
    for name, run in families(check.backends).items():
        if check.family in (None, name):
            run(check)


def families(backends: Iterable[str]) -> dict[str, Callable[[Check], None]]:
    """Each family of kernels by its name. Each runs in a process of its own, since an access to
    memory that is not there ends all that its process does on the GPU.
    """
    return {
        "elementwise": lambda check: elementwise(check, check.backends["triton"]),
        "store": lambda check: store(check, check.backends["triton"]),
        **{f"attention {name}": partial(_attention_of_backend, name) for name in backends},
        "sampling": lambda check: sampling(check, check.backends["triton"].sampling),
        **{f"{form} weights": partial(_products_with_codes, form) for form in (INT4, FP8)},
        "experts": experts,
    }


def _attention_of_backend(name: str, check: Check) -> None:
    attention(check, name, check.backends[name])


def _products_with_codes(form: str, check: Check) -> None:
    grouped_numerics(check, form)


def elementwise(check: Check, kernels: Kernels) -> None:
    """Norms and the gate, over rows of several widths."""
    for num_tokens, width in (
        ((5, 64),) if check.small else ((1, 1024), (257, 4096), (33, 5120), (9, 80))
    ):
        x_TE, residual_TE = check.normal(num_tokens, width), check.normal(num_tokens, width)
        weight_E = 1 + 0.3 * check.normal(width)
        shape = f"{num_tokens} x {width}"
        check.add(f"rms_norm {shape}", partial(_rms_norm, kernels, x_TE, weight_E))
        check.add(
            f"add_rms_norm {shape}", partial(_add_rms_norm, kernels, x_TE, residual_TE, weight_E)
        )
        check.add(
            f"silu_and_mul {shape}",
            partial(_silu_and_mul, kernels, torch.cat((x_TE, residual_TE), dim=1)),
        )


def _rms_norm(kernels: Kernels, x_TE: torch.Tensor, weight_E: torch.Tensor) -> Row:
    with poisoned():
        out_TE = kernels.rms_norm(x_TE, weight_E, EPS)
    return judge(out_TE, rms_norm_reference(x_TE.float(), weight_E.float(), EPS), 2)


def _add_rms_norm(
    kernels: Kernels, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor
) -> Row:
    with poisoned():
        out_TE, total_TE = kernels.add_rms_norm(x_TE, residual_TE, weight_E, EPS)
    # The norm is computed from the rounded sum.
    normed = judge(out_TE, rms_norm_reference(total_TE.float(), weight_E.float(), EPS), 2)
    return worst_of(normed, judge(total_TE, x_TE.float() + residual_TE.float(), 1))


def _silu_and_mul(kernels: Kernels, gate_up_T2F: torch.Tensor) -> Row:
    with poisoned():
        out_TF = kernels.silu_and_mul(gate_up_T2F)
    return judge(out_TF, silu_and_mul_reference(gate_up_T2F.float()), 2)


def store(check: Check, kernels: Kernels) -> None:
    """QK-norm, rotation and store, for blocks of 16 and 256 tokens."""
    cases = (
        ((2, 1, 64, 4),)
        if check.small
        else ((16, 8, 128, 16), (32, 8, 128, 256), (8, 8, 64, 16), (16, 2, 64, 16))
    )
    for heads, kv_heads, dim, block_size in cases:
        name = f"qk_norm_rope_store {heads}/{kv_heads} x {dim}, block {block_size}"
        check.add(name, partial(_store_case, check, kernels, heads, kv_heads, dim, block_size))


def _store_case(
    check: Check, kernels: Kernels, heads: int, kv_heads: int, dim: int, block_size: int
) -> Row:
    num_tokens, num_blocks = (5, 3) if check.small else (333, 60)
    qkv_TXD = check.normal(num_tokens, heads + 2 * kv_heads, dim)
    q_weight_D, k_weight_D = (1 + 0.3 * check.normal(dim) for _ in range(2))
    angle_LE = check.normal(4096, dim // 2, dtype=torch.float32) * 10
    cos_sin_LD = torch.cat((angle_LE.cos(), angle_LE.sin()), dim=1)
    positions_T = torch.randint(4096, (num_tokens,), device=check.device, dtype=torch.int32)
    places_T = torch.randperm(num_blocks * block_size, device=check.device)[:num_tokens]
    places_T[::4] = -1
    shape = (num_blocks, block_size, kv_heads, dim)
    k_cache, v_cache = (
        torch.full(shape, torch.nan, dtype=check.dtype, device=check.device) for _ in range(2)
    )
    with poisoned():
        q_THD = kernels.qk_norm_rope_store(
            qkv_TXD,
            q_weight_D,
            k_weight_D,
            EPS,
            cos_sin_LD,
            positions_T,
            k_cache,
            v_cache,
            places_T,
        )
    q, k, v_TKD = qkv_TXD.split((heads, kv_heads, kv_heads), dim=1)
    exact_q, exact_k = qk_norm_rope_reference(
        q.float(), k.float(), q_weight_D.float(), k_weight_D.float(), EPS, cos_sin_LD, positions_T
    )
    written_T = places_T >= 0
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    others = torch.ones(len(keys), dtype=torch.bool, device=check.device)
    others[places_T[written_T]] = False
    same = torch.equal(values[places_T[written_T]], v_TKD[written_T])
    untouched = bool(keys[others].isnan().all() and values[others].isnan().all())
    # Two roundings before the rotation, which adds two values, up to sqrt(2) times the larger; one
    # after it.
    row = worst_of(
        judge(q_THD.flatten(0, 1), exact_q.flatten(0, 1), 4),
        judge(keys[places_T[written_T]].flatten(0, 1), exact_k[written_T].flatten(0, 1), 4),
    )
    return row | {"passed": row["passed"] and same and untouched}


def sampling(check: Check, kernels: SamplingKernels) -> None:
    """The draw, and the kernels over the logits, on rows with ties and with NaN."""
    check.add("target_weight", partial(_same_draws, check, kernels))
    parts: dict[str, Callable[[SamplingKernels, GapRows], Row]] = {
        "row_best": _same_best,
        "list_nearest": _same_lists,
        "gap_histogram": _same_histograms,
        "block_weights": _same_weights,
        "pick_column": _same_picks,
    }
    for num_columns in (140,) if check.small else (1003, 151936):
        for kind in ("ties", "broken") if check.small else ("normal", "ties", "broken"):
            logits_BV = _logits(check, kind, num_columns)
            dtypes = (torch.bfloat16,) if check.small else (torch.float32, torch.bfloat16)
            gaps = [_gap_rows(check, logits_BV.to(dtype)) for dtype in dtypes]
            for name, part in parts.items():
                check.add(
                    f"{name} {kind} {num_columns}", partial(_worst_of_dtypes, kernels, part, gaps)
                )


def _worst_of_dtypes(
    kernels: SamplingKernels, part: Callable[[SamplingKernels, GapRows], Row], gaps: list[GapRows]
) -> Row:
    return worst_of(*(part(kernels, each) for each in gaps))


def _logits(check: Check, kind: str, num_columns: int) -> torch.Tensor:
    logits_BV = check.normal(6, num_columns, dtype=torch.float32) * 4
    if kind == "ties":
        return logits_BV.round()
    if kind == "broken":
        scattered_BV = torch.rand_like(logits_BV)
        logits_BV[scattered_BV < 0.3] = torch.nan
        logits_BV[scattered_BV > 0.7] = -torch.inf
        logits_BV[1] = -torch.inf
    return logits_BV


def _gap_rows(check: Check, logits_BV: torch.Tensor) -> GapRows:
    max_B, _, block_max_BX = SAMPLING_REFERENCE.row_best(logits_BV)
    rows_R = torch.tensor([4, 1] if check.small else [4, 0, 2, 1, 3], device=check.device)
    return GapRows(
        logits_BV=logits_BV,
        block_max_BX=block_max_BX,
        rows_R=rows_R,
        max_R=max_B[rows_R] + 0.0,
        temperature_R=torch.tensor([0.6, 1.0, 0.3, 0.013, 2.5], device=check.device)[: len(rows_R)],
    )


def _same_draws(check: Check, kernels: SamplingKernels) -> Row:
    """Of 300 rows, on the second of three ranks."""
    seeds_R, positions_R = (
        torch.randint(limit, (300,), device=check.device) for limit in (2**63 - 1, 40960)
    )
    kept_weight_NR = torch.randint(2**56, (3, 300), device=check.device)
    with poisoned():
        got_R = kernels.target_weight(seeds_R, positions_R, kept_weight_NR, 1)
    return equal((got_R, SAMPLING_REFERENCE.target_weight(seeds_R, positions_R, kept_weight_NR, 1)))


def _same_best(kernels: SamplingKernels, gap_rows: GapRows) -> Row:
    with poisoned():
        got = kernels.row_best(gap_rows.logits_BV)
    want = SAMPLING_REFERENCE.row_best(gap_rows.logits_BV)
    has_best_B = want[0] > -torch.inf  # for a row that is all NaN any column will do
    return equal((got[0], want[0]), (got[1][has_best_B], want[1][has_best_B]), (got[2], want[2]))


def _same_lists(kernels: SamplingKernels, gap_rows: GapRows) -> Row:
    """The lists of nearest tokens, and the limits that follow from them."""
    num_rows, device = len(gap_rows.rows_R), gap_rows.rows_R.device
    top_k_R = torch.tensor([20, 1, 50, 7, 3], device=device)[:num_rows]
    top_p_R = torch.tensor(
        [TOP_P_ONE * 9 // 10, TOP_P_ONE, TOP_P_ONE // 2, TOP_P_ONE, 1], device=device
    )[:num_rows]
    min_p_gap_limit_R = torch.tensor(
        [torch.inf, torch.inf, torch.inf, 2.0, torch.inf], device=device
    )[:num_rows]
    want_RK = SAMPLING_REFERENCE.list_nearest(gap_rows, top_k_R, 50)
    with poisoned():
        got_RK = kernels.list_nearest(gap_rows, top_k_R, 50)
        gap_limit_R, kept_weight_NR = kernels.gap_limits_from_lists(
            want_RK[None], top_k_R, top_p_R, min_p_gap_limit_R
        )
    want_gap_limit_R, want_kept_NR = SAMPLING_REFERENCE.gap_limits_from_lists(
        want_RK[None], top_k_R, top_p_R, min_p_gap_limit_R
    )
    row = equal((got_RK, want_RK), (gap_limit_R, want_gap_limit_R))
    return worst_of(row, near(kept_weight_NR, want_kept_NR, 50))


def _same_histograms(kernels: SamplingKernels, gap_rows: GapRows) -> Row:
    """All three digits of one descent, of counts and of weights, to the middle of each row: so
    there are gaps with smaller and with larger prefixes.
    """
    within_R = torch.full_like(gap_rows.max_R, torch.inf)
    rows = []
    for by_weight in (False, True):
        prefix_R = torch.zeros_like(gap_rows.rows_R, dtype=torch.int32)
        for radix_pass in range(len(RADIX_PASSES)):
            arguments = (gap_rows, within_R, prefix_R, radix_pass, by_weight)
            with poisoned():
                got_RX = kernels.gap_histogram(*arguments)
            want_RX = SAMPLING_REFERENCE.gap_histogram(*arguments)
            rows.append(
                near(got_RX, want_RX, gap_rows.logits_BV.shape[1])
                if by_weight
                else equal((got_RX, want_RX))
            )
            is_half_RX = 2 * want_RX.cumsum(dim=1) >= want_RX.sum(dim=1, keepdim=True)
            digit_R = is_half_RX.to(torch.int32).argmax(dim=1).to(torch.int32)
            prefix_R = (prefix_R << RADIX_PASSES[radix_pass][1]) + digit_R
    return worst_of(*rows)


def _same_weights(kernels: SamplingKernels, gap_rows: GapRows) -> Row:
    rows = []
    for gap_limit in (torch.inf, 3.0, 0.0):
        gap_limit_R = torch.full_like(gap_rows.max_R, gap_limit)
        with poisoned():
            got = kernels.block_weights(gap_rows, gap_limit_R)
        want = SAMPLING_REFERENCE.block_weights(gap_rows, gap_limit_R)
        rows += [near(got[0], want[0], 128), near(got[1], want[1], gap_rows.logits_BV.shape[1])]
        rows.append(equal((got[0].sum(dim=1), got[1])))
    return worst_of(*rows)


def _same_picks(kernels: SamplingKernels, gap_rows: GapRows) -> Row:
    """The column at which the running sum of the kernel's own weights, each taken alone, exceeds an
    index.
    """
    gap_limit_R = torch.full_like(gap_rows.max_R, 20.0)
    weights_RV = torch.stack(
        [_weights_alone(kernels, gap_rows, r, gap_limit_R) for r in range(len(gap_limit_R))]
    )
    with poisoned():
        sums_RX, total_R = kernels.block_weights(gap_rows, gap_limit_R)
    running_RV = weights_RV.cumsum(dim=1)
    rows = [equal((running_RV[:, -1], total_R))]
    middle_R = (torch.rand_like(gap_rows.max_R).double() * total_R).to(torch.int64)
    edge_R = running_RV[:, running_RV.shape[1] // 2].contiguous()
    for target_weight_R in (
        torch.zeros_like(total_R),
        middle_R,
        edge_R,
        total_R - 1,
        total_R,
        torch.full_like(total_R, -1),
    ):
        place_R = (running_RV <= target_weight_R[:, None]).sum(dim=1)
        want_R = torch.where((target_weight_R >= 0) & (target_weight_R < total_R), place_R, -1)
        with poisoned():
            got_R = kernels.pick_column(gap_rows, gap_limit_R, sums_RX, target_weight_R)
        rows.append(equal((got_R, want_R)))
    return worst_of(*rows)


def _weights_alone(
    kernels: SamplingKernels, gap_rows: GapRows, place: int, gap_limit_R: torch.Tensor
) -> torch.Tensor:
    """Weights of the tokens of one row, int64 [V], each computed as the one token of a row of its
    own.
    """
    logits_V1 = gap_rows.logits_BV[gap_rows.rows_R[place]][:, None].contiguous()
    num_rows = len(logits_V1)
    alone = dataclasses.replace(
        gap_rows,
        logits_BV=logits_V1,
        block_max_BX=SAMPLING_REFERENCE.row_best(logits_V1)[2],
        rows_R=torch.arange(num_rows, device=logits_V1.device),
        max_R=gap_rows.max_R[place].repeat(num_rows),
        temperature_R=gap_rows.temperature_R[place].repeat(num_rows),
    )
    with poisoned():
        return kernels.block_weights(alone, gap_limit_R[place].repeat(num_rows))[1]
