"""A backend with some of its functions replaced, to observe or to shorten a run."""

from __future__ import annotations

from typing import Any


class Replaced:
    """`base` with some of its functions replaced by `functions`."""

    def __init__(self, base: Any, **functions: Any) -> None:
        self.__dict__.update(functions)
        self._base = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def functions_of(protocol: type) -> list[str]:
    """The names of a protocol's methods."""
    return [
        name
        for name in vars(protocol)
        if not name.startswith("_") and callable(getattr(protocol, name))
    ]
