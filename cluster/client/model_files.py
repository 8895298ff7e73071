"""Finding a checkpoint: a directory, or a hub id to download. Does not read the weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scheduler.errors import ConfigError, RequestError
from scheduler.params import SamplingParams
from workers.models.local import MODEL_PATTERNS, TOKENIZER_PATTERNS, download

HUB_ID_PATTERN = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")


def find_model(model: str, revision: str | None = None, *, option: str = "model") -> Path:
    """The directory of a checkpoint, or of a tokenizer; a hub id is downloaded first. `option`:
    which of the two it names, "model" or "tokenizer". Raises `ConfigError`.
    """
    if (path := find_directory(model, option=option)) is not None:
        if revision is not None:
            raise ConfigError(
                f"revision {revision!r} is one of a hub id, and {option} {model!r} is a directory;"
                " leave revision out, or give a hub id"
            )
        return path
    if not HUB_ID_PATTERN.match(model):
        raise ConfigError(
            f"{option} {model!r} is neither an existing directory nor a hub id such as"
            " Qwen/Qwen3-0.6B"
        )
    return _download(model, revision, option)


def find_directory(model: str, *, option: str = "model") -> Path | None:
    """The directory that `model` names, None if nothing is there. Raises `ConfigError`, which calls
    it by `option`, if it is a file, or may not be looked at.
    """
    try:
        path = Path(model).expanduser()
        is_dir, path_exists = bool(model) and path.is_dir(), bool(model) and path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, an unknown ~user, a NUL
        raise ConfigError(f"{option} {model!r} is not a usable path: {error}") from None
    if is_dir:
        return path.resolve()
    if path_exists:
        raise ConfigError(f"{option} {model!r} is a file; give the directory that holds it")
    return None


def _download(model: str, revision: str | None, option: str) -> Path:
    patterns = MODEL_PATTERNS if option == "model" else TOKENIZER_PATTERNS
    try:
        return download(model, revision, patterns)
    except Exception as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{option} {model!r} is not a directory here, and it cannot be downloaded as a hub id:"
            f" {first_line.rstrip('.')}. Check the spelling, the network and"
            " HF_HUB_OFFLINE, or give a directory"
        ) from error


def generation_defaults(generation_config: Mapping[str, Any]) -> SamplingParams:
    """The defaults of a `generation_config.json`; `do_sample` false means greedy."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    configured_names = [name for name in names if generation_config.get(name) is not None]
    values = {name: generation_config[name] for name in configured_names}
    if generation_config.get("do_sample") is False:
        values["temperature"] = 0.0
    try:
        return SamplingParams.from_dict(values)
    except RequestError as error:
        raise ConfigError(f"generation_config.json: {error}") from None
