"""What one request may hold: the one table of bounds, each with its reason.

A request that exceeds a bound is refused before anything is built from it. The HTTP API checks the
bounds of its bodies on the parsed JSON, before it makes objects of them; `SamplingParams` checks
its own, whoever makes it. Whatever is not in the table, such as the text of a message, is bounded
by the size of the body. docs/limits.md shows the table; a test compares the two.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.errors import RequestError

KIB = 2**10
MIB = 2**20
MAX_OUTPUTS = 128  # of one request


@dataclass(frozen=True, slots=True)
class Bound:
    """The most of something that a request may hold, and why not more."""

    maximum: int
    unit: str  # what is counted
    scope: str  # which part of a request
    reason: str


# Bounds of connections and of requests, before the JSON is read.
HTTP_BOUNDS: Mapping[str, Bound] = {
    "head": Bound(
        65_536,
        "bytes",
        "request line, headers and trailers together",
        "they are kept until the request ends; browsers and proxies send at most 16 KiB",
    ),
    "headers": Bound(
        256, "headers", "the head of a request", "each is an object; clients send about 20"
    ),
    "connections": Bound(
        4_096,
        "connections",
        "one API process; then the oldest one without a complete request is dropped, or 503",
        "each may hold a head; four times the outputs that one engine takes by default",
    ),
    "pipelined": Bound(
        16,
        "requests",
        "one connection, beside the one that is answered; with more it is closed",
        "each is kept until its turn; clients send none ahead",
    ),
    "head time": Bound(
        30,
        "seconds",
        "from the beginning of a connection, or the first byte of a later request, to the end of"
        " its head",
        "connections that send nothing must not use up the descriptors",
    ),
    "rest time": Bound(
        10,
        "seconds",
        "for the rest of a body after the answer",
        "an answer that comes early, such as 413, is seen by clients that still send",
    ),
    "body time": Bound(
        30,
        "seconds",
        "how far a body of at most 256 KiB may fall behind 8 KiB per second; then 408",
        "a slow upload may take its time, one that stands still may not",
    ),
    "body pause": Bound(
        10,
        "seconds",
        "the same for a larger body",
        "while it stands still, it takes the memory of others",
    ),
    "body": Bound(
        8 * MIB,
        "bytes",
        "the body, decoded (`max_body_bytes`)",
        "a context of 262,144 tokens is about 1 MiB of text",
    ),
    "bodies": Bound(
        256 * MIB,
        "bytes",
        "all bodies that one API process has received and not yet tokenized; beyond it, 503",
        "clients that upload at the same time must not fill the memory",
    ),
    "small body": Bound(
        256 * KIB,
        "bytes",
        "a body that is read however many others there are",
        "large uploads must not lock out others; most requests are smaller",
    ),
}
# Bounds of the JSON of a body, most of them counted before it is parsed. They bound the time for
# which the parser holds the interpreter: at most about 30 ms, where each character of a text is
# escaped.
JSON_BOUNDS: Mapping[str, Bound] = {
    "values": Bound(
        524_288,
        "values",
        "the body: numbers, texts, lists and objects",
        "12 prompts of 40,960 token ids; more would stall other requests while it is parsed",
    ),
    "texts": Bound(
        131_072,
        "texts",
        "the body, the keys of its objects among them",
        "twice as many as keys; to make one takes as long as two numbers, and memory of its own",
    ),
    "containers": Bound(
        32_768,
        "lists and objects",
        "the body",
        "each takes up to 200 times its bytes; 2,048 messages with calls and 128 tools have 20,000",
    ),
    "pairs": Bound(
        65_536, "keys", "all objects of the body", "as for lists and objects; most have two"
    ),
    "bare": Bound(
        4 * MIB,
        "bytes",
        "the body outside of texts",
        "524,288 token ids of six digits; numbers of thousands of digits are slow to read",
    ),
    "depth": Bound(
        160, "levels", "nested lists and objects", "schemas of 64 levels, two for each property"
    ),
    "keys": Bound(2_048, "keys", "any one object", "each is looked up; schemas have the most"),
    "unknown fields": Bound(
        256,
        "unknown fields",
        "the names in the body, and in the objects in it that say how to answer",
        "each is compared with all known ones",
    ),
}
# Bounds of fields, and of what they ask for together. `SamplingParams` checks its own.
FIELD_BOUNDS: Mapping[str, Bound] = {
    "messages": Bound(
        2_048, "messages", "`messages` (`max_messages`)", "the template runs over all of them"
    ),
    "input": Bound(
        8_192,
        "items",
        "`input` of a response; four times `max_messages`, if that is more",
        "a message may come as up to four items",
    ),
    "parts": Bound(
        1_024, "parts", "the content of a message", "each is an object; clients send a few"
    ),
    "tool_calls": Bound(
        256, "calls", "the `tool_calls` of a message", "each is an object; models make a few"
    ),
    "tools": Bound(256, "tools", "`tools`", "all are part of the prompt; OpenAI documents 128"),
    "prompt": Bound(
        MAX_OUTPUTS,
        "prompts",
        "`prompt`",
        f"each is at least one output, of which a request may have {MAX_OUTPUTS}",
    ),
    "tokenized text": Bound(
        MIB,
        "characters",
        "text of `/tokenize`, `/v1/messages/count_tokens` and `/v1/responses/input_tokens`",
        "a token takes 350 bytes while it is made; prompts are bounded by the context",
    ),
    "alternatives": Bound(
        MIB,
        "log probabilities",
        "an answer: outputs times `max_tokens` times alternatives and one; the same of prompts,"
        " where they are asked for",
        "each takes 90 bytes of the answer; one output of 32,768 tokens with 20 has 688,128",
    ),
    "repeated prompt": Bound(
        MIB,
        "tokens",
        "prompts that are repeated in each output: `echo`, `return_token_ids`",
        "an answer of 128 outputs must not hold a prompt of 40,000 tokens 128 times",
    ),
    "stop": Bound(
        32, "texts", "`stop`, `stop_sequences`", "each is matched with each new character"
    ),
    "stop text": Bound(
        1_024, "characters", "one stop text", "text that may begin one is held back"
    ),
    "stop_token_ids": Bound(
        1_024, "token ids", "`stop_token_ids`", "they go to every rank; OpenAI has no such field"
    ),
    "logit_bias": Bound(
        1_024, "token ids", "`logit_bias`", "they go to every rank; OpenAI documents the same limit"
    ),
    "cache_salt": Bound(
        1_024, "characters", "`cache_salt`", "every block of the prefix cache keeps it"
    ),
    "model": Bound(512, "characters", "`model`", "names of the hub have at most 96"),
    "name": Bound(256, "characters", "the name of a tool, and of a schema", "OpenAI documents 64"),
    "metadata": Bound(16, "keys", "`metadata`", "it is repeated in the answer; OpenAI's limit"),
    "metadata text": Bound(
        2_048, "characters", "a key or value of `metadata`", "OpenAI documents 64 and 512"
    ),
    "user": Bound(
        2_048,
        "characters",
        "`user`, `safety_identifier`, `prompt_cache_key`",
        "they change nothing; OpenAI documents 64",
    ),
    "chat_template_kwargs": Bound(
        64, "keys", "`chat_template_kwargs`", "templates read fewer than ten variables"
    ),
    "schema": Bound(
        65_536,
        "characters",
        "a JSON schema, the parameters of a tool, or a structural tag",
        "as many bytes are compiled to a grammar, which takes seconds",
    ),
    "schema values": Bound(
        16_384,
        "values",
        "a JSON schema, the parameters of a tool, or a structural tag",
        "each becomes a part of the grammar; OpenAI documents 5,000 properties",
    ),
    "choice": Bound(
        1_024, "texts", "`structured_outputs.choice`", "each is a branch; OpenAI documents 1,000"
    ),
    "choice text": Bound(
        65_536, "characters", "all texts of `structured_outputs.choice`", "the grammar holds them"
    ),
    "regex": Bound(
        8_192, "characters", "`structured_outputs.regex`", "it is compiled to an automaton"
    ),
    "pattern": Bound(8_192, "characters", "a `pattern` of a schema", "as for `regex`"),
}
BOUND_TABLES: Mapping[str, Mapping[str, Bound]] = {
    "The HTTP request": HTTP_BOUNDS,
    "The JSON of its body": JSON_BOUNDS,
    "Its fields": FIELD_BOUNDS,
}


def field_limit(name: str) -> int:
    """The bound `name` of `FIELD_BOUNDS`."""
    return FIELD_BOUNDS[name].maximum


def check_bound(
    name: str,
    count: int,
    place: str,
    parameter: str | None = None,
    configured_maximum: int | None = None,
) -> None:
    """Raise `RequestError` naming `place` if it holds more than the bound `name` of `FIELD_BOUNDS`
    or `JSON_BOUNDS` allows. `parameter`: that of the error, `place` if None. `configured_maximum`
    replaces a bound that is configured.
    """
    bound = FIELD_BOUNDS.get(name) or JSON_BOUNDS[name]
    limit = bound.maximum if configured_maximum is None else configured_maximum
    if count > limit:
        raise RequestError(
            f"{place}: {count} {bound.unit} are too many; at most {limit} are possible",
            place if parameter is None else parameter,
        )


def check_schema_bounds(value: object, place: str, parameter: str) -> None:
    """Raise `RequestError` for what is not JSON, and for JSON beyond the bounds of schemas, reading
    hardly more of it.
    """
    num_values, num_characters, depth = 0, 0, 0
    values_at_depth: list[object] = [value]
    while values_at_depth:
        depth += 1
        check_bound("depth", depth, place, parameter)
        values_below: list[object] = []
        for nested_value in values_at_depth:
            num_values += 1
            texts: list[str] = []
            if isinstance(nested_value, str):
                texts.append(nested_value)
            elif isinstance(nested_value, Mapping):
                for key in nested_value:
                    if not isinstance(key, str):
                        raise RequestError(
                            f"{place}: the names in an object are text, got {short_repr(key)}",
                            parameter,
                        )
                    texts.append(key)
                values_below.extend(nested_value.values())
            elif isinstance(nested_value, list | tuple):
                values_below.extend(nested_value)
            elif not isinstance(nested_value, int | float | None):
                raise RequestError(
                    f"{place} holds {short_repr(nested_value)}, which is not JSON", parameter
                )
            num_characters += sum(map(len, texts))
            check_bound("schema values", num_values + len(values_below), place, parameter)
            check_bound("schema", num_characters, place, parameter)
            for text in texts:
                check_unicode(text, place, parameter)
        values_at_depth = values_below


def check_unicode(text: str, place: str, parameter: str) -> None:
    """Raise `RequestError` for text that has half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{place} cannot be encoded: {error}", parameter) from None


class _ShortRepr(reprlib.Repr):
    """Shows the first items of what is long. Unlike its base, it does not sort keys."""

    def repr_dict(self, mapping: Mapping[object, object], level: int) -> str:
        if mapping and level <= 0:
            return "{...}"
        first_items = itertools.islice(mapping.items(), self.maxdict)
        shown_items = [
            f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}"
            for key, value in first_items
        ]
        return "{" + ", ".join(shown_items + ["..."] * (len(mapping) > self.maxdict)) + "}"


_SHORT_REPR = _ShortRepr()
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = _SHORT_REPR.maxlong = 80
_SHORT_REPR.maxlist = _SHORT_REPR.maxtuple = _SHORT_REPR.maxdict = _SHORT_REPR.maxset = (
    _SHORT_REPR.maxfrozenset
) = 5
_SHORT_REPR.maxlevel = 3


def short_repr(value: object) -> str:
    """A value in an error message: at most 100 characters, or 100 and "...", made without
    reading all of it.
    """
    text = _SHORT_REPR.repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
