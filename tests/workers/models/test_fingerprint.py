"""A checkpoint that has changed is told from the one that an engine began with."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.model import ModelConfig
from configs.paths import DEFAULT_MODEL_DIR
from configs.quantization import Quantization
from kernels.select import select_backend
from tests.checkpoints import Shape, make_checkpoint
from workers.models.checkpoint import SINGLE_FILE_NAME
from workers.models.fingerprint import LoadedWeightsHash, fingerprint
from workers.models.layers import Part
from workers.models.loader import load_weights
from workers.models.qwen3 import Qwen3
from workers.parallel.group import TensorParallelGroup


def test_copies_have_one_fingerprint_and_other_weights_another(tmp_path: Path) -> None:
    copy = shutil.copytree(DEFAULT_MODEL_DIR, tmp_path / "copy")
    assert fingerprint(copy) == fingerprint(DEFAULT_MODEL_DIR)
    weights = copy / "model.safetensors"
    os.utime(weights)
    assert fingerprint(copy) == fingerprint(DEFAULT_MODEL_DIR)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    assert fingerprint(copy) != fingerprint(DEFAULT_MODEL_DIR)


@pytest.mark.parametrize(
    ("name", "counts"),
    [("config.json", True), ("tokenizer.json", False), ("generation_config.json", False)],
)
def test_what_gives_weights_their_meaning_counts(name: str, counts: bool, tmp_path: Path) -> None:
    copy = shutil.copytree(DEFAULT_MODEL_DIR, tmp_path / "copy")
    text = (copy / name).read_text()
    (copy / name).write_text(text.replace("{", "{ ", 1))
    assert (fingerprint(copy) != fingerprint(DEFAULT_MODEL_DIR)) is counts


def loaded_hash(
    model_dir: Path,
    rank: int,
    size: int,
    quantization: Quantization | None = None,
    finish: Callable[[Part], None] = lambda part: None,
) -> str:
    config = ModelConfig.from_dir(model_dir)
    group = TensorParallelGroup(rank, size, torch.device("cpu"))
    kernels = select_backend("cpu", "reference")
    model = Qwen3(config, group, kernels, torch.float32, 64, quantization)
    with LoadedWeightsHash() as weights_hash:
        load_weights(model.parts(), model_dir, config, finish, weights_hash=weights_hash)
    return weights_hash.hexdigest()


@pytest.mark.parametrize(
    "quantization", [None, Quantization(is_stored=False, includes_vocabulary=True)]
)
def test_one_changed_number_changes_the_hash_of_the_rank_that_has_it_alone(
    quantization: Quantization | None, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, Shape(name="plain"))
    before = [loaded_hash(tmp_path, rank, 2, quantization) for rank in range(2)]
    assert before == [loaded_hash(tmp_path, rank, 2, quantization) for rank in range(2)]
    assert before[0] != before[1]
    tensors = load_file(tmp_path / SINGLE_FILE_NAME)
    tensors["model.layers.1.mlp.gate_proj.weight"][-1, -1] += 1.0  # the last rank's
    save_file(tensors, tmp_path / SINGLE_FILE_NAME)
    after = [loaded_hash(tmp_path, rank, 2, quantization) for rank in range(2)]
    assert after[0] == before[0] and after[1] != before[1]


def test_a_change_that_samples_miss_is_seen_when_weights_are_loaded(tmp_path: Path) -> None:
    """64 samples of 64 KiB see a part of a file that is larger."""
    make_checkpoint(tmp_path, Shape(name="large", vocab=30_000))
    path = tmp_path / SINGLE_FILE_NAME
    assert path.stat().st_size > 3 * 64 * 65536
    quick, weights_hash = fingerprint(tmp_path), loaded_hash(tmp_path, 0, 1)
    data = bytearray(path.read_bytes())
    place = len(data) // 64 + 65536 + 1001  # between the second sample and the third
    data[place] ^= 64
    path.write_bytes(data)
    assert fingerprint(tmp_path) == quick
    assert loaded_hash(tmp_path, 0, 1) != weights_hash


def test_what_cannot_be_hashed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the last values, which are hashed while the context ends."""

    class Broken:
        def update(self, data: object) -> None:
            raise MemoryError

    for num_tensors in (1, 20):
        with pytest.raises(MemoryError), LoadedWeightsHash() as weights_hash:
            monkeypatch.setattr(weights_hash, "_digest", Broken())
            for _ in range(num_tensors):
                weights_hash.add(torch.ones(3))


def test_a_part_is_hashed_before_it_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing may use the same memory."""

    def overwrite(part: Part) -> None:
        for piece in part.slices():
            piece.target.zero_()

    make_checkpoint(tmp_path, Shape(name="plain"))
    before = loaded_hash(tmp_path, 0, 1)
    add = LoadedWeightsHash.add

    def add_slowly(self: LoadedWeightsHash, values: torch.Tensor) -> None:
        self._executor.submit(time.sleep, 0.01)
        add(self, values)

    monkeypatch.setattr(LoadedWeightsHash, "add", add_slowly)
    assert loaded_hash(tmp_path, 0, 1, finish=overwrite) == before
