"""Options of a served application: one frozen, checked tree that includes the engine's options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.engine import MAX_TIMEOUT_S, EngineConfig
from configs.options import check_option, option
from scheduler.errors import ConfigError

MAX_REPLICAS = 1024
_LAUNCH_FIELDS = ("listen_address", "shared_port_path", "bound_host")  # that `from_dict` refuses


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What is served, by how many replicas, and within which limits."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: Mapping[str, Any] = field(default_factory=dict)  # defaults of `SamplingParams`
    replicas: int = option(
        1, help="Engines, each with its own ranks.", at_least=1, at_most=MAX_REPLICAS
    )
    max_replicas: int | None = option(
        None,
        help="With it, engines are added under load up to this number, and ended after it.",
        at_least=1,
        at_most=MAX_REPLICAS,
    )
    api_replicas: int = option(
        1,
        help="Processes that answer HTTP; in a Ray of its own all of them listen on the port.",
        at_least=1,
        at_most=MAX_REPLICAS,
    )
    target_ongoing_requests: int | None = option(
        None,
        help="Requests per engine beyond which one is added; by default half of --max-num-seqs.",
        at_least=1,
        at_most=2**20,
    )
    upscale_delay_s: float = option(
        30.0,
        help="How long load must be above before an engine is added.",
        above=0,
        at_most=MAX_TIMEOUT_S,
        has_flag=False,
    )
    downscale_delay_s: float = option(
        600.0,
        help="How long load must be below before an engine is ended.",
        above=0,
        at_most=MAX_TIMEOUT_S,
        has_flag=False,
    )
    served_model_name: str | None = option(
        None, help="Name in the API; by default that of --model."
    )
    api_key: str | None = option(None, help="Key that clients must send; or set EAGLERAY_API_KEY.")
    allowed_hosts: str | None = option(
        None,
        help="Names, separated by commas, under which a server without a key is reached"
        " besides localhost.",
    )
    allowed_origins: str | None = option(
        None, help="Sites, separated by commas, whose pages may use a server without a key."
    )
    keep_billing_header: bool = option(
        False,
        help="Give the model the line about billing that Claude Code puts before its instructions;"
        " it differs between sessions, so nothing behind it is cached for the next one.",
    )
    unknown_fields: str = option(
        "ignore",
        help="Fields of HTTP requests that are not known: ignore, or refuse.",
        choices=("ignore", "refuse"),
    )
    max_open_requests: int = option(
        1024,
        help="Outputs that run or wait, per engine; a request with n counts n times. Beyond it,"
        " requests get 503.",
        at_least=1,
        at_most=2**20,
    )
    max_body_bytes: int = option(
        8 * 2**20, help="Longest body.", at_least=1, at_most=2**30, has_flag=False
    )
    max_messages: int = option(
        2048, help="Longest conversation.", at_least=1, at_most=2**20, has_flag=False
    )
    slow_reader_timeout_s: float = option(
        30.0,
        help="How long a client may take nothing of an answer.",
        above=0,
        at_most=MAX_TIMEOUT_S,
        has_flag=False,
    )
    drain_timeout_s: float = option(
        300.0,
        help="How long running requests may take to finish after SIGTERM.",
        above=0,
        at_most=MAX_TIMEOUT_S,
    )

    # Host and port at which the API process itself listens, or the socket through which several of
    # them get the port that they share; without either, requests come through Serve.
    listen_address: tuple[str, int] | None = None
    shared_port_path: str | None = None
    # Host at which HTTP arrives, if it is known.
    bound_host: str | None = None

    def __post_init__(self) -> None:
        for option_field in dataclasses.fields(self):
            if "flag" in option_field.metadata:
                check_option(option_field, getattr(self, option_field.name))
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(
                f"max_replicas {self.max_replicas} is below replicas {self.replicas}, with which"
                " serving starts; raise it, or leave it out for a fixed number"
            )
        if self.target_ongoing_requests is not None and self.max_replicas is None:
            raise ConfigError(
                "target_ongoing_requests says when engines are added; give max_replicas with it"
            )
        if self.api_key is not None:
            object.__setattr__(self, "api_key", checked_api_key(self.api_key))

    @property
    def has_single_engine(self) -> bool:
        """Whether there is always exactly one engine."""
        return self.replicas == (self.max_replicas or 1) == 1

    @property
    def api_has_engine(self) -> bool:
        """Whether one process holds the API and the engine."""
        return self.has_single_engine and self.api_replicas == 1

    @property
    def max_open_outputs(self) -> int:
        """The number of outputs that may run or wait at a time, in all API processes if they share
        a port, otherwise in each.
        """
        max_open_outputs = self.max_open_requests * (self.max_replicas or self.replicas)
        return (
            max_open_outputs if self.shared_port_path else -(-max_open_outputs // self.api_replicas)
        )

    @property
    def listens_itself(self) -> bool:
        """Whether the API takes connections itself, and not from Ray Serve's proxy."""
        return self.listen_address is not None or self.shared_port_path is not None

    @staticmethod
    def split_names(text: str | None) -> tuple[str, ...]:
        """The names in a text that separates them by commas."""
        return tuple(name.strip() for name in (text or "").split(",") if name.strip())

    @property
    def model_name(self) -> str:
        """The model's name in the API; for a directory, the last part of its path."""
        if self.served_model_name is not None:
            return self.served_model_name
        model = self.engine.model
        return Path(model).resolve().name if Path(model).is_dir() else model

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServeConfig:
        """Build from decoded YAML or JSON: `engine` is a mapping of engine options. An unknown key
        raises `ConfigError` naming the known keys.
        """
        names = [option_field.name for option_field in dataclasses.fields(cls)]
        known_names = [name for name in names if name not in _LAUNCH_FIELDS]
        unknown_names = [key for key in values if key not in known_names]
        if unknown_names:
            raise ConfigError(
                f"unknown serving option {unknown_names[0]!r}; known are {', '.join(known_names)}."
                " Options of the engine belong under engine:"
            )
        for name in ("engine", "sampling"):
            if not isinstance(values.get(name, {}), Mapping):
                raise ConfigError(f"{name} must be a mapping of options, got {values[name]!r}")
        return cls(**{**values, "engine": EngineConfig.from_dict(values.get("engine", {}))})


def checked_api_key(text: str) -> str:
    """A key without spaces and newlines at its ends, which a file from which it was read may have,
    and a header does not. Raises `ConfigError` for one that clients could not send.
    """
    key = text.strip()
    name = "api_key (--api-key or EAGLERAY_API_KEY)"
    if not key:
        raise ConfigError(f"{name} must not be empty; leave it out to serve without one")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{name} must consist of printable ASCII characters, which every client can send in a"
            " header; make another key"
        )
    return key
