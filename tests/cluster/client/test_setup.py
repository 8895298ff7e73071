"""What is known about an engine before Ray starts is found once, for every process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster.client import model_files
from cluster.client.setup import make_engine_setup
from configs.engine import EngineConfig
from configs.paths import DEFAULT_MODEL_DIR


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
    assert setup.foreseen_config.engine.tokenizer == str(DEFAULT_MODEL_DIR)
    assert setup.tokenizer is not None


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
    assert setup.model.eos_token_ids == setup.foreseen_config.model.eos_token_ids == ends
