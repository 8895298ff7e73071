"""What hostile requests do to others: `python -m tests.cluster.api.hostile [--mib N] [NAME...]`.

Each request goes through the application, over a scripted engine, in a process of its own whose
memory can be measured. Prints one line of JSON per request: its status, the longest time for which
the event loop did nothing else, the memory it took at its peak, and what all requests up to this
one have left.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import resource
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard

from cluster.api.app import SWITCH_INTERVAL_S, Api
from cluster.client.allocator import return_large_allocations
from scheduler.bounds import MIB
from scheduler.messages import Request
from tests.cluster.api.scripted import LIMITS, ScriptedEngine, make_api

CONTEXT = 40_960  # tokens, as of Qwen3
TICK_S = 0.001
PART = 65_536  # bytes that arrive at a time
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
Make = Callable[[int], str]


def filled(before: str, item: str, after: str) -> Make:
    """Makes a body of about so many bytes: `item` repeated, and separated by commas."""

    def make(size: int) -> str:
        return before + ",".join([item] * (size // (len(item) + 1))) + after

    return make


def numbered(before: str, item: str, after: str) -> Make:
    """As `filled`, with items that differ: `item` has a place for a number."""

    def make(size: int) -> str:
        items = (item % number for number in range(size // (len(item) + 6)))
        return before + ",".join(items) + after

    return make


def repeated(before: str, text: str, after: str) -> Make:
    """As `filled`, without commas."""
    return lambda size: before + text * (size // len(text)) + after


def deep(before: str) -> Make:
    return lambda size: before + '{"a":[' * (size // 12) + "]}" * (size // 12) + "}"


USER = '{"role": "user", "content": "Hi"}'
IDS = "[" + ",".join(["300"] * 40_000) + "]"
REQUESTS: dict[str, tuple[str, Make]] = {
    "objects as prompts": (COMPLETION, filled('{"prompt": [', "{}", "]}")),
    "lists as prompts": (COMPLETION, filled('{"prompt": [', "[]", "]}")),
    "texts as prompts": (COMPLETION, filled('{"prompt": [', '"a"', "]}")),
    "numbers as a prompt": (COMPLETION, filled('{"prompt": [', "1.5", "]}")),
    "long numbers as a prompt": (COMPLETION, filled('{"prompt": [', "9" * 4000, "]}")),
    "a long prompt": (COMPLETION, repeated('{"prompt": "', "a 1, ", '"}')),
    "a long word": (COMPLETION, repeated('{"prompt": "', "a", '"}')),
    "objects as messages": (CHAT, filled('{"messages": [', "{}", "]}")),
    "many messages": (CHAT, filled('{"messages": [', USER, "]}")),
    "parts of a message": (
        CHAT, filled('{"messages": [{"role": "user", "content": [', "{}", "]}]}")
    ),
    "unknown keys of a message": (CHAT, numbered('{"messages": [{', '"k%d": 1', "}]}")),
    "arguments of a call": (
        CHAT,
        filled(
            '{"messages": [' + USER + ', {"role": "assistant", "content": "", "tool_calls": [{"id":'
            ' "1", "function": {"name": "f", "arguments": "[', "[]", ']"}}]}]}',
        ),
    ),
    "many tools": (
        CHAT,
        filled(
            '{"messages": [' + USER + '], "tools": [',
            '{"type": "function", "function": {"name": "f"}}',
            "]}",
        ),
    ),
    "a deep schema": (
        CHAT, deep('{"messages": [' + USER + '], "structured_outputs": {"json": ')
    ),
    "a wide schema": (
        CHAT,
        numbered(
            '{"messages": [' + USER + '], "response_format": {"type": "json_schema", "json_schema":'
            ' {"name": "x", "schema": {"type": "object", "properties": {',
            '"k%d": {"type": "string"}',
            "}}}}}",
        ),
    ),
    "a schema of alternatives": (
        CHAT,
        filled('{"messages": [' + USER + '], "structured_outputs": {"json": {"anyOf": [', "{}",
               "]}}}"),
    ),
    "a long regex": (
        CHAT, repeated('{"messages": [' + USER + '], "structured_outputs": {"regex": "', "(a|b)*",
                       '"}}')
    ),
    "many choices": (
        CHAT, numbered('{"messages": [' + USER + '], "structured_outputs": {"choice": [', '"c%d"',
                       "]}}")
    ),
    "a long cache salt": (COMPLETION, repeated('{"prompt": "Hi", "cache_salt": "', "a", '"}')),
    "a long model name": (COMPLETION, repeated('{"prompt": "Hi", "model": "', "a", '"}')),
    "an unknown field": (COMPLETION, repeated('{"prompt": "Hi", "', "a", '": 1}')),
    "a long template variable": (
        CHAT,
        repeated('{"messages": [' + USER + '], "chat_template_kwargs": {"', "a", '": 1}}'),
    ),
    "a long message to continue": (
        CHAT,
        repeated(
            '{"continue_final_message": true, "add_generation_prompt": false, "messages": [{"role":'
            ' "user", "content": "',
            "a",
            '"}]}',
        ),
    ),
    "far too many alternatives": (
        COMPLETION,
        lambda _: '{"prompt": "Hi", "n": 128, "max_tokens": 1000, "logprobs": 20}',
    ),
    "a prompt in far too many outputs": (
        COMPLETION,
        lambda _: f'{{"prompt": {IDS[:150_001]}0], "n": 128, "max_tokens": 1, "echo": true}}',
    ),
    "unknown fields": (COMPLETION, numbered('{"prompt": "Hi", ', '"k%d": 1', "}")),
    "metadata": (RESPONSES, numbered('{"input": "Hi", "metadata": {', '"k%d": "v"', "}}")),
    "objects as blocks": (
        MESSAGES,
        filled('{"max_tokens": 5, "messages": [{"role": "user", "content": [', "{}", "]}]}"),
    ),
    "objects as turns": (MESSAGES, filled('{"max_tokens": 5, "messages": [', "{}", "]}")),
    "objects as items": (RESPONSES, filled('{"input": [', "{}", "]}")),
    "many stop texts": (
        COMPLETION, numbered('{"prompt": "Hi", "stop": [', '"stop%d"', "]}")
    ),
    "a long stop text": (COMPLETION, repeated('{"prompt": "Hi", "stop": "', "a", '"}')),
    "logit bias": (
        COMPLETION, lambda size: json.dumps(
            {"prompt": "Hi", "n": 128, "logit_bias": {str(i): 1 for i in range(size // 16)}}
        ),
    ),
    "stop token ids": (COMPLETION, filled('{"prompt": "Hi", "stop_token_ids": [', "1", "]}")),
    "ids of tokens": ("/detokenize", filled('{"tokens": [', "300", "]}")),
    "text to tokenize": ("/tokenize", repeated('{"prompt": "', "a 1, ", '"}')),
    # Just within the bounds of the JSON as a whole, so that later checks get to see them.
    "as many values as possible": (
        COMPLETION, lambda _: '{"prompt": [' + "1," * 500_000 + '{"a": 1}]}'
    ),
    "as many objects as possible": (
        CHAT, lambda _: '{"messages": [' + ",".join([USER] * 31_000) + "]}"
    ),
    "as many parts as possible": (
        CHAT,
        lambda _: '{"messages": [' + ",".join(
            ['{"role": "user", "content": [' + ",".join(['{"type": "text", "text": ""}'] * 300)
             + "]}"] * 100
        ) + "]}",
    ),
    "as many calls as possible": (
        CHAT,
        lambda _: '{"messages": [' + ",".join(
            ['{"role": "assistant", "tool_calls": [' + ",".join(
                ['{"id": "1", "function": {"name": "f", "arguments": ""}}'] * 256
            ) + "]}"] * 60
        ) + "]}",
    ),
    "as many blocks of a system's text as possible": (
        MESSAGES,
        lambda _: '{"max_tokens": 5, "messages": [' + USER + '], "system": ['
        + ",".join(['{"type": "text", "text": ""}'] * 32_000) + "]}",
    ),
    "as many blocks as possible": (
        MESSAGES,
        lambda _: '{"max_tokens": 5, "messages": [' + ",".join(
            ['{"role": "user", "content": [' + ",".join(
                ['{"type": "tool_result", "tool_use_id": "1", "content": [{}]}'] * 150
            ) + "]}"] * 100
        ) + "]}",
    ),
    "as many keys as possible": (
        CHAT,
        lambda _: '{"messages": [' + ",".join(
            ["{" + ",".join(f'"k{i}": 1' for i in range(2000)) + "}"] * 30
        ) + "]}",
    ),
    "a body that is read at once": (
        CHAT,
        lambda _: '{"messages": [' + USER + '], "structured_outputs": {"json": {"anyOf": ['
        + ",".join(["{}"] * 5_400) + "]}}}",
    ),
    "brackets without end": (CHAT, lambda size: "[" * size),
    "keys without end": (CHAT, lambda size: '{"a":' * (size // 5)),
    "quotes": (CHAT, lambda size: '"' * size),
    "backslashes": (CHAT, lambda size: '{"a": "' + "\\" * size),
}  # fmt: skip
# Requests of honest clients, which must be answered.
HONEST: dict[str, tuple[str, Make]] = {
    "prompts of many ids": (COMPLETION, lambda _: f'{{"prompt": [{",".join([IDS] * 12)}]}}'),
    "as many ids of tokens as possible": (
        "/detokenize",
        lambda _: '{"tokens": [' + ",".join(["300"] * 500_000) + "]}",
    ),
    "as much text to tokenize as possible": (
        "/tokenize",
        lambda _: '{"prompt": "' + "a 1, " * (MIB // 5) + '"}',
    ),
    "a long chat": (
        CHAT,
        lambda _: json.dumps(
            {
                "messages": [{"role": "user", "content": "word, " * 20}] * 200,
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": f"f{i}",
                            "parameters": {
                                "type": "object",
                                "properties": {f"p{j}": {"type": "string"} for j in range(4)},
                            },
                        },
                    }
                    for i in range(50)
                ],
            }
        ),
    ),
}


def completion(**fields: Any) -> tuple[str, Make]:
    return COMPLETION, lambda _: json.dumps({"prompt": "Hi"} | fields)


def chat(**fields: Any) -> tuple[str, Make]:
    messages = {"messages": [{"role": "user", "content": "Hi"}]}
    return CHAT, lambda _: json.dumps(messages | {"logprobs": True} | fields)


# Small requests for much. Their answers come at once, so that all is written at a time.
ANSWERS: dict[str, tuple[str, Make]] = {
    "a long answer with alternatives": chat(max_tokens=4_000, top_logprobs=20),
    "many answers with alternatives": chat(n=16, max_tokens=1_000, top_logprobs=20),
    "many completions with alternatives": completion(n=128, max_tokens=300, logprobs=20),
    "a step of many streams": completion(n=128, max_tokens=1, logprobs=20, stream=True),
    "a step of many chats": chat(n=128, max_tokens=1, top_logprobs=20, stream=True),
    "ids of a prompt in each output": completion(
        prompt=[300] * 8_000, n=128, max_tokens=1, return_token_ids=True
    ),
    "a prompt in each stream": completion(
        prompt=[300] * 8_000, n=128, max_tokens=1, echo=True, stream=True
    ),
    "ids of a prompt in each stream": completion(
        prompt=[300] * 8_000, n=128, max_tokens=1, return_token_ids=True, stream=True
    ),
}


def packed(packer: Any, num_mib: int) -> Callable[[], bytes]:
    """Makes a completion's body with MiB of white space, without holding them."""

    def make() -> bytes:
        parts = [packer.compress(b'{"prompt": "Hi", "max_tokens": 2')]
        parts += [packer.compress(b" " * MIB) for _ in range(num_mib)]
        return b"".join([*parts, packer.compress(b"}"), packer.flush()])

    return make


# Completions whose bodies are encoded: bombs, and what an honest client may send.
ENCODED: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a bomb in gzip": ("gzip", packed(zlib.compressobj(wbits=31), 100)),
    "a bomb in deflate": ("deflate", packed(zlib.compressobj(), 100)),
    "a bomb in zstd": ("zstd", packed(zstandard.ZstdCompressor().compressobj(), 100)),
    "a large body in gzip": ("gzip", packed(zlib.compressobj(wbits=31), 3)),
    "a large body in zstd": ("zstd", packed(zstandard.ZstdCompressor().compressobj(), 3)),
}


def answer_of(request: Request) -> str:
    """As long as the request allows."""
    return "word " * request.sampling.max_tokens


class Lateness:
    """Measures the longest time for which an event loop does nothing else. While other programs
    use the processor, the loop is late through no fault of its own, so only time counts that this
    process has used.
    """

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def watch(self) -> None:
        while True:
            began_s, used_s = time.monotonic(), time.process_time()
            await asyncio.sleep(TICK_S)
            late_s = time.monotonic() - began_s - TICK_S
            self.worst_s = max(self.worst_s, min(late_s, time.process_time() - used_s))


async def send(api: Api, path: str, body: bytes, encoding: str = "") -> tuple[int, bytes]:
    """Post a body as a server would pass it on. Returns the status and the answer."""
    headers = [(b"content-encoding", encoding.encode())] if encoding else []
    status, answer = 0, list[bytes]()
    parts = [body[place : place + PART] for place in range(0, len(body), PART)]
    parts.reverse()

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        part = parts.pop()
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def take(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        if body := message.get("body"):
            answer.append(body)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
    scope["headers"] = headers
    await api(scope, receive, take)
    return status, b"".join(answer)  # which copies nothing if it came at once


def memory() -> int:
    """The peak of this process's memory so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_now() -> int:
    """The memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def measure(names: list[str], size: int) -> None:
    engine = ScriptedEngine(answer_of, 0.0, per_step=CONTEXT)
    sizes = dataclasses.replace(LIMITS, max_model_len=CONTEXT)
    api = make_api(engine, sizes=sizes)
    await send(api, COMPLETION, b'{"prompt": "Hi"}')
    gc.collect()
    gc.freeze()
    at_first = memory_now()
    for name in names:
        path, encoding = COMPLETION, ""
        if name in ENCODED:
            encoding, make_body = ENCODED[name]
            body = make_body()
        else:
            path, make = (REQUESTS | ANSWERS | HONEST)[name]
            body = make(size).encode()
        before, lateness = memory(), Lateness()
        watching = asyncio.ensure_future(lateness.watch())
        await asyncio.sleep(0.01)
        began_s = time.monotonic()
        status, answer = await send(api, path, body, encoding)
        await asyncio.sleep(0.01)
        watching.cancel()
        line = {
            "name": name,
            "status": status,
            "stall_ms": round(1e3 * lateness.worst_s, 1),
            "memory_mib": round((memory() - before) / 2**20),
            "seconds": round(time.monotonic() - began_s, 2),
            "answer_bytes": len(answer),
            "answer": answer[:300].decode(errors="replace"),
        }
        del body
        line["left_mib"] = round((memory_now() - at_first) / 2**20)
        print(json.dumps(line), flush=True)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Send hostile requests.")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--mib", type=float, default=7.9)
    args = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return_large_allocations()
    names = args.names or [*ENCODED, *REQUESTS, *ANSWERS, *HONEST]
    asyncio.run(measure(names, int(args.mib * 2**20)))


if __name__ == "__main__":
    main()
