"""Matrices that are stored as codes with scales become exactly the values that these stand for, on
every rank; the engine then computes what transformers does with those values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.rank_pool import WorkerPool, executor_of
from configs.model import ModelConfig
from kernels.select import select_backend
from scheduler.errors import ConfigError
from tests.checkpoints import Shape, make_checkpoint
from tests.stored_checkpoints import (
    Matrix,
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
from tests.workers.models.parts import fill_parts, slices_of
from tests.workers.test_exactness import run_logits
from workers.models.checkpoint import SINGLE_FILE_NAME, check_checkpoint
from workers.models.qwen3 import Qwen3
from workers.parallel.group import TensorParallelGroup

# 4 ranks cut the MLP of 640 features within groups and blocks of 128, and heads within those of 64.
# It is unpacked in several parts.
SHAPE = Shape(name="stored", hidden=128, intermediate=640, heads=4, kv_heads=2, head_dim=32)
WITH_EXPERTS = Shape(
    name="experts",
    hidden=128,
    extra={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
)
Draw = Callable[[Any, int, int], Matrix]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def _actorder(config: dict[str, Any]) -> dict[str, Any]:
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return config


FORMATS: dict[str, tuple[dict[str, Any], Draw]] = {
    **{f"awq_{size}": (awq(size), draw_awq(size, F16)) for size in (32, 64, 128, -1)},
    **{
        f"pack_{size}_{'symmetric' if symmetric else 'zeros'}": (
            pack_quantized(size, symmetric),
            draw_pack_quantized(size, symmetric, BF16),
        )
        for size in (32, 64, 128, -1)
        for symmetric in (True, False)
    },
    "pack_8_bits": (pack_quantized(128, False, 8), draw_pack_quantized(128, False, BF16, 8)),
    "pack_actorder": (
        _actorder(pack_quantized(32, False)),
        draw_pack_quantized(32, False, BF16, ordered=False),
    ),
    "fp8_float32_scales": (fp8_blocks(), draw_fp8("block", F32, "weight_scale_inv")),
    "fp8_bfloat16_scales": (fp8_blocks(), draw_fp8("block", BF16, "weight_scale_inv")),
    **{
        f"float_{strategy}": (float_quantized(strategy), draw_fp8(strategy, BF16))
        for strategy in ("tensor", "channel", "block")
    },
}


def stored_model(model_dir: Path, name: str, shape: Shape = SHAPE) -> Any:
    """Write a checkpoint in a format. Returns the transformers model of the stored values."""
    model = make_checkpoint(model_dir, shape)
    write_stored(model_dir, model, *FORMATS[name])
    return model


def loaded(model_dir: Path, rank: int, size: int, dtype: torch.dtype = F32) -> list[Any]:
    """The filled slices of a rank."""
    config = ModelConfig.from_dir(model_dir)
    group = TensorParallelGroup(rank, size, torch.device("cpu"))
    model = Qwen3(config, group, select_backend("cpu", "reference"), dtype, 64)
    fill_parts(model, model_dir, config)
    return slices_of(model)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_every_rank_gets_the_stored_values(
    tmp_path: Path, name: str, size: int, dtype: torch.dtype
) -> None:
    """To the bit: computed in float32, then rounded once to the dtype of the engine."""
    weights = stored_model(tmp_path, name).state_dict()
    for rank in range(size):
        for piece in loaded(tmp_path, rank, size, dtype):
            length = piece.target.shape[piece.dim]
            part = weights[piece.name].narrow(piece.dim, piece.start, length)
            assert torch.equal(piece.target, part.to(dtype)), piece.name


@pytest.mark.parametrize("name", ["awq_32", "pack_actorder", "fp8_bfloat16_scales"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_engine_computes_with_the_stored_values(
    pool: WorkerPool, tmp_path: Path, name: str, size: int
) -> None:
    model = stored_model(tmp_path, name)
    tokens = [int(t) for t in np.random.default_rng(5).integers(0, SHAPE.vocab, 40)]
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    with executor_of(pool, config_of(tmp_path, tensor_parallel_size=size)) as executor:
        ours = run_logits(executor, tokens)
    assert np.abs(ours - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["awq_32", "pack_32_symmetric", "fp8_bfloat16_scales"])
def test_experts_are_stored_like_other_matrices(tmp_path: Path, name: str) -> None:
    """Beside a router, which is not quantized."""
    shape = WITH_EXPERTS
    make_checkpoint(tmp_path, shape)
    tensors = split_experts(load_file(tmp_path / SINGLE_FILE_NAME))
    save_file(tensors, tmp_path / SINGLE_FILE_NAME)
    values = Values(tensors)
    write_stored(tmp_path, values, *FORMATS[name])
    for rank in range(2):
        pieces = loaded(tmp_path, rank, 2)
        assert sum(".mlp.experts." in piece.name for piece in pieces) == 2 * 4 * 3
        for piece in pieces:
            length = piece.target.shape[piece.dim]
            part = values.state_dict()[piece.name].narrow(piece.dim, piece.start, length)
            assert torch.equal(piece.target, part), piece.name


class Values:
    """The tensors of a checkpoint, as `write_stored` asks a model for them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._tensors


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint of merged experts with a tensor for each matrix, as quantized ones have."""
    split: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj") or not prefix.endswith("experts"):
            split[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = zip(("gate", "up"), matrix.chunk(2), strict=True)
            for kind, part in parts if last == "gate_up_proj" else [("down", matrix)]:
                split[f"{prefix}.{expert}.{kind}_proj.weight"] = part.clone()
    return split


def test_a_matrix_may_be_left_as_it_is(tmp_path: Path) -> None:
    weights = stored_model(tmp_path, "awq_32").state_dict()
    name = "model.layers.1.mlp.down_proj."
    tensors = load_file(tmp_path / SINGLE_FILE_NAME)
    for part in ("qweight", "qzeros", "scales"):
        del tensors[name + part]
    tensors[f"{name}weight"] = weights[f"{name}weight"].clone()
    save_file(tensors, tmp_path / SINGLE_FILE_NAME)
    for piece in loaded(tmp_path, 0, 1):
        assert torch.equal(piece.target, weights[piece.name]), piece.name


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("awq_32", "qweight"),
        ("pack_32_zeros", "weight_packed"),
        ("fp8_bfloat16_scales", "weight_scale_inv"),
        ("float_channel", "weight_scale"),
    ],
)
def test_codes_of_which_config_json_says_nothing_are_refused(
    tmp_path: Path, name: str, part: str
) -> None:
    stored_model(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"_proj\.{part}, .* has no quantization_config"):
        check_checkpoint(tmp_path, ModelConfig.from_dir(tmp_path))


@pytest.mark.parametrize(("order", "said"), [(None, "null"), ("static", '"static"')])
def test_an_index_that_contradicts_actorder_is_refused(
    tmp_path: Path, order: str | None, said: str
) -> None:
    stored_model(tmp_path, "pack_actorder")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = order
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError,
        match=f'weight_g_idx is not in order, but .* actorder is {said}: set it to "group"',
    ):
        loaded(tmp_path, 0, 1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_codes_without_scales_or_a_config_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    make_checkpoint(tmp_path, SHAPE)
    tensors = load_file(tmp_path / SINGLE_FILE_NAME)
    tensors[f"{UP}weight"] = tensors[f"{UP}weight"].to(dtype)
    save_file(tensors, tmp_path / SINGLE_FILE_NAME)
    with pytest.raises(
        ConfigError, match=r"holds .*\.up_proj\.weight: its files are quantized, but .* has no"
    ):
        check_checkpoint(tmp_path, ModelConfig.from_dir(tmp_path))


Change = Callable[[dict[str, torch.Tensor]], object]
UP = "model.layers.0.mlp.up_proj."


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "awq_32",
            lambda t: t.update({UP + "scales": t[UP + "scales"][:-1].contiguous()}),
            r"up_proj.scales has shape \[3, 640\], but config.json calls for \[4, 640\]",
        ),
        (
            "fp8_bfloat16_scales",
            lambda t: t.update(
                {UP + "weight_scale_inv": t[UP + "weight_scale_inv"].T.contiguous()}
            ),
            r"up_proj.weight_scale_inv has shape \[1, 5\], but config.json calls for \[5, 1\]",
        ),
        (
            "pack_32_symmetric",
            lambda t: t[UP + "weight_scale"][3, 1].fill_(torch.nan),
            r"up_proj.weight_scale holds scales that are not finite numbers. Download",
        ),
        (
            "float_tensor",
            lambda t: t[UP + "weight_scale"].fill_(torch.inf),
            r"up_proj.weight_scale holds scales that are not finite numbers. Download",
        ),
        (
            "fp8_bfloat16_scales",
            lambda t: t[UP + "weight"].view(torch.uint8)[600, 100].fill_(0xFF),
            r"up_proj.weight holds codes that are not numbers. Download",
        ),
        (
            "fp8_float32_scales",
            lambda t: t[UP + "weight_scale_inv"][4, 0].fill_(torch.nan),
            r"up_proj.weight_scale_inv holds scales that are not finite numbers. Download",
        ),
        (
            "fp8_bfloat16_scales",
            lambda t: t.pop(UP + "weight_scale_inv"),
            r"lacks model.layers.0.mlp.up_proj.weight_scale_inv, which its config.json calls for",
        ),
        (
            "pack_32_zeros",
            lambda t: t.update({UP + "weight_packed": t[UP + "weight_packed"].float()}),
            "up_proj.weight_packed is of dtype F32, .* codes of dtype I32",
        ),
        (
            "awq_32",
            lambda t: t.pop("model.norm.weight"),
            "lacks model.norm.weight",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_one_message(
    tmp_path: Path, name: str, change: Change, message: str
) -> None:
    stored_model(tmp_path, name)
    tensors = load_file(tmp_path / SINGLE_FILE_NAME)
    change(tensors)
    save_file(tensors, tmp_path / SINGLE_FILE_NAME)
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, 0, 1)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "awq_128",
            Shape(name="half_a_group", hidden=128, intermediate=96, head_dim=32),
            r"down_proj.weight has 96 inputs, which are not whole groups of 128; AWQ can store it"
            r" in groups of 16, 32, 96\. Use",
        ),
        (
            "awq_32",
            Shape(name="half_a_word", hidden=128, intermediate=128, head_dim=34, kv_heads=1),
            r"k_proj.weight has 34 outputs; AWQ stores multiples of 8\. Use",
        ),
    ],
)
def test_a_matrix_that_a_format_cannot_store_is_refused(
    tmp_path: Path, name: str, shape: Shape, message: str
) -> None:
    make_checkpoint(tmp_path, shape)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = FORMATS[name][0]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / SINGLE_FILE_NAME)
    save_file(
        {n: t for n, t in tensors.items() if not n.endswith("_proj.weight")},
        tmp_path / SINGLE_FILE_NAME,
    )
    path = re.escape(str(tmp_path / "config.json"))
    with pytest.raises(ConfigError, match=rf"^{path}: model\.layers\.0\..*{message}"):
        check_checkpoint(tmp_path, ModelConfig.from_dir(tmp_path))
