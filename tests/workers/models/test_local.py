"""Where a rank finds its checkpoint."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from cluster.error_kinds import kind_of
from configs.engine import ResolvedConfig
from configs.paths import DEFAULT_MODEL_DIR
from scheduler.errors import ConfigError, UnreadableError
from tests.workers.conftest import config_of
from workers.models import local
from workers.models.checkpoint import INDEX_NAME, SINGLE_FILE_NAME
from workers.models.local import MODEL_PATTERNS, local_checkpoint, recheck_checkpoint
from workers.progress import Progress

HASH = "0123456789abcdef"


def config_at(path: Path, model: str) -> ResolvedConfig:
    config = config_of(DEFAULT_MODEL_DIR)
    engine = dataclasses.replace(config.engine, model=model)
    return dataclasses.replace(config, model_dir=str(path), engine=engine)


def test_a_directory_that_this_machine_lacks_is_named_with_the_machine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"the machine {os.uname().nodename} has no checkpoint"):
        local_checkpoint(config_at(tmp_path / "model", str(tmp_path / "model")))


class StandInForTheHub:
    """Replaces `snapshot_download` and checks its arguments, because tests cannot reach a hub."""

    def __init__(self, answer: Path | Exception) -> None:
        self.answer = answer

    def __call__(
        self, model: str, *, revision: str, allow_patterns: list[str], tqdm_class: Any
    ) -> str:
        assert (model, revision, allow_patterns) == ("Qwen/Qwen3-0.6B", HASH, MODEL_PATTERNS)
        with tqdm_class(total=100, disable=True) as progress_bar:
            progress_bar.update(40)
            progress_bar.update(60)
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def test_a_hub_id_is_downloaded_in_the_revision_that_the_engine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_at(tmp_path / "snapshots" / HASH, "Qwen/Qwen3-0.6B")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", StandInForTheHub(tmp_path))
    assert local_checkpoint(config) == tmp_path


def test_a_download_counts_as_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, progress = config_at(tmp_path / "snapshots" / HASH, "Qwen/Qwen3-0.6B"), Progress()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", StandInForTheHub(tmp_path))
    local_checkpoint(config, progress)
    assert progress.num_download_updates == 2


NOT_FOUND: Any = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (OSError("no answer"), True),
        (RuntimeError("no answer"), True),  # httpx has errors that are no `OSError`
        (RevisionNotFoundError("no answer", response=NOT_FOUND), False),
        (RepositoryNotFoundError("no answer", response=NOT_FOUND), False),
    ],
)
def test_a_hub_that_does_not_answer_ends_nothing_and_one_that_lacks_the_revision_does(
    error: Exception, may_pass: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_at(tmp_path / "snapshots" / HASH, "Qwen/Qwen3-0.6B")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", StandInForTheHub(error))
    with pytest.raises(
        ConfigError, match=rf"cannot download .* in revision {HASH}: no answer"
    ) as raised:
        local_checkpoint(config)
    assert kind_of(raised.value).is_transient == may_pass


def test_what_can_be_loaded_no_more_is_found_before_processes_start(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEFAULT_MODEL_DIR, model)
    config = config_at(model, str(model))
    recheck_checkpoint(config)
    [weights] = model.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(ConfigError, match=r"safetensors"):
        recheck_checkpoint(config)
    weights.unlink()
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors file"):
        recheck_checkpoint(config)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("name", [SINGLE_FILE_NAME, INDEX_NAME])
def test_a_checkpoint_that_cannot_be_read_at_the_moment_is_not_lost(
    name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEFAULT_MODEL_DIR, model)
    if name == INDEX_NAME:
        (model / SINGLE_FILE_NAME).rename(model / "model-00001-of-00001.safetensors")
        (model / INDEX_NAME).write_text("{}")
    open_file = Path.open

    def fail(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == name:
            raise OSError(number, os.strerror(number))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(UnreadableError, match=os.strerror(number)) as raised:
        recheck_checkpoint(config_at(model, str(model)))
    assert kind_of(raised.value).is_transient


def test_a_file_server_that_does_not_answer_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(local, "check_checkpoint", lambda *_: answered.wait())
    began = time.monotonic()
    with pytest.raises(UnreadableError, match=r"default_model cannot be read: no answer within"):
        recheck_checkpoint(config_at(DEFAULT_MODEL_DIR, str(DEFAULT_MODEL_DIR)), limit_s=0.1)
    assert time.monotonic() - began < 5
    answered.set()


def test_what_is_missing_of_a_hub_id_may_be_downloaded_again(tmp_path: Path) -> None:
    recheck_checkpoint(config_at(tmp_path / "snapshots" / HASH, "Qwen/Qwen3-0.6B"))
