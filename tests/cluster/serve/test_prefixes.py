"""Which engine gets which prompt."""

from __future__ import annotations

import itertools
import random

import pytest

from cluster.serve.prefixes import (
    MAX_HASHES_PER_PROMPT,
    MIN_EXTRA_REQUESTS,
    PrefixTable,
    prefix_hashes,
    session_hash,
)

IDS = (f"r{number}" for number in itertools.count())


def put(
    table: PrefixTable, tokens: list[int], engines: str = "ab", session: str | None = None
) -> tuple[str, str]:
    """(request id, engine)"""
    request_id = next(IDS)
    hashed = session_hash(session) if session is not None else None
    return request_id, table.choose(request_id, list(engines), prefix_hashes(tokens, 16), hashed)


def test_a_salt_and_a_session_may_be_any_text_also_half_a_character() -> None:
    """A handle's caller may give what HTTP refuses; the block manager takes it too."""
    tokens = list(range(32))
    assert prefix_hashes(tokens, 16, "a\ud800") != prefix_hashes(tokens, 16, "a\ud801")
    assert session_hash("a\ud800") != session_hash("a\ud801")


def test_a_prompt_that_goes_on_shares_the_hashes_of_its_beginning() -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(1000) for _ in range(40_000)]
    for short, long in [(100, 101), (2048, 2064), (2047, 5000), (3000, 40_000)]:
        first, second = prefix_hashes(tokens[:short], 16), prefix_hashes(tokens[:long], 16)
        assert len(second) <= MAX_HASHES_PER_PROMPT
        shared = [each for each in second if each in set(first)]
        assert shared and shared == list(second[: len(shared)]), "a prefix of the hashes"
        stride = 16 * 2 ** max(0, (long // 16 // MAX_HASHES_PER_PROMPT).bit_length())
        assert len(shared) >= short // stride - 1
    changed = [tokens[0] + 1, *tokens[1:1000]]
    assert not set(prefix_hashes(changed, 16)) & set(prefix_hashes(tokens[:1000], 16))
    salted = prefix_hashes(tokens[:1000], 16, "salt")
    assert not set(salted) & set(prefix_hashes(tokens[:1000], 16))
    assert len(prefix_hashes(tokens[:15], 16)) == 0


def test_conversations_stay_with_their_engine() -> None:
    rng, table = random.Random(1), PrefixTable()
    histories = [[rng.randrange(1000) for _ in range(40)] for _ in range(8)]
    homes: dict[int, set[str]] = {number: set() for number in range(8)}
    for _ in range(6):
        open_now = []
        for number in rng.sample(range(8), 8):
            request_id, engine = put(table, histories[number])
            homes[number].add(engine)
            open_now.append(request_id)
            histories[number] += [rng.randrange(1000) for _ in range(40)]
        for request_id in open_now:
            table.end(request_id)
    assert all(len(engines) == 1 for engines in homes.values())
    assert sorted(next(iter(engines)) for engines in homes.values()) == ["a"] * 4 + ["b"] * 4


@pytest.mark.parametrize("shared", [0, 500])
@pytest.mark.parametrize("engines", ["ab", "abcde"])
def test_no_engine_gets_much_more_than_its_share(shared: int, engines: str) -> None:
    rng, table = random.Random(2), PrefixTable()
    beginning = [rng.randrange(1000) for _ in range(shared)]
    counts: dict[str, int] = dict.fromkeys(engines, 0)
    open_now: list[str] = []
    for _ in range(400):
        tokens = beginning + [rng.randrange(1000) for _ in range(50)]
        request_id, engine = put(table, tokens, engines)
        counts[engine] += 1
        open_now.append(request_id)
        if len(open_now) > 40:
            table.end(open_now.pop(rng.randrange(len(open_now))))
    assert max(counts.values()) <= 1.5 * 400 / len(engines), counts


def test_load_comes_before_what_is_cached() -> None:
    table = PrefixTable()
    tokens = list(range(200))
    home = put(table, tokens)[1]
    others = 0
    for _ in range(20):
        others += put(table, tokens)[1] != home
    assert others == 10 and put(table, tokens, "a")[1] == "a"
    table = PrefixTable()
    homes = [put(table, tokens)[1] for _ in range(MIN_EXTRA_REQUESTS + 2)]
    assert len(set(homes[:-1])) == 1 != len(set(homes)), "a short queue is worth what is cached"


def test_a_session_goes_before_a_prefix() -> None:
    table = PrefixTable()
    one = put(table, list(range(100)))[1]
    other = put(table, list(range(500, 600)), session="s")[1]
    assert one != other
    assert put(table, list(range(100)), session="s")[1] == other
    assert put(table, list(range(100)))[1] in "ab"


def test_engines_that_are_gone_are_forgotten_and_new_ones_get_their_share_only() -> None:
    table = PrefixTable()
    held = [put(table, [number] * 64) for number in range(100)]
    held.append(put(table, [1] * 64, "ac"))
    for request_id, _ in held:
        table.end(request_id)
    chosen = []
    for number in range(100, 120):
        request_id, engine = put(table, [number] * 64, "ac")
        chosen.append(engine)
        table.end(request_id)
    assert 8 <= chosen.count("c") <= 12, chosen


def test_engines_to_avoid_come_last_and_are_not_forgotten() -> None:
    table, hashes = PrefixTable(), prefix_hashes(list(range(64)), 16)
    assert table.choose("one", "ab", hashes, None) == "a"
    assert table.choose("one", "ab", hashes, None, avoided_engines="a") == "b", "chosen anew"
    assert table.choose("two", "ab", hashes, None, avoided_engines="ab") == "a", "there is no other"
    for request in ("one", "two"):
        table.end(request)
    assert not +table._num_open_requests_by_engine and not table._engine_by_request


def test_memory_is_bounded_and_what_was_used_last_stays() -> None:
    table = PrefixTable(max_hashes=100)
    kept = list(range(64))
    home = put(table, kept)[1]
    for number in range(1000):
        request_id, _ = put(table, [number] * 64)
        table.end(request_id)
        if number % 10 == 0:
            request_id, engine = put(table, kept)
            assert engine == home
            table.end(request_id)
    assert len(table._engines_by_hash) <= 100 and len(table._engine_by_request) == 1


def test_processes_that_know_nothing_of_each_other_agree_on_the_engine_of_a_session() -> None:
    tables = [PrefixTable(is_only_chooser=False) for _ in range(3)]
    homes = dict[str, str]()
    for number in range(60):
        session, tokens = f"session {number}", [number] * 40
        chosen = [put(table, tokens, "abc", session) for table in tables]
        [homes[session]] = {engine for _, engine in chosen}
        for table, (request_id, _) in zip(tables, chosen, strict=True):
            table.end(request_id)
    counts = [[*homes.values()].count(engine) for engine in "abc"]
    assert min(counts) > 10, "all engines have some"
    fewer = PrefixTable(is_only_chooser=False)
    for session, home in homes.items():
        request_id, engine = put(fewer, [1], "ab", session)
        fewer.end(request_id)
        assert home == engine or home == "c", "those of an engine that stays stay"
