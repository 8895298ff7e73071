"""Prints docs/options.md from the fields of options: `python -m tests.pages.options`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from configs.engine import EngineConfig
from configs.options import flag_of
from configs.serve import ServeConfig
from scheduler.params import DEFAULT_SAMPLING_PARAMS, SamplingParams

INTRODUCTION = """\
# Options

This page is made from the fields that it describes. Unknown options, flags, keys and parameters are
refused by name, [fields of HTTP requests](fields.md) only where that matters.
"""
ENGINE_SECTION = """\
## Engine

`LLM(...)` takes the names on the left, `serve.yaml` has them under `engine:`, and `chat`,
`generate`, `serve` and `bench` take the flags.
"""
SERVING_SECTION = """\
## Serving

`serve` takes the flags, and `serve.yaml` has the names, beside `engine:` and `sampling:`, the
defaults of requests. Where to listen is said by `--host` and `--port` (127.0.0.1, 8000), or by
`http_options`.
"""
SAMPLING_SECTION = """\
## Sampling

Fields of `SamplingParams`, keys of `sampling_params` in a file of requests, fields of HTTP
requests, and flags of `chat`, `generate` and `serve`. A parameter that a request leaves unset comes
from the flags or `LLM(sampling_defaults=...)`, then from the checkpoint's `generation_config.json`,
then from this table. `top_k`, `top_p` and `min_p` apply in this order, after the temperature.
"""
ENVIRONMENT_SECTION = """\
## Environment

| variable | |
|---|---|
"""
ENVIRONMENT_VARIABLES = {
    "EAGLERAY_API_KEY": "the key that clients of `serve` must send, where other users of the"
    " machine can read command lines",
    "EAGLERAY_CACHE_DIR": "where compiled CPU kernels are kept, by default `eagleray` in"
    " `XDG_CACHE_HOME` or `~/.cache`, or below `TMPDIR` where that cannot be written; all clones of"
    " one version share them",
    "OMP_WAIT_POLICY=passive": "on a CPU: torch's threads, which compute products of many rows,"
    " sleep as soon as they have nothing to do, and not after 0.1 ms. Set it before the engine"
    " starts",
    "RAY_worker_niceness": "0 in a local Ray that Eagleray starts, so that ranks get their share of"
    " a busy core; Ray's own default is 15",
}


def page() -> str:
    """The text of docs/options.md."""
    sections = [
        INTRODUCTION,
        ENGINE_SECTION + _table("option", _option_rows(EngineConfig)),
        SERVING_SECTION + _table("option", _option_rows(ServeConfig)),
        SAMPLING_SECTION + _table("parameter", _parameter_rows()),
        ENVIRONMENT_SECTION
        + "".join(
            f"| `{name}` | {description} |\n" for name, description in ENVIRONMENT_VARIABLES.items()
        ),
    ]
    return "\n".join(sections)


def _table(name_heading: str, rows: Iterator[tuple[str, str, object, str]]) -> str:
    lines = ["", f"| {name_heading} | flag | default | |", "|---|---|---|---|"]
    for name, flag, default, help_text in rows:
        default_cell = "" if default is None else f"`{_text_of(default)}`"
        flag_cell = f"`{flag}`" if flag else ""
        lines.append(f"| `{name}` | {flag_cell} | {default_cell} | {help_text} |")
    return "\n".join([*lines, ""])


def _text_of(default: object) -> object:
    return str(default).lower() if isinstance(default, bool) else default


def _option_rows(config: type[Any]) -> Iterator[tuple[str, str, object, str]]:
    """(name, flag, default, help text) of each option."""
    for field in dataclasses.fields(config):
        metadata = field.metadata
        if "flag" not in metadata:
            continue
        flag = (flag_of(field) or "").replace("/--no-", "` `--no-")
        default = metadata["flag_default"] if flag else field.default
        yield field.name, flag, default, metadata["help"]


def _parameter_rows() -> Iterator[tuple[str, str, object, str]]:
    """(name, flag, default, help text) of each sampling parameter."""
    for field in dataclasses.fields(SamplingParams):
        flag = flag_of(field) or ""
        yield field.name, flag, getattr(DEFAULT_SAMPLING_PARAMS, field.name), field.metadata["help"]


if __name__ == "__main__":
    print(page(), end="")
