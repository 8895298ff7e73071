"""Checkpoints of 4 bits and of FP8, kept so in memory: logits are those of a transformers model
with the values that are stored, at every tensor-parallel size.
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
from configs.model import ModelConfig
from configs.quantization import (
    FP8,
    INT4,
    computed_quantization,
    stored_quantization,
)
from kernels.cpu.backend import CPU_KERNELS
from kernels.gpu.backend import TRITON_KERNELS
from kernels.gpu.grouped import MAX_FUSED_ROWS
from kernels.interface import GroupedCodes
from kernels.reference.fp8 import MAX_FP8
from kernels.reference.grouped import dequantize, quantize_blocks, quantize_groups
from scheduler.errors import ConfigError
from tests.checkpoints import Shape, make_checkpoint, pack_checkpoint
from tests.kernels.replaced import Replaced
from tests.stored_checkpoints import (
    SINGLE_FILE_NAME,
    awq,
    draw_awq,
    draw_fp8,
    draw_pack_quantized,
    float_quantized,
    fp8_blocks,
    pack_quantized,
    write_stored,
)
from tests.workers.conftest import config_of
from tests.workers.models.parts import fill_and_pack_parts, fill_parts, slices_of
from tests.workers.test_exactness import run_logits
from workers.loading import load_model
from workers.memory.weights import WeightsFile, adopt_weights
from workers.models.checkpoint import quantization_of_files
from workers.models.layers import ReplicatedVector
from workers.models.qwen3 import Qwen3
from workers.models.weights import GroupedWeight, WeightFormat, WeightSlice
from workers.parallel.group import TensorParallelGroup
from workers.progress import Progress

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
    "fp8_float32": (fp8_blocks(), draw_fp8("block", torch.float32, "weight_scale_inv")),
    "fp8_bfloat16": (fp8_blocks(), draw_fp8("block", torch.bfloat16, "weight_scale_inv")),
    **{
        f"float_{strategy}": (float_quantized(strategy), draw_fp8(strategy, torch.bfloat16))
        for strategy in ("tensor", "channel", "block")
    },
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


def form_of(name: str) -> str:
    """How a rank holds the matrices of a format."""
    return FP8 if name.startswith("f") else INT4


def loaded_model(model_dir: Path, rank: int = 0, size: int = 1, packs: bool = True) -> Qwen3:
    """One rank of a model whose codes are kept."""
    model = ModelConfig.from_dir(model_dir)
    group = TensorParallelGroup(rank, size, torch.device("cpu"))
    assert model.stored_format is not None
    quantization = stored_quantization(model.stored_format, model.input_sizes(size))
    kept, _ = quantization_of_files(model_dir, model, quantization)
    assert kept is not None
    ours = Qwen3(model, group, CPU_KERNELS, torch.float32, 64, kept)
    (fill_and_pack_parts if packs else fill_parts)(ours, model_dir, model)
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
        assert config.quantization is not None and config.quantization.name == form_of(name)
        with executor_of(pool, config) as executor:
            ours = run_logits(executor, TOKENS)
        assert np.abs(ours - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_codes_that_are_kept_stand_for_the_stored_values(
    tmp_path: Path, name: str, size: int
) -> None:
    """To the bit, on every rank; e4m3 numbers times their scales rounded to float32."""
    weights = stored_model(tmp_path, name).state_dict()
    for rank in range(size):
        model = loaded_model(tmp_path, rank, size, packs=False)
        pieces = [piece for piece in slices_of(model) if piece.scale is not None]
        assert len(pieces) == 7 * SHAPE.layers
        for piece in pieces:
            values = dequantize(codes_of(piece))
            part = weights[piece.name].narrow(piece.dim, piece.start, values.shape[piece.dim])
            assert torch.equal(values, part), piece.name


def codes_of(piece: WeightSlice) -> GroupedCodes:
    """What a slice was filled with."""
    assert piece.scale is not None
    return GroupedCodes(
        words=piece.target,
        zeros=piece.zeros,
        scale=piece.scale,
        num_rows=len(piece.target),
    )


@pytest.mark.parametrize("name", ["awq_128", "fp8_bfloat16", "float_tensor"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_holds_its_share_of_the_file(tmp_path: Path, name: str, size: int) -> None:
    """Within 5%, of the matrices of the layers."""
    shape = Shape(name="wide", hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=128)
    stored_model(tmp_path, name, shape)
    in_file = sum(
        tensor.nbytes
        for name, tensor in load_file(tmp_path / SINGLE_FILE_NAME).items()
        if name.endswith(("qweight", "qzeros", "scales", "_proj.weight", "scale_inv", "scale"))
    )
    for rank in range(size):
        layers = loaded_model(tmp_path, rank, size).layers
        parts = [part for layer in layers for part in layer.parts()]
        weights = [part.weight for part in parts if not isinstance(part, ReplicatedVector)]  # type: ignore[attr-defined]
        assert all(isinstance(weight, GroupedWeight) for weight in weights)
        tensors = [
            tensor
            for weight in weights
            for tensor in (weight.weight.words, weight.weight.zeros, weight.weight.scale)
            if tensor is not None
        ]
        assert sum(tensor.nbytes for tensor in tensors) < 1.05 * in_file / size


@pytest.mark.parametrize("name", ["awq_128", "fp8_bfloat16"])
def test_a_standby_computes_with_the_same_codes(tmp_path: Path, name: str) -> None:
    stored_model(tmp_path, name)
    model = loaded_model(tmp_path)
    x = torch.randn(2, SHAPE.hidden)
    before = model.layers[1].mlp(x)
    memory = WeightsFile("eagleray-test-grouped", model.group, model.kernels).finish(model)
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
    model, plain = ModelConfig.from_dir(tmp_path), load_file(tmp_path / SINGLE_FILE_NAME)
    for rank in range(size):
        group = TensorParallelGroup(rank, size, torch.device("cpu"))
        ours = Qwen3(model, group, CPU_KERNELS, torch.float32, 64, computed_quantization(INT4))
        fill_parts(ours, tmp_path, model)
        pieces = [piece for piece in slices_of(ours) if piece.scale is not None]
        assert len(pieces) == 7 * SHAPE.layers + 2, "with embedding and head"
        for piece in pieces:
            whole = plain[piece.name]
            grouped = whole.unflatten(1, (-1, 128))
            span = grouped.amax(2).clamp(min=0) - grouped.amin(2).clamp(max=0)
            steps = (span / 15).repeat_interleave(128, 1)
            values = dequantize(codes_of(piece))
            part = slice(piece.start, piece.start + values.shape[piece.dim])
            place = (part, slice(None)) if piece.dim == 0 else (slice(None), part)
            error = (values - whole[place]).abs() / steps[place]
            assert 0.4 < error.max() < 0.55, "bfloat16 scales round a little more"


@pytest.mark.parametrize("form", [INT4, FP8])
@pytest.mark.parametrize("matrix", ["down_proj", "up_proj"])  # 4 ranks cut groups; blocks of rows
def test_codes_that_are_computed_are_the_same_on_any_number_of_ranks(
    tmp_path: Path, form: str, matrix: str
) -> None:
    name = f"model.layers.1.mlp.{matrix}.weight"
    make_checkpoint(tmp_path, SHAPE)
    model = ModelConfig.from_dir(tmp_path)
    values = {}
    for size in (1, 4):
        parts = []
        for rank in range(size):
            group = TensorParallelGroup(rank, size, torch.device("cpu"))
            ours = Qwen3(model, group, CPU_KERNELS, torch.float32, 64, computed_quantization(form))
            fill_parts(ours, tmp_path, model)
            piece = next(piece for piece in slices_of(ours) if piece.name == name)
            parts.append(dequantize(codes_of(piece)))
        values[size] = torch.cat(parts, dim=piece.dim)
    assert torch.equal(values[1], values[4])


@pytest.mark.parametrize("form", [INT4, FP8])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("shape", [SHAPE, TIED], ids=lambda shape: shape.name)
def test_a_plain_checkpoint_computes_with_rounded_weights(
    pool: WorkerPool, tmp_path: Path, shape: Shape, backend: str, form: str
) -> None:
    model = make_checkpoint(tmp_path, shape)
    with torch.inference_mode():
        plain = model(torch.tensor([TOKENS])).logits[0].numpy()
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(rounded_values(parameter, form))
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    assert np.abs(plain - expected).max() > 1e-2, "the weights were not rounded"
    for size in (1, 2, 4):
        options = {"tensor_parallel_size": size, "attention_backend": backend}
        config = config_of(tmp_path, quantization=form, **options)
        with executor_of(pool, config) as executor:
            ours = run_logits(executor, TOKENS)
        assert np.abs(ours - expected).max() < 1e-4 * np.abs(expected).max()


def rounded_values(values: torch.Tensor, form: str) -> torch.Tensor:
    """What a plain matrix becomes."""
    if form == FP8:
        codes, scale = quantize_blocks(values, 128)
        numbers = codes.view(torch.float8_e4m3fn).float()
        return numbers * scale.repeat_interleave(128, 1)
    codes, zeros, scale = quantize_groups(values, 128)
    zeros, scale = (table.repeat_interleave(128, 1).float() for table in (zeros, scale))
    return (codes - zeros) * scale


@pytest.mark.parametrize("form", [INT4, FP8])
@pytest.mark.parametrize("largest", [0, 1e-32, 3e-30, 1e-28])
def test_tiny_numbers_are_rounded_with_the_scale_that_is_held(form: str, largest: float) -> None:
    """To half a step, of scales not below 2^-100, which every dtype of computed scales holds."""
    values = (2 * torch.rand(3, 128) - 1) * largest
    error = (rounded_values(values, form) - values).abs().max()
    assert error <= largest / 13 + (2.0**-100 if largest else 0)


def test_the_largest_number_of_a_block_becomes_the_largest_code() -> None:
    """And each number the nearest of those that the block's scale gives."""
    values = torch.randn(200, 256)
    codes, scale = quantize_blocks(values, 128)
    for rows in (slice(128), slice(128, 200)):
        for group in range(2):
            inputs = slice(128 * group, 128 * group + 128)
            block, step = values[rows, inputs], float(scale[rows.start or 0, group])
            assert (scale[rows, group] == step).all()
            assert step == pytest.approx(float(block.abs().max()) / MAX_FP8, rel=1e-6)
            nearest = (block / step).to(torch.float8_e4m3fn)
            assert torch.equal(codes[rows, inputs], nearest.view(torch.uint8))


def poisoned_vocabulary(form: str, kernels: Any) -> GroupedWeight:
    """Of 8 rows, the last 4 padding, in memory that held codes that are not numbers."""
    matrix = WeightFormat(
        kernels=kernels,
        group=TensorParallelGroup(0, 1, torch.device("cpu")),
        dtype=torch.float32,
        weight_dtype=torch.float32,
        quantization=computed_quantization(form),
    ).matrix(8, 128, is_vocabulary=True)
    assert isinstance(matrix, GroupedWeight)
    matrix.weight.words.fill_(0x7F)
    matrix.weight.scale.fill_(1)
    if matrix.weight.zeros is not None:
        matrix.weight.zeros.fill_(0xFF)
    matrix.zero(4)
    return matrix


@pytest.mark.parametrize("form", [INT4, FP8])
def test_rows_that_no_vocabulary_fills_are_zero(form: str) -> None:
    matrix = poisoned_vocabulary(form, CPU_KERNELS)
    assert not matrix.rows(torch.arange(4, 8)).any()
    assert matrix.rows(torch.arange(4)).any()


@pytest.mark.parametrize("form", [INT4, FP8])
@pytest.mark.parametrize("num_rows", [1, MAX_FUSED_ROWS + 1])
def test_products_with_rows_that_no_vocabulary_fills_are_zero(form: str, num_rows: int) -> None:
    kernels = CPU_KERNELS
    if not torch.cuda.is_available():
        kernels = Replaced(CPU_KERNELS, quantized=TRITON_KERNELS.quantized)
    for held_kernels in (CPU_KERNELS, kernels):
        matrix = poisoned_vocabulary(form, held_kernels)
        assert not matrix.packed().product(torch.ones(num_rows, 128), None)[:, 4:].any()


@pytest.mark.parametrize("name", ["pack_32", "float_channel"])
def test_a_checkpoint_with_a_plain_matrix_is_widened_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    weights, form = stored_model(tmp_path, name).state_dict(), form_of(name)
    matrix = "model.layers.1.mlp.down_proj."
    tensors = load_file(tmp_path / SINGLE_FILE_NAME)
    tensors = {n: t for n, t in tensors.items() if not n.startswith(matrix)}
    tensors[f"{matrix}weight"] = weights[f"{matrix}weight"].clone()
    save_file(tensors, tmp_path / SINGLE_FILE_NAME)
    config = config_of(tmp_path)
    kept, reason = quantization_of_files(tmp_path, config.model, config.quantization)
    assert (kept, reason) == (None, f"{matrix}weight is not quantized")
    group = TensorParallelGroup(0, 1, torch.device("cpu"))
    with caplog.at_level(logging.WARNING):
        load_model(config, group, CPU_KERNELS, Progress())
    assert f"matrices are unpacked, because {matrix}weight is not quantized" in caplog.text
    refusal = (
        f"'{form}' is not possible .* {re.escape(matrix)}weight is not quantized. Leave it out"
    )
    with pytest.raises(ConfigError, match=refusal):
        quantization_of_files(tmp_path, config.model, config.quantization, is_asked_for=True)
