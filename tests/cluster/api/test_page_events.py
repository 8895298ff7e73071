"""How the page reads the events of a stream, run by node."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from importlib import resources
from typing import Any

import httpx
import pytest

from cluster.api import page
from cluster.api.admission import ApiLimits
from cluster.api.replies import DONE_EVENT, event
from tests.cluster.api.scripted import serve

# Reads the chunks of some streams, as hexadecimal digits, and writes what `events` makes of each.
DRIVER = """
const fs = require("fs");
require("vm").runInThisContext(fs.readFileSync(process.argv[1], "utf8"));
(async () => {
  const results = [];
  for (const chunks of JSON.parse(fs.readFileSync(0))) {
    const result = { events: [], error: null, isCancelled: false };
    const body = new ReadableStream({
      pull(controller) {
        if (chunks.length) controller.enqueue(Buffer.from(chunks.shift(), "hex"));
        else controller.close();
      },
      cancel() { result.isCancelled = true; },
    }, { highWaterMark: 0 });
    try {
      for await (const event of events(new Response(body))) result.events.push(event);
    } catch (error) {
      result.error = error.message;
    }
    results.push(result);
  }
  console.log(JSON.stringify(results));
})();
"""
EVENTS: list[dict[str, Any]] = [{"n": 1}, {"text": "ü🦅\r\n\u2028 data: x\n\n"}, {"n": [3]}]
STREAM = b"".join(map(event, EVENTS)) + DONE_EVENT
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")


def read(streams: list[list[bytes]]) -> list[dict[str, Any]]:
    """What the page makes of streams of these chunks."""
    assert NODE is not None
    done = subprocess.run(
        [NODE, "-e", DRIVER, str(resources.files(page) / "events.js")],
        input=json.dumps([[chunk.hex() for chunk in chunks] for chunks in streams]),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def cuts(stream: bytes) -> Iterator[list[bytes]]:
    """Every cut in two, and one byte at a time, with empty chunks in between."""
    yield from ([stream[:i], stream[i:]] for i in range(len(stream) + 1))
    yield list(itertools.chain(*((bytes([byte]), b"") for byte in stream)))


def check(stream: bytes, want: list[Any], error: str | None = None) -> None:
    """However a stream is cut, these are its events."""
    for result in read([*cuts(stream)]):
        assert (result["events"], result["error"]) == (want, error)


@needs_node
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_events_are_read_however_their_bytes_are_cut(end: bytes) -> None:
    check(STREAM.replace(b"\n", end), EVENTS)


@needs_node
@pytest.mark.parametrize(
    "comment", [b": waiting\n\n", b":\n\n", b":\n", b": data: 1\n", b":" + b"x" * 300 + b"\n\n\n"]
)
def test_comments_are_ignored_wherever_they_stand(comment: bytes) -> None:
    check(b"".join(comment + part for part in (*map(event, EVENTS), DONE_EVENT)), EVENTS)


@needs_node
@pytest.mark.parametrize(
    ("lines", "want"),
    [
        (b'data: {"a":\ndata: 1}', {"a": 1}),
        (b'data: {"a":\n: waiting\ndata: 1}', {"a": 1}),
        (b'data:{"a": " 1"}', {"a": " 1"}),
        (b'event: x\nid: 1\ndata: {"a": ":"}\nretry: 5\nunknown', {"a": ":"}),
        (b'data\ndata: {"a": 1}\ndata:', {"a": 1}),
        (b'\xef\xbb\xbfdata: {"a": 1}', {"a": 1}),
    ],
    ids=[
        "several lines",
        "a comment inside",
        "no space",
        "other fields",
        "empty lines of data",
        "byte order mark",
    ],
)
def test_fields_are_those_of_the_standard(lines: bytes, want: dict[str, Any]) -> None:
    check(lines + b"\n\n" + DONE_EVENT, [want])


@needs_node
def test_an_event_without_data_is_none() -> None:
    check(b"event: ping\n\nid: 1\n\n" + STREAM, EVENTS)


@needs_node
@pytest.mark.parametrize("name", [b"", b"event: error\n"])
def test_an_error_in_place_of_an_event_ends_the_stream(name: bytes) -> None:
    error = name + event({"error": {"message": "rank 1 is gone"}})
    check(event({"n": 1}) + error + STREAM, [{"n": 1}], "rank 1 is gone")


@needs_node
@pytest.mark.parametrize("rest", [b"", b'data: {"n": 2}', b'data: {"n": 2}\n', b"data: [DONE]\n"])
def test_a_stream_that_breaks_off_is_an_error(rest: bytes) -> None:
    check(event({"n": 1}) + rest, [{"n": 1}], "the answer broke off")


@needs_node
def test_what_is_not_json_is_an_error_in_words() -> None:
    check(b"data: <html>\n\n", [], "the server sent an event that is not JSON")


@needs_node
def test_the_connection_is_freed_when_the_last_event_has_come() -> None:
    [result] = read([[STREAM, b": and so on\n\n"]])
    assert result["isCancelled"] and result["events"] == EVENTS


@needs_node
def test_a_silent_server_is_no_error() -> None:
    """The bytes of a real server that waits longer between tokens than streams may be silent."""
    text = "ü, and so on"
    asked = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    limits = ApiLimits(ping_interval_s=0.02)
    with (
        serve(lambda request: text, step_s=0.1, limits=limits) as server,
        httpx.stream("POST", f"{server.url}/v1/chat/completions", json=asked) as answer,
    ):
        stream = b"".join(answer.iter_raw())
    assert stream.count(b": waiting\n\n") > 5
    for result in read([[stream], *cuts(stream)]):
        assert result["error"] is None
        deltas = [choice["delta"] for one in result["events"] for choice in one["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == text
