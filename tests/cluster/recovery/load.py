"""Requests that run while processes are killed, and what each client saw of them.

Every kind of request is there: greedy, seeded, several outputs, stop strings, logprobs, penalties,
whole outputs, a grammar, and prompts that begin alike. A client keeps the history of its stream,
and `compare` compares it with that of an undisturbed run.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from cluster import LLM
from cluster.client.outputs import Chunk
from scheduler.params import SamplingParams, StructuredOutputs

PROMPTS = (
    "What is 47 + 38?",
    "Count on from 17.",
    "What day comes after Tuesday?",
    "Spell the word train.",
)
WORDS = StructuredOutputs(regex="([a-z]+ ){200}")
SHARED = "Numbers: " + " ".join(map(str, range(40))) + ". "  # more than a block of 64 tokens


@dataclass
class Case:
    """One request of the load."""

    prompt: str
    params: SamplingParams
    whole: bool = False


def cases(count: int, tokens: int, *, have_grammar: bool = False) -> list[Case]:
    """`count` requests of about `tokens` tokens, of all kinds in turn."""
    made = []
    for i in range(count):
        common: dict[str, Any] = {"max_tokens": tokens + i % 7, "ignore_eos": True}
        kinds: list[tuple[dict[str, Any], bool]] = [
            ({"temperature": 0}, False),
            ({"temperature": 0.9, "seed": i}, False),
            ({"temperature": 0.8, "seed": i, "n": 2}, False),
            ({"temperature": 0, "stop": ["9 9", "zz"]}, False),
            ({"temperature": 0, "logprobs": 2}, False),
            ({"temperature": 0.7, "seed": i, "presence_penalty": 0.5}, False),
            ({"temperature": 0.7, "seed": i, "repetition_penalty": 1.2}, True),
            ({"temperature": 0}, True),
        ]
        if have_grammar:
            kinds.append(
                ({"temperature": 0, "ignore_eos": None, "structured_outputs": WORDS}, False)
            )
        own, whole = kinds[i % len(kinds)]
        prompt = f"{SHARED if i % 3 == 0 else ''}{PROMPTS[i % len(PROMPTS)]} ({i})"
        made.append(Case(prompt, SamplingParams(**(common | own)), whole))
    return made


@dataclass
class History:
    """What the client of one request received."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)  # by output index
    text: dict[int, str] = field(default_factory=dict)
    num_logprobs: int = 0
    finish_reasons: dict[int, str] = field(default_factory=dict)
    error: str | None = None

    def add(self, chunk: Chunk) -> None:
        assert chunk.index not in self.finish_reasons, "tokens after the end"
        self.token_ids.setdefault(chunk.index, []).extend(chunk.token_ids)
        self.text[chunk.index] = self.text.get(chunk.index, "") + chunk.text
        self.num_logprobs += len(chunk.logprobs or ())
        if chunk.finish_reason is not None:
            self.finish_reasons[chunk.index] = chunk.finish_reason


class Load:
    """Cases under way, a thread per client."""

    def __init__(self, llm: LLM, of: list[Case]) -> None:
        self.cases = of
        self.histories = [History() for _ in of]
        self.num_tokens = 0
        self._llm = llm
        self._threads = [
            threading.Thread(target=self._follow, args=pair, daemon=True)
            for pair in zip(of, self.histories, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def wait(self, limit_s: float) -> list[History]:
        """The histories, once every client has ended."""
        until = time.monotonic() + limit_s
        for thread, case in zip(self._threads, self.cases, strict=True):
            thread.join(max(0.0, until - time.monotonic()))
            assert not thread.is_alive(), f"{case} did not end within {limit_s} s"
        return self.histories

    def wait_for_news(self, limit_s: float, *, num_tokens: int = 1) -> float:
        """Seconds until the streams together have `num_tokens` more tokens."""
        began, enough = time.monotonic(), self.num_tokens + num_tokens
        while self.num_tokens < enough:
            assert time.monotonic() - began < limit_s, f"no token within {limit_s} s"
            if not self.is_running:
                return 0.0
            time.sleep(0.005)
        return time.monotonic() - began

    def _follow(self, case: Case, history: History) -> None:
        try:
            if case.whole:
                [output] = self._llm.generate(case.prompt, case.params)
                for done in output.outputs:
                    history.token_ids[done.index] = done.token_ids
                    history.text[done.index] = done.text
                    history.finish_reasons[done.index] = str(done.finish_reason)
                history.error = str(output.error) if output.error else None
                return
            for chunk in self._llm.stream(case.prompt, case.params):
                history.add(chunk)
                self.num_tokens += len(chunk.token_ids)
        except Exception as error:
            history.error = f"{type(error).__name__}: {error}"


def compare(cases_: list[Case], seen: list[History], expected: list[History]) -> list[str]:
    """Lists the tokens and requests that are lost, duplicated, wrong or failed."""
    faults = []
    for case, mine, theirs in zip(cases_, seen, expected, strict=True):
        if mine.error is not None:
            faults.append(f"failed: {case.prompt}: {mine.error}")
        elif mine != theirs:
            faults.append(f"wrong: {case.prompt} {case.params}:\n  {mine}\n  {theirs}")
    return faults
