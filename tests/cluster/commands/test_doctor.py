"""What `launch.py doctor` says of weights is what a rank that has loaded them holds."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.commands.doctor import _examine_model, _rank_weights
from configs.engine import EngineConfig
from configs.model import ModelConfig
from kernels.cpu.tensor_bytes import tensor_address_range
from tests.checkpoints import Shape, make_checkpoint, pack_checkpoint
from tests.stored_checkpoints import SINGLE_FILE_NAME
from tests.workers.test_grouped import stored_model
from workers.configuration import find_kernels, resolve_config
from workers.loading import load_model
from workers.memory.weights import _ModelPickler, _objects_of_own_process
from workers.parallel.group import TensorParallelGroup
from workers.progress import Progress

PLAIN_MATRIX = "model.layers.1.mlp.down_proj."
# The dtype in config.json and the form on a CPU that multiplies in bfloat16, by the kind of files.
DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "awq_128": "float16",
    "awq_128 with a plain matrix": "float16",
    "pack_32": "bfloat16",
    "fp8_bfloat16": "bfloat16",
    "fp8_bfloat16 with a plain matrix": "bfloat16",
    "gptq with desc_act": "float16",
    "float_channel": "bfloat16",
}


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.commands.doctor.has_cuda", lambda: False)


def write(model_dir: Path, kind: str, is_tied: bool = False, intermediate: int = 640) -> None:
    """A checkpoint of a kind, whose vectors and vocabulary have the dtype of its config.json."""
    dtype = getattr(torch, DTYPES[kind])
    shape = Shape(
        name="sized", hidden=128, intermediate=intermediate, head_dim=32, tied=is_tied, dtype=dtype
    )
    name = kind.partition(" ")[0]
    if name == "gptq":
        model = make_checkpoint(model_dir, shape)
        pack_checkpoint(model_dir, model, bits=4, group_size=64, ordered=False)
    elif name in ("bfloat16", "float16"):
        make_checkpoint(model_dir, shape)
    else:
        model = stored_model(model_dir, name, shape)
    if kind.endswith("plain matrix"):
        tensors = load_file(model_dir / SINGLE_FILE_NAME)
        tensors = {n: t for n, t in tensors.items() if not n.startswith(PLAIN_MATRIX)}
        values = model.state_dict()[f"{PLAIN_MATRIX}weight"].to(dtype)
        save_file(tensors | {f"{PLAIN_MATRIX}weight": values}, model_dir / SINGLE_FILE_NAME)
    raw = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(raw | {"dtype": DTYPES[kind]}))


def held_bytes(model_dir: Path, rank: int, num_ranks: int) -> int:
    """Of the tensors of a rank that has loaded and packed its weights."""
    engine_config = EngineConfig(model=str(model_dir), tensor_parallel_size=num_ranks, spares="off")
    config = resolve_config(engine_config, ModelConfig.from_dir(model_dir), model_dir, "cpu")
    kernels = find_kernels(config)
    group = TensorParallelGroup(rank, num_ranks, torch.device("cpu"))
    model = load_model(config, group, kernels, Progress()).model
    pickler = _ModelPickler(io.BytesIO(), _objects_of_own_process(kernels, group))
    pickler.dump(model)
    bytes_by_address = dict(map(tensor_address_range, pickler.tensors))
    return sum(bytes_by_address.values()) - model.cos_sin_LD.nbytes


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", DTYPES)
def test_a_rank_holds_as_many_bytes_as_it_says(tmp_path: Path, kind: str, is_tied: bool) -> None:
    write(tmp_path, kind, is_tied)
    model = ModelConfig.from_dir(tmp_path)
    for num_ranks in (1, 2):
        weights = _rank_weights(str(tmp_path), model, tmp_path, num_ranks)
        for rank in range(num_ranks):
            assert weights.num_bytes == held_bytes(tmp_path, rank, num_ranks), weights.text


def test_doctor_says_the_form_and_why_codes_are_unpacked(tmp_path: Path) -> None:
    write(tmp_path, "awq_128")
    lines, _ = _examine_model(str(tmp_path))
    assert "in int4, as they are stored, and of the vocabulary in float32" in lines[1]
    write(tmp_path, "awq_128 with a plain matrix")
    lines, _ = _examine_model(str(tmp_path))
    assert lines[1].endswith(f"in float32; unpacked, because {PLAIN_MATRIX}weight is not quantized")


def test_each_number_of_ranks_has_a_form_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "float_channel", intermediate=644)
    model = ModelConfig.from_dir(tmp_path)
    num_bytes = _rank_weights("it", model, tmp_path, 1).num_bytes
    monkeypatch.setattr(
        "cluster.commands.doctor.os.sysconf",
        {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 5 * num_bytes // 4}.__getitem__,
    )
    _, one, two, *lines = [
        line for line in _examine_model(str(tmp_path))[0] if "--tp 4:" not in line
    ]
    assert "in fp8, as they are stored" in one
    assert two.endswith("unpacked, because groups of a rank are not whole words of codes")
    assert "with --tp 1 enough for such weights of all ranks with --spares off" in lines[0]
    assert "with --tp 2, 4 too little for such weights of all ranks" in lines[1]
