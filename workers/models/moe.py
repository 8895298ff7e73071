"""The MLP of a layer with experts, on one tensor-parallel rank.

The router is whole on every rank. What it gets from an all-reduce has the same bits everywhere, and
the norm and the router's product keep them the same on any number of threads, because all ranks
have the same kind of processor, which is checked at the start (`cluster/ranks/group.py`). So all
ranks choose the same experts without asking each other. Of every expert a rank holds a part of the
features, as of a dense MLP: columns of gate and up, and what they multiply of down. A token's
partial sums over its experts are added up over the ranks in one all-reduce
(docs/decisions/0035-experts.md).

Legend: T tokens, X experts, E hidden size, F features of one expert on this rank, K experts
of a token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from configs.model import ModelConfig
from kernels.interface import ExpertWeights
from workers.models.layers import Part, ReplicatedLinear
from workers.models.weights import WeightFormat, WeightSlice


class MoE:
    """A router and its experts: for each token the weighted sum of the MLPs of some experts. Slices
    are those of checkpoints that hold each expert's matrices as tensors of their own.
    """

    def __init__(self, name: str, model: ModelConfig, weight_format: WeightFormat) -> None:
        experts_config = model.experts
        assert experts_config is not None and weight_format.quantization is None, (
            "the configuration was checked"
        )
        self.name = name
        self.experts_config = experts_config
        self.kernels, self.dtype = weight_format.kernels, weight_format.dtype
        self.group = weight_format.group
        self.shard_size = experts_config.intermediate_size // self.group.size

        def empty_weight(num_rows: int, size_in: int) -> Tensor:
            shape = (experts_config.num_experts, num_rows, size_in)
            return torch.empty(shape, dtype=weight_format.weight_dtype, device=self.group.device)

        self.router = ReplicatedLinear(
            f"{name}.gate", model.hidden_size, experts_config.num_experts, weight_format
        )
        self.weights = ExpertWeights(
            gate_up=empty_weight(2 * self.shard_size, model.hidden_size),
            down=empty_weight(model.hidden_size, self.shard_size),
        )

    def __call__(self, x_TE: Tensor, num_live_tokens_1: Tensor | None = None) -> Tensor:
        """[T, E], the same on every rank; arbitrary for tokens of a graph's padding."""
        weights_TK, ids_TK = self.kernels.experts.route(
            self.router(x_TE),
            self.experts_config.num_experts_per_token,
            self.experts_config.normalizes_weights,
            num_live_tokens_1,
        )
        out_TE = self.kernels.experts.mlp(x_TE, weights_TK, ids_TK, self.weights)
        return out_TE if self.group.size == 1 else self.group.all_reduce(out_TE)

    def slices(self) -> Iterator[WeightSlice]:
        yield from self.router.slices()
        size, full_size = self.weights.down.shape[1], self.experts_config.intermediate_size
        start = self.group.rank * self.shard_size
        for expert, (gate_up, down) in enumerate(
            zip(self.weights.gate_up, self.weights.down, strict=True)
        ):
            name = f"{self.name}.experts.{expert}"
            gate, up = gate_up.split(self.shard_size)
            yield WeightSlice(f"{name}.gate_proj.weight", (full_size, size), gate, 0, start)
            yield WeightSlice(f"{name}.up_proj.weight", (full_size, size), up, 0, start)
            yield WeightSlice(f"{name}.down_proj.weight", (size, full_size), down, 1, start)

    def parts(self) -> tuple[Part, ...]:
        return (self,)

    def pack(self) -> None:
        """Call once, after every slice is filled."""
        self.router.pack()
        self.weights = self.kernels.experts.pack_weights(self.weights, self.dtype)
