"""The checkpoint on the machine where a rank runs: a directory that exists there, or a download."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from pathlib import Path

from configs.engine import ResolvedConfig
from scheduler.errors import ConfigError, UnreadableError
from workers.models.checkpoint import check_checkpoint
from workers.progress import Progress

RECHECK_LIMIT_S = 10.0
TOKENIZER_PATTERNS = ["*.json", "*.txt", "*.jinja", "*.model"]
MODEL_PATTERNS = [*TOKENIZER_PATTERNS, "*.safetensors"]


def local_checkpoint(config: ResolvedConfig, progress: Progress | None = None) -> Path:
    """The directory of the checkpoint on this machine.

    The engine was configured where `config.model_dir` exists. A hub id that is not here yet is
    downloaded, in the same revision; the hub's library lets one process per machine do it. Raises
    `ConfigError` naming the machine that lacks a directory, or if the hub no longer has the
    revision; `UnreadableError` if the download failed otherwise, which may pass. `progress` counts
    while a download goes on.
    """
    model_dir = Path(config.model_dir)
    model = config.engine.model
    if model_dir.is_dir():
        return model_dir
    host = socket.gethostname()
    if not _is_hub_snapshot(config):
        raise ConfigError(
            f"the machine {host} has no checkpoint at {model_dir}, but a rank has to run there:"
            " copy it to the same path, share the folder, or use a hub id"
        )
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        return download(model, model_dir.name, MODEL_PATTERNS, progress)
    except Exception as error:
        is_missing = isinstance(error, RepositoryNotFoundError | RevisionNotFoundError)
        raise (ConfigError if is_missing else UnreadableError)(
            f"the machine {host} cannot download {model!r} in revision {model_dir.name}: {error}"
        ) from error


def recheck_checkpoint(config: ResolvedConfig, limit_s: float = RECHECK_LIMIT_S) -> None:
    """Raise `ConfigError` if a checkpoint with which an engine began can be loaded no more, before
    any process starts to load it; `UnreadableError` if that may pass, also after `limit_s`. Of a
    hub id, what is missing may be downloaded again.
    """
    if _is_hub_snapshot(config):
        return
    check_future: Future[None] = Future()

    def check() -> None:
        try:
            check_checkpoint(local_checkpoint(config), config.model)
        except BaseException as error:
            check_future.set_exception(error)
        else:
            check_future.set_result(None)

    # A thread of its own, which may be left behind: a file server that is gone never answers.
    threading.Thread(target=check, name="eagleray-check", daemon=True).start()
    try:
        check_future.result(limit_s)
    except TimeoutError as error:
        if check_future.done():
            raise  # of the system
        raise UnreadableError(
            f"{config.model_dir} cannot be read: no answer within {limit_s:g} s"
        ) from error


def _is_hub_snapshot(config: ResolvedConfig) -> bool:
    return Path(config.model_dir).parent.name == "snapshots"  # where the hub's library puts it


def download(
    model: str, revision: str | None, patterns: list[str], progress: Progress | None = None
) -> Path:
    """The directory of a hub id, after downloading what is missing; `progress` counts meanwhile.
    Raises the library's errors.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    class CountedProgress(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            if progress is not None:
                progress.num_download_updates += 1
            return super().update(n)  # type: ignore[no-any-return]

    path = snapshot_download(
        model, revision=revision, allow_patterns=patterns, tqdm_class=CountedProgress
    )
    return Path(path)
