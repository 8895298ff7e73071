"""The mailbox: whatever is lost on the way, a frontend gets every token exactly once."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.mailbox import Mailbox
from cluster.news import News, unpack
from scheduler.errors import EngineDeadError
from scheduler.messages import Deltas, TokenLogprobs

DEAD = EngineDeadError("the engine has stopped")


def tokens(first_index: int, *token_ids: int, **fields: object) -> News:
    return News(first_index=first_index, token_ids=list(token_ids), **fields)  # type: ignore[arg-type]


def logprob(value: float) -> TokenLogprobs:
    return TokenLogprobs(logprob=value, top_token_ids=(1, 2), top_logprobs=(value, value - 1))


def only(deltas: Deltas) -> News:
    [(_, news)] = unpack(deltas)
    return news


# What a reply holds


def test_what_was_put_comes_back_whole() -> None:
    mailbox = Mailbox()
    mailbox.put("a", tokens(0, 11, num_cached_tokens=16))
    mailbox.put("b", tokens(3, 21, 22, logprobs=[logprob(-1.0), None], finish_reason="length"))
    mailbox.put("c", tokens(0, finish_reason="error", error=DEAD))
    assert dict(unpack(mailbox.collect(0))) == {
        "a": tokens(0, 11, num_cached_tokens=16),
        "b": tokens(3, 21, 22, logprobs=[logprob(-1.0), None], finish_reason="length"),
        "c": tokens(0, finish_reason="error", error=DEAD),
    }


def test_a_reply_is_flat_arrays_with_an_entry_a_request() -> None:
    mailbox = Mailbox()
    mailbox.put("a", tokens(0, 11))
    mailbox.put("b", tokens(3, 21, 22, finish_reason="stop"))
    reply = mailbox.collect(0)
    assert reply.request_ids == ("a", "b")
    assert (reply.first_indices.tolist(), reply.num_tokens.tolist()) == ([0, 3], [1, 2])
    assert reply.token_ids.tolist() == [11, 21, 22]
    assert (reply.finish_reasons, reply.errors, reply.logprobs) == ({"b": "stop"}, {}, {})


def test_news_of_several_steps_become_one_entry() -> None:
    mailbox = Mailbox()
    mailbox.put("a", tokens(0, 11))
    mailbox.put("a", tokens(1, 12))
    mailbox.put("a", tokens(2, 13, num_cached_tokens=4, finish_reason="stop"))
    assert only(mailbox.collect(0)) == tokens(
        0, 11, 12, 13, num_cached_tokens=4, finish_reason="stop"
    )


def test_an_end_stays_known_whatever_comes_after_it() -> None:
    mailbox = Mailbox()
    mailbox.put("a", tokens(0, 11, finish_reason="stop", error=DEAD))
    mailbox.put("a", tokens(1))
    assert only(mailbox.collect(0)) == tokens(0, 11, finish_reason="stop", error=DEAD)


def test_an_error_joins_the_tokens_that_came_before_it() -> None:
    mailbox = Mailbox()
    mailbox.put("a", tokens(0, 11))
    mailbox.put("a", tokens(0, finish_reason="error", error=DEAD))
    assert only(mailbox.collect(0)) == tokens(0, 11, finish_reason="error", error=DEAD)


def test_an_empty_mailbox_gives_an_empty_reply_with_a_new_number() -> None:
    mailbox = Mailbox()
    first, second = mailbox.collect(0), mailbox.collect(1)
    assert (first.request_ids, second.request_ids) == ((), ())
    assert second.reply_number > first.reply_number > 0


def test_has_news_speaks_of_what_was_never_sent() -> None:
    mailbox = Mailbox()
    seen = [mailbox.has_news]
    mailbox.put("a", tokens(0, 11))
    seen.append(mailbox.has_news)
    mailbox.collect(0)
    assert [*seen, mailbox.has_news] == [False, True, False]


# Logprobs


def test_logprobs_of_several_steps_line_up_with_their_tokens() -> None:
    mailbox = Mailbox()
    mailbox.put("a", tokens(0, 11, logprobs=[logprob(-1.0)]))
    mailbox.put("a", tokens(1, 12, logprobs=[logprob(-2.0)]))
    assert only(mailbox.collect(0)).logprobs == [logprob(-1.0), logprob(-2.0)]


def test_tokens_without_logprobs_leave_a_gap_before_later_ones() -> None:
    mailbox = Mailbox()
    mailbox.put("a", tokens(0, 11, 12))
    mailbox.put("a", tokens(2, 13, logprobs=[logprob(-3.0)]))
    assert only(mailbox.collect(0)).logprobs == [None, None, logprob(-3.0)]


def test_tokens_without_logprobs_leave_a_gap_after_earlier_ones() -> None:
    mailbox = Mailbox()
    mailbox.put("a", tokens(0, 11, logprobs=[logprob(-1.0)]))
    mailbox.put("a", tokens(1, 12, 13))
    assert only(mailbox.collect(0)).logprobs == [logprob(-1.0), None, None]


# Acknowledgment


def test_what_was_acknowledged_is_not_sent_again() -> None:
    mailbox = Mailbox()
    mailbox.put("a", tokens(0, 11))
    received = mailbox.collect(0).reply_number
    mailbox.put("a", tokens(1, 12))
    assert only(mailbox.collect(received)) == tokens(1, 12)


def test_what_was_not_acknowledged_is_sent_again_with_what_is_new() -> None:
    mailbox = Mailbox()
    mailbox.put("a", tokens(0, 11))
    mailbox.collect(0)  # lost
    mailbox.put("a", tokens(1, 12))
    mailbox.put("b", tokens(0, 21))
    assert dict(unpack(mailbox.collect(0))) == {"a": tokens(0, 11, 12), "b": tokens(0, 21)}


def test_replies_lost_in_a_row_lose_nothing() -> None:
    mailbox = Mailbox()
    received = mailbox.collect(0).reply_number
    for index in range(4):
        mailbox.put("a", tokens(index, 11 + index))
        mailbox.collect(received)  # lost
    assert only(mailbox.collect(received)) == tokens(0, 11, 12, 13, 14)


def test_the_end_of_a_request_in_a_lost_reply_is_sent_again() -> None:
    mailbox = Mailbox()
    mailbox.put("a", tokens(0, 11, finish_reason="stop"))
    mailbox.collect(0)  # lost
    assert only(mailbox.collect(0)).finish_reason == "stop"


def test_a_repeated_token_is_known_by_its_index() -> None:
    mailbox = Mailbox()
    mailbox.put("a", tokens(0, 11))
    received = mailbox.collect(0).reply_number
    mailbox.put("a", tokens(1, 12))
    mailbox.collect(received)  # lost
    mailbox.put("a", tokens(2, 13))
    assert only(mailbox.collect(received)).first_index == 1


def test_an_acknowledgment_of_an_older_reply_clears_nothing() -> None:
    mailbox = Mailbox()
    old = mailbox.collect(0).reply_number
    mailbox.put("a", tokens(0, 11))
    mailbox.collect(old)  # lost
    assert only(mailbox.collect(old)) == tokens(0, 11)


def test_a_new_mailbox_goes_on_after_the_number_its_frontend_had() -> None:
    # The driver had forgotten a silent frontend, which now comes back.
    mailbox = Mailbox()
    mailbox.put("a", tokens(0, 11))
    reply = mailbox.collect(57)
    assert reply.reply_number > 57 and only(reply) == tokens(0, 11)
    mailbox.put("a", tokens(1, 12))
    assert only(mailbox.collect(57)) == tokens(0, 11, 12)


# Events in any order


@dataclass
class Receiver:
    """A frontend that recognizes repeated tokens by their index."""

    acknowledged: int = 0
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    finish_reasons: dict[str, str] = field(default_factory=dict)

    def take(self, reply: Deltas) -> None:
        self.acknowledged = reply.reply_number
        for request_id, news in unpack(reply):
            have = self.token_ids.setdefault(request_id, [])
            known = len(have) - news.first_index
            assert known >= 0, (
                f"tokens {len(have)} to {news.first_index} of {request_id} are missing"
            )
            have += news.token_ids[known:]
            given = news.logprobs if news.logprobs is not None else [None] * len(news.token_ids)
            assert len(given) == len(news.token_ids)
            self.logprobs.setdefault(request_id, []).extend(given[known:])
            if news.finish_reason:
                self.finish_reasons[request_id] = news.finish_reason


PUT = st.tuples(
    st.sampled_from("abc"),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([None, None, None, "stop"]),
)
POLL = st.sampled_from(["received", "lost"])


@settings(deadline=None)
@given(st.lists(PUT | POLL, max_size=60))
def test_whatever_replies_are_lost_the_receiver_ends_with_exactly_what_was_put(
    events: list[tuple[str, int, bool, str | None] | str],
) -> None:
    mailbox, receiver, sent = Mailbox(), Receiver(), Receiver()
    for number, event in enumerate(events):
        if isinstance(event, str):
            reply = pickle.loads(pickle.dumps(mailbox.collect(receiver.acknowledged)))
            if event == "received":
                receiver.take(reply)
            continue
        request_id, count, with_logprobs, reason = event
        if request_id in sent.finish_reasons:
            continue
        have = sent.token_ids.setdefault(request_id, [])
        new_ids = [1000 * number + i for i in range(count)]
        new_logprobs = [logprob(-float(token)) for token in new_ids] if with_logprobs else None
        mailbox.put(
            request_id, tokens(len(have), *new_ids, logprobs=new_logprobs, finish_reason=reason)
        )
        have += new_ids
        sent.logprobs.setdefault(request_id, []).extend(new_logprobs or [None] * count)
        if reason:
            sent.finish_reasons[request_id] = reason
    receiver.take(mailbox.collect(receiver.acknowledged))
    assert receiver.token_ids == sent.token_ids
    assert receiver.logprobs == sent.logprobs
    assert receiver.finish_reasons == sent.finish_reasons
    assert not mailbox.collect(receiver.acknowledged).request_ids
