"""Faults under load over HTTP: `python -m tests.cluster.serve.soak [--faults 60]`.

`launch.py serve` answers the official clients of OpenAI and Anthropic: completions, chats, messages
and responses, with stop strings, logprobs, several outputs, tools, schemas and reasoning. Most read
their streams as they come, some slowly, and some disconnect. Meanwhile ranks, what stands by for
them, and the driver are killed, stopped and crashed. What a client joins from a stream must equal
the whole answer of the undisturbed server. At the end the server must hold what it held before.
Prints one JSON line; fails if an answer is lost, wrong or refused, or something is left over.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import anthropic
import openai

from benchmarks.common import machine
from tests.cluster.processes import OURS, command_of, family, num_memory_files, wait_until
from tests.cluster.serve.served import Program, stats_of

OPTIONS = (
    "--device=cpu --dtype=float32 --num-kv-blocks=120 --max-num-seqs=16 --stuck-after-s=4"
    " --served-model-name=model"
)
QUESTIONS = ("What is 47 + 38?", "Count on from 17.", "What day comes after Tuesday?")
# Values that end, so that the client can parse them.
TOOL_PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": [3, 14, 159]}, "b": {"enum": [26, 535, 8979]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": TOOL_PARAMETERS}}
]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "sum", "schema": TOOL_PARAMETERS},
}
KINDS = ("rank or spare", "all ranks and spares", "stop", "SIGSEGV", "driver")
# Clients that read slowly, and that disconnect, among all.
SLOW_SHARE, LEAVING_SHARE = 0.1, 0.15
LIMIT_S, MAX_WRONG = 240.0, 50
ANSWERS_BETWEEN_FAULTS = 8  # so that no request meets six faults, which would convict it


class Left(Exception):
    """The client has disconnected, as it meant to."""


class Reader:
    """How one client reads its stream: at once, slowly, or only the first few events."""

    def __init__(self, rng: random.Random) -> None:
        drawn = rng.random()
        self._pause_s = 0.05 if drawn < SLOW_SHARE else 0.0
        leaves = SLOW_SHARE <= drawn < SLOW_SHARE + LEAVING_SHARE
        self._num_events_left = rng.randrange(1, 60) if leaves else None

    def read(self, events: Any) -> list[Any]:
        """Read the events. Raises `Left` where the client disconnects."""
        read = []
        for event in events:
            read.append(event)
            time.sleep(self._pause_s)
            if self._num_events_left is not None:
                self._num_events_left -= 1
                if self._num_events_left == 0:
                    raise Left
        return read


class Clients:
    """The calls of the load. Each takes a reader of its stream, or None for the whole answer, and
    returns what was answered, without what differs from call to call.
    """

    def __init__(self, url: str) -> None:
        self._openai = openai.OpenAI(
            base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=LIMIT_S
        )
        self._anthropic = anthropic.Anthropic(
            base_url=url, api_key="-", max_retries=0, timeout=LIMIT_S
        )
        self.calls: list[Callable[[Reader | None], Any]] = []
        for number, question in enumerate(QUESTIONS):
            messages: list[Any] = [{"role": "user", "content": question}]
            greedy = {"temperature": 0}
            long = {"extra_body": {"ignore_eos": True}, "max_tokens": 150}
            for options in (
                {"temperature": 0, **long},
                {"temperature": 0.9, "seed": number, **long},
                {"temperature": 0.8, "seed": number, "n": 2, **long},
                {"temperature": 0, "logprobs": True, "top_logprobs": 2, **long},
                {"temperature": 0, "stop": ["9 9", "zz"], **long},
                {"temperature": 0, "tools": TOOLS, "tool_choice": "required", "max_tokens": 300},
                {"temperature": 0, "response_format": SCHEMA, "max_tokens": 300},
            ):
                self.calls.append(self._chat({"messages": messages, **options}))
            self.calls.append(self._completion({"prompt": question, "seed": number, **long}))
            self.calls.append(
                self._message({"messages": messages, "max_tokens": 150, "extra_body": greedy})
            )
            self.calls.append(self._response({"input": question, "max_output_tokens": 150}))

    def _chat(self, body: dict[str, Any]) -> Callable[[Reader | None], Any]:
        def call(reader: Reader | None) -> Any:
            if reader is None:
                whole = self._openai.chat.completions.create(model="model", **body)
                return _comparable(whole)
            usage: Any = {"include_usage": True}
            with self._openai.chat.completions.stream(
                model="model", stream_options=usage, **body
            ) as stream:
                reader.read(stream)  # the final completion would be refused for its length
                return _comparable(stream.current_completion_snapshot)

        return call

    def _completion(self, body: dict[str, Any]) -> Callable[[Reader | None], Any]:
        def call(reader: Reader | None) -> Any:
            if reader is None:
                whole = self._openai.completions.create(model="model", **body)
                return whole.choices[0].text, whole.choices[0].finish_reason
            with self._openai.completions.create(model="model", stream=True, **body) as stream:
                chunks = reader.read(stream)
            text = "".join(chunk.choices[0].text for chunk in chunks)
            return text, chunks[-1].choices[0].finish_reason

        return call

    def _message(self, body: dict[str, Any]) -> Callable[[Reader | None], Any]:
        def call(reader: Reader | None) -> Any:
            if reader is None:
                whole = self._anthropic.messages.create(model="model", **body)
                return _comparable(whole)
            with self._anthropic.messages.stream(model="model", **body) as stream:
                reader.read(stream)
                return _comparable(stream.get_final_message())

        return call

    def _response(self, body: dict[str, Any]) -> Callable[[Reader | None], Any]:
        def call(reader: Reader | None) -> Any:
            if reader is None:
                whole = self._openai.responses.create(model="model", temperature=0, **body)
                return _comparable(whole)
            with self._openai.responses.stream(model="model", temperature=0, **body) as stream:
                reader.read(stream)
                return _comparable(stream.get_final_response())

        return call


def _comparable(answer: Any) -> Any:
    """What must be the same from call to call: not ids, times, or how much was cached."""
    varying = {"id", "call_id", "created", "created_at", "completed_at", "parsed", "index"}
    varying |= {"parsed_arguments", "prompt_tokens_details", "input_tokens_details"}
    varying |= {"cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens"}

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                name: strip(each)
                for name, each in value.items()
                if name not in varying and each not in (None, "")
            }
        return [strip(each) for each in value] if isinstance(value, list) else value

    return strip(answer.model_dump())


class Faults:
    """Signals to the processes of one server."""

    def __init__(self, session: int, rng: random.Random) -> None:
        self._session, self._rng = session, rng
        self.done: collections.Counter[str] = collections.Counter()

    def pids(self, name: str) -> list[int]:
        """The processes of actors of this class."""
        found = []
        for pid in family(self._session):
            if (command_of(pid) or "").startswith(f"ray::{name}"):
                found.append(pid)
        return found

    def cause(self) -> None:
        """One fault of a kind of which there were fewest, if there is a process for it."""
        least = min(self.done[kind] for kind in KINDS)
        kind = self._rng.choice([kind for kind in KINDS if self.done[kind] == least])
        ranks = self.pids("RankActor")
        chosen = ranks if kind == "all ranks and spares" else ranks[:0]
        number = {"stop": signal.SIGSTOP, "SIGSEGV": signal.SIGSEGV}.get(kind, signal.SIGKILL)
        if kind == "driver":
            chosen = self.pids("Driver")
        elif not chosen and ranks:
            chosen = [self._rng.choice(ranks)]
        for pid in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        self.done[kind] += bool(chosen)


def held(url: str, session: int) -> dict[str, float]:
    """What must be the same after any number of faults."""
    numbers, pids = stats_of(url), family(session)
    return {
        "ready": numbers["eagleray_ready"],  # the rest is 0 while the engine does not answer
        "running": numbers["eagleray_num_requests_running"],
        "waiting": numbers["eagleray_num_requests_waiting"],
        "open outputs": numbers["eagleray_http_outputs_open"],
        "blocks": numbers["eagleray_kv_blocks"] - numbers["eagleray_kv_blocks_free"],
        "memory files": num_memory_files(pids),
        "actors": sum((command_of(pid) or "").startswith(OURS) for pid in pids),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults under load over HTTP.")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    program = Program(*OPTIONS.split(), f"--tp={args.tp}")
    counts: collections.Counter[str] = collections.Counter()
    seconds: list[float] = []
    wrong: list[str] = []
    try:
        program.wait_until_ready()
        threading.Thread(target=program.process.communicate, daemon=True).start()  # reads its log
        session = program.process.pid
        clients, faults = Clients(program.url), Faults(session, rng)
        expected = [call(None) for call in clients.calls]
        for number, call in enumerate(clients.calls):
            if (joined := call(Reader(random.Random(2)))) != expected[number]:
                raise SystemExit(f"undisturbed, joined and whole:\n{joined}\n{expected[number]}")
        wait_until(lambda: len(faults.pids("RankActor")) == 2 * args.tp, "spares", 60.0)
        time.sleep(5.0)
        before = held(program.url, session)

        def answer(number: int, reader: Reader | None) -> None:
            began_s = time.monotonic()
            try:
                answered = clients.calls[number](reader)
            except Left:
                counts["left"] += 1
                return
            except Exception as error:
                wrong.append(f"{number}: {type(error).__name__}: {error}")
                return
            counts["whole" if reader is None else "streams"] += 1
            seconds.append(time.monotonic() - began_s)
            if answered != expected[number]:
                wrong.append(f"{number}:\n  {answered}\n  {expected[number]}")

        with ThreadPoolExecutor(args.clients) as threads:
            running: set[Future[None]] = set()
            next_fault_s, next_fault_after = time.monotonic() + 2.0, 0
            while sum(faults.done.values()) < args.faults and len(wrong) < MAX_WRONG:
                running = {each for each in running if not each.done()}
                while len(running) < args.clients:
                    number = rng.randrange(len(clients.calls))
                    reader = None if rng.random() < 0.2 else Reader(rng)
                    running.add(threads.submit(answer, number, reader))
                num_ended = counts.total() + len(wrong)
                if time.monotonic() > next_fault_s and num_ended >= next_fault_after:
                    faults.cause()
                    next_fault_after = num_ended + ANSWERS_BETWEEN_FAULTS
                    next_fault_s = time.monotonic() + 2.0 + 10.0 * rng.random()
                    print(f"{sum(faults.done.values())}: {dict(counts)}, {len(wrong)}", flush=True)
                time.sleep(0.02)
        until = time.monotonic() + LIMIT_S
        while (after := held(program.url, session)) != before and time.monotonic() < until:
            time.sleep(0.5)
        if after != before:
            wrong.append(f"held at the end: {after}")
        num_recoveries = stats_of(program.url)["eagleray_recoveries_total"]
    finally:
        program.kill()
    line = {
        "machine": machine(),
        "faults": dict(faults.done),
        "tp": args.tp,
        "answers": dict(counts),
        "seconds of an answer": [round(statistics.median(seconds), 2), round(max(seconds), 2)],
        "not_as_expected": len(wrong),
        "recoveries of the last driver": num_recoveries,
        "held": before,
    }
    for each in wrong:
        print(each)
    print(json.dumps(line))
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
