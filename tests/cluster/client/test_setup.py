"""What is known about an engine before Ray starts is found once, for every process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.client import model_files
from cluster.client.setup import make_engine_setup
from configs.engine import EngineConfig
from configs.paths import DEFAULT_MODEL_DIR
from scheduler.errors import ConfigError
from tests.checkpoints import Shape, make_checkpoint
from tests.stored_checkpoints import awq, draw_awq, write_stored
from workers.models.checkpoint import SINGLE_FILE_NAME


@pytest.mark.parametrize("given", ["Qwen/Qwen3-0.6B", "copy", "./copy", "~/copy"])
def test_a_tokenizer_is_found_once_and_named_by_its_folder(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver, which starts in another folder, reads the tokenizer's file for grammars."""
    (tmp_path / "copy").symlink_to(DEFAULT_MODEL_DIR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(model_files, "download", lambda *_: DEFAULT_MODEL_DIR)
    setup = make_engine_setup(
        EngineConfig(model=str(DEFAULT_MODEL_DIR), tokenizer=given, device="cpu")
    )
    assert setup.config.tokenizer == str(DEFAULT_MODEL_DIR)
    assert setup.expected_config.engine.tokenizer == str(DEFAULT_MODEL_DIR)
    assert setup.tokenizer is not None


def test_a_form_in_which_one_matrix_is_not_stored_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    model = make_checkpoint(tmp_path, Shape(name="stored"))
    write_stored(tmp_path, model, awq(32), draw_awq(32, torch.float16))
    asked_for = EngineConfig(model=str(tmp_path), device="cpu", quantization="int4")
    make_engine_setup(asked_for)
    tensors = load_file(tmp_path / SINGLE_FILE_NAME)
    name = "model.layers.1.mlp.down_proj."
    for part in ("qweight", "qzeros", "scales"):
        del tensors[name + part]
    tensors[f"{name}weight"] = model.state_dict()[f"{name}weight"].clone()
    save_file(tensors, tmp_path / SINGLE_FILE_NAME)
    make_engine_setup(EngineConfig(model=str(tmp_path), device="cpu"))
    with pytest.raises(ConfigError, match=f"'int4' is not possible .*{name}weight is not quant"):
        make_engine_setup(asked_for)


END_OF_TEXT, END_OF_TURN = 507, 509


def default_model_with(path: Path, eos_token: str | None, template: str | None = None) -> Path:
    """The default model, whose configuration says that only the end of a text ends an output."""
    shutil.copytree(DEFAULT_MODEL_DIR, path)
    (path / "generation_config.json").unlink()
    change(path / "config.json", eos_token_id=END_OF_TEXT)
    change(path / "tokenizer_config.json", eos_token=eos_token)
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


LEAVES_OUT = (
    "{% for message in messages if message.role == 'user' %}<|im_start|>{{ message.content }}"
    "{% endfor %}"
)
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("eos_token", "template", "ends"),
    [
        ("<|im_end|>", PLAIN, (END_OF_TEXT, END_OF_TURN)),
        ("<|endoftext|>", None, (END_OF_TEXT, END_OF_TURN)),
        (None, None, (END_OF_TEXT, END_OF_TURN)),
        ("<|endoftext|>", PLAIN, (END_OF_TEXT,)),
        ("<|endoftext|>", LEAVES_OUT, (END_OF_TEXT,)),
    ],
    ids=[
        "the tokenizer's end",
        "the template's end of a turn",
        "without the first",
        "neither",
        "a template without answers",
    ],
)
def test_answers_end_where_any_file_of_the_checkpoint_says(
    eos_token: str | None, template: str | None, ends: tuple[int, ...], tmp_path: Path
) -> None:
    path = default_model_with(tmp_path / "model", eos_token, template)
    setup = make_engine_setup(EngineConfig(model=str(path), device="cpu"))
    assert setup.model.eos_token_ids == setup.expected_config.model.eos_token_ids == ends
