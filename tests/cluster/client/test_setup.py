"""What is known about an engine before Ray starts is found once, for every process."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.client import model_files
from cluster.client.setup import prepare
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
    setup = prepare(EngineConfig(model=str(DEFAULT_MODEL_DIR), tokenizer=given, device="cpu"))
    assert setup.config.tokenizer == str(DEFAULT_MODEL_DIR)
    assert setup.foreseen.engine.tokenizer == str(DEFAULT_MODEL_DIR)
    assert setup.tokenizer is not None
