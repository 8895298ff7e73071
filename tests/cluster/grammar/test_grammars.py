"""Everything that a grammar allows is valid: random walks through real helper processes, judged by
independent validators.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from cluster.client.tokenizer import Tokenizer
from cluster.grammar.compiler import GrammarCompiler
from cluster.grammar.follower import CHILD_MEMORY_BYTES
from cluster.grammar.formats import (
    HonoredTool,
    format_after_thinking,
    format_of,
    possible_calls_format,
    required_calls_format,
    structural_tag_of,
)
from cluster.grammar.helper import HelperLostError
from cluster.grammar.keywords import FORMAT_NAMES
from cluster.grammar.markers import AnswerState
from cluster.grammar.matching import GrammarMatching
from cluster.grammar.schemas import ANY_OBJECT
from configs.model import ModelConfig
from configs.paths import DEFAULT_MODEL_DIR
from scheduler.engine import MaskAnswer
from scheduler.errors import RequestError, RequestFailedError
from scheduler.messages import Request, int32_array
from scheduler.params import ResolvedSampling, StructuredOutputs
from scheduler.sequence import Sequence

MODEL = ModelConfig.from_dir(Path(DEFAULT_MODEL_DIR))
EOS = set(MODEL.eos_token_ids)
NUM_SCHEMAS = 75
WAIT_S = 60.0
REGEXES = [
    r"\d{3}-\d{4}",
    r"(yes|no)!?",
    r"[a-z]+@[a-z]+\.(com|org)",
    r"[A-Z][a-z]{2,5}( [A-Z][a-z]{2,5})?",
    r"-?(0|[1-9]\d*)(\.\d+)?",
    r"#[0-9a-f]{6}",
    r"(a|b)*c",
    r"x{0,3}y?z",
    r"[^0-9\n]{4}",
    r"ä+ö",
    r".{5,40}",
    r"\S+\s\S+",
    r"{a{,2}}",
]
CHOICES = [["yes", "no"], ["a", "ab", "abc"], ["positive", "negative", "neutral"], ["ja, sicher"]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEFAULT_MODEL_DIR)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    assert tokenizer.file is not None
    made = GrammarCompiler(tokenizer.file, MODEL.vocab_size, MODEL.eos_token_ids)
    yield made
    made.close()


@pytest.fixture(scope="module")
def matching(tokenizer: Tokenizer) -> Iterator[GrammarMatching]:
    assert tokenizer.file is not None
    made = GrammarMatching(tokenizer.file, MODEL.vocab_size, MODEL.eos_token_ids)
    yield made
    made.close()


def sequence(structural_tag: bytes, name: str = "a") -> Sequence:
    request = Request(
        request_id=name,
        token_ids=int32_array([1, 2]),
        num_prompt_tokens=2,
        sampling=ResolvedSampling(seed=0, max_tokens=1000),
        structural_tag=structural_tag,
    )
    return Sequence(request, arrival_index=0, max_total_tokens=1002)


def allowed_by(mask: MaskAnswer) -> list[int]:
    """The token ids of a mask."""
    if mask is None:
        return list(range(MODEL.vocab_size))
    assert isinstance(mask, bytes), mask
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return [int(i) for i in bits[: MODEL.vocab_size].nonzero()[0]]


def walk(
    structural_tag: bytes,
    matching: GrammarMatching,
    tokenizer: Tokenizer,
    rng: random.Random,
    most: int,
) -> tuple[str, bool]:
    """(a random text that the grammar allows, whether it ended). Tokens that close something are
    more likely, so that texts end.
    """
    seq = sequence(structural_tag)

    def text() -> str:
        return tokenizer.decode(seq.token_ids[2:].tolist())

    try:
        for _ in range(most):
            allowed = allowed_by(matching.masks([seq], WAIT_S)[0])
            assert allowed, f"nothing is allowed after {text()!r}"
            weights = [50 if tokenizer.decode([t]) in ('"', "}", "]", ",") else 1 for t in allowed]
            [token] = rng.choices(allowed, weights)
            if token in EOS or (EOS & {*allowed} and rng.random() < 0.3):
                return text(), True
            seq.token_ids.append(token)
        return text(), False
    finally:
        matching.forget(seq.request_id)


def random_schema(rng: random.Random, depth: int = 2) -> Any:
    """A schema of keywords that are honored."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    kind = rng.choice(kinds + (["object"] * 5 + ["array", "array", "anyOf", "types"]) * (depth > 0))
    if kind == "string":
        low = rng.randint(0, 3)
        limits = {"minLength": low, "maxLength": low + rng.randint(0, 5)}
        of: list[dict[str, Any]] = [
            limits,
            {},
            {"pattern": r"^[a-c]{1,4}$"},
            {"format": rng.choice(FORMAT_NAMES)},
        ]
        return {"type": "string"} | rng.choice(of)
    if kind in ("integer", "number"):
        low = rng.randint(-200, 100)
        bounds = rng.choice((("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")))
        limits = dict(zip(bounds, (low, low + rng.randint(2, 300)), strict=True))
        return {"type": kind} | rng.choice((limits, {}, dict([limits.popitem()])))
    if kind == "enum":
        return {"enum": rng.sample(["red", 1, 2.5, None, True, "a b", [1], {"x": "y"}], 3)}
    if kind == "const":
        return {"const": rng.choice(["x", 7, False, {"k": [1, "two"]}])}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "types":
        return {"type": rng.sample(["string", "integer", "boolean", "null"], 2)}
    if kind == "array":
        low = rng.randint(0, 2)
        limits = rng.choice(({}, {"minItems": low, "maxItems": low + rng.randint(0, 2)}))
        return {"type": "array", "items": random_schema(rng, depth - 1)} | limits
    if kind == "object":
        names = rng.sample(["name", "age", "a b", "größe", "list", 'q"uote'], rng.randint(1, 4))
        more = rng.choice(({}, {"additionalProperties": False}, {"additionalProperties": True}))
        return {
            "type": "object",
            "title": "an annotation",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
        } | more
    return {"type": kind}


def test_random_schemas(
    compiler: GrammarCompiler, matching: GrammarMatching, tokenizer: Tokenizer
) -> None:
    rng, num_ended = random.Random(24), 0
    for number in range(NUM_SCHEMAS):
        schema = random_schema(rng)
        if number % 5 == 0:
            schema = {
                "$defs": {"node": schema},
                "type": "object",
                "properties": {"first": {"$ref": "#/$defs/node"}},
                "required": ["first"],
            }
        jsonschema.Draft202012Validator.check_schema(schema)
        structural_tag = compiler.check(
            structural_tag_of(format_of(StructuredOutputs(json=schema)))
        )
        text, has_ended = walk(structural_tag, matching, tokenizer, rng, 250)
        if has_ended:
            num_ended += 1
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            try:
                jsonschema.validate(json.loads(text), schema, format_checker=checker)
            except (ValueError, jsonschema.ValidationError) as error:
                raise AssertionError(f"{schema} let {text!r} through: {error}") from error
    print(f"{num_ended} of {NUM_SCHEMAS} walks ended, all validate")
    assert num_ended > 0.7 * NUM_SCHEMAS


@pytest.mark.parametrize("regex", REGEXES)
def test_regexes(
    compiler: GrammarCompiler, matching: GrammarMatching, tokenizer: Tokenizer, regex: str
) -> None:
    structural_tag, rng = (
        compiler.check(structural_tag_of(format_of(StructuredOutputs(regex=regex)))),
        random.Random(1),
    )
    ended = [walk(structural_tag, matching, tokenizer, rng, 100) for _ in range(10)]
    assert any(has_ended for _, has_ended in ended)
    for text, has_ended in ended:
        assert not has_ended or re.fullmatch(regex, text), text


@pytest.mark.parametrize(
    ("pattern", "lets_through", "keeps_out"),
    [
        (r"^[0-9](\.[0-9]+)?Z$", ["1Z", "1.23Z"], ["12Z", "123Z", "1.Z"]),
        (r"^(a(b|c+)?)?d$", ["d", "ad", "abd", "accd"], ["cd", "bd", "accbd"]),
        (r"^[)?(]?\)?x(y)?$", ["?x", ")x", "x", "xy"], ["xx", "yx"]),
        (r"^a\(b+\)?$", ["a(b", "a(bb)"], ["ab", "a)"]),
    ],
)
def test_optional_groups_of_patterns(
    compiler: GrammarCompiler,
    matching: GrammarMatching,
    tokenizer: Tokenizer,
    pattern: str,
    lets_through: list[str],
    keeps_out: list[str],
) -> None:
    structure = StructuredOutputs(json={"type": "string", "pattern": pattern})
    structural_tag = compiler.check(structural_tag_of(format_of(structure)))
    for text in (*lets_through, *keeps_out):
        assert (text in lets_through) == (re.search(pattern, text) is not None), text
        seq = sequence(structural_tag)
        seq.token_ids.extend(tokenizer.encode(f'"{text}"'))
        [answer] = matching.masks([seq], WAIT_S)
        matching.forget(seq.request_id)
        assert isinstance(answer, RequestFailedError) == (text in keeps_out), text


@pytest.mark.parametrize("choice", CHOICES)
def test_choices(
    compiler: GrammarCompiler, matching: GrammarMatching, tokenizer: Tokenizer, choice: list[str]
) -> None:
    structural_tag, rng = (
        compiler.check(structural_tag_of(format_of(StructuredOutputs(choice=choice)))),
        random.Random(1),
    )
    texts = {walk(structural_tag, matching, tokenizer, rng, 50) for _ in range(100)}
    assert texts == {(text, True) for text in choice}


TOOLS = [
    HonoredTool(
        name="add",
        schema={
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    ),
    HonoredTool(name="no_arguments", schema=ANY_OBJECT),
]
CALLS = re.compile(r"<tool_call>\n(\{.*?\})\n</tool_call>", re.DOTALL)


def check_calls(text: str) -> int:
    calls = [json.loads(call) for call in CALLS.findall(text)]
    for call in calls:
        assert call.keys() == {"name", "arguments"}
        schema = next(tool.schema for tool in TOOLS if tool.name == call["name"])
        jsonschema.validate(call["arguments"], schema)
    return len(calls)


@pytest.mark.parametrize("ends_after_one_call", [True, False])
def test_required_calls(
    compiler: GrammarCompiler,
    matching: GrammarMatching,
    tokenizer: Tokenizer,
    ends_after_one_call: bool,
) -> None:
    structural_tag = compiler.check(
        structural_tag_of(required_calls_format(TOOLS, ends_after_one_call=ends_after_one_call))
    )
    rng, ended = random.Random(5), 0
    for _ in range(10):
        text, has_ended = walk(structural_tag, matching, tokenizer, rng, 300)
        if has_ended:
            ended += 1
            count = check_calls(text)
            assert count == 1 if ends_after_one_call else count >= 1
            assert not CALLS.sub("", text).strip("\n"), text
    assert ended


def test_possible_calls(
    compiler: GrammarCompiler, matching: GrammarMatching, tokenizer: Tokenizer
) -> None:
    structural_tag = compiler.check(structural_tag_of(possible_calls_format(TOOLS)))
    start = tokenizer.encode('Well. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n')
    seq = sequence(structural_tag)
    seq.token_ids.extend(start)
    text = {tokenizer.decode([token]) for token in allowed_by(matching.masks([seq], WAIT_S)[0])}
    matching.forget(seq.request_id)
    assert text and all("</tool_call>".startswith(each) for each in text)
    seq = sequence(structural_tag)
    seq.token_ids.extend(tokenizer.encode('<tool_call>\n{"name": "other'))
    [answer] = matching.masks([seq], WAIT_S)
    matching.forget(seq.request_id)
    assert isinstance(answer, RequestFailedError) and "does not allow token" in str(answer)


@pytest.mark.parametrize(
    "state", [AnswerState.REASONING, AnswerState.UNDECIDED, AnswerState.CONTENT]
)
def test_the_answer_comes_after_the_reasoning(
    compiler: GrammarCompiler, matching: GrammarMatching, tokenizer: Tokenizer, state: AnswerState
) -> None:
    answer = format_after_thinking(format_of(StructuredOutputs(choice=["yes"])), state)
    structural_tag = compiler.check(structural_tag_of(answer))
    thoughts = {
        AnswerState.REASONING: "Is 1 = 1? yes, I think.</think>\n\n",
        AnswerState.UNDECIDED: "<think>Is 1 = 1?</think>\n\n",
        AnswerState.CONTENT: "",
    }[state]
    for before in {thoughts, "" if state is AnswerState.UNDECIDED else thoughts}:
        seq = sequence(structural_tag)
        seq.token_ids.extend(tokenizer.encode(before))
        [mask] = matching.masks([seq], WAIT_S)
        matching.forget(seq.request_id)
        texts = {tokenizer.decode([token]) for token in allowed_by(mask)}
        assert any(text and "yes".startswith(text) for text in texts), texts
        assert "n" not in texts and not EOS & {*allowed_by(mask)}
    if state is AnswerState.REASONING:
        seq = sequence(structural_tag)
        seq.token_ids.extend(tokenizer.encode("hm"))
        [mask] = matching.masks([seq], WAIT_S)
        matching.forget(seq.request_id)
        assert mask is None or not EOS & {*allowed_by(mask)}, "an end without an answer"
        assert len(allowed_by(mask)) > 300, "reasoning is free"


def test_masks_are_a_function_of_known_tokens(
    compiler: GrammarCompiler, matching: GrammarMatching, tokenizer: Tokenizer
) -> None:
    """However many tokens become known at a time, and even after the helper was killed."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    structural_tag = compiler.check(structural_tag_of(format_of(StructuredOutputs(json=schema))))
    tokens = tokenizer.encode('{"n": 12')
    step_by_step = sequence(structural_tag, "steps")
    for token in tokens:
        matching.masks([step_by_step], WAIT_S)
        step_by_step.token_ids.append(token)
    at_once = sequence(structural_tag, "at once")
    at_once.token_ids.extend(tokens)
    first, second = matching.masks([step_by_step, at_once], WAIT_S)
    assert first == second and first is second, "rows with equal masks share one"
    process = matching._helper._process
    assert process is not None
    process.kill()  # and its children end with it
    process.wait()
    again = sequence(structural_tag, "again")
    for seq in (step_by_step, at_once):
        seq.token_ids.extend(tokenizer.encode("3"))
    again.token_ids.extend(at_once.token_ids[2:])
    first, second = matching.masks([step_by_step, at_once], WAIT_S)
    assert isinstance(first, bytes) and first == second == matching.masks([again], WAIT_S)[0]
    assert matching._helper._process not in (process, None)
    for name in ("steps", "at once", "again"):
        matching.forget(name)


def test_a_grammar_that_no_token_fits_is_the_callers_fault(
    compiler: GrammarCompiler, matching: GrammarMatching, tokenizer: Tokenizer
) -> None:
    tag = structural_tag_of({"type": "regex", "pattern": r"a[^\s\S]"})
    first, second = (sequence(compiler.check(tag), name) for name in ("first", "second"))
    before = matching.masks([first, second], WAIT_S)
    assert all(isinstance(mask, bytes) for mask in before)
    for seq in (first, second):
        seq.token_ids.extend(tokenizer.encode("a"))
    for answer in matching.masks([first, second], WAIT_S):
        assert isinstance(answer, RequestError) and answer.parameter == "structured_outputs"
        assert "no token fits the grammar here; output tokens so far: 1" in str(answer)
    for name in ("first", "second"):
        matching.forget(name)


# What is refused, and what is hostile


@pytest.mark.parametrize(
    "pattern", ["a{3,1}", "a++", "[z-a]", "{x}"], ids=["bounds", "possessive", "range", "brace"]
)
def test_no_place_in_a_source_reaches_a_user(compiler: GrammarCompiler, pattern: str) -> None:
    for tag in ({"type": "regex", "pattern": pattern}, {"type": "regex", "pattern": ""}):
        with pytest.raises(RequestError, match=r"it cannot be compiled: [A-Z]") as error:
            compiler.check(structural_tag_of(tag))
        assert not re.search(r"project|\.cc|:\d\d|Check failed", str(error.value))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "object", "not": {}}, "json.not: this keyword"),
        ({"items": {"uniqueItems": True}}, "json.items.uniqueItems: this keyword"),
        ({"type": "string", "format": "credit-card"}, "the format 'credit-card'"),
        ({"type": "string", "pattern": "a", "minLength": 2}, "together with"),
        ({"type": "string", "pattern": "(?!a)b"}, r"other than '\(\?:', are not supported"),
        ({"type": "string", "pattern": 7}, "must be text, got 7"),
        ({"minLength": 3}, "json.minLength needs a type beside it: string"),
        ({"items": {"maximum": 3}}, "json.items.maximum needs a type beside it: integer or number"),
        ({"type": "string", "minLength": -1}, "minLength must be between 0 and 10000, got -1"),
        ({"type": "string", "maxLength": "3"}, "maxLength must be between 0 and 10000, got '3'"),
        (
            {"type": "object", "required": ["b"], "additionalProperties": False},
            "required names 'b', which properties does not",
        ),
        ({"type": "integer", "enum": [1, "a"]}, "lists 'a', which is not of its type"),
        ({"type": "number", "const": True}, "lists True, which is not of its type"),
        ({"$ref": "http://example.com/a"}, "must point into the schema itself"),
        ({"$ref": "#/$defs/missing"}, "'#/\\$defs/missing' leads to no schema"),
        ({"$ref": "#"}, "no finite value fits this schema"),
        ({"anyOf": [{"$ref": "#"}, {"$ref": "#/anyOf/0"}]}, "no finite value fits this schema"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            },
            "no finite value fits this schema",
        ),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no finite value fits"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no finite value fits"),
        (
            {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
            "no finite value fits '#/\\$defs/a'",
        ),
        ({"enum": 5}, "json.enum must be a list of at least one value, got 5"),
        ({"type": "string", "enum": {"a": 1}}, "json.enum must be a list of at least one value"),
        ({"type": "object", "required": [["a"]]}, "json.required must be a list of names"),
        ({"type": {"a": 1}}, "json.type must be one of string, .*got {'a': 1}"),
        ({"type": [{}]}, "json.type must be one of"),
        (
            {"type": "array", "minItems": "a"},
            "json.minItems must be a whole number from 0 to 10000",
        ),
        ({"type": "array", "maxItems": 10**12}, "json.maxItems must be a whole number"),
        ({"type": "number", "minimum": "1"}, "json.minimum must be a number, got '1'"),
        ({"type": "string", "format": ["date"]}, "json.format must be a name, got \\['date'\\]"),
        ({"type": "string", "maxLength": True}, "maxLength must be between 0 and 10000, got True"),
        ({"type": "string", "pattern": "a" * 9000}, "json.pattern: 9000 characters are too many"),
        ("{not json", "json is not a JSON schema"),
        (r'{"const": "\ud800"}', "structured_outputs.json cannot be encoded"),
        (
            f'{{"oneOf": [{{"const": 1}}, {{"const": {"[" * 600}{"]" * 600}}}]}}',
            "structured_outputs.json: 161 levels are too many",
        ),
        (f'{{"enum": [{"1," * 20_000}1]}}', "structured_outputs.json: 20003 values are too many"),
        ({"properties": 3}, "must map names to schemas"),
        ({"items": "string"}, "must be a JSON schema, got 'string'"),
        ({"type": "strnig"}, "json.type must be one of string, .*got 'strnig'"),
        ({"type": "string", "pattern": "(unclosed"}, "json.pattern: a group is not closed"),
        ({"type": "string", "pattern": "a{3,1}"}, "json.pattern: nothing is repeated"),
    ],
)
def test_refused_schemas(compiler: GrammarCompiler, schema: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        compiler.check(structural_tag_of(format_of(StructuredOutputs(json=schema))))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"next": {"$ref": "#"}}, "type": "object", "additionalProperties": False},
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]},
        {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    ],
)
def test_schemas_that_refer_to_themselves_and_end(
    compiler: GrammarCompiler, matching: GrammarMatching, tokenizer: Tokenizer, schema: Any
) -> None:
    structural_tag = compiler.check(structural_tag_of(format_of(StructuredOutputs(json=schema))))
    texts = [
        walk(structural_tag, matching, tokenizer, random.Random(seed), 60) for seed in range(20)
    ]
    ended = [json.loads(text) for text, has_ended in texts if has_ended]
    assert ended
    for value in ended:
        jsonschema.validate(value, schema)


def test_depth_and_size_are_limited(compiler: GrammarCompiler) -> None:
    deep: Any = {"type": "string"}
    for _ in range(70):
        deep = {"type": "array", "items": deep}
    with pytest.raises(RequestError, match="deeper than 64 levels"):
        format_of(StructuredOutputs(json=deep))
    with pytest.raises(RequestError, match=r"json: .* characters are too many; at most 65536"):
        StructuredOutputs(json={"enum": [f"value {i}" for i in range(10_000)]})
    with pytest.raises(RequestError, match=r"json: .* values are too many; at most 16384"):
        StructuredOutputs(json={"anyOf": [{}] * 20_000})
    wide = {"enum": [f"value {i}" for i in range(5_000)]}  # as JSON it has more characters
    with pytest.raises(RequestError, match="larger than 65536 bytes"):
        compiler.check(structural_tag_of(format_of(StructuredOutputs(json=wide))))


def test_a_helper_ends_with_its_parent(matching: GrammarMatching, tokenizer: Tokenizer) -> None:
    assert tokenizer.file is not None
    other = GrammarMatching(tokenizer.file, MODEL.vocab_size, MODEL.eos_token_ids)
    child = other._helper.fork(CHILD_MEMORY_BYTES)
    process, commands = other._helper._process, other._helper._command_socket
    assert process is not None and commands is not None
    commands.close()  # as when the parent is killed
    assert process.wait(5) == 0
    with pytest.raises(HelperLostError):
        child.call(5.0, "load", b"")


def test_a_machine_without_the_tokenizer_says_so(tmp_path: Path, compiler: GrammarCompiler) -> None:
    structural_tag = compiler.check(structural_tag_of(format_of(StructuredOutputs(choice=["a"]))))
    elsewhere = GrammarMatching(tmp_path / "tokenizer.json", MODEL.vocab_size, MODEL.eos_token_ids)
    [answer] = elsewhere.masks([sequence(structural_tag)], WAIT_S)
    assert isinstance(answer, RequestFailedError) and "copy the checkpoint" in str(answer)
