"""Log probabilities of a prompt on their way from news to outputs."""

from __future__ import annotations

from array import array

import pytest

from cluster.client.outputs import Chunk, Generation, OutputFollower
from cluster.client.requests import RequestBuilder
from cluster.engine.mailbox import Mailbox
from cluster.news import News, unpack
from scheduler.errors import EngineError, RequestFailedError
from scheduler.messages import PromptLogprobs, Request, TokenLogprobs, int32_array
from scheduler.params import ResolvedSampling, SamplingParams
from tests.cluster.api.scripted import LIMITS, MODEL

PROMPT = [5, 6, 7, 8, 9]


def part(first: int, end: int) -> PromptLogprobs:
    """Those of the tokens from `first_position` to `end`: their places, negated."""
    places = range(first, end)
    return PromptLogprobs(
        first_position=first,
        num_top_logprobs=1,
        logprobs=array("f", (-place for place in places)),
        token_ranks=int32_array(places),
        top_token_ids=int32_array(10 * place for place in places),
        top_logprobs=array("f", (-place / 2 for place in places)),
    )


def entry(place: int) -> TokenLogprobs:
    return TokenLogprobs(
        logprob=-place, top_token_ids=(10 * place,), top_logprobs=(-place / 2,), rank=place
    )


WHOLE = [None, entry(1), entry(2), entry(3), entry(4)]


def follow(*, is_prompt_only: bool = False) -> tuple[Generation, OutputFollower, list[Chunk]]:
    chunks: list[Chunk] = []
    request = Request(
        request_id="one",
        token_ids=int32_array(PROMPT),
        num_prompt_tokens=len(PROMPT),
        sampling=ResolvedSampling(seed=0, max_tokens=3, prompt_logprobs=1),
    )
    output = OutputFollower(request, 0, None, chunks.append, is_prompt_only=is_prompt_only)
    return Generation(None, [output]), output, chunks


def test_parts_become_one_entry_per_token_and_the_first_has_none() -> None:
    generation, output, chunks = follow()
    for news in (part(1, 3), part(3, 5)):
        generation.take(output, News(first_index=0, prompt_logprobs=news))
    assert not chunks, "nothing is shown before the first token"
    generation.take(output, News(first_index=0, token_ids=[1]))
    generation.take(output, News(first_index=1, token_ids=[2], finish_reason="length"))
    entries = generation.output().prompt_logprobs
    assert entries is not None and list(entries) == WHOLE
    assert entries[-1] == entry(4) and entries[1:3] == WHOLE[1:3]
    assert [None if c.prompt_logprobs is None else list(c.prompt_logprobs) for c in chunks] == [
        WHOLE,
        None,
    ]
    with pytest.raises(IndexError):
        entries[5]


def test_what_is_sent_again_counts_once_and_gaps_are_noticed() -> None:
    generation, output, _ = follow()
    for news in (part(1, 3), part(1, 4), part(2, 5), part(1, 2)):
        generation.take(output, News(first_index=0, prompt_logprobs=news))
    assert list(generation.prompt_logprobs or ()) == WHOLE
    generation, output, _ = follow()
    with pytest.raises(EngineError, match="prompt tokens 1 to 2 are missing"):
        generation.take(output, News(first_index=0, prompt_logprobs=part(3, 5)))


def test_a_mailbox_sends_them_until_they_are_confirmed() -> None:
    mailbox = Mailbox()
    mailbox.put("one", News(first_index=0, prompt_logprobs=part(1, 3)))
    mailbox.collect(0)
    mailbox.put("one", News(first_index=0, token_ids=[4], prompt_logprobs=part(3, 5)))
    [(_, news)] = unpack(mailbox.collect(0))  # the first reply was lost
    assert news.prompt_logprobs == part(1, 5) and news.token_ids == [4]
    mailbox.put("one", News(first_index=1, token_ids=[5]))
    [(_, news)] = unpack(mailbox.collect(2))
    assert news.prompt_logprobs is None and news.token_ids == [5]


def test_without_output_the_token_of_the_engine_is_dropped() -> None:
    generation, output, chunks = follow(is_prompt_only=True)
    generation.take(output, News(first_index=0, prompt_logprobs=part(1, 5)))
    news = News(first_index=0, token_ids=[3], logprobs=[entry(1)], finish_reason="stop")
    generation.take(output, news)
    done = generation.output()
    assert (done.token_ids, done.text, done.finish_reason) == ([], "", "length")
    assert done.outputs[0].logprobs is None and list(done.prompt_logprobs or ()) == WHOLE
    assert [chunk.finish_reason for chunk in chunks] == ["length"]


def test_a_driver_that_takes_over_is_not_asked_for_scores_that_have_arrived() -> None:
    generation, output, _ = follow()
    generation.take(output, News(first_index=0, prompt_logprobs=part(1, 3)))
    assert output.continued_request().sampling.prompt_logprobs == 1, "some are missing"
    generation.take(output, News(first_index=0, token_ids=[1], prompt_logprobs=part(3, 5)))
    assert output.continued_request().sampling.prompt_logprobs == -1


def two_outputs() -> tuple[Generation, list[Chunk]]:
    chunks: list[Chunk] = []
    builder = RequestBuilder(MODEL, None, SamplingParams(), LIMITS, seed=0)
    params = SamplingParams(n=2, prompt_logprobs=1, max_tokens=2)
    return builder.build(PROMPT, params, chunks.append), chunks


def test_of_several_outputs_the_first_is_scored_and_each_shows_the_scores_first() -> None:
    generation, chunks = two_outputs()
    assert [request.sampling.prompt_logprobs for request in generation.requests] == [1, -1]
    first, second = generation.outputs
    generation.take(second, News(first_index=0, token_ids=[1]))
    generation.take(first, News(first_index=0, prompt_logprobs=part(1, 5)))
    assert not chunks, "the second waits for the first"
    generation.take(first, News(first_index=0, token_ids=[3]))
    generation.take(second, News(first_index=1, token_ids=[2], finish_reason="length"))
    assert [(chunk.index, chunk.token_ids) for chunk in chunks] == [(0, [3]), (1, [1]), (1, [2])]
    assert [list(chunk.prompt_logprobs or ()) for chunk in chunks] == [WHOLE, WHOLE, []]


def test_an_output_that_has_waited_for_the_first_is_shown_when_both_are_aborted() -> None:
    generation, chunks = two_outputs()
    generation.take(generation.outputs[1], News(first_index=0, token_ids=[1]))
    for output in generation.outputs:
        output.abort()
    assert [(chunk.index, chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [
        (0, [], "abort"),
        (1, [1], None),
        (1, [], "abort"),
    ]


def test_an_output_that_has_waited_for_the_first_is_shown_when_the_request_fails() -> None:
    generation, chunks = two_outputs()
    generation.take(generation.outputs[1], News(first_index=0, token_ids=[1]))
    generation.fail(RequestFailedError("its ranks failed"))
    assert (chunks[0].index, chunks[0].token_ids) == (1, [1])


def test_a_long_prompt_is_shown_in_pieces() -> None:
    generation, output, chunks = follow()
    generation.take(output, News(first_index=0, token_ids=[1], prompt_logprobs=part(1, 150)))
    pieces = list(chunks[0].split_prompt_logprobs())
    parts = [list(piece.prompt_logprobs or ()) for piece in pieces]
    assert [len(entries) for entries in parts] == [64, 64, 22, 0]
    together = [entry for entries in parts for entry in entries]
    assert together == list(generation.prompt_logprobs or ())
    assert [piece.token_ids for piece in pieces] == [[], [], [], [1]]
    assert list(pieces[-1].split_prompt_logprobs()) == [pieces[-1]]
