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

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.model import ModelConfig
from scheduler.errors import ConfigError
from tests.checkpoints import Shape, make_checkpoint
from workers.models.checkpoint import INDEX_NAME, SINGLE_NAME, check_checkpoint, expected_tensors

Tensors = dict[str, torch.Tensor]


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
    tensors = load_file(model_dir / SINGLE_NAME)
    change(tensors)
    save_file(tensors, model_dir / SINGLE_NAME)


@pytest.mark.parametrize(
    "shape",
    [Shape(name="tied", tied=True), Shape(name="bias", extra={"attention_bias": True})],
    ids=lambda s: s.name,
)
def test_names_and_shapes_are_those_transformers_saves(tmp_path: Path, shape: Shape) -> None:
    make_checkpoint(tmp_path, shape)
    saved = {
        name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / SINGLE_NAME).items()
    }
    assert expected_tensors(ModelConfig.from_dir(tmp_path)) == saved
    check(tmp_path)


def test_sharded_files_are_found_through_the_index(sharded_dir: Path) -> None:
    assert len(list(sharded_dir.glob("*.safetensors"))) >= 3
    check(sharded_dir)


def test_files_of_other_names_are_found_without_an_index(model_dir: Path) -> None:
    (model_dir / SINGLE_NAME).rename(model_dir / "weights.safetensors")
    check(model_dir)


def test_tied_checkpoint_may_store_its_head(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape(name="tied", tied=True))
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    check(tmp_path)


def test_no_weights_is_refused(model_dir: Path) -> None:
    (model_dir / SINGLE_NAME).rename(model_dir / "pytorch_model.bin")
    with pytest.raises(
        ConfigError,
        match=r"holds no \*\.safetensors file \(pytorch_model.bin must be conv",
    ):
        check(model_dir)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file_is_refused_by_name(model_dir: Path, keep: int) -> None:
    path = model_dir / SINGLE_NAME
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        ConfigError, match=r"model\.safetensors .*download or copy the checkpoint again"
    ):
        check(model_dir)


@pytest.mark.parametrize(
    "header", [b"{not json", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [1]}}']
)
def test_damaged_header_is_refused(model_dir: Path, header: bytes) -> None:
    (model_dir / SINGLE_NAME).write_bytes(len(header).to_bytes(8, "little") + header)
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
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is of dtype I8"):
        check(model_dir)


def test_index_naming_an_absent_file_is_refused(sharded_dir: Path) -> None:
    gone = sorted(sharded_dir.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(
        ConfigError, match=rf"{gone.name} does not exist, though the index names it"
    ):
        check(sharded_dir)


def test_index_contradicting_its_files_is_refused(sharded_dir: Path) -> None:
    edit_index(
        sharded_dir,
        lambda placed: placed.update({"model.norm.weight": placed["model.embed_tokens.weight"]}),
    )
    with pytest.raises(
        ConfigError, match=r"places model\.norm\.weight in model-00001.*does not hold it"
    ):
        check(sharded_dir)


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
