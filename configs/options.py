"""Declaring an option once: its default, its limits, and its flag on the command line."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from scheduler.errors import ConfigError


def option(
    default: Any,
    *,
    flag: str | None = None,
    has_flag: bool = True,
    help: str = "",
    flag_default: Any = dataclasses.MISSING,
    at_least: int | None = None,
    above: float | None = None,
    or_zero: bool = False,
    at_most: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field. Numbers are whole if they have `at_least`, and fractional if they have
    `above`; 0 is possible too with `or_zero`. Without `flag` its flag is its name (`flag_of`).
    `flag_default`: what the command line takes in place of `default` if the flag is left out.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "flag": flag,
            "has_flag": has_flag,
            "help": help or (f"One of {', '.join(choices)}." if choices else ""),
            "flag_default": default if flag_default is dataclasses.MISSING else flag_default,
            "at_least": at_least,
            "above": above,
            "or_zero": or_zero,
            "at_most": at_most,
            "choices": choices,
        },
    )


def flag_of(field: dataclasses.Field[Any]) -> str | None:
    """The flag of an option on the command line, None if it has none."""
    if not field.metadata.get("has_flag"):
        return None
    return field.metadata.get("flag") or "--" + field.name.replace("_", "-")


def check_option(field: dataclasses.Field[Any], value: object) -> None:
    """Raise `ConfigError` naming the option, what is possible and what was given."""
    name, metadata = field.name, field.metadata
    if value is None and field.default is None:
        return
    if isinstance(field.default, bool):
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, got {value!r}")
    elif metadata["choices"]:
        if value not in metadata["choices"]:
            raise ConfigError(
                f"{name} must be one of {', '.join(metadata['choices'])}, got {value!r}"
            )
    elif metadata["at_least"] is not None:
        _check_whole(name, value, metadata["at_least"], metadata["at_most"])
    elif metadata["above"] is not None:
        if not (metadata["or_zero"] and value == 0 and not isinstance(value, bool)):
            zero_wording = "0, or " if metadata["or_zero"] else ""
            _check_real(name, value, metadata["above"], metadata["at_most"], zero_wording)
    elif not isinstance(value, str):
        raise ConfigError(f"{name} must be text, got {value!r}")


def _check_whole(name: str, value: object, at_least: int, at_most: int | None) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < at_least or (at_most is not None and value > at_most):  # type: ignore[operator]
        range_wording = f"at least {at_least}" + (
            f" and at most {at_most}" if at_most is not None else ""
        )
        raise ConfigError(f"{name} must be a whole number of {range_wording}, got {value!r}")


def _check_real(name: str, value: object, above: float, at_most: float, zero_wording: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not above < value <= at_most:  # type: ignore[arg-type,operator]
        unit = " seconds" if name.endswith("_s") else ""
        raise ConfigError(
            f"{name} must be {zero_wording}above {above:g} and at most {at_most:g}{unit},"
            f" got {value!r}"
        )
