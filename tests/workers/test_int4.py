"""Checkpoints of 4 bits, kept so in memory: logits are those of a transformers model with the
values that are stored, at every tensor-parallel size.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.rank_pool import WorkerPool, executor_of
from configs.engine import EngineConfig, ResolvedConfig
from configs.model import ModelConfig
from configs.quantization import INT4, Quantization, computed_quantization, stored_quantization
from kernels.cpu.backend import CPU_KERNELS
from kernels.interface import Int4Weight
from kernels.reference.int4 import quantize_groups, widened
from kernels.select import choose
from scheduler.errors import ConfigError
from tests.checkpoints import Shape, make_checkpoint, pack_checkpoint
from tests.stored_checkpoints import (
    SINGLE_NAME,
    awq,
    draw_awq,
    draw_pack_quantized,
    pack_quantized,
    write_stored,
)
from tests.workers.conftest import config_of
from tests.workers.test_exactness import run_logits
from workers.configuration import resolve
from workers.memory.weights import adopt_weights, keep_weights
from workers.models.loader import kept_quantization, load_weights
from workers.models.qwen3 import Qwen3
from workers.models.weights import GroupedWeight
from workers.parallel.group import TensorParallelGroup

# 4 ranks cut the MLP within groups of 128, and heads within those of 64.
SHAPE = Shape(name="four_bits", hidden=128, intermediate=640, heads=4, kv_heads=2, head_dim=32)
TIED = Shape(
    name="tied_odd_vocabulary", hidden=128, intermediate=256, head_dim=32, vocab=1003, tied=True
)
FORMATS: dict[str, Any] = {
    "awq_128": (awq(128), draw_awq(128, torch.float16)),
    "pack_32": (pack_quantized(32, True), draw_pack_quantized(32, True, torch.bfloat16)),
    "pack_row": (pack_quantized(-1, False), draw_pack_quantized(-1, False, torch.bfloat16)),
    "gptq": None,
}
TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, SHAPE.vocab, 40)]


def stored_model(model_dir: Path, name: str, shape: Shape = SHAPE) -> Any:
    """Write a checkpoint in a format. Returns the transformers model of the stored values."""
    model = make_checkpoint(model_dir, shape)
    if name == "gptq":
        pack_checkpoint(model_dir, model, bits=4, group_size=64, symmetric=False)
    else:
        write_stored(model_dir, model, *FORMATS[name])
    return model


def loaded_model(model_dir: Path, rank: int = 0, size: int = 1) -> Qwen3:
    """One rank of a model in 4 bits."""
    model = ModelConfig.from_dir(model_dir)
    group = TensorParallelGroup(rank, size, torch.device("cpu"))
    assert model.stored is not None
    quantization = stored_quantization(model.stored, model.sizes_in(size))
    kept = kept_quantization(model_dir, model, quantization)
    assert kept is not None and kept.name == INT4
    ours = Qwen3(model, group, CPU_KERNELS, torch.float32, 64, kept)
    load_weights(ours.slices(), model_dir, model)
    ours.pack()
    return ours


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_stored_values(
    pool: WorkerPool, tmp_path: Path, name: str, backend: str
) -> None:
    model = stored_model(tmp_path, name)
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    for size in (1, 2, 4):
        config = config_of(tmp_path, tensor_parallel_size=size, attention_backend=backend)
        assert config.quantization is not None and config.quantization.name == INT4
        with executor_of(pool, config) as executor:
            ours = run_logits(executor, TOKENS)
        assert np.abs(ours - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_holds_its_share_of_the_file(tmp_path: Path, size: int) -> None:
    """Within 5%, of the matrices of the layers."""
    shape = Shape(name="wide", hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=128)
    stored_model(tmp_path, "awq_128", shape)
    in_file = sum(
        tensor.nbytes
        for name, tensor in load_file(tmp_path / SINGLE_NAME).items()
        if name.endswith(("qweight", "qzeros", "scales"))
    )
    for rank in range(size):
        layers = loaded_model(tmp_path, rank, size).layers
        weights = [matrix.weight for layer in layers for matrix in layer.matrices()]  # type: ignore[attr-defined]
        assert all(isinstance(weight, GroupedWeight) for weight in weights)
        assert sum(weight.nbytes for weight in weights) < 1.05 * in_file / size


def test_a_standby_computes_with_the_same_codes(tmp_path: Path) -> None:
    stored_model(tmp_path, "awq_128")
    model = loaded_model(tmp_path)
    x = torch.randn(2, SHAPE.hidden)
    before = model.layers[1].mlp(x)
    memory = keep_weights(model, "eagleray-test-int4")
    try:
        group = TensorParallelGroup(0, 1, torch.device("cpu"))
        adopted = adopt_weights(memory, ModelConfig.from_dir(tmp_path), group, CPU_KERNELS)
        assert torch.equal(adopted.layers[1].mlp(x), before)
        assert torch.equal(model.layers[1].mlp(x), before)
    finally:
        memory.close()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_plain_checkpoint_is_rounded_to_the_same_codes_on_any_number_of_ranks(
    tmp_path: Path, size: int
) -> None:
    """By at most half a step, a fifteenth of what a group of 128 inputs spans."""
    make_checkpoint(tmp_path, SHAPE)
    model, plain = ModelConfig.from_dir(tmp_path), load_file(tmp_path / SINGLE_NAME)
    for rank in range(size):
        group = TensorParallelGroup(rank, size, torch.device("cpu"))
        ours = Qwen3(model, group, CPU_KERNELS, torch.float32, 64, computed_quantization(INT4))
        pieces = [piece for piece in ours.slices() if piece.zeros is not None]
        load_weights(pieces, tmp_path, model)
        assert len(pieces) == 7 * SHAPE.layers + 2, "with embedding and head"
        for piece in pieces:
            assert piece.scale is not None and piece.zeros is not None
            weight = Int4Weight(
                words_YW=piece.target,
                zeros_YG=piece.zeros,
                scale_YG=piece.scale,
                num_rows=len(piece.target),
            )
            whole = plain[piece.name]
            grouped = whole.unflatten(1, (-1, 128))
            span = grouped.amax(2).clamp(min=0) - grouped.amin(2).clamp(max=0)
            steps = (span / 15).repeat_interleave(128, 1)
            values = widened(weight)
            part = slice(piece.start, piece.start + values.shape[piece.dim])
            place = (part, slice(None)) if piece.dim == 0 else (slice(None), part)
            error = (values - whole[place]).abs() / steps[place]
            assert 0.4 < error.max() < 0.55, "bfloat16 scales round a little more"


def test_codes_that_are_computed_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"  # 4 ranks cut its groups
    make_checkpoint(tmp_path, SHAPE)
    model = ModelConfig.from_dir(tmp_path)
    words = {}
    for size in (1, 4):
        parts = []
        for rank in range(size):
            group = TensorParallelGroup(rank, size, torch.device("cpu"))
            ours = Qwen3(model, group, CPU_KERNELS, torch.float32, 64, computed_quantization(INT4))
            pieces = [piece for piece in ours.slices() if piece.name == name]
            load_weights(pieces, tmp_path, model)
            parts.append(pieces[0].target)
        words[size] = torch.cat(parts, dim=1)
    assert torch.equal(words[1], words[4])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("shape", [SHAPE, TIED], ids=lambda shape: shape.name)
def test_a_plain_checkpoint_computes_with_rounded_weights(
    pool: WorkerPool, tmp_path: Path, shape: Shape, backend: str
) -> None:
    model = make_checkpoint(tmp_path, shape)
    with torch.inference_mode():
        plain = model(torch.tensor([TOKENS])).logits[0].numpy()
        for parameter in model.parameters():
            if parameter.ndim == 2:
                codes, zeros, scale = quantize_groups(parameter, 128)
                zeros, scale = (t.repeat_interleave(128, 1).float() for t in (zeros, scale))
                parameter.copy_((codes - zeros) * scale)
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    assert np.abs(plain - expected).max() > 1e-2, "the weights were not rounded"
    for size in (1, 2, 4):
        options = {"tensor_parallel_size": size, "attention_backend": backend}
        config = config_of(tmp_path, quantization=INT4, **options)
        with executor_of(pool, config) as executor:
            ours = run_logits(executor, TOKENS)
        assert np.abs(ours - expected).max() < 1e-4 * np.abs(expected).max()


def test_groups_that_are_no_whole_words_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape(name="narrow", intermediate=100))
    with pytest.raises(ConfigError, match="'int4' is not possible for matrices of 64, 64, 100"):
        resolved(tmp_path, quantization=INT4)


def resolved(model_dir: Path, device: str = "cpu", **options: Any) -> ResolvedConfig:
    model = ModelConfig.from_dir(model_dir)
    backend = choose(device, options.get("attention_backend", "auto"))
    return resolve(EngineConfig(**options), model, model_dir, device, backend)


def test_what_cannot_be_kept_is_widened(tmp_path: Path) -> None:
    """Groups in another order, 8 bits, and where other codes are asked for."""
    model = make_checkpoint(tmp_path, SHAPE)
    pack_checkpoint(tmp_path, model, bits=4, group_size=64, ordered=False)
    assert resolved(tmp_path).quantization is None
    model = make_checkpoint(tmp_path, SHAPE)
    pack_checkpoint(tmp_path, model, bits=8, group_size=64)
    assert resolved(tmp_path).quantization is None
    stored_model(tmp_path, "pack_32")
    assert resolved(tmp_path).quantization is not None
    from_user = resolved(tmp_path, quantization="int8").quantization
    assert from_user == Quantization(stored=False, vocabulary=True)


@pytest.mark.parametrize("name", ["triton", "reference"])
def test_4_bits_are_kept_on_gpus_too(tmp_path: Path, name: str) -> None:
    stored_model(tmp_path, "pack_32")
    quantization = resolved(tmp_path, "cuda", attention_backend=name).quantization
    assert quantization is not None and quantization.name == INT4 and quantization.stored
    make_checkpoint(tmp_path, SHAPE)
    options = {"attention_backend": name, "quantization": INT4}
    assert resolved(tmp_path, "cuda", **options).quantization == computed_quantization(INT4)


def test_a_checkpoint_with_a_plain_matrix_is_widened_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = stored_model(tmp_path, "pack_32").state_dict()
    name = "model.layers.1.mlp.down_proj."
    tensors = load_file(tmp_path / SINGLE_NAME)
    tensors = {n: t for n, t in tensors.items() if not n.startswith(name)}
    save_file(tensors | {f"{name}weight": weights[f"{name}weight"].clone()}, tmp_path / SINGLE_NAME)
    config = resolved(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert kept_quantization(tmp_path, config.model, config.quantization) is None
    assert f"not kept in 4 bits, because {name}weight is not quantized" in caplog.text
    refusal = f"'int4' is not possible .* {re.escape(name)}weight is not quantized. Leave it out"
    with pytest.raises(ConfigError, match=refusal):
        kept_quantization(tmp_path, config.model, config.quantization, is_asked_for=True)
