"""Whatever a model writes, answers are valid JSON in UTF-8, the same streamed and whole."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.api import parser as parser_module
from cluster.api import replies
from cluster.api.messages.writer import MessageWriter
from cluster.api.omissions import Omissions
from cluster.api.parser import MAX_DEPTH, ToolCall
from cluster.api.replies import ChatWriter, encode_json, event, json_pieces
from cluster.api.responses.tools import ToolTable
from cluster.api.responses.writer import ResponseWriter
from cluster.client.outputs import Chunk, Generation
from cluster.grammar.markers import CALL, END_CALL, END_THINK, THINK, AnswerState
from tests.cluster.api.scripted import TOKENIZER
from tests.cluster.api.test_parser_work import generation_of

NUM_ANSWERS = 600
DEEP = 100_000

NO_TOOLS = ToolTable([], Omissions())  # calls are looked for, of whatever is called


def call(arguments: str, name: str = '"f"') -> str:
    return f'{CALL}{{"name": {name}, "arguments": {arguments}}}{END_CALL}'


def nested(depth: int) -> str:
    """Arguments of a call whose deepest value lies `depth` levels deep, with the call's object."""
    return "[" * (depth - 1) + "]" * (depth - 1)


NO_CALLS = {
    "a string that begins like an object": f'{CALL}"{{1"{END_CALL}',
    "a string with a whole object": f'{CALL}"{{\\"name\\": \\"f\\"}}"{END_CALL}',
    "a list with an object": f'{CALL}[{{"name": "f"}}]{END_CALL}',
    "a number": f"{CALL}1{END_CALL}",
    "nothing": f"{CALL}{END_CALL}",
    "NaN": call('{"a": NaN}'),
    "minus infinity": call("[-Infinity]"),
    "infinity for a name": call("{}", name="Infinity"),
    "a number beyond floats": call('{"a": -1e400}'),
    "a number beyond integers": call('{"a": ' + "9" * 5000 + "}"),
    "a lone surrogate for a name": call("{}", name='"\\ud800"'),
    "surrogates in the wrong order in a name": call("{}", name='"f\\ude00\\ud83d"'),
    "arguments nested too deep": call(nested(MAX_DEPTH + 1)),
    "very deep arguments": call(nested(DEEP)),
    "open arrays": CALL + "[" * DEEP + END_CALL,
    "open objects": CALL + '{"a":' * DEEP + END_CALL,
    "a control character in a string": call('{"a": "\x01"}'),
    "a byte order mark": f'{CALL}\ufeff{{"name": "f"}}{END_CALL}',
}
CALLS = {
    "a lone surrogate": '{"a": "\\ud800"}',
    "a lone surrogate for a key": '{"\\udfff": 1}',
    "a pair of surrogates": '{"a": "\\ud83e\\udd85"}',
    "ends of lines": '{"a": "\u2028\u2029\x85"}',
    "no object": "[1,  2]",
    "no object, with a brace": '"{1"',
    "null": "null",
    "a large number": '{"a": 1e308, "b": ' + "9" * 400 + "}",
    "a small number": '{"a": 1e-400}',
    "braces in strings": '{"a": "' + "[" * 2 * MAX_DEPTH + '\\""}',
    "many arrays side by side": "[" + "[]," * 2 * MAX_DEPTH + "[]]",
    "arguments nested as deep as possible": nested(MAX_DEPTH),
    "two keys of one name": '{"a": 1, "a": "2"}',
}
PIECES = [
    *(THINK, END_THINK, CALL, END_CALL, "<tool_call", "</tool_ca", "<think", "\n", "\r", " "),
    *('{"name": "f", "arguments": ', '{"name": ', '"arguments": ', '"f"', '{"', "{", "}", "}}"),
    *("[", "]", ",", ":", '"', "\\", '\\"', "\\ud800", "\\ude00", '"\\ud800"', "\\u", "\\n"),
    *("NaN", "Infinity", "-Infinity", "1e400", "9" * 5000, "-0", "1.", "true", "null", '"{1"'),
    *("[" * 2000, '{"a":' * 2000, "\u2028", "\u2029", "\x85", "\x00", "\ufeff", "\ufffd", "ü🦅"),
    *(call("{}"), call("[NaN]"), call('{"\\ud800": 1e999}'), f"{CALL}{{}}{END_CALL}", "word"),
]


def read(data: str | bytes) -> Any:
    """Strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(data, parse_constant=refuse)


def read_events(data: bytes) -> list[Any]:
    """The events of a stream as several readers of lines see them."""
    lines = data.split(b"\n")
    assert data.decode().splitlines() == data.decode().split("\n")[:-1], data
    return [read(line[6:]) for line in lines if line.startswith(b"data: {")]


def writer_of(api: str, generation: Generation, state: AnswerState) -> Any:
    if api == "chat":
        return ChatWriter("tiny", [generation], TOKENIZER, state=state, looks_for_calls=True)
    if api == "messages":
        return MessageWriter("tiny", generation, state=state, looks_for_calls=True)
    return ResponseWriter({}, generation, TOKENIZER, state=state, tools=NO_TOOLS)


Answer = list[tuple[str, Any]]  # the parts of an answer in their order, neighbors of a kind joined


def joined(parts: Answer) -> Answer:
    together: Answer = []
    for kind, group in itertools.groupby(parts, lambda part: part[0]):
        values = [value for _, value in group]
        if kind == "call":
            together += [(kind, value) for value in values]
        elif text := "".join(values):
            together.append((kind, text))
    return together


def chat_of_events(events: list[Any]) -> Answer:
    parts: Answer = []
    for one in events:
        for choice in one["choices"]:
            delta = choice["delta"]
            parts += [(name, delta[name]) for name in ("reasoning", "content") if delta.get(name)]
            parts += [("call", made["function"]) for made in delta.get("tool_calls", ())]
    order = ("reasoning", "content", "call")
    return joined(sorted(parts, key=lambda part: order.index(part[0])))


def chat_of_body(body: Any) -> Answer:
    message = body["choices"][0]["message"]
    parts = [("reasoning", message["reasoning"] or ""), ("content", message["content"] or "")]
    return joined(parts + [("call", made["function"]) for made in message.get("tool_calls", ())])


def messages_of_events(events: list[Any]) -> Answer:
    blocks: list[Any] = []
    for one in events:
        if one["type"] == "content_block_start":
            blocks.append(one["content_block"])
        elif one["type"] == "content_block_delta":
            delta = one["delta"]
            if delta["type"] == "input_json_delta":
                blocks[-1]["input"] = read(delta["partial_json"])
            else:
                kind = delta["type"].removesuffix("_delta")
                blocks[-1][kind] += delta[kind]
    return messages_of_body({"content": blocks})


def messages_of_body(body: Any) -> Answer:
    return joined(
        [
            ("call", (block["name"], block["input"]))
            if block["type"] == "tool_use"
            else (block["type"], block[block["type"]])
            for block in body["content"]
        ]
    )


def responses_of_events(events: list[Any]) -> Answer:
    parts: Answer = []
    for one in events:
        if one["type"] in ("response.output_text.delta", "response.reasoning_text.delta"):
            parts.append((one["type"].split(".")[1], one["delta"]))
        elif one["type"] == "response.function_call_arguments.done":
            parts.append(("call", (one["name"], one["arguments"])))
    assert responses_of_body(events[-1]["response"]) == joined(parts)
    return joined(parts)


def responses_of_body(body: Any) -> Answer:
    return joined(
        [
            ("call", (item["name"], item["arguments"]))
            if item["type"] == "function_call"
            else (item["content"][0]["type"], item["content"][0]["text"])
            for item in body["output"]
        ]
    )


READERS: dict[str, tuple[Callable[[list[Any]], Answer], Callable[[Any], Answer]]] = {
    "chat": (chat_of_events, chat_of_body),
    "messages": (messages_of_events, messages_of_body),
    "responses": (responses_of_events, responses_of_body),
}


def answers_of(
    api: str, pieces: list[str], state: AnswerState = AnswerState.UNDECIDED
) -> tuple[Answer, Answer]:
    """(the answer that a client of the stream puts together, the whole answer)"""
    generation = generation_of("".join(pieces))
    of_events, of_body = READERS[api]
    body = writer_of(api, generation, state).body()
    streamed, last = writer_of(api, generation, state), len(pieces) - 1
    data = b"".join(
        streamed.events(
            0, Chunk(index=0, text=text, token_ids=[], finish_reason="stop" if i == last else None)
        )
        for i, text in enumerate(pieces)
    )
    return of_events(read_events(data)), of_body(read(encode_json(body).encode()))


def random_pieces(seed: int) -> tuple[list[str], AnswerState]:
    rng = random.Random(seed)
    text = "".join(rng.choices(PIECES, k=rng.randrange(1, 12)))
    if rng.random() < 0.5:  # calls with anything inside are less rare
        text = CALL + text + END_CALL
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    return pieces, rng.choice([AnswerState.UNDECIDED, AnswerState.REASONING, AnswerState.CONTENT])


def check_random(api: str) -> None:
    for seed in range(NUM_ANSWERS):
        pieces, state = random_pieces(seed)
        streamed, whole = answers_of(api, pieces, state)
        assert streamed == whole, seed


def pieces_of(text: str) -> Iterator[list[str]]:
    yield [text]
    middle = len(text) // 2
    yield [text[:middle], text[middle:]]
    if len(text) < 200:
        yield list(text)


@pytest.mark.parametrize("api", READERS)
def test_any_text_is_answered_the_same_streamed_and_whole(api: str) -> None:
    check_random(api)


@pytest.mark.parametrize("api", READERS)
@pytest.mark.parametrize("name", NO_CALLS)
def test_what_is_no_call_stays_text(api: str, name: str) -> None:
    for pieces in pieces_of(NO_CALLS[name]):
        streamed, whole = answers_of(api, pieces)
        assert streamed == whole
        assert [text for _, text in whole] == [NO_CALLS[name]]


@pytest.mark.parametrize("api", READERS)
@pytest.mark.parametrize("name", CALLS)
def test_calls_with_unusual_arguments_are_calls(api: str, name: str) -> None:
    arguments = CALLS[name]
    value = json.loads(arguments)
    want = {
        "chat": {"name": "f", "arguments": arguments},
        "messages": ("f", value if isinstance(value, dict) else {"arguments": value}),
        "responses": ("f", arguments),
    }
    for pieces in pieces_of(call(arguments)):
        streamed, whole = answers_of(api, pieces)
        assert streamed == whole == [("call", want[api])]


# All that Python's `str.splitlines` takes for the end of a line, and half of a pair.
LINE_ENDS = [char for char in map(chr, range(0x3000)) if len(f"a{char}b".splitlines()) > 1]


@pytest.mark.parametrize("char", [*LINE_ENDS, "\ud800"])
def test_no_character_breaks_an_event(char: str) -> None:
    assert len(LINE_ENDS) == 10
    body = {f"key{char}": f"a{char}\nb"}
    [line, empty, rest] = event(body).decode().split("\n")
    assert not empty and not rest and line.splitlines() == [line]
    assert read(line.removeprefix("data: ")) == body
    whole = b"".join(json_pieces({"choices": [body], "ids": iter([body])})).decode()
    assert whole.splitlines() == [whole] and read(whole)["choices"] == [body]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_lacks_become_null(number: float) -> None:
    body = {"a": [1.5, number, {"b": (number, "NaN")}], "c": number}
    assert read(encode_json(body)) == {"a": [1.5, None, {"b": [None, "NaN"]}], "c": None}


def _reads_any_json(body: str) -> ToolCall | None:
    try:
        value = json.loads(body)
        return ToolCall(name=value["name"], arguments=json.dumps(value["arguments"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


@pytest.mark.parametrize(
    ("owner", "name", "replacement"),
    [
        (parser_module, "_read_call", _reads_any_json),
        (parser_module, "_DECODER", json.JSONDecoder()),
        (parser_module, "MAX_DEPTH", 10**9),
        (replies, "_escaped", lambda match: match[0]),
    ],
)
def test_planted_faults_are_found(
    owner: object, name: str, replacement: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises((AssertionError, ValueError, RecursionError)):
        check_random("messages")
