"""docs/options.md, written from the fields: `python -m cluster.commands.options_page`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from configs.engine import EngineConfig
from configs.options import flag_of
from configs.serve import ServeConfig
from scheduler.params import DEFAULTS, SamplingParams

HEAD = """\
# Options

This page is made from the fields that it describes. Unknown options, flags, keys and parameters are
refused by name, [fields of HTTP requests](fields.md) only where that matters.
"""
ENGINE = """\
## Engine

`LLM(...)` takes the names on the left, `serve.yaml` has them under `engine:`, and `chat`,
`generate`, `serve` and `bench` take the flags.
"""
SERVING = """\
## Serving

`serve` takes the flags, and `serve.yaml` has the names, beside `engine:` and `sampling:`, the
defaults of requests. Where to listen is said by `--host` and `--port` (127.0.0.1, 8000), or by
`http_options`.
"""
SAMPLING = """\
## Sampling

Fields of `SamplingParams`, keys of `sampling_params` in a file of requests, fields of HTTP
requests, and flags of `chat`, `generate` and `serve`. A parameter that a request leaves unset comes
from the flags or `LLM(sampling_defaults=...)`, then from the checkpoint's `generation_config.json`,
then from this table. `top_k`, `top_p` and `min_p` apply in this order, after the temperature.
"""
ENVIRONMENT = """\
## Environment

| variable | |
|---|---|
"""
VARIABLES = {
    "EAGLERAY_API_KEY": "the key that clients of `serve` must send, where other users of the"
    " machine can read command lines",
    "EAGLERAY_CACHE_DIR": "where compiled CPU kernels are kept, by default `~/.cache/eagleray`, or"
    " below `TMPDIR` where that cannot be written; all clones of one version share them",
    "OMP_WAIT_POLICY=passive": "on a CPU that other programs use as well: ranks stop spinning while"
    " they wait. Set it before the engine starts; it costs about 15% on an idle machine",
    "RAY_worker_niceness": "0 in a local Ray that Eagleray starts, so that ranks get their share of"
    " a busy core; Ray's own default is 15",
}


def page() -> str:
    """The text of docs/options.md."""
    parts = [
        HEAD,
        ENGINE + _table("option", _options(EngineConfig)),
        SERVING + _table("option", _options(ServeConfig)),
        SAMPLING + _table("parameter", _parameters()),
        ENVIRONMENT + "".join(f"| `{name}` | {text} |\n" for name, text in VARIABLES.items()),
    ]
    return "\n".join(parts)


def _table(first: str, rows: Iterator[tuple[str, str, object, str]]) -> str:
    lines = ["", f"| {first} | flag | default | |", "|---|---|---|---|"]
    for name, flag, default, text in rows:
        shown = "" if default is None else f"`{_value(default)}`"
        lines.append(f"| `{name}` | {f'`{flag}`' if flag else ''} | {shown} | {text} |")
    return "\n".join([*lines, ""])


def _value(default: object) -> object:
    return str(default).lower() if isinstance(default, bool) else default


def _options(config: type[Any]) -> Iterator[tuple[str, str, object, str]]:
    """(name, flag, default, what it does) of each option."""
    for field in dataclasses.fields(config):
        limits = field.metadata
        if "flag" not in limits:
            continue
        flag = (flag_of(field) or "").replace("/--no-", "` `--no-")
        default = limits["flag_default"] if flag else field.default
        yield field.name, flag, default, limits["help"]


def _parameters() -> Iterator[tuple[str, str, object, str]]:
    """The same of each sampling parameter."""
    for field in dataclasses.fields(SamplingParams):
        flag = flag_of(field) or ""
        yield field.name, flag, getattr(DEFAULTS, field.name), field.metadata["help"]


if __name__ == "__main__":
    print(page(), end="")
