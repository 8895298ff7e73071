"""8-bit weights: logits equal those of a transformers model whose products are replaced by 8-bit
ones, at every tensor-parallel size, and a checkpoint of codes gives the same as quantizing while
loading.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.rank_pool import WorkerPool, executor_of
from kernels.cpu.capabilities import has_int8
from kernels.reference.int8 import quantize_rows
from tests.checkpoints import Shape, make_checkpoint, quantize_checkpoint
from tests.workers.conftest import config_of
from tests.workers.test_exactness import run_logits

SHAPES = [
    Shape(name="plain"),
    Shape(name="tied_odd_vocabulary", vocab=1003, tied=True),
    Shape(name="bias_one_kv_head", kv_heads=1, extra={"attention_bias": True}),
]
TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 512, 40)]
# Float32 sums in another order. They may change a code by 1 of 127, which would show.
TOLERANCE = 2e-3
BACKENDS = ["reference", "cpu"] if has_int8() else ["reference"]


class EightBit(nn.Module):
    """A linear layer of codes, its input cut into `size` parts as on so many ranks."""

    def __init__(self, linear: nn.Linear, size: int) -> None:
        super().__init__()
        self.codes_YX, self.scale_Y = quantize_rows(linear.weight)
        self.bias, self.size = linear.bias, size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for part, codes in zip(
            x.chunk(self.size, -1), self.codes_YX.chunk(self.size, 1), strict=True
        ):
            x_codes, x_scale = quantize_rows(part.flatten(0, -2))
            sums = x_codes.double() @ codes.double().T
            product = sums * self.scale_Y.double() * x_scale.double().unsqueeze(1)
            total = total + product.float().view(*x.shape[:-1], -1)
        return total if self.bias is None else total + self.bias


def eight_bit(model: Any, size: int, vocabulary: bool) -> Any:
    """A copy of a transformers model with 8-bit products."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for part, letters in ((attention, "qkv"), (mlp, ("gate", "up"))):
            for name in (f"{letter}_proj" for letter in letters):
                setattr(part, name, EightBit(getattr(part, name), 1))
        attention.o_proj = EightBit(attention.o_proj, size)
        mlp.down_proj = EightBit(mlp.down_proj, size)
    if vocabulary:
        model.lm_head = EightBit(model.lm_head, 1)
        codes, scale = quantize_rows(model.model.embed_tokens.weight)
        rows = codes.float() * scale.unsqueeze(1)
        model.model.embed_tokens.weight = nn.Parameter(rows, requires_grad=False)
    return model


def logits_of(model: Any) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0].numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_logits_are_those_of_8_bit_products(
    pool: WorkerPool, tmp_path: Path, shape: Shape, backend: str
) -> None:
    model = make_checkpoint(tmp_path, shape)
    plain = logits_of(model)
    for size in (1, 2, 4):
        want = logits_of(eight_bit(model, size, vocabulary=True))
        config = config_of(
            tmp_path,
            tensor_parallel_size=size,
            quantization="int8",
            attention_backend=backend,
        )
        with executor_of(pool, config) as executor:
            ours = run_logits(executor, TOKENS)
        difference, cost = np.abs(ours - want).max(), np.abs(ours - plain)
        print(
            f"{shape.name} tp {size}: {difference:.1e} from 8-bit products, {cost.max():.2f} (mean"
            f" {cost.mean():.3f}) from plain ones, logits reach {np.abs(plain).max():.1f}"
        )
        assert difference < TOLERANCE
        assert cost.max() > 10 * TOLERANCE, "the products were not quantized"


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_of_codes(pool: WorkerPool, tmp_path: Path, size: int) -> None:
    """In the format of compressed-tensors, with an embedding and a head that are not quantized."""
    model = make_checkpoint(tmp_path, SHAPES[2])
    want = logits_of(eight_bit(model, size, vocabulary=False))
    quantize_checkpoint(tmp_path)
    config = config_of(tmp_path, tensor_parallel_size=size, attention_backend=BACKENDS[-1])
    assert config.quantization is not None and config.quantization.is_stored
    with executor_of(pool, config) as executor:
        assert np.abs(run_logits(executor, TOKENS) - want).max() < TOLERANCE
