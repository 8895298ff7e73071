"""Experts on a CPU: the same choices as the definition, and the same sums up to rounding; a token's
result depends on no other token and not on the number of threads.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu.experts import CpuExperts, PackedExperts
from kernels.cpu.tile import has_dot_products
from kernels.interface import ExpertWeights
from kernels.reference.experts import ReferenceExperts, expert_mlp_reference, route_reference
from kernels.select import select_backend

pytestmark = pytest.mark.usefixtures("two_threads")
OURS = CpuExperts()
FORMS = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "mixed": (torch.float32, torch.bfloat16),
}
# Experts, of a token, tokens, hidden size, features.
SIZES = [
    (8, 1, 1, 64, 64),
    (8, 2, 40, 64, 96),
    (128, 8, 17, 128, 48),
    (16, 16, 5, 48, 10),
    (4, 2, 700, 66, 34),  # more rows than stay in the cache
    (3, 2, 9, 31, 7),  # odd: pairs of bfloat16 do not come out even
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights_of(num_experts: int, hidden: int, features: int, dtype: torch.dtype) -> ExpertWeights:
    return ExpertWeights(
        gate_up=(normal(num_experts, 2 * features, hidden, seed=1) / hidden**0.5).to(dtype),
        down=(normal(num_experts, hidden, features, seed=2) / features**0.5).to(dtype),
    )


def copy_of(weights: ExpertWeights) -> ExpertWeights:
    """Packing overwrites what it is given."""
    return ExpertWeights(gate_up=weights.gate_up.clone(), down=weights.down.clone())


def routing_of(
    num_experts: int, num_experts_per_token: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    return route_reference(normal(num_tokens, num_experts, seed=3), num_experts_per_token, True)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_sums_are_those_of_the_definition(
    form: tuple[torch.dtype, torch.dtype], sizes: tuple[int, int, int, int, int]
) -> None:
    (dtype, weight_dtype), (num_experts, _, num_tokens, hidden, features) = form, sizes
    weights = weights_of(num_experts, hidden, features, weight_dtype)
    x, (shares, ids) = normal(num_tokens, hidden).to(dtype), routing_of(*sizes[:3])
    packed = OURS.pack_weights(copy_of(weights), dtype)
    # With the weights of `ids`, but in float64: what is exact but for their rounding.
    exact_weights = ExpertWeights(gate_up=weights.gate_up.double(), down=weights.down.double())
    exact = expert_mlp_reference(x.double(), shares.double(), ids, exact_weights)
    error = (OURS.mlp(x, shares, ids, packed).double() - exact).abs().max()
    of_reference = (expert_mlp_reference(x, shares, ids, weights).double() - exact).abs().max()
    rounding = 2 * torch.finfo(dtype).eps * float(exact.abs().max())
    assert error <= max(3 * float(of_reference), rounding)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_packed_weights_stay_where_they_were(form: tuple[torch.dtype, torch.dtype]) -> None:
    weights = weights_of(4, 64, 64, form[1])
    packed = OURS.pack_weights(weights, form[0])
    if form[0] is torch.bfloat16 and not has_dot_products():
        assert packed is weights
        return
    assert isinstance(packed, PackedExperts)
    assert packed.gate_up.data_ptr() == weights.gate_up.data_ptr()
    assert packed.down.data_ptr() == weights.down.data_ptr()
    assert packed.gate_up.numel() == weights.gate_up.numel()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_token_gets_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    form: tuple[torch.dtype, torch.dtype],
) -> None:
    if form[0] is torch.bfloat16 and not has_dot_products():
        pytest.skip("PyTorch multiplies, which rounds as it likes")
    experts = OURS.pack_weights(weights_of(16, 128, 64, form[1]), form[0])
    x, (shares, ids) = normal(300, 128).to(form[0]), routing_of(16, 4, 300)
    together = OURS.mlp(x, shares, ids, experts)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(5))
    assert torch.equal(OURS.mlp(x[order], shares[order], ids[order], experts), together[order])
    for t in (0, 7, 299):
        alone = OURS.mlp(x[t : t + 1], shares[t : t + 1], ids[t : t + 1], experts)
        assert torch.equal(alone[0], together[t])
    select_backend("cpu", "cpu").set_num_threads(1)
    assert torch.equal(OURS.mlp(x, shares, ids, experts), together)


@pytest.mark.parametrize("normalizes_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_experts", "num_experts_per_token"), [(1, 1), (8, 2), (128, 8), (160, 160)]
)
def test_choices_and_weights_are_those_of_the_definition(
    num_experts: int, num_experts_per_token: int, dtype: torch.dtype, normalizes_weights: bool
) -> None:
    """In bfloat16 some logits are equal."""
    logits = (4 * normal(50, num_experts)).to(dtype)
    shares, ids = OURS.route(logits, num_experts_per_token, normalizes_weights, None)
    expected_shares, expected_ids = route_reference(
        logits, num_experts_per_token, normalizes_weights
    )
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(shares, expected_shares, rtol=1e-6, atol=1e-9)


def test_of_equal_experts_the_first_is_chosen() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    for route in (OURS.route, route_reference):
        shares, ids = route(logits, 3, False, None)
        assert ids.tolist() == [[1, 2, 4], [0, 1, 2]]
        assert torch.equal(shares[1], torch.full((3,), 0.2))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_no_tokens_give_no_rows(form: tuple[torch.dtype, torch.dtype]) -> None:
    weights, x = weights_of(8, 64, 32, form[1]), torch.empty(0, 64, dtype=form[0])
    packed = OURS.pack_weights(copy_of(weights), form[0])
    for kernels, experts in ((ReferenceExperts(), weights), (OURS, packed)):
        shares, ids = kernels.route(torch.empty(0, 8, dtype=form[0]), 2, True, None)
        assert shares.shape == ids.shape == (0, 2)
        out = kernels.mlp(x, shares, ids, experts)
        assert out.shape == (0, 64) and out.dtype == form[0]


def test_very_unequal_logits_give_finite_weights() -> None:
    shares, ids = OURS.route(torch.tensor([[-1e30, 3e38, 0.0, -torch.inf]]), 3, True, None)
    assert ids.tolist() == [[1, 2, 0]] and shares.tolist() == [[1.0, 0.0, 0.0]]


def test_logits_that_are_no_numbers_choose_experts_that_there_are() -> None:
    _, ids = OURS.route(torch.full((2, 8), torch.nan), 3, True, None)
    assert all(len(set(row)) == 3 and 0 <= min(row) <= max(row) < 8 for row in ids.tolist())


def test_all_tokens_may_go_to_one_expert() -> None:
    weights = weights_of(8, 64, 32, torch.float32)
    ids, shares = torch.full((520, 1), 5, dtype=torch.int32), torch.ones(520, 1)
    x = normal(520, 64)
    ours = OURS.mlp(x, shares, ids, OURS.pack_weights(copy_of(weights), torch.float32))
    torch.testing.assert_close(ours, expert_mlp_reference(x, shares, ids, weights))
