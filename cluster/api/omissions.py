"""What a request holds and the model does not get: parts that are not text, tools we cannot run.

Agents send all that other servers have answered and all the tools they have, and repeat with every
request what was once shown to them, so refusing any of it would end the session for good. Instead
it is left out, or a line of text stands in its place, which also tells the model what it cannot
see; and the answer names it. A server that refuses unknown fields refuses this too.
"""

from __future__ import annotations

from scheduler.errors import RequestError

MAX_NAMES = 32  # of one request; what is left out beyond them is not named
MAX_NAME_LENGTH = 80  # characters; types may be from the request


class Omissions:
    """The names of what one request had to do without, each once, in order."""

    def __init__(self, *, refuse: bool = False) -> None:
        """`refuse`: nothing may be left out."""
        self._names: dict[str, None] = {}
        self._refuse = refuse

    def add(self, name: str) -> None:
        """Note what is left out, as `tools.web_search`. Raises `RequestError` if nothing may be."""
        name = name[:MAX_NAME_LENGTH]
        if self._refuse:
            raise RequestError(
                f"{name}: the model cannot get this, and the server was started to refuse what it"
                " does not know; leave it out",
                name.partition(".")[0],
            )
        if len(self._names) < MAX_NAMES:
            self._names[name] = None

    def leave_out(self, holder: str, kind: str) -> str:
        """Note a part of type `kind` that is left out. `holder`: the bare name of what has it, a
        field of the request or of an item, or a type of block. Returns the text that stands for
        the part. Raises as `add`.
        """
        self.add(f"{holder}.{kind}")
        return f"[{kind[:MAX_NAME_LENGTH]} omitted: this model reads text only]"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)
