"""A token costs the same however long the answer is: a client can ask for any text, and all streams
of a process share one event loop.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.api.messages.writer import MessageWriter
from cluster.api.omissions import Omissions
from cluster.api.parser import AnswerParser
from cluster.api.replies import ChatWriter
from cluster.api.responses.tools import ToolTable
from cluster.api.responses.writer import ResponseWriter
from cluster.client.outputs import Chunk, CompletionOutput, Generation
from cluster.grammar.markers import CALL, END_CALL, END_THINK, THINK, AnswerState
from tests.cluster.api.scripted import TOKENIZER

NUM_CHARS = 64 * 1024
NUM_CHARS_OF_TOKEN = 4
LIMIT_S = (
    3.0  # of the thread's processor time; linear work takes a tenth, and a third beside others
)

NO_TOOLS = ToolTable([], Omissions())  # calls are looked for, of whatever is called


def repeated(text: str, num_chars: int = NUM_CHARS) -> str:
    return (text * (num_chars // len(text) + 1))[:num_chars]


ARGUMENTS = json.dumps({"text": repeated('line\n"quoted" \\ ü🦅 ')}, ensure_ascii=False)
OPEN = {
    "a call": CALL + repeated("a"),
    "a call with a long string": f'{CALL}{{"name": "f", "arguments": {{"a": "{repeated("b")}',
    "a call of empty strings": CALL + repeated('""'),
    "a string of escapes": CALL + '"' + repeated("\\\\"),
    "a string of quoted end markers": CALL + '"' + repeated(END_CALL),
    "partial end markers in a call": CALL + repeated(END_CALL[:-1]),
    "nested braces": f'{CALL}{{"name": "f", "arguments": ' + repeated('{"a":['),
    "reasoning": THINK + repeated("so "),
    "partial ends of reasoning": THINK + repeated(END_THINK[:-1]),
    "line ends in reasoning": THINK + "x" + repeated("\n"),
    "partial markers": repeated(CALL[:-1]),
    "beginnings of markers": repeated("<"),
    "line ends": "x" + repeated("\r\n"),
    "spaces at the beginning": repeated(" \n"),
    "line ends after a marker": f"{THINK}{END_THINK}" + repeated("\n"),
}
COMPLETE = {
    "a call with long arguments": f'{CALL}{{"name": "f", "arguments": {ARGUMENTS}}}{END_CALL}',
    "many empty calls": repeated(CALL + END_CALL),
    "many calls": repeated(f'{CALL}{{"name": "f"}}{END_CALL}\n'),
    "text and calls in turn": repeated(f'x{CALL}{{"name": "f"}}{END_CALL}\n'),
}


def tokens(text: str, num_chars: int = NUM_CHARS_OF_TOKEN) -> Iterable[str]:
    return (text[i : i + num_chars] for i in range(0, len(text), num_chars))


def check_work(push: Callable[[str], object], pieces: Iterable[str]) -> None:
    """Push all pieces; fails as soon as they have taken too long."""
    start_s, num_pushed = time.thread_time(), 0
    for piece in pieces:
        push(piece)
        num_pushed += len(piece)
        took_s = time.thread_time() - start_s
        assert took_s < LIMIT_S, f"{num_pushed} characters took {took_s:.2f} s"


@pytest.mark.parametrize("name", [*OPEN, *COMPLETE])
def test_work_per_token_does_not_grow(name: str) -> None:
    parser = AnswerParser(AnswerState.UNDECIDED, looks_for_calls=True)
    text = (OPEN | COMPLETE)[name]
    check_work(parser.push, tokens(text))
    check_work(lambda _: parser.finish(), [""])


@pytest.mark.parametrize("name", [*OPEN, *COMPLETE])
def test_a_whole_answer_takes_linear_work(name: str) -> None:
    parser = AnswerParser(AnswerState.UNDECIDED, looks_for_calls=True)
    check_work(parser.push, [(OPEN | COMPLETE)[name] * 10])
    check_work(lambda _: parser.finish(), [""])


def generation_of(text: str) -> Generation:
    """What writers read of a finished generation, with this text."""
    done = CompletionOutput(0, text=text, finish_reason="stop")
    request = SimpleNamespace(num_prompt_tokens=1)
    fields = {"completions": [done], "requests": [request], "num_cached_tokens": 0}
    return cast(Generation, SimpleNamespace(**fields))


def writers_of(text: str) -> dict[str, Any]:
    generation = generation_of(text)
    state = AnswerState.UNDECIDED
    return {
        "chat": ChatWriter("tiny", [generation], TOKENIZER, state=state, looks_for_calls=True),
        "messages": MessageWriter("tiny", generation, state=state, looks_for_calls=True),
        "responses": ResponseWriter({}, generation, TOKENIZER, state=state, tools=NO_TOOLS),
    }


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
@pytest.mark.parametrize("text", ["plain text ", CALL + END_CALL, "\n<think>"])
def test_writers_of_streams_take_linear_work(api: str, text: str) -> None:
    text = repeated(text)
    writer = writers_of(text)[api]

    def push(piece: str) -> None:
        writer.events(0, Chunk(index=0, text=piece, token_ids=[1]))

    check_work(push, tokens(text, 2 * NUM_CHARS_OF_TOKEN))


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_writers_of_whole_answers_take_linear_work(api: str) -> None:
    """Many pieces of one block: each of these calls is text."""
    text = repeated(CALL + "x" * 250 + END_CALL, 64 * NUM_CHARS)
    writer = writers_of(text)[api]
    check_work(lambda _: writer.body(), [""])
