"""Keeps the requests that a server gets, and writes them down without what they say.

An ASGI application around the API. Bodies keep their fields, types and structure; texts become
neutral words, ids are numbered, and of many tools only those are kept that differ in form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.api.app import Api

Message = MutableMapping[str, Any]

MAX_RECORDED = 6  # bodies of one program, each of another form
MAX_TOOLS = 6
_HEADERS = ("accept", "anthropic-beta", "anthropic-version", "openai-beta")
# Keys whose texts say what something is.
_KEPT = frozenset(
    """
    type role name model format required enum effort status tool_choice verbosity summary detail
    service_tier truncation include reasoning_effort display ttl syntax phase schema mode context
    execution keep modalities prompt_cache_retention betas scope edit source clear pattern $schema
    $ref
    """.split()  # noqa: SIM905
)
_IDS = frozenset(("id", "call_id", "tool_call_id", "tool_use_id"))


@dataclass
class Recorded:
    """One request and the status of its answer; `reason`: what an error says."""

    method: str
    path: str  # with the query
    headers: dict[str, str]
    body: bytes = b""
    status: int = 0
    reason: bytes = b""

    def json(self) -> Any:
        """The body, None if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


@dataclass
class Recorder:
    """The application; `requests` are those since the last `take`."""

    api: Api
    requests: list[Recorded] = field(default_factory=list)

    def take(self) -> list[Recorded]:
        """The requests until now, which are forgotten."""
        requests, self.requests = self.requests, []
        return requests

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self.api(scope, receive, send)
            return
        query = scope["query_string"].decode()
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        recorded = Recorded(
            method=scope["method"],
            path=scope["path"] + (f"?{query}" if query else ""),
            headers={name: headers[name] for name in _HEADERS if name in headers},
        )
        self.requests.append(recorded)

        async def receive_part() -> Message:
            message: Message = await receive()
            recorded.body += message.get("body", b"")
            return message

        async def send_part(message: Message) -> None:
            recorded.status = message.get("status", recorded.status)
            body = message.get("body", b"")
            if recorded.status >= 400 or b'"error":{' in body[:200]:
                recorded.reason += body
            await send(message)

        await self.api(scope, receive_part, send_part)


def write(requests: list[Recorded], folder: Path, program: str) -> None:
    """Write the bodies of one program, those whose form is new, in place of earlier ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob(f"{program}-[0-9].json"):
        earlier.unlink()
    forms: set[str] = set()
    number = 0
    for request in requests:
        body = request.json()
        if request.method != "POST" or body is None or number == MAX_RECORDED:
            continue
        neutral = Neutral().of(body)
        new = {request.path, *_forms(neutral)} - forms
        if not new:
            continue
        forms |= new
        number += 1
        kept = {"path": request.path, "headers": request.headers, "body": neutral}
        path = folder / f"{program}-{number}.json"
        path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


class Neutral:
    """Makes one body neutral; the same id always becomes the same."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}

    def of(self, value: Any, key: str = "") -> Any:
        """The value of `key`, without what it says."""
        if isinstance(value, dict):
            if key == "properties":
                return {name: self.of(item) for name, item in value.items()}
            return {name: self.of(item, name) for name, item in value.items()}
        if isinstance(value, list):
            items = _different(value) if key == "tools" else value
            return [self.of(item, key) for item in items]
        if not isinstance(value, str) or key in _KEPT or not value:
            return value
        if key in _IDS:
            return self._ids.setdefault(value, f"id_{len(self._ids) + 1}")
        return self._text(value, key)

    def _text(self, text: str, key: str) -> str:
        """Arguments of calls stay JSON."""
        if key in ("arguments", "input"):
            try:
                return json.dumps(self.of(json.loads(text), "arguments"))
            except ValueError:
                pass
        return "Some words."


def _different(tools: list[Any]) -> list[Any]:
    """Those tools that have a form which none before has; at most `MAX_TOOLS`."""
    forms: set[str] = set()
    different = []
    for tool in tools:
        if new := set(_forms(tool)) - forms:
            forms |= new
            different.append(tool)
    return different[:MAX_TOOLS]


def _forms(value: Any, key: str = "") -> Iterator[str]:
    """Names of fields with the kinds of their values, without the names that tools give."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _forms(item, "" if key == "properties" else name)
    elif isinstance(value, list):
        yield f"{key}: list"
        for item in value:
            yield from _forms(item, key)
    else:
        shown = value if key == "type" else type(value).__name__
        yield f"{key}: {shown}"
