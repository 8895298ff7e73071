"""Reasoning and calls are the same however an answer's text is cut; planted faults are found."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator

import pytest

from cluster.api import parser as parser_module
from cluster.api.parser import AnswerParser, AnswerParts, ToolCall
from cluster.grammar.markers import (
    CALL,
    END_CALL,
    END_THINK,
    THINK,
    AnswerState,
    answer_state_after,
)

MARKERS = (THINK, END_THINK, CALL, END_CALL)


def call(arguments: str, name: str = "add") -> str:
    return f'{CALL}\n{{"name": "{name}", "arguments": {arguments}}}\n{END_CALL}'


def parse(
    pieces: list[str], state: AnswerState, *, tools: bool = True, is_cut_off: bool = False
) -> AnswerParts:
    whole, parser = AnswerParts(), AnswerParser(state, looks_for_calls=tools)
    for parts in [*map(parser.push, pieces), parser.finish(is_cut_off=is_cut_off)]:
        whole.reasoning += parts.reasoning
        whole.content += parts.content
        whole.calls += parts.calls
    return whole


CASES: list[tuple[str, AnswerState, AnswerParts]] = [
    ("Hello", AnswerState.UNDECIDED, AnswerParts("", "Hello")),
    ("", AnswerState.UNDECIDED, AnswerParts()),
    ("  \n", AnswerState.UNDECIDED, AnswerParts("", "  \n")),
    ("<thin", AnswerState.UNDECIDED, AnswerParts("", "<thin")),
    ("<thinner> air", AnswerState.UNDECIDED, AnswerParts("", "<thinner> air")),
    ("\n<think>\nso\nit\n</think>\n\nHi\n", AnswerState.UNDECIDED, AnswerParts("so\nit", "Hi\n")),
    ("<think>\n\n</think>\n\nHi", AnswerState.UNDECIDED, AnswerParts("", "Hi")),
    ("so it is\n</think>\n\nHi", AnswerState.REASONING, AnswerParts("so it is", "Hi")),
    ("so it is\n\n", AnswerState.REASONING, AnswerParts("so it is\n\n")),
    ("a < b </thin </think>", AnswerState.REASONING, AnswerParts("a < b </thin ")),
    (
        "<think>is text here</think>",
        AnswerState.CONTENT,
        AnswerParts("", "<think>is text here</think>"),
    ),
    ("\n\nHi", AnswerState.CONTENT, AnswerParts("", "Hi")),
    (
        call('{"a": 1}'),
        AnswerState.UNDECIDED,
        AnswerParts("", "", [ToolCall(name="add", arguments='{"a": 1}')]),
    ),
    (
        f"<think>\nhm\n</think>\n\nLet me see.\n{call('{}')}\n{call('[1,  2]', 'b')}",
        AnswerState.UNDECIDED,
        AnswerParts(
            "hm",
            "Let me see.",
            [ToolCall(name="add", arguments="{}"), ToolCall(name="b", arguments="[1,  2]")],
        ),
    ),
    (
        call('{"t": "' + END_CALL + ' \\" ' + CALL + ' \\\\"}'),
        AnswerState.CONTENT,
        AnswerParts(
            "",
            "",
            [ToolCall(name="add", arguments='{"t": "' + END_CALL + ' \\" ' + CALL + ' \\\\"}')],
        ),
    ),
    (
        f"{CALL}no JSON{END_CALL}\n\nHi",
        AnswerState.CONTENT,
        AnswerParts("", f"{CALL}no JSON{END_CALL}\n\nHi"),
    ),
    (
        f'{CALL}{{"name": "f"}}{END_CALL}after',
        AnswerState.CONTENT,
        AnswerParts("", "after", [ToolCall(name="f", arguments="{}")]),
    ),
    (
        f'{CALL}{{"arguments": {{"name": "x"}}, "name": "f"}}{END_CALL}',
        AnswerState.CONTENT,
        AnswerParts("", "", [ToolCall(name="f", arguments='{"name": "x"}')]),
    ),
    (
        f'x\n{CALL}\n{{"name": "f", "argu',
        AnswerState.CONTENT,
        AnswerParts("", f'x\n{CALL}\n{{"name": "f", "argu'),
    ),
    (
        f"x\n\n{CALL}\n{{broken}}\n{END_CALL}\ny",
        AnswerState.CONTENT,
        AnswerParts("", f"x\n\n{CALL}\n{{broken}}\n{END_CALL}\ny"),
    ),
    (
        f"a <tool_cal b {END_CALL}",
        AnswerState.CONTENT,
        AnswerParts("", f"a <tool_cal b {END_CALL}"),
    ),
]


def random_answer(rng: random.Random) -> tuple[str, AnswerState]:
    """Text made of markers, parts of markers, line ends, calls and words, in any order."""
    pieces = [
        *MARKERS,
        *(marker[: rng.randrange(1, len(marker))] for marker in MARKERS),
        "\n",
        "\n\n",
        " ",
        "word",
        "ü🦅",
        '"',
        "\\",
        "{}",
        call('{"a": "ü", "b": [1.50, {"c": null}]}'),
        call('{"quote": "\\"' + END_CALL + '"}'),
        call("{broken"),
    ]
    text = "".join(rng.choices(pieces, k=rng.randrange(1, 9)))
    return text, rng.choice([AnswerState.UNDECIDED, AnswerState.REASONING, AnswerState.CONTENT])


def answers() -> Iterator[tuple[str, AnswerState]]:
    yield from ((text, state) for text, state, _ in CASES)
    yield from (random_answer(random.Random(seed)) for seed in range(400))


def cuts(text: str) -> Iterator[list[str]]:
    """Every cut in two, one character at a time, and some random cuts."""
    yield from ([text[:i], text[i:]] for i in range(len(text) + 1))
    yield list(text)
    rng = random.Random(text)
    for _ in range(5):
        places = sorted(rng.choices(range(len(text) + 1), k=6))
        yield [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


def check_all_cuts() -> None:
    for text, state in answers():
        for tools in (True, False):
            whole = parse([text], state, tools=tools)
            for pieces in cuts(text):
                assert parse(pieces, state, tools=tools) == whole, (pieces, state, tools)
        cut_off = parse([text], state, is_cut_off=True)
        for pieces in cuts(text):
            assert parse(pieces, state, is_cut_off=True) == cut_off, (pieces, state)


def check_cases() -> None:
    for text, state, want in CASES:
        assert parse([text], state) == want, (text, state)


def test_parts_are_those_expected() -> None:
    check_cases()


def test_however_an_answer_is_cut_its_parts_add_up_to_the_same() -> None:
    check_all_cuts()


def test_nothing_of_an_answer_is_lost() -> None:
    """Except for markers and the line ends next to them."""
    for text, state in answers():
        parts = parse([text], state)
        kept = parts.reasoning + parts.content + "".join(c.name + c.arguments for c in parts.calls)
        form = "".join(MARKERS) + '\n\r{"name": "", "arguments": }' + " "
        for char in set(text) - set(form):
            assert kept.count(char) == text.count(char), (text, state, char)


BEGUN = f'Well.\n{CALL}\n{{"name": "add", "arguments": {{"a": "x\\" y", "b": [1, 2]}}}}\n{END_CALL}'


@pytest.mark.parametrize("size", range(len("Well.\n" + CALL), len(BEGUN) + 1))
def test_a_call_that_is_cut_off_has_the_arguments_that_came(size: int) -> None:
    text = BEGUN[:size]
    parts = parse([text], AnswerState.CONTENT, is_cut_off=True)
    assert parts.content == "Well."
    before = BEGUN.index(', "arguments"')
    arguments = BEGUN[BEGUN.index('{"a"') : BEGUN.index("}\n<")]
    if size < before:
        assert parts.calls == []
    else:
        came = text[BEGUN.index('{"a"') :]
        [found] = parts.calls
        assert found.name == "add" and found.arguments == came[: len(arguments)]
        assert found.is_complete == (len(came) > len(arguments))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (f"Use {CALL} to call", AnswerParts("", f"Use {CALL} to call")),
        (f'{CALL}{{"arguments": {{}}, "nam', AnswerParts()),
        (f'{CALL}{{"name": "", "argu', AnswerParts()),
        (
            f"{call('{}')}\nmore {CALL}",
            AnswerParts("", "more ", [ToolCall(name="add", arguments="{}")]),
        ),
    ],
)
def test_only_what_begins_as_a_call_is_taken_out_of_the_content(
    text: str, want: AnswerParts
) -> None:
    assert parse([text], AnswerState.CONTENT, is_cut_off=True) == want


def test_without_tools_calls_are_text() -> None:
    text = f"x\n{call('{}')}\n"
    assert parse([text], AnswerState.CONTENT, tools=False) == AnswerParts("", text)


def test_arguments_are_a_part_of_the_answer_letter_by_letter() -> None:
    for text, state in answers():
        for found in parse([text], state).calls:
            assert found.arguments in text or found.arguments == "{}"
            json.loads(found.arguments)


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        ("<|im_start|>assistant\n", AnswerState.UNDECIDED),
        ("<|im_start|>assistant\n<think>\n", AnswerState.REASONING),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", AnswerState.CONTENT),
        ("", AnswerState.UNDECIDED),
    ],
)
def test_an_answer_begins_where_the_prompt_ends(prompt: str, state: AnswerState) -> None:
    assert answer_state_after(prompt) is state


def _holds_only_a_whole_start(text: str, marker: str, start: int) -> int:
    return len(marker) - 1 if text.endswith(marker[:-1], start) else 0


def _decides_at_once(self: AnswerParser) -> bool:
    is_reasoning = self._text.startswith(THINK)
    self._text = self._text.removeprefix(THINK)
    self._state = AnswerState.REASONING if is_reasoning else AnswerState.CONTENT
    return True


def _drops_the_rest(self: AnswerParser, *, is_cut_off: bool = False) -> AnswerParts:
    return AnswerParts()


def _completes_json(body: str) -> ToolCall | None:
    value = json.loads(body.strip().rstrip("}") + "}}")
    return ToolCall(name=value["name"], arguments=json.dumps(value["arguments"]))


def _writes_arguments_anew(body: str) -> ToolCall | None:
    try:
        value = json.loads(body)
        return ToolCall(name=value["name"], arguments=json.dumps(value.get("arguments", {})))
    except (ValueError, KeyError, TypeError):
        return None


PLANTED: dict[str, tuple[object, str, object]] = {
    "beginnings of markers are not withheld": (
        parser_module,
        "_partial_marker_length",
        lambda *_: 0,
    ),
    "only one beginning is withheld": (
        parser_module,
        "_partial_marker_length",
        _holds_only_a_whole_start,
    ),
    "line ends next to markers are kept": (AnswerParser, "_take_text", AnswerParser._take_withheld),
    "the first characters decide": (AnswerParser, "_decide", _decides_at_once),
    "the end is dropped": (AnswerParser, "finish", _drops_the_rest),
    "the first end marker ends a call": (parser_module, "_QUOTE_OR_END", re.compile(END_CALL)),
    "quotes after a backslash count": (
        parser_module,
        "_REST_OF_STRING",
        re.compile(r'[^"]*'),
    ),
    "a backslash that ends a piece is forgotten": (
        parser_module,
        "_REST_OF_STRING",
        re.compile(r'(?:[^"\\]|\\.|\\$)*', re.DOTALL),
    ),
    "JSON is completed": (parser_module, "_read_call", _completes_json),
    "arguments are written anew": (parser_module, "_read_call", _writes_arguments_anew),
    "the first key is taken": (
        parser_module,
        "_raw_value",
        lambda key, text: text.partition(":")[2].rpartition("}")[0].strip(),
    ),
    "no call is one": (parser_module, "_read_call", lambda body: None),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement = PLANTED[fault]
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        check_cases()
        check_all_cuts()
