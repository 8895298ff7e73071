"""Models with experts behind graphs: each replay chooses and sorts anew, padding among the rows."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.experts import TritonExperts
from kernels.reference.experts import route_reference
from kernels.select import select_backend
from tests.checkpoints import Shape, make_checkpoint
from tests.kernels.test_experts import weights_of
from tests.workers.batch.graph_pair import MakeRunner, Pair, admitted
from tests.workers.fake_gpu import FakeGpu
from workers.batch import mixed_graphs

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not interpreted here")
def test_nothing_waits_for_the_device() -> None:
    experts, weights = TritonExperts(), weights_of(8, 32, 16, torch.float32)
    gpu, x = FakeGpu(), torch.randn(5, 32)

    def run() -> None:
        experts.mlp(x, *experts.route(torch.randn(5, 8), 2, True), weights)

    gpu.capture(run)


def test_the_reference_waits_for_the_device() -> None:
    """So it is refused with graphs."""
    weights, gpu = weights_of(8, 32, 16, torch.float32), FakeGpu()
    x, chosen = torch.randn(5, 32), route_reference(torch.randn(5, 8), 2, True)
    reference = select_backend("cpu", "reference").experts
    with pytest.raises(AssertionError, match="waits for the device"):
        gpu.capture(lambda: reference.mlp(x, *chosen, weights))
