"""Runners over one small model, with graphs and without, that get the same plans."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from kernels.interface import Kernels
from kernels.reference.backend import REFERENCE_KERNELS as REFERENCE
from scheduler.messages import int32_array
from scheduler.params import ResolvedSampling
from tests.workers.conftest import config_of
from tests.workers.fake_gpu import FakeGpu, FakeGraph
from tests.workers.models.parts import fill_and_pack_parts
from tests.workers.planner import Planner, Row
from workers.device import Device
from workers.model_runner import ModelRunner
from workers.models.qwen3 import Qwen3
from workers.parallel.group import TensorParallelGroup

BLOCK_SIZE = 4


class MakeRunner:
    """Makes a runner on a device; the weights are the same every time."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint

    def __call__(
        self,
        device: Device,
        max_num_seqs: int,
        kernels: Kernels = REFERENCE,
        num_blocks: int | None = None,
        **options: Any,
    ) -> ModelRunner:
        options = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max(64, max_num_seqs),
        } | options
        config = config_of(self._checkpoint, attention_backend="reference", **options)
        group = TensorParallelGroup(0, 1, device.torch_device)
        kernels = device.recordable(kernels) if isinstance(device, FakeGpu) else kernels
        length, quantization = config.max_model_len, config.quantization
        model = Qwen3(config.model, group, kernels, torch.float32, length, quantization)
        fill_and_pack_parts(model, Path(config.model_dir), config.model)
        num_blocks = num_blocks or max_num_seqs * 4
        return ModelRunner(config, model, device, num_blocks)


class Pair:
    """Two runners that get the same plans, one with graphs. `tolerance`: of their caches."""

    def __init__(
        self,
        make: MakeRunner,
        max_num_seqs: int,
        graph_kernels: Kernels = REFERENCE,
        tolerance: float = 1e-5,
        **options: Any,
    ) -> None:
        self.gpu, self.tolerance = FakeGpu(), tolerance
        self.with_graphs = make(self.gpu, max_num_seqs, graph_kernels, **options)
        self.eager = make(Device(torch.device("cpu")), max_num_seqs, **options)
        self.planner = Planner(BLOCK_SIZE)

    def step(self, rows: list[tuple[Row, int]]) -> int | None:
        """Run a step on both and compare them. Returns the captured size that ran."""
        plan = self.planner.step(rows)
        graphs = model_graphs(self.with_graphs)
        replays = [graph.num_replays for graph in graphs]
        (tokens, _), (expected, _) = (
            runner.run(plan).finish(1.0, "a step") for runner in (self.with_graphs, self.eager)
        )
        assert tokens == expected
        caches = self.with_graphs.cache.tensor, self.eager.cache.tensor
        torch.testing.assert_close(*caches, rtol=self.tolerance, atol=self.tolerance)
        self.planner.take(plan.step_id, int32_array(tokens))
        ran = [i for i, graph in enumerate(graphs) if graph.num_replays != replays[i]]
        assert len(ran) <= 1
        return captured_sizes(self.with_graphs)[ran[0]] if ran else None


def model_graphs(runner: ModelRunner) -> list[FakeGraph]:
    """Those of the model, in the order in which they were captured; those of sampling come last."""
    assert isinstance(runner.device, FakeGpu)
    return runner.device.graphs[: -len(runner.next_tokens.graphs) or None]


def sampling_graphs(runner: ModelRunner) -> list[FakeGraph]:
    """Those of sampling, in the order in which they were captured."""
    assert isinstance(runner.device, FakeGpu)
    return runner.device.graphs[len(model_graphs(runner)) :]


def captured_sizes(runner: ModelRunner) -> list[int]:
    """Of each graph of the model, in the order in which they were captured."""
    mixed, decode = runner.mixed_graphs, runner.decode_graphs
    assert mixed is not None and decode is not None
    num_bounds = len(decode._graphs) // len(decode.sizes)
    decode_sizes = [size for size in reversed(decode.sizes) for _ in range(num_bounds)]
    return [*reversed(mixed.sizes), *decode_sizes]


def admitted(pair: Pair, number: int, sampling: ResolvedSampling | None = None) -> list[Row]:
    """Rows in slots 0 to `number` - 1, each with a prompt of 1 to 7 tokens."""
    rng = random.Random(number)
    rows = [Row([rng.randrange(100) for _ in range(rng.randint(1, 7))], 1) for _ in range(number)]
    for slot, row in enumerate(rows):
        row.num_prompt = len(row.tokens)
        row.sampling = sampling or row.sampling
        pair.planner.admit(row, slot)
    return rows
