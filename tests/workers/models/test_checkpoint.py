"""A checkpoint that cannot be run is refused from its headers alone, naming file and tensor, before
anything starts.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.model import ModelConfig
from kernels.select import select_backend
from scheduler.errors import ConfigError
from tests.checkpoints import Shape, make_checkpoint
from tests.workers.models.parts import fill_parts, slices_of
from workers.models.checkpoint import (
    INDEX_NAME,
    SINGLE_FILE_NAME,
    check_checkpoint,
    expected_tensors,
)
from workers.models.qwen3 import Qwen3
from workers.parallel.group import TensorParallelGroup

Tensors = dict[str, torch.Tensor]
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def model_dir(small_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that tests may damage."""
    return Path(shutil.copytree(small_checkpoint, tmp_path / "model"))


@pytest.fixture
def sharded_dir(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "sharded", Shape(name="sharded", num_shards=3))
    return tmp_path / "sharded"


def check(model_dir: Path) -> None:
    check_checkpoint(model_dir, ModelConfig.from_dir(model_dir))


def edit(model_dir: Path, change: Callable[[Tensors], object]) -> None:
    """Rewrite the weights with a change."""
    rewrite(model_dir / SINGLE_FILE_NAME, change)


def rewrite(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def assert_loads_as_in_transformers(model_dir: Path) -> None:
    """Both load every tensor, with the same values."""
    from transformers import Qwen3ForCausalLM

    load: Any = Qwen3ForCausalLM.from_pretrained
    theirs, report = load(model_dir, output_loading_info=True)
    assert not report["missing_keys"]
    config = ModelConfig.from_dir(model_dir)
    group = TensorParallelGroup(0, 1, torch.device("cpu"))
    model = Qwen3(config, group, select_backend("cpu"), torch.float32, 64)
    fill_parts(model, model_dir, config)
    pieces = slices_of(model)
    for piece in pieces:
        assert torch.equal(piece.target, theirs.get_parameter(piece.name)), piece.name


@pytest.mark.parametrize(
    "shape",
    [Shape(name="tied", tied=True), Shape(name="bias", extra={"attention_bias": True})],
    ids=lambda s: s.name,
)
def test_names_and_shapes_are_those_transformers_saves(tmp_path: Path, shape: Shape) -> None:
    make_checkpoint(tmp_path, shape)
    saved = {
        name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / SINGLE_FILE_NAME).items()
    }
    assert expected_tensors(ModelConfig.from_dir(tmp_path)) == saved
    check(tmp_path)


def test_sharded_files_are_found_through_the_index(sharded_dir: Path) -> None:
    assert len(list(sharded_dir.glob("*.safetensors"))) >= 3
    check(sharded_dir)


def test_files_of_other_names_are_found_without_an_index(model_dir: Path) -> None:
    (model_dir / SINGLE_FILE_NAME).rename(model_dir / "weights.safetensors")
    check(model_dir)


def test_tied_checkpoint_may_store_its_head(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape(name="tied", tied=True))
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    check(tmp_path)


def test_no_weights_is_refused(model_dir: Path) -> None:
    (model_dir / SINGLE_FILE_NAME).rename(model_dir / "pytorch_model.bin")
    with pytest.raises(
        ConfigError,
        match=r"holds no \*\.safetensors file \(pytorch_model.bin must be conv",
    ):
        check(model_dir)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file_is_refused_by_name(model_dir: Path, keep: int) -> None:
    path = model_dir / SINGLE_FILE_NAME
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        ConfigError, match=r"model\.safetensors .*download or copy the checkpoint again"
    ):
        check(model_dir)


@pytest.mark.parametrize(
    "header", [b"{not json", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [1]}}']
)
def test_damaged_header_is_refused(model_dir: Path, header: bytes) -> None:
    (model_dir / SINGLE_FILE_NAME).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ConfigError, match=r"model\.safetensors has a header that cannot be read"):
        check(model_dir)


def test_missing_tensor_is_named(model_dir: Path) -> None:
    edit(model_dir, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        check(model_dir)


def test_missing_head_points_at_tied_embeddings(model_dir: Path) -> None:
    edit(model_dir, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"lacks lm_head\.weight.*tie_word_embeddings"):
        check(model_dir)


def test_unexpected_tensors_are_named_but_not_all(model_dir: Path) -> None:
    edit(model_dir, lambda t: t.update({f"model.extra.{i}": torch.zeros(1) for i in range(9)}))
    with pytest.raises(
        ConfigError, match=r"holds model\.extra\.0, .* and 5 more, which a Qwen3 model"
    ):
        check(model_dir)


def test_wrong_shape_is_named(model_dir: Path) -> None:
    edit(model_dir, lambda t: t.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(
        ConfigError,
        match=r"model\.norm\.weight has shape \[63\], but config\.json calls for \[64\]",
    ):
        check(model_dir)


def test_quantized_tensor_is_refused(model_dir: Path) -> None:
    edit(model_dir, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(ConfigError, match=r"holds model\.norm\.weight: its files are quantized"):
        check(model_dir)


def test_index_naming_an_absent_file_is_refused(sharded_dir: Path) -> None:
    gone = sorted(sharded_dir.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(
        ConfigError, match=rf"{gone.name} does not exist, though the index names it"
    ):
        check(sharded_dir)


def test_a_tensor_is_read_from_where_it_lies_and_not_from_where_the_index_says(
    sharded_dir: Path,
) -> None:
    edit_index(sharded_dir, lambda placed: placed.update({"model.norm.weight": placed[EMBEDDING]}))
    assert_loads_as_in_transformers(sharded_dir)


def test_a_tensor_that_only_the_index_has_is_named(sharded_dir: Path) -> None:
    edit_index(sharded_dir, lambda placed: placed.update({"model.norm.weight": placed[EMBEDDING]}))
    for path in sharded_dir.glob("*.safetensors"):
        rewrite(path, lambda tensors: tensors.pop("model.norm.weight", None))
    with pytest.raises(ConfigError, match=r"lacks model\.norm\.weight, which its config"):
        check(sharded_dir)


def test_index_may_list_a_tied_head_that_no_file_holds(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape(name="tied", tied=True, num_shards=3))
    edit_index(tmp_path, lambda placed: placed.update({"lm_head.weight": placed[EMBEDDING]}))
    assert_loads_as_in_transformers(tmp_path)


def test_tied_checkpoint_may_store_its_head_instead_of_its_embedding(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape(name="tied", tied=True))
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop(EMBEDDING)}))
    assert_loads_as_in_transformers(tmp_path)


def test_tied_head_that_differs_from_the_embedding_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape(name="tied", tied=True))
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING] + 1}))
    with pytest.raises(ConfigError, match=r"lm_head\.weight, which differs .*tie_word_embeddings"):
        check(tmp_path)


def test_shards_that_the_index_does_not_name_are_not_read(sharded_dir: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(64)}, sharded_dir / "old.safetensors")
    assert_loads_as_in_transformers(sharded_dir)


def test_of_a_tensor_in_two_shards_the_one_that_the_index_names_counts(sharded_dir: Path) -> None:
    last = sorted(sharded_dir.glob("*.safetensors"))[-1]
    rewrite(last, lambda tensors: tensors.update({EMBEDDING: torch.zeros(512, 64)}))
    stored = check_checkpoint(sharded_dir, ModelConfig.from_dir(sharded_dir))[EMBEDDING]
    assert stored.path != last


def test_an_index_beside_a_whole_file_is_not_read(model_dir: Path) -> None:
    (model_dir / INDEX_NAME).write_text('{"weight_map": {"model.norm.weight": "gone.safetensors"}}')
    assert_loads_as_in_transformers(model_dir)


def test_stored_rotary_frequencies_are_not_used(model_dir: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(model_dir, lambda tensors: tensors.update({name: torch.zeros(8)}))
    assert_loads_as_in_transformers(model_dir)


def test_index_pointing_outside_is_refused(sharded_dir: Path) -> None:
    edit_index(
        sharded_dir, lambda placed: placed.update({"model.norm.weight": "../elsewhere.safetensors"})
    )
    with pytest.raises(ConfigError, match="not a file name in this directory"):
        check(sharded_dir)


def test_tensor_in_two_files_is_refused(sharded_dir: Path) -> None:
    (sharded_dir / INDEX_NAME).unlink()
    first = sorted(sharded_dir.glob("*.safetensors"))[0]
    shutil.copy(first, sharded_dir / "old.safetensors")
    with pytest.raises(ConfigError, match=r"is in both .*old\.safetensors: remove the stale files"):
        check(sharded_dir)


def test_checking_needs_no_torch(model_dir: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from configs.model import ModelConfig\n"
        "from workers.models import checkpoint\n"
        f"d = Path({str(model_dir)!r}); checkpoint.check_checkpoint(d, ModelConfig.from_dir(d))\n"
        "assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, timeout=60)


def edit_index(model_dir: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = model_dir / INDEX_NAME
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))
