"""Stop strings end the answer, and not the reasoning before it, however tokens cut the text."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.parser import AnswerParser
from cluster.client.text_stream import TextStream
from cluster.grammar.markers import END_THINK, THINK, AnswerState

STATES = [AnswerState.UNDECIDED, AnswerState.REASONING, AnswerState.CONTENT]
PIECES = ["a", "b", "ab", "\n", "\n\n", " ", "<", "<thi", "nk>", "</thi", THINK, END_THINK]


class Pieces:
    """A tokenizer whose tokens are the pieces of one text."""

    text_bytes = None

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.pieces[token_id] for token_id in token_ids)


def streamed(
    pieces: Sequence[str], stop: Sequence[str], state: AnswerState, min_tokens: int = 0
) -> tuple[str, int | None]:
    """(the text of a stream, up to which piece it goes if a stop string ended it)"""
    stream = TextStream(Pieces(pieces), stop, min_tokens, state)
    text = ""
    for place in range(len(pieces)):
        text += stream.push([place])
        if stream.num_tokens_to_stop:
            return text, place
    return text + stream.finish(), None


def searched(text: str, stop: Sequence[str], state: AnswerState) -> str:
    """The text up to the stop string that is complete first, by searching the whole text."""
    start: int | None = 0
    if state is AnswerState.UNDECIDED and (match := re.match(rf"\s*{THINK}", text)):
        state, start = AnswerState.REASONING, match.end()
    if state is AnswerState.REASONING:
        match = re.compile(rf"{END_THINK}[\n\r]*").search(text, start or 0)
        start = None if match is None else match.end()
    if start is None:
        return text
    places = [(text.find(each, start), each) for each in stop]
    ends = [(place + len(each), place) for place, each in places if place >= 0]
    if not ends:
        return text
    first_end = min(ends)[0]
    return text[: min(place for end, place in ends if end == first_end)]


def of_pieces(pieces: Sequence[str], stop: Sequence[str], state: AnswerState) -> str:
    """As `searched`; of several stop strings that one piece completes, the earliest wins."""
    for count in range(len(pieces) + 1):
        text = "".join(pieces[:count])
        may_be_marker = state is AnswerState.UNDECIDED and THINK.startswith(text.lstrip())
        if may_be_marker and count < len(pieces):
            continue  # whether this is reasoning is not known yet
        ended = [searched(text, [each], state) for each in stop]
        if any(len(each) < len(text) for each in ended) or (text and count == len(pieces)):
            shortest = min(ended, key=len, default=text)
            if len(shortest) < len(text):
                return shortest
    return "".join(pieces)


@pytest.mark.parametrize(
    ("text", "state", "want"),
    [
        ("<think>\na. b\n</think>\n\nc. d", AnswerState.UNDECIDED, "<think>\na. b\n</think>\n\nc"),
        ("a. b</think>\n\nc. d", AnswerState.REASONING, "a. b</think>\n\nc"),
        ("a. b", AnswerState.REASONING, "a. b"),
        ("a. b</thin.", AnswerState.REASONING, "a. b</thin."),
        ("a. b", AnswerState.UNDECIDED, "a"),
        ("<thin. b", AnswerState.UNDECIDED, "<thin"),
        ("  \n.", AnswerState.UNDECIDED, "  \n"),
        ("<think>a</think>. b", AnswerState.CONTENT, "<think>a</think>"),
        ("a</think>.", AnswerState.REASONING, "a</think>"),
    ],
)
def test_a_stop_string_ends_the_answer_alone(text: str, state: AnswerState, want: str) -> None:
    for pieces in ([text], list(text), re.findall(r"</?think>|.", text, re.DOTALL)):
        assert streamed(pieces, ["."], state)[0] == want, pieces


def test_line_ends_after_the_reasoning_are_no_part_of_the_answer() -> None:
    pieces = ["a", "</think>", "\n\n", "b", "\n\n", "c"]
    assert streamed(pieces, ["\n\n"], AnswerState.REASONING) == ("a</think>\n\nb", 4)
    assert (
        AnswerParser(AnswerState.REASONING, looks_for_calls=False).push("a</think>\n\nb").content
        == "b"
    )


def test_one_token_may_end_the_reasoning_and_the_answer() -> None:
    assert streamed(["a.", "</think>\n\nb.c", "d"], ["."], AnswerState.REASONING) == (
        "a.</think>\n\nb",
        1,
    )


def test_reasoning_is_not_held_back() -> None:
    stream = TextStream(Pieces(["a", "STO", "P"]), ["STOP"], 0, AnswerState.REASONING)
    assert stream.push([0, 1]) == "aSTO"


def test_the_first_min_tokens_are_not_searched_whatever_they_are() -> None:
    assert streamed(["a.", "</think>", "b.", "c."], ["."], AnswerState.REASONING, 3) == (
        "a.</think>b.c",
        3,
    )
    assert streamed(["<", "a.", "b."], ["."], AnswerState.UNDECIDED, 2) == ("<a.b", 2)


@settings(max_examples=600, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=12),
    st.lists(
        st.sampled_from(["a", "ab", "b\n", "\n\n", "<", "k>a", "aba"]), min_size=1, max_size=2
    ),
    st.sampled_from(STATES),
)
def test_any_pieces_end_as_searching_the_whole_would(
    pieces: list[str], stop: list[str], state: AnswerState
) -> None:
    assert streamed(pieces, stop, state)[0] == of_pieces(pieces, stop, state)
