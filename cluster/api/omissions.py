"""What a request holds and the model does not get: parts that are not text, tools that this server
cannot run.

Conversations of agents hold such things, and every later request repeats them, so refusing them
would end the session. Instead each is left out, or a line of text stands in its place, and the
answer names it. What a user shows the model is refused: without it, the answer would be about
something else.
"""

from __future__ import annotations

from scheduler.errors import RequestError

MAX_NAMES = 32
MAX_NAME = 80  # characters; types may be from the request


class Omissions:
    """The names of what one request had to do without, each once, in order."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def add(self, name: str) -> None:
        """Note what is left out, such as `tools.web_search`."""
        if len(self._names) < MAX_NAMES:
            self._names[name[:MAX_NAME]] = None

    def line(self, place: str, kind: str) -> str:
        """Note that a part of this kind is left out of `place`. Returns the line of text that
        stands for it.
        """
        self.add(f"{place}.{kind}")
        return f"[{kind[:MAX_NAME]} omitted: this model reads text only]"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)


def refusal_of(kind: str, field: str) -> RequestError:
    """The error for a part of this kind in a message of the user."""
    return RequestError(
        f"a message of the user has a part of type {kind!r}, and this model reads text only; leave"
        " the part out, or say in words what it shows. In the result of a tool, a line of text"
        " would stand in its place",
        field,
    )
