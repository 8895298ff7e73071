"""Which engine has cached the beginning of a prompt: block hashes → engines, in bounded memory.

Does not use Ray. Load comes first: an engine that has clearly more open requests than the idlest
one is passed over, whatever it has cached.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable
from collections.abc import Sequence as Seq

import xxhash

MAX_TABLE_ENTRIES = 2**16  # about 20 MB
MAX_HASHES_PER_PROMPT = 128
# How many more open requests than the idlest engine an engine may have: a share of the mean, and at
# least this many.
MAX_EXTRA_SHARE, MIN_EXTRA_REQUESTS = 0.5, 4


def prefix_hashes(token_ids: Seq[int], block_size: int, cache_salt: str = "") -> array[int]:
    """A hash per prefix of whole blocks, shortest first, 64 bits each. `cache_salt` is hashed
    before the tokens: what an engine has cached under another salt is of no use.

    For a long prompt, only every n-th block has one. n is the smallest power of two that leaves at
    most `MAX_HASHES_PER_PROMPT`, so prompts of any length share hashes of common prefixes.
    """
    stride = block_size
    while len(token_ids) // stride > MAX_HASHES_PER_PROMPT:
        stride *= 2
    hashes = array("Q")
    hasher = xxhash.xxh3_64(cache_salt.encode("utf-8", "surrogatepass"))
    token_array = array("i", token_ids)
    for end in range(stride, len(token_array) + 1, stride):
        hasher.update(token_array[end - stride : end].tobytes())
        hashes.append(hasher.intdigest())
    return hashes


def session_hash(session_id: str) -> int:
    """The hash of a session, 64 bits."""
    return xxhash.xxh3_64_intdigest(session_id.encode("utf-8", "surrogatepass"), seed=1)


class PrefixTable:
    """Chooses engines for requests, by name. Not safe for several threads."""

    def __init__(
        self, max_hashes: int = MAX_TABLE_ENTRIES, *, is_only_chooser: bool = True
    ) -> None:
        """`max_hashes`: of prefixes and sessions. `is_only_chooser`: no other process chooses
        engines for the same clients. If others do, a session that is new here may not be new to
        them, so it has an engine on which all agree.
        """
        self._max_hashes = max_hashes
        self._is_only_chooser = is_only_chooser
        # The engines that got a prompt with this prefix, or the last that got a request of this
        # session; least recently used first.
        self._engines_by_hash: OrderedDict[int, set[str]] = OrderedDict()
        self._engines: frozenset[str] = frozenset()  # all that there were at the last choice
        self._engine_by_request: dict[Hashable, str] = {}  # of open requests
        self._num_open_requests_by_engine: Counter[str] = Counter()
        # The number of the last choice that fell on the engine.
        self._last_choice_number_by_engine: Counter[str] = Counter()
        self._num_choices = 0

    def choose(
        self,
        request: Hashable,
        all_engines: Collection[str],
        hashes: Seq[int],
        hashed_session: int | None,
        avoided_engines: Collection[str] = (),
    ) -> str:
        """The engine for a request, which counts as open until `end` is called; the same engine if
        called again. The engine of its session comes first, then the one with the longest prefix of
        its prompt; `avoided_engines` come last. Engines not in `all_engines` are forgotten.
        """
        if self._engines != (present_engines := frozenset(all_engines)):
            self._keep_only(present_engines)
        candidates = present_engines - set(avoided_engines) or present_engines
        if (chosen_engine := self._engine_by_request.get(request, "")) in candidates:
            return chosen_engine
        self.end(request)
        loads = [self._num_open_requests_by_engine[engine] for engine in candidates]
        mean_load = sum(loads) / len(loads)
        max_load = min(loads) + max(MIN_EXTRA_REQUESTS, MAX_EXTRA_SHARE * mean_load)
        num_hashes_by_engine = self._num_matching_hashes_by_engine(hashes)
        engines_by_hash = self._engines_by_hash
        affine_engines = set[str]()
        if hashed_session is not None:
            affine_engines = engines_by_hash.get(hashed_session) or self._rendezvous_engine(
                hashed_session, candidates
            )

        def cost(engine: str) -> tuple[bool, bool, int, int, int]:
            num_open_requests = self._num_open_requests_by_engine[engine]
            is_full = num_open_requests > max_load
            lacks_session_affinity = engine not in affine_engines
            load_and_last_choice = (num_open_requests, self._last_choice_number_by_engine[engine])
            return (
                is_full,
                lacks_session_affinity,
                -num_hashes_by_engine[engine],
                *load_and_last_choice,
            )

        chosen_engine = min(sorted(candidates), key=cost)
        self._engine_by_request[request] = chosen_engine
        self._num_open_requests_by_engine[chosen_engine] += 1
        self._num_choices += 1
        self._last_choice_number_by_engine[chosen_engine] = self._num_choices
        if hashed_session is not None:
            self._engines_by_hash[hashed_session] = {chosen_engine}
            self._engines_by_hash.move_to_end(hashed_session)
        for prefix_hash in hashes:
            self._engines_by_hash.setdefault(prefix_hash, set()).add(chosen_engine)
            self._engines_by_hash.move_to_end(prefix_hash)
        while len(self._engines_by_hash) > self._max_hashes:
            self._engines_by_hash.popitem(last=False)
        return chosen_engine

    def end(self, request: Hashable) -> None:
        """A request has ended, or was not sent."""
        engine = self._engine_by_request.pop(request, None)
        if engine is not None:
            self._num_open_requests_by_engine[engine] -= 1

    def _rendezvous_engine(self, hashed_session: int, engines: Collection[str]) -> set[str]:
        """The engine of a session of which this table knows nothing, if it is to have one: by
        rendezvous hashing, so that it changes for few sessions when an engine comes or goes.
        """
        if self._is_only_chooser:
            return set()

        def weight(engine: str) -> int:
            return xxhash.xxh3_64_intdigest(engine.encode(), seed=hashed_session)

        return {max(engines, key=weight)}

    def _keep_only(self, engines: frozenset[str]) -> None:
        """Forget all engines but these."""
        self._engines = engines
        for counter in (self._num_open_requests_by_engine, self._last_choice_number_by_engine):
            for lost_engine in counter.keys() - engines:
                del counter[lost_engine]
        open_requests = self._engine_by_request.items()
        self._engine_by_request = {r: engine for r, engine in open_requests if engine in engines}
        for engines_with_hash in self._engines_by_hash.values():
            engines_with_hash &= engines

    def _num_matching_hashes_by_engine(self, hashes: Seq[int]) -> Counter[str]:
        """By engine, how many hashes long the prefix is that it has been sent before."""
        num_hashes_by_engine: Counter[str] = Counter()
        for number, prefix_hash in enumerate(hashes, 1):
            engines_with_hash = self._engines_by_hash.get(prefix_hash)
            if not engines_with_hash:
                break
            for engine in engines_with_hash:
                num_hashes_by_engine[engine] = number
        return num_hashes_by_engine
