"""Matrices that GPTQ has packed are unpacked to exactly the values that are stored, on every rank;
the engine then computes what transformers does with those values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.rank_pool import WorkerPool, executor_of
from configs.model import ModelConfig
from configs.quantization import Quantization
from kernels.select import select_backend
from scheduler.errors import ConfigError
from tests.checkpoints import Shape, make_checkpoint, pack_checkpoint
from tests.workers.conftest import config_of
from tests.workers.models.parts import fill_parts, slices_of
from tests.workers.models.test_loader import build
from tests.workers.test_exactness import run_logits
from workers.models.checkpoint import INDEX_NAME, SINGLE_FILE_NAME, check_checkpoint
from workers.models.loader import held_dtype
from workers.models.qwen3 import Qwen3
from workers.parallel.group import TensorParallelGroup

FORMATS: dict[str, dict[str, Any]] = {
    "usual": {},
    "four_bits": {"bits": 4},
    "one_group": {"group_size": -1},
    "index": {"ordered": False},
    "zero_points": {"symmetric": False},
    "four_bits_zero_points_index": {"bits": 4, "symmetric": False, "ordered": False},
    "gptq_v2": {"symmetric": False, "checkpoint_format": "gptq_v2"},
}
# A matrix of 96 inputs has a group that is not full; an MLP of 320 is unpacked in two parts.
SHAPE = Shape(name="packed", hidden=64, intermediate=320, heads=4, kv_heads=2, head_dim=24)
NO_NEGATIVES = "model.layers.0.mlp.up_proj.weight"


def stored_model(model_dir: Path, **options: Any) -> Any:
    """Write a packed checkpoint. Returns the transformers model of the stored values."""
    model = make_checkpoint(model_dir, SHAPE)
    tensors = load_file(model_dir / SINGLE_FILE_NAME)
    tensors[NO_NEGATIVES][:, :32].abs_()  # so that groups have the zero point 0
    save_file(tensors, model_dir / SINGLE_FILE_NAME)
    pack_checkpoint(model_dir, model, **options)
    return model


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_gets_the_stored_values(
    tmp_path: Path, options: dict[str, Any], size: int
) -> None:
    before = make_checkpoint(tmp_path, SHAPE).state_dict()
    wanted = stored_model(tmp_path, **options).state_dict()
    down = "model.layers.1.mlp.down_proj.weight"
    error = (wanted[down] - before[down]).abs().max() / before[down].abs().max()
    assert 1e-4 < error < 0.1, "the values were not quantized, or badly"
    config = ModelConfig.from_dir(tmp_path)
    for rank in range(size):
        for piece in loaded(build(config, rank, size), tmp_path, config):
            part = wanted[piece.name].narrow(piece.dim, piece.start, piece.target.shape[piece.dim])
            assert torch.equal(piece.target, part), piece.name


def loaded(model: Qwen3, model_dir: Path, config: ModelConfig) -> list[Any]:
    fill_parts(model, model_dir, config)
    return slices_of(model)


@pytest.mark.parametrize("size", [1, 2])
def test_the_engine_computes_with_the_stored_values(
    pool: WorkerPool, tmp_path: Path, size: int
) -> None:
    model = stored_model(tmp_path, bits=4, ordered=False)
    tokens = [int(t) for t in np.random.default_rng(5).integers(0, SHAPE.vocab, 40)]
    with torch.inference_mode():
        wanted = model(torch.tensor([tokens])).logits[0].numpy()
    with executor_of(pool, config_of(tmp_path, tensor_parallel_size=size)) as executor:
        ours = run_logits(executor, tokens)
    assert np.abs(ours - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_parts_of_a_matrix_may_lie_in_several_files(tmp_path: Path) -> None:
    wanted = stored_model(tmp_path).state_dict()
    tensors = load_file(tmp_path / SINGLE_FILE_NAME)
    (tmp_path / SINGLE_FILE_NAME).unlink()
    placed = {
        name: "b.safetensors" if name.endswith(("scales", "qzeros")) else "a.safetensors"
        for name in tensors
    }
    for file in ("a.safetensors", "b.safetensors"):
        save_file({n: t for n, t in tensors.items() if placed[n] == file}, tmp_path / file)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": placed}))
    config = ModelConfig.from_dir(tmp_path)
    for piece in loaded(build(config, 0, 1), tmp_path, config):
        assert torch.equal(piece.target, wanted[piece.name]), piece.name


def test_each_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored_model(tmp_path)
    config, opened = ModelConfig.from_dir(tmp_path), []

    def counting(path: Path, **options: Any) -> Any:
        opened.append(path)
        return safe_open(path, **options)

    monkeypatch.setattr("workers.models.stored.safe_open", counting)
    loaded(build(config, 0, 1), tmp_path, config)
    assert opened == [tmp_path / SINGLE_FILE_NAME]


@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize(("desc_act", "filling"), [(True, -1), (False, -1), (False, 0)])
def test_an_index_that_was_never_filled_in_means_inputs_in_order(
    tmp_path: Path, group_size: int, desc_act: bool, filling: int
) -> None:
    wanted = stored_model(tmp_path, group_size=group_size).state_dict()
    path = tmp_path / SINGLE_FILE_NAME
    tensors = load_file(path)
    tensors |= {n: torch.full_like(t, filling) for n, t in tensors.items() if n.endswith("g_idx")}
    save_file(tensors, path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"]["desc_act"] = desc_act
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_dir(tmp_path)
    for piece in loaded(build(config, 0, 1), tmp_path, config):
        assert torch.equal(piece.target, wanted[piece.name]), piece.name


@pytest.mark.parametrize("rank", [0, 1])
def test_8_bit_products_are_of_the_stored_values(tmp_path: Path, rank: int) -> None:
    """Packed matrices are quantized again, with one scale per row, as plain ones would be."""
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    model = stored_model(packed)
    model.save_pretrained(plain)
    pieces = []
    for model_dir in (packed, plain):
        config = ModelConfig.from_dir(model_dir)
        group = TensorParallelGroup(rank, 2, torch.device("cpu"))
        quantization = Quantization(is_stored=False, includes_vocabulary=True)
        backend = select_backend("cpu", "reference")
        ours = Qwen3(config, group, backend, torch.float32, 64, quantization)
        pieces.append(loaded(ours, model_dir, config))
    for ours, wanted in zip(*pieces, strict=True):
        assert torch.equal(ours.target, wanted.target), ours.name
        assert ours.scale is None or torch.equal(ours.scale, wanted.scale), ours.name


def test_an_index_that_is_not_needed_need_not_be_stored(tmp_path: Path) -> None:
    stored_model(tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE_NAME)
    save_file({n: t for n, t in tensors.items() if "g_idx" not in n}, tmp_path / SINGLE_FILE_NAME)
    check_checkpoint(tmp_path, ModelConfig.from_dir(tmp_path))


def test_an_index_that_is_needed_is_missed(tmp_path: Path) -> None:
    stored_model(tmp_path, ordered=False)
    tensors = load_file(tmp_path / SINGLE_FILE_NAME)
    tensors.pop("model.layers.0.mlp.up_proj.g_idx")
    save_file(tensors, tmp_path / SINGLE_FILE_NAME)
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.0\.mlp\.up_proj\.g_idx"):
        check_checkpoint(tmp_path, ModelConfig.from_dir(tmp_path))


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    stored_model(tmp_path, ordered=False)
    tensors = load_file(tmp_path / SINGLE_FILE_NAME)
    tensors["model.layers.0.mlp.up_proj.g_idx"][5] = 2  # of groups 0 and 1
    save_file(tensors, tmp_path / SINGLE_FILE_NAME)
    config = ModelConfig.from_dir(tmp_path)
    with pytest.raises(ConfigError, match=r"up_proj\.g_idx names groups that do not exist; .* 2\."):
        loaded(build(config, 0, 1), tmp_path, config)


@pytest.mark.parametrize("desc_act", [False, None])
def test_an_index_that_contradicts_desc_act_is_refused(
    tmp_path: Path, desc_act: bool | None
) -> None:
    stored_model(tmp_path, ordered=False)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"]["desc_act"] = desc_act
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_dir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"_proj\.g_idx is not in order, but .* desc_act is false: set it to true"
    ):
        loaded(build(config, 0, 1), tmp_path, config)


def test_codes_of_another_dtype_are_refused(tmp_path: Path) -> None:
    stored_model(tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE_NAME)
    name = "model.layers.0.mlp.up_proj.qweight"
    tensors[name] = tensors[name].float()
    save_file(tensors, tmp_path / SINGLE_FILE_NAME)
    with pytest.raises(
        ConfigError, match=r"up_proj\.qweight is of dtype F32, .* codes of dtype I32"
    ):
        check_checkpoint(tmp_path, ModelConfig.from_dir(tmp_path))


def test_stored_values_are_not_rounded_where_the_engine_computes_in_float32(
    tmp_path: Path,
) -> None:
    stored_model(tmp_path)
    config = ModelConfig.from_dir(tmp_path)
    assert held_dtype(tmp_path, config, torch.float32, torch.bfloat16) is torch.float32
