"""Text in and out: detokenizing as tokens come, stop strings, prompts and chat templates."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.client.detokenizing import NUM_CONTEXT_TOKENS
from cluster.client.prompts import Conversation
from cluster.client.text_stream import TextStream
from cluster.client.tokenizer import Tokenizer, load_tokenizer
from scheduler.errors import ConfigError, RequestError
from tests.cluster.client.byte_tokenizer import END_ID, NUM_IDS, PIECES, ids, write_tokenizer

USER = {"role": "user", "content": "Hi"}
# A few letters of one to four bytes, so that stop strings match often.
FEW_LETTERS = st.text(alphabet="abü€🦅", min_size=1, max_size=4)
ANY_IDS = st.lists(st.integers(0, NUM_IDS - 1), max_size=80)
FEW_IDS = st.lists(
    st.sampled_from([*ids("a", "b", "ü", "🦅"), *"ü€🦅".encode(), *ids(*PIECES[10:14])]),
    min_size=1,
    max_size=24,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def texts(stream: TextStream, token_ids: list[int]) -> list[str]:
    """The text that is certain after each token, and after the end."""
    text, seen = "", []
    for token_id in token_ids:
        text += stream.push([token_id])
        seen.append(text)
        if stream.num_tokens_to_stop:
            return seen
    return [*seen, text + stream.finish()]


# Detokenizing


def test_text_comes_with_its_token(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    assert texts(stream, ids("Hello", " wor", "ld")) == [
        "Hello",
        "Hello wor",
        "Hello world",
        "Hello world",
    ]


def test_a_character_split_over_tokens_comes_when_it_is_complete(tokenizer: Tokenizer) -> None:
    token_ids = [*ids("a"), *"🦅".encode(), *ids("b")]
    assert texts(TextStream(tokenizer), token_ids) == ["a", "a", "a", "a", "a🦅", "a🦅b", "a🦅b"]


def test_a_token_that_ends_one_character_and_begins_another_gives_what_is_certain(
    tokenizer: Tokenizer,
) -> None:
    eagle = "🦅".encode()
    token_ids = ids(b"x" + eagle[:1], eagle[1:] + b"y")
    assert texts(TextStream(tokenizer), token_ids) == ["x", "x🦅y", "x🦅y"]


def test_unfinished_bytes_at_the_end_become_a_replacement_character(tokenizer: Tokenizer) -> None:
    assert texts(TextStream(tokenizer), [*ids("a"), *"🦅".encode()[:2]]) == [
        "a",
        "a",
        "a",
        "a\ufffd",
    ]


def test_a_replacement_character_that_the_model_wrote_is_kept(tokenizer: Tokenizer) -> None:
    assert texts(TextStream(tokenizer), ids("a", "\ufffd", "b"))[-1] == "a\ufffdb"


def test_bytes_that_never_make_a_character_are_text_soon_and_cost_no_more_each(
    tokenizer: Tokenizer,
) -> None:
    stuck = "🦅".encode()[:1]
    counts: list[int] = []

    class Counting:
        text_bytes = None

        def decode(self, token_ids: list[int]) -> str:
            counts.append(len(token_ids))
            return tokenizer.decode(token_ids)

    counting: Any = Counting()
    stream = TextStream(counting, ["END"])
    text = ""
    for i in range(1, 201):
        text += stream.push([*stuck])
        assert text == "\ufffd" * (i - 3)
    assert max(counts) <= 2 * NUM_CONTEXT_TOKENS + 1
    assert [stream.push([token]) for token in ids("a", "EN", "D")] == ["\ufffd" * 3 + "a", "", ""]
    assert stream.num_tokens_to_stop == 1


def test_characters_that_every_token_cuts_are_whole(tokenizer: Tokenizer) -> None:
    eagle = "🦅".encode()
    token_ids = ids(b"x" + eagle[:1], *[eagle[1:] + eagle[:1]] * 80, eagle[1:] + b"y")
    seen = texts(TextStream(tokenizer), token_ids)
    assert seen[-1] == "x" + "🦅" * 81 + "y"
    assert not any("\ufffd" in text for text in seen)


class WordTokenizer:
    """Decodes to words with spaces between them: the text of a token depends on whether one came
    before it.
    """

    text_bytes = None

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(f"w{token_id}" for token_id in token_ids)


def test_spaces_that_depend_on_the_token_before_are_kept() -> None:
    words: Any = WordTokenizer()
    assert texts(TextStream(words), [*range(100)])[-1] == " ".join(f"w{i}" for i in range(100))


def test_special_tokens_give_no_text(tokenizer: Tokenizer) -> None:
    assert texts(TextStream(tokenizer), [*ids("a"), END_ID, *ids("b"), END_ID]) == [
        "a",
        "a",
        "ab",
        "ab",
        "ab",
    ]


def test_a_stream_without_tokens_has_no_text(tokenizer: Tokenizer) -> None:
    assert texts(TextStream(tokenizer), []) == [""]


@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_the_bytes_of_any_text_give_that_text(tokenizer: Tokenizer, text: str) -> None:
    assert texts(TextStream(tokenizer), list(text.encode()))[-1] == text


@settings(deadline=None)
@given(token_ids=ANY_IDS)
def test_any_tokens_give_the_text_of_decoding_them_whole(
    tokenizer: Tokenizer, token_ids: list[int]
) -> None:
    assert texts(TextStream(tokenizer), token_ids)[-1] == tokenizer.decode(token_ids)


@settings(deadline=None)
@given(bunches=st.lists(ANY_IDS, max_size=5))
def test_tokens_in_bunches_give_the_text_of_decoding_them_whole(
    tokenizer: Tokenizer, bunches: list[list[int]]
) -> None:
    stream = TextStream(tokenizer)
    text = "".join(map(stream.push, bunches)) + stream.finish()
    assert text == tokenizer.decode([token for bunch in bunches for token in bunch])


def test_a_stop_string_in_a_bunch_says_where(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["END"])
    assert stream.push(ids("a", "E", "N", "D", "b")) == "a"
    assert stream.num_tokens_to_stop == 4


# Stop strings


def test_text_ends_before_a_stop_string(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["END"])
    assert texts(stream, ids("Hello", "END", " wor")) == ["Hello", "Hello"]
    assert stream.stop_string is not None


def test_the_token_that_completes_a_stop_string_is_the_one_that_says_so(
    tokenizer: Tokenizer,
) -> None:
    stream = TextStream(tokenizer, ["END"])
    num_tokens_to_stop = []
    for token_id in ids("a", "E", "N", "D"):
        stream.push([token_id])
        num_tokens_to_stop.append(stream.num_tokens_to_stop)
    assert num_tokens_to_stop == [None, None, None, 1]


@pytest.mark.parametrize(
    "pieces", [("a", "E", "N", "D"), ("a", "EN", "D", "b"), ("a", "END"), ("a", "one END two")]
)
def test_a_stop_string_is_found_however_tokens_cut_it(
    tokenizer: Tokenizer, pieces: tuple[str, ...]
) -> None:
    stream = TextStream(tokenizer, ["END"])
    assert texts(stream, ids(*pieces))[-1] == "".join(pieces).partition("END")[0]
    assert stream.stop_string is not None


def test_what_may_begin_a_stop_string_is_held_until_it_does_not(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["END"])
    assert texts(stream, ids("a", "E", "N", "b", "E")) == ["a", "a", "a", "aENb", "aENb", "aENbE"]
    assert stream.stop_string is None


def test_no_more_is_held_than_may_begin_a_stop_string(tokenizer: Tokenizer) -> None:
    # After "aab" only "ab" can continue to "abab"; the first "a" is certain.
    assert texts(TextStream(tokenizer, ["abab"]), ids("a", "a", "b"))[:3] == ["", "a", "a"]


def test_a_stop_string_that_overlaps_its_own_beginning_is_found(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["abab!"])
    assert texts(stream, ids("a", "b", "a", "b", "a", "b", "!"))[-1] == "ab"
    assert stream.stop_string is not None


def test_held_text_comes_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["END"])
    assert texts(stream, ids("a", "EN")) == ["a", "a", "aEN"]
    assert stream.stop_string is None


def test_as_many_and_as_long_stop_strings_as_possible_take_little_time(
    tokenizer: Tokenizer,
) -> None:
    # Each token ends with the beginning of all of them.
    stop = ["a" * 1000 + f"{i:024d}" for i in range(32)]
    tokens = tokenizer.encode("a" * 2000)
    stream = TextStream(tokenizer, stop)
    began_s = time.process_time()
    text = stream.push(tokens)
    assert (time.process_time() - began_s) / len(tokens) < 1e-3
    assert stream.stop_string is None and len(text) == 1000


def test_of_several_stop_strings_in_one_token_the_earliest_wins(tokenizer: Tokenizer) -> None:
    for stop in (["END", "STOP"], ["STOP", "END"]):
        assert texts(TextStream(tokenizer, stop), ids("aSTOPbENDc")) == ["a"]


def test_of_several_stop_strings_the_one_complete_first_wins(tokenizer: Tokenizer) -> None:
    # "END!" would begin earlier, but "D" is complete a token before it.
    stream = TextStream(tokenizer, ["END!", "D"])
    assert texts(stream, ids("a", "EN", "D", "!")) == ["a", "a", "aEN"]


def test_a_stop_string_inside_one_token_ends_the_text_inside_it(tokenizer: Tokenizer) -> None:
    assert texts(TextStream(tokenizer, ["END"]), ids("a", "one END two")) == ["a", "aone "]


def test_a_stop_string_of_many_bytes_a_character_is_found_over_tokens(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["ü🦅"])
    assert texts(stream, [*ids("a"), *"ü🦅".encode()])[-1] == "a"
    assert stream.stop_string is not None


def test_a_stop_string_among_the_first_tokens_leaves_no_text(tokenizer: Tokenizer) -> None:
    assert texts(TextStream(tokenizer, ["Hello"]), ids("Hello")) == [""]


def test_nothing_is_added_at_the_end_of_a_stopped_stream(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["END"])
    assert stream.push(ids("one END two")) == "one "
    assert stream.finish() == ""


@pytest.mark.parametrize("text", ["a" * 8000, "ab" * 4000, ("a" * 999 + "b") * 8])
def test_long_stop_strings_cost_no_more_than_short_ones(tokenizer: Tokenizer, text: str) -> None:
    stop = [text[start:2000] + "!" for start in range(8)]
    stream, start_s = TextStream(tokenizer, stop), time.thread_time()
    pieces = []
    for token_id in text.encode():
        pieces.append(stream.push([token_id]))
        assert time.thread_time() - start_s < 3.0
    assert "".join(pieces) + stream.finish() == text


def certain_text(data: bytes) -> str:
    """The text without the beginning of a character at the end."""
    for size in (3, 2, 1):
        try:
            data[-size:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return data[:-size].decode(errors="replace")
    return data.decode(errors="replace")


def by_search(
    tokenizer: Tokenizer, token_ids: list[int], stop: list[str]
) -> tuple[int | None, list[str]]:
    """(number of tokens up to the match, text after each token): the whole text is decoded and
    searched every time.
    """
    seen: list[str] = []
    for count in range(1, len(token_ids) + 1):
        complete = certain_text(b"".join(map(tokenizer.token_bytes, token_ids[:count])))
        found = [place for place in (complete.find(text) for text in stop) if place >= 0]
        if found:
            return count, [*seen, complete[: min(found)]]
        held = max(
            (n for text in stop for n in range(1, len(text)) if complete.endswith(text[:n])),
            default=0,
        )
        seen.append(complete[: len(complete) - held])
    return None, seen


@settings(deadline=None, max_examples=200)
@given(token_ids=FEW_IDS, stop=st.lists(FEW_LETTERS, min_size=1, max_size=3))
def test_stop_strings_end_and_hold_text_as_searching_the_whole_would(
    tokenizer: Tokenizer, token_ids: list[int], stop: list[str]
) -> None:
    stream = TextStream(tokenizer, stop)
    stopped_at: int | None = None
    text, seen = "", []
    for count, token_id in enumerate(token_ids, 1):
        text += stream.push([token_id])
        seen.append(text)
        if stream.num_tokens_to_stop:
            stopped_at = count
            break
    assert (stopped_at, seen) == by_search(tokenizer, token_ids, stop)


# Prompts


def test_text_is_encoded_and_decoded(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("aü🦅") == list("aü🦅".encode())
    assert tokenizer.decode(list("aü🦅".encode())) == "aü🦅"


def test_a_conversation_is_rendered_up_to_the_assistants_answer(tokenizer: Tokenizer) -> None:
    assert tokenizer.render_chat(Conversation(messages=[USER])) == "user:Hi;assistant:"


def test_what_the_chat_template_refuses_is_refused_with_its_words(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="the chat template refuses these messages: no thieves"):
        tokenizer.render_chat(Conversation(messages=[{"role": "thief", "content": "Hi"}]))


def test_a_tokenizer_without_chat_template_refuses_messages(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template; send a prompt instead"):
        tokenizer.render_chat(Conversation(messages=[USER]))


# Loading


def test_a_directory_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


def test_a_directory_with_a_tokenizer_has_one_with_its_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    assert tokenizer is not None and tokenizer.has_chat_template


def test_a_damaged_tokenizer_is_refused_with_its_path(tmp_path: Path) -> None:
    (write_tokenizer(tmp_path) / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"the tokenizer in .* cannot be loaded") as refused:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(refused.value)


def test_text_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="prompt"):
        Tokenizer(write_tokenizer(tmp_path)).encode("\udcff")


def test_stop_strings_do_not_end_the_first_min_tokens(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["b"], min_tokens=3)
    assert texts(stream, ids("a", "b", "a", "a", "b", "c"))[-1] == "abaa"
    assert stream.stop_string == "b"
