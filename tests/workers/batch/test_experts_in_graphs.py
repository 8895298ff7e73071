"""Models with experts behind graphs: each replay chooses and sorts anew, padding among the rows."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from kernels.gpu.experts import TritonExperts
from kernels.interface import ExpertWeights, Kernels
from kernels.reference.backend import REFERENCE_KERNELS as REFERENCE
from kernels.reference.experts import route_reference
from kernels.select import select_backend
from tests.checkpoints import Shape, make_checkpoint
from tests.kernels.replaced import Replaced
from tests.kernels.test_experts import weights_of
from tests.workers.batch.graph_pair import MakeRunner, Pair, admitted
from tests.workers.fake_gpu import FakeGpu
from workers.batch import mixed_graphs

NUM_EXPERTS = 8
EXPERTS = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def make_with_experts(tmp_path_factory: pytest.TempPathFactory) -> MakeRunner:
    model_dir = tmp_path_factory.mktemp("experts")
    make_checkpoint(model_dir, Shape(name="experts", extra=EXPERTS | {"norm_topk_prob": True}))
    return MakeRunner(model_dir)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not interpreted here")
def test_replayed_steps_give_the_tokens_of_eager_ones(
    make_with_experts: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_graphs, "_SIZES", ())  # large, so slow in the interpreter
    pair = Pair(make_with_experts, 3, select_backend("cpu", "triton"))
    rows = admitted(pair, 3)
    pair.step([(row, 10) for row in rows])
    for chosen in (rows, rows[:1], rows[1:], rows[::2], rows):
        assert pair.step([(row, 1) for row in chosen]) in (1, 2, 3)


@pytest.mark.parametrize(
    ("sizes", "num_tokens", "ran"), [((), [1, 1, 1], 4), ((16,), [1, 7, 1], 16)], ids=str
)
def test_padding_chooses_no_expert_whose_weights_would_be_read(
    make_with_experts: MakeRunner,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, ...],
    num_tokens: list[int],
    ran: int,
) -> None:
    monkeypatch.setattr(mixed_graphs, "_SIZES", sizes)
    choices: list[Tensor] = []

    def mlp(x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, weights: ExpertWeights) -> Tensor:
        choices.append(ids_TK.clone())
        return REFERENCE.experts.mlp(x_TE, weights_TK, ids_TK, weights)

    experts = Replaced(REFERENCE.experts, mlp=mlp)
    pair = Pair(make_with_experts, 4, cast(Kernels, Replaced(REFERENCE, experts=experts)))
    rows = admitted(pair, 3)
    if not sizes:
        pair.step([(row, 10) for row in rows])
    num_live = sum(min(n, len(row.tokens)) for row, n in zip(rows, num_tokens, strict=True))
    choices.clear()
    assert pair.step(list(zip(rows, num_tokens, strict=True))) == ran
    assert len(choices) == 2  # a layer each
    for ids_TK in choices:
        assert (ids_TK[:num_live] < NUM_EXPERTS).all() and len(ids_TK) == ran
        assert (ids_TK[num_live:] == NUM_EXPERTS).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not interpreted here")
def test_nothing_waits_for_the_device() -> None:
    experts, weights = TritonExperts(), weights_of(8, 32, 16, torch.float32)
    gpu, x = FakeGpu(), torch.randn(5, 32)

    def run() -> None:
        experts.mlp(x, *experts.route(torch.randn(5, 8), 2, True, None), weights)

    gpu.capture(run)


def test_the_reference_waits_for_the_device() -> None:
    """So it is refused with graphs."""
    weights, gpu = weights_of(8, 32, 16, torch.float32), FakeGpu()
    x, chosen = torch.randn(5, 32), route_reference(torch.randn(5, 8), 2, True)
    reference = select_backend("cpu", "reference").experts
    with pytest.raises(AssertionError, match="waits for the device"):
        gpu.capture(lambda: reference.mlp(x, *chosen, weights))
