"""Which engine has seen the beginning of a prompt: block hashes → engines, in bounded memory.

Does not use Ray. Load goes first: an engine that has clearly more open requests than the idlest one
is passed over, whatever it has cached.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable
from collections.abc import Sequence as Seq

import xxhash

MAX_HASHES = 2**16  # remembered, about 20 MB
MAX_HASHES_PER_PROMPT = 128
# How many more open requests than the idlest engine one may have: a share of the mean, but at least
# this many.
LEAD, MIN_LEAD = 0.5, 4


def prefix_hashes(token_ids: Seq[int], block_size: int, cache_salt: str = "") -> array[int]:
    """A hash per prefix of whole blocks, shortest first, 64 bits each.

    For a long prompt, only every n-th block has one: n is the smallest power of two that leaves at
    most `MAX_HASHES_PER_PROMPT`, so prompts of different lengths have hashes of the same prefixes.
    """
    stride = block_size
    while len(token_ids) // stride > MAX_HASHES_PER_PROMPT:
        stride *= 2
    hashes = array("Q")
    running = xxhash.xxh3_64(cache_salt.encode())
    tokens = array("i", token_ids)
    for end in range(stride, len(tokens) + 1, stride):
        running.update(tokens[end - stride : end].tobytes())
        hashes.append(running.intdigest())
    return hashes


def session_hash(session_id: str) -> int:
    """The hash of a session, 64 bits."""
    return xxhash.xxh3_64_intdigest(session_id.encode(), seed=1)


class PrefixTable:
    """Chooses engines for requests, by name. One thread."""

    def __init__(self, max_hashes: int = MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        self._seen: OrderedDict[int, set[str]] = OrderedDict()  # least recently used first
        self._engines: frozenset[str] = frozenset()  # the engines known at the last choice
        self._of_request: dict[Hashable, str] = {}  # the engine of each open request
        self._num_open: Counter[str] = Counter()
        self._last: Counter[str] = Counter()  # when each was chosen, as a count of choices
        self._num_choices = 0

    def choose(
        self,
        request: Hashable,
        all_engines: Collection[str],
        hashes: Seq[int],
        session: int | None,
        avoid: Collection[str] = (),
    ) -> str:
        """The engine for a request, which counts as open until `ended` is called; the same engine
        if asked again. The engine of its session goes first, then the one that has seen most of its
        prompt; those in `avoid` come last. Engines that are not in `all_engines` are forgotten.
        """
        if self._engines != (now := frozenset(all_engines)):
            self._keep(now)
        engines = now - set(avoid) or now
        if (chosen := self._of_request.get(request, "")) in engines:
            return chosen
        self.ended(request)
        loads = [self._num_open[engine] for engine in engines]
        most = min(loads) + max(MIN_LEAD, LEAD * sum(loads) / len(loads))
        depth = self._depths(hashes, engines)
        of_session = self._seen.get(session, set()) if session is not None else set()

        def order(engine: str) -> tuple[bool, bool, int, int, int]:
            num_open = self._num_open[engine]
            is_full, is_other = num_open > most, engine not in of_session
            return is_full, is_other, -depth[engine], num_open, self._last[engine]

        chosen = min(sorted(engines), key=order)
        self._of_request[request] = chosen
        self._num_open[chosen] += 1
        self._num_choices += 1
        self._last[chosen] = self._num_choices
        if session is not None:
            self._seen[session] = {chosen}
            self._seen.move_to_end(session)
        for each in hashes:
            self._seen.setdefault(each, set()).add(chosen)
            self._seen.move_to_end(each)
        while len(self._seen) > self._max_hashes:
            self._seen.popitem(last=False)
        return chosen

    def ended(self, request: Hashable) -> None:
        """A request has ended, or was not sent."""
        engine = self._of_request.pop(request, None)
        if engine is not None:
            self._num_open[engine] -= 1

    def _keep(self, engines: frozenset[str]) -> None:
        """Forget all engines but these."""
        self._engines = engines
        for counts in (self._num_open, self._last):
            for gone in counts.keys() - engines:
                del counts[gone]
        self._of_request = {r: e for r, e in self._of_request.items() if e in engines}
        for known in self._seen.values():
            known &= engines

    def _depths(self, hashes: Seq[int], engines: Collection[str]) -> Counter[str]:
        """Per engine, how far into the prompt it has seen a prefix, in hashes."""
        depth: Counter[str] = Counter()
        for place, each in enumerate(hashes, 1):
            known = self._seen.get(each)
            if not known:
                break
            for engine in known:
                depth[engine] = place
        return depth
