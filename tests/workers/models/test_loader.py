"""The slices of all ranks together are the checkpoint, and loaded weights are in the rank's own
memory.
"""

from __future__ import annotations

import errno
import itertools
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cluster.error_kinds import kind_of
from configs.model import ModelConfig
from kernels.select import select_backend
from scheduler.errors import ConfigError
from tests.checkpoints import Shape, make_checkpoint
from tests.workers.models.parts import fill_and_pack_parts, fill_parts, slices_of
from workers.models.checkpoint import SINGLE_FILE_NAME, expected_tensors
from workers.models.layers import MergedColumnParallelLinear, Part
from workers.models.loader import held_dtype, load_weights
from workers.models.qwen3 import MLP, Qwen3
from workers.models.weights import PlainWeight, Weight
from workers.parallel.group import TensorParallelGroup
from workers.progress import Progress

SHAPES = [
    Shape(name="plain"),
    Shape(name="tied", tied=True, vocab=1003),
    Shape(name="bias", extra={"attention_bias": True}),
    Shape(name="one_kv_head", kv_heads=1, vocab=5),
]


def values(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, PlainWeight)
    return weight.values_YX


def mlp_of(model: Qwen3, layer: int) -> MLP:
    mlp = model.layers[layer].mlp
    assert isinstance(mlp, MLP)
    return mlp


def build(model: ModelConfig, rank: int, size: int, dtype: torch.dtype = torch.float32) -> Qwen3:
    """One rank's model, not loaded yet. Loading needs no peers."""
    group = TensorParallelGroup(rank, size, torch.device("cpu"))
    return Qwen3(model, group, select_backend("cpu"), dtype, 64)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_slices_of_all_ranks_cover_every_tensor_with_its_values(
    tmp_path: Path, shape: Shape, size: int
) -> None:
    make_checkpoint(tmp_path, shape)
    config, stored = ModelConfig.from_dir(tmp_path), load_file(tmp_path / SINGLE_FILE_NAME)
    covered = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in stored.items()}
    for rank in range(size):
        model = build(config, rank, size)
        pieces = slices_of(model)
        assert {piece.name: piece.shape for piece in pieces} == expected_tensors(config)
        fill_parts(model, tmp_path, config)
        for piece in pieces:
            length = piece.target.shape[piece.dim]
            assert torch.equal(
                piece.target, stored[piece.name].narrow(piece.dim, piece.start, length)
            ), piece.name
            covered[piece.name].narrow(piece.dim, piece.start, length).fill_(True)
        for weight in (model.embedding.weight, model.head.weight):
            assert not values(weight)[model.embedding.num_ids :].any(), (
                "rows beyond the vocabulary are zero"
            )
    assert all(cover.all() for cover in covered.values())


def test_matrices_lie_one_after_the_other_in_merged_parameters(small_checkpoint: Path) -> None:
    config, stored = (
        ModelConfig.from_dir(small_checkpoint),
        load_file(small_checkpoint / SINGLE_FILE_NAME),
    )
    model = build(config, 0, 1)
    fill_parts(model, small_checkpoint, config)
    layer = model.layers[1]
    prefix = "model.layers.1."
    qkv = torch.cat([stored[f"{prefix}self_attn.{letter}_proj.weight"] for letter in "qkv"])
    gate_up = torch.cat([stored[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(values(layer.attention.qkv.weight), qkv)
    assert torch.equal(values(mlp_of(model, 1).gate_up.weight), gate_up)


def test_more_ranks_than_kv_heads_share_them_in_order(small_checkpoint: Path) -> None:
    """4 query heads, 2 KV heads, 4 ranks: query head r attends to KV head r // 2."""
    config, stored = (
        ModelConfig.from_dir(small_checkpoint),
        load_file(small_checkpoint / SINGLE_FILE_NAME),
    )
    keys = stored["model.layers.0.self_attn.k_proj.weight"]
    for rank in range(4):
        model = build(config, rank, 4)
        fill_parts(model, small_checkpoint, config)
        ours = values(model.layers[0].attention.qkv.weight)[config.head_dim : 2 * config.head_dim]
        assert torch.equal(ours, keys.view(2, config.head_dim, -1)[rank // 2])


def test_weights_take_the_dtype_of_the_engine_in_contiguous_memory(small_checkpoint: Path) -> None:
    config, stored = (
        ModelConfig.from_dir(small_checkpoint),
        load_file(small_checkpoint / SINGLE_FILE_NAME),
    )
    model = build(config, 1, 2, torch.bfloat16)
    fill_parts(model, small_checkpoint, config)
    down = values(mlp_of(model, 0).down.weight)
    assert down.is_contiguous() and down.dtype == torch.bfloat16
    full = stored["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(down, full[:, full.shape[1] // 2 :].to(torch.bfloat16))


def test_weights_outlive_their_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape(name="plain"))
    config, path = ModelConfig.from_dir(tmp_path), tmp_path / SINGLE_FILE_NAME
    model = build(config, 0, 1)
    fill_parts(model, tmp_path, config)
    before = values(mlp_of(model, 0).down.weight).clone()
    with path.open("r+b") as file:  # a mapping would show the same inode
        file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(values(mlp_of(model, 0).down.weight), before)


@pytest.mark.parametrize("size", [1, 2])
def test_a_tied_embedding_is_held_once_in_bfloat16(tmp_path: Path, size: int) -> None:
    """Its rows are looked up in the packed weight. Each rank has a part, the last one padding."""
    make_checkpoint(tmp_path, Shape(name="tied", tied=True, vocab=1003, dtype=torch.bfloat16))
    config, stored = ModelConfig.from_dir(tmp_path), load_file(tmp_path / SINGLE_FILE_NAME)
    for rank in range(size):
        group = TensorParallelGroup(rank, size, torch.device("cpu"))
        model = Qwen3(config, group, select_backend("cpu"), torch.float32, 64, None, torch.bfloat16)
        fill_and_pack_parts(model, tmp_path, config)
        assert model.embedding.weight is model.head.weight
        first, count = model.embedding.first_id, model.embedding.num_ids
        rows = model.embedding.weight.rows(torch.arange(model.embedding.shard_size))
        wanted = stored["model.embed_tokens.weight"][first : first + count].to(torch.float32)
        assert torch.equal(rows[:count], wanted) and not rows[count:].any()


def test_matrices_are_held_in_bfloat16_only_if_all_are_stored_in_it(tmp_path: Path) -> None:
    """config.json may name a dtype other than the one in which weights are stored."""
    make_checkpoint(tmp_path, Shape(name="stored", dtype=torch.bfloat16))
    config, path = ModelConfig.from_dir(tmp_path), tmp_path / SINGLE_FILE_NAME
    single, half = torch.float32, torch.bfloat16
    assert held_dtype(tmp_path, config, single, half) is half
    assert held_dtype(tmp_path, config, single, single) is single
    tensors = load_file(path)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].float()}, path)
    assert held_dtype(tmp_path, config, single, half) is half, "vectors are held in float32 anyway"
    for name in ("lm_head.weight", "model.layers.1.mlp.down_proj.weight"):
        save_file(tensors | {name: tensors[name].float()}, path)
        assert held_dtype(tmp_path, config, single, half) is single


def test_progress_grows_to_the_total(small_checkpoint: Path) -> None:
    config = ModelConfig.from_dir(small_checkpoint)
    model = build(config, 0, 2)
    progress, loaded_bytes = Progress(), []
    load_weights(
        model.parts(),
        small_checkpoint,
        config,
        lambda part: loaded_bytes.append(progress.loaded_bytes),
        progress,
    )
    part_bytes = [sum(piece.nbytes for piece in part.slices()) for part in model.parts()]
    assert loaded_bytes == list(itertools.accumulate(part_bytes))
    assert progress.loaded_bytes < (small_checkpoint / SINGLE_FILE_NAME).stat().st_size


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (OSError(errno.EIO, "not now"), True),
        (FileNotFoundError("not now"), True),  # what `safe_open` raises if too many files are open
        (SafetensorError("not now"), False),
    ],
)
def test_a_file_that_cannot_be_read_while_it_is_loaded_is_not_lost(
    error: Exception, may_pass: bool, small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("workers.models.stored.safe_open", fail)
    config = ModelConfig.from_dir(small_checkpoint)
    with pytest.raises(
        ConfigError, match=rf"{SINGLE_FILE_NAME} cannot be read: .*not now"
    ) as raised:
        fill_parts(build(config, 0, 1), small_checkpoint, config)
    assert kind_of(raised.value).is_transient == may_pass


def test_loading_refuses_what_the_check_refuses(small_checkpoint: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_dir(small_checkpoint)
    with pytest.raises(ConfigError, match="holds no"):
        fill_parts(build(config, 0, 1), tmp_path, config)


def test_memory_that_a_part_gives_up_is_free_at_once(small_checkpoint: Path) -> None:
    """A matrix whose packed copy is used instead must not be held until the next part is loaded."""
    config = ModelConfig.from_dir(small_checkpoint)
    model = build(config, 0, 1)

    def finish(part: Part) -> None:
        if isinstance(part, MergedColumnParallelLinear):
            assert isinstance(part.weight, PlainWeight)
            values = weakref.ref(part.weight.values_YX)
            part.weight = PlainWeight(kernels=part.weight.kernels, values_YX=torch.empty(0, 0))
            freed.append(values() is None)

    freed: list[bool] = []
    load_weights(model.parts(), small_checkpoint, config, finish)
    assert freed and all(freed)
