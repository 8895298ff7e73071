"""Triton's experts against the references, on a GPU or in the interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.experts import TritonExperts, _sort_pairs_by_expert, choose_tile_config
from kernels.interface import ExpertWeights
from kernels.reference.experts import expert_mlp_reference, route_reference
from tests.kernels.gpu_device import DEVICE
from tests.kernels.test_gpu_elementwise import BFLOAT16, DTYPES, TOLERANCE, normal

OURS = TritonExperts()
# Experts, of a token, tokens, hidden size, features.
SIZES = [
    (8, 1, 1, 64, 64),
    (8, 2, 40, 64, 96),
    (32, 4, 17, 96, 48),
    (5, 5, 5, 48, 10),
    (4, 2, 60, 66, 34),
    (2, 2, 150, 32, 32),  # high tiles
]


def weights_of(num_experts: int, hidden: int, features: int, dtype: torch.dtype) -> ExpertWeights:
    return ExpertWeights(
        gate_up=normal(num_experts, 2 * features, hidden, seed=1, dtype=dtype) / hidden**0.5,
        down=normal(num_experts, hidden, features, seed=2, dtype=dtype) / features**0.5,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sums_are_those_of_the_reference(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    num_experts, num_experts_per_token, num_tokens, hidden, features = sizes
    weights = weights_of(num_experts, hidden, features, dtype)
    x = normal(num_tokens, hidden, dtype=dtype)
    before = x.clone()
    shares, ids = route_reference(
        normal(num_tokens, num_experts, seed=3), num_experts_per_token, True
    )
    want = expert_mlp_reference(x, shares, ids, weights)
    got = OURS.mlp(x, shares, ids, weights)
    assert got.dtype == dtype and torch.equal(x, before)
    largest = float(want.abs().max())
    torch.testing.assert_close(got, want, atol=2 * TOLERANCE[dtype] * largest, rtol=0)


@pytest.mark.parametrize("rows_per_expert", [1, 100])
def test_every_kind_of_tile_computes_the_same(
    rows_per_expert: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = choose_tile_config(rows_per_expert, 2)
    monkeypatch.setattr("kernels.gpu.experts.choose_tile_config", lambda *_: tiles)
    weights = weights_of(4, 160, 96, BFLOAT16)
    x, (shares, ids) = (
        normal(70, 160, dtype=BFLOAT16),
        route_reference(normal(70, 4, seed=3), 2, False),
    )
    want = expert_mlp_reference(x, shares, ids, weights)
    largest = float(want.abs().max())
    torch.testing.assert_close(
        OURS.mlp(x, shares, ids, weights), want, atol=2 * TOLERANCE[BFLOAT16] * largest, rtol=0
    )


@pytest.mark.parametrize(
    ("num_experts", "num_experts_per_token", "num_tokens"), [(8, 2, 1), (6, 3, 1500)]
)
def test_pairs_are_sorted_and_every_one_is_in_one_tile(
    num_experts: int, num_experts_per_token: int, num_tokens: int
) -> None:
    _, ids = route_reference(normal(num_tokens, num_experts, seed=6), num_experts_per_token, False)
    ids[ids == 1] = 0  # some expert has no token; a token may have one twice here
    order, tiles = _sort_pairs_by_expert(ids, num_experts, 16)
    assert torch.equal(order.long(), ids.flatten().sort(stable=True).indices)
    covered = []
    for expert, first, num_rows in tiles.tolist():
        if num_rows:
            pairs = order[first : first + num_rows]
            assert len(pairs) == num_rows <= 16 and (ids.flatten()[pairs.long()] == expert).all()
            covered += pairs.tolist()
    assert sorted(covered) == list(range(num_tokens * num_experts_per_token))


@pytest.mark.parametrize("normalizes_weights", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "num_experts_per_token"), [(1, 1), (8, 2), (128, 8), (20, 20)]
)
def test_choices_and_weights_are_those_of_the_reference(
    num_experts: int, num_experts_per_token: int, normalizes_weights: bool
) -> None:
    logits = (4 * normal(12, num_experts)).round(decimals=1).to(BFLOAT16)  # some are equal
    shares, ids = OURS.route(logits, num_experts_per_token, normalizes_weights, None)
    expected_shares, expected_ids = route_reference(
        logits, num_experts_per_token, normalizes_weights
    )
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(shares, expected_shares, rtol=3e-6, atol=1e-9)


def test_no_tokens_give_no_rows() -> None:
    weights, x = weights_of(8, 64, 32, BFLOAT16), normal(0, 64, dtype=BFLOAT16)
    shares, ids = OURS.route(normal(0, 8, dtype=BFLOAT16), 2, True, None)
    assert shares.shape == ids.shape == (0, 2)
    for mlp in (OURS.mlp, expert_mlp_reference):
        assert mlp(x, shares, ids, weights).shape == (0, 64)


def test_logits_without_order_choose_experts_that_there_are() -> None:
    logits = torch.tensor([[torch.nan] * 5, [-torch.inf] * 5, [1.0, -torch.inf, 2.0, 0.0, 0.0]])
    _, ids = OURS.route(logits.to(DEVICE), 3, True, None)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2], [2, 0, 3]]


def test_a_token_gets_the_same_bits_in_any_batch_of_the_same_tiles() -> None:
    weights = weights_of(8, 64, 32, BFLOAT16)
    x, (shares, ids) = (
        normal(20, 64, dtype=BFLOAT16),
        route_reference(normal(20, 8, seed=3), 2, True),
    )
    together = OURS.mlp(x, shares, ids, weights)
    alone = OURS.mlp(x[7:8].clone(), shares[7:8].clone(), ids[7:8].clone(), weights)
    assert torch.equal(alone[0], together[7])


def test_padding_chooses_no_expert_and_reads_none() -> None:
    weights, num_live = weights_of(32, 64, 32, BFLOAT16), torch.tensor([3], dtype=torch.int32)
    x, logits = normal(16, 64, dtype=BFLOAT16), normal(16, 32, seed=4, dtype=BFLOAT16)
    shares, ids = OURS.route(logits, 4, True, num_live.to(DEVICE))
    live_shares, live_ids = OURS.route(logits[:3].contiguous(), 4, True, None)
    assert torch.equal(ids[:3], live_ids) and torch.equal(shares[:3], live_shares)
    _, tiles = _sort_pairs_by_expert(ids, 32, 16)
    experts_read = {expert for expert, _, num_rows in tiles.tolist() if num_rows}
    assert experts_read == set(live_ids.flatten().tolist())
    out = OURS.mlp(x, shares, ids, weights)
    assert torch.equal(out[:3], OURS.mlp(x[:3].contiguous(), live_shares, live_ids, weights))
    assert not out[3:].any()
    reference = route_reference(logits, 4, True, num_live.to(DEVICE))
    assert torch.equal(ids, reference[1])
    assert not expert_mlp_reference(x, *reference, weights)[3:].any()
