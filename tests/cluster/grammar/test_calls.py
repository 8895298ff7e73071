"""Calls of many tools follow their schemas as far as a grammar can; what does not is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import xgrammar

from cluster.client.requests import RequestBuilder
from cluster.client.tokenizer import Tokenizer
from cluster.grammar import process
from cluster.grammar.calls import CallableTool, CallStructure, candidate_formats
from cluster.grammar.compiler import GrammarCompiler
from cluster.grammar.formats import MAX_STRUCTURAL_TAG_BYTES, structural_tag_of
from cluster.grammar.schemas import ANY_OBJECT
from configs.model import ModelConfig
from configs.paths import DEFAULT_MODEL_DIR
from scheduler.errors import OverloadedError, RequestError
from scheduler.params import SamplingParams
from tests.cluster.grammar.agent_tools import TOOLS
from tests.scheduler.helpers import make_limits

MODEL = ModelConfig.from_dir(DEFAULT_MODEL_DIR)
ODD = {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}


def structure(tools: dict[str, Any], strict: tuple[str, ...] = ()) -> CallStructure:
    return CallStructure(
        tools=tuple(
            CallableTool(name=name, parameters=parameters, is_strict=name in strict)
            for name, parameters in tools.items()
        ),
        excludes_free_text=True,
    )


def wide(num_properties: int) -> dict[str, Any]:
    properties = {f"property_{i}": {"type": "integer"} for i in range(num_properties)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def schemas_of(choice: Any) -> list[Any]:
    return [tag["content"]["json_schema"] for tag in choice.format["tags"]]


@pytest.fixture(scope="module")
def builder() -> Iterator[RequestBuilder]:
    tokenizer = Tokenizer(DEFAULT_MODEL_DIR)
    limits = make_limits(max_num_seqs=4, num_blocks=64)
    made = RequestBuilder(MODEL, tokenizer, SamplingParams(max_tokens=5), limits, seed=0)
    yield made
    made.close()


def test_all_tools_of_an_agent_follow_their_schemas(builder: RequestBuilder) -> None:
    strict = structure(TOOLS, tuple(TOOLS))
    for calls in (structure(TOOLS), strict):
        generation = builder.build("x", SamplingParams(structured_outputs=calls), None)
        assert generation.loosened_tools == ()
        assert (
            generation.requests[0].structural_tag
            == structural_tag_of(next(candidate_formats(calls)).format).encode()
        )


def test_they_take_little_of_what_a_grammar_of_a_large_vocabulary_may_take() -> None:
    """With 150,000 tokens, which no other test has: all pieces of up to three letters."""
    letters = b' etaoinshrdlucmfwypvbgkjqxz0123456789_"{}[],:.-/ETAOINSHRDLU'
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes([a, b]) for a in letters for b in letters]
    tokens += [bytes([a, b, c]) for a in letters for b in letters for c in letters]
    tokens = [*tokens[:150_000], b"</s>"]
    info = xgrammar.TokenizerInfo(
        tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[len(tokens) - 1]
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    compiled = compiler.compile_structural_tag(
        structural_tag_of(next(candidate_formats(structure(TOOLS))).format)
    )
    print(f"{compiled.memory_size_bytes} bytes")
    assert compiled.memory_size_bytes < process.MAX_COMPILED_BYTES


def test_only_a_tool_whose_schema_cannot_be_honored_is_named() -> None:
    choice = next(candidate_formats(structure({"fits": wide(2), "odd": ODD})))
    assert choice.loosened_tools == ("odd",)
    left = {"type": "object", "properties": {"a": {}}, "required": ["a"]}
    assert schemas_of(choice)[1] == left
    with pytest.raises(RequestError, match=r"the parameters of odd.properties.a.not: this keyword"):
        next(candidate_formats(structure({"odd": ODD}, ("odd",))))


def test_arguments_are_an_object_where_the_schema_says_nothing() -> None:
    tools = {"nothing": {}, "text": {"description": "x"}, "strict": {}}
    choice = next(candidate_formats(structure(tools, ("strict",))))
    assert schemas_of(choice) == [ANY_OBJECT] * 3 and choice.loosened_tools == ()


def test_the_largest_schemas_give_way_until_the_source_is_small_enough() -> None:
    tools = {f"tool_{i}": wide(i) for i in range(256)}
    choice = next(candidate_formats(structure(tools)))
    assert len(structural_tag_of(choice.format)) <= MAX_STRUCTURAL_TAG_BYTES
    first = int(choice.loosened_tools[0].removeprefix("tool_"))
    assert (
        choice.loosened_tools == tuple(f"tool_{i}" for i in range(first, 256)) and 0 < first < 255
    )
    kept = schemas_of(choice)[first - 1]
    assert kept != ANY_OBJECT and schemas_of(choice)[first] == ANY_OBJECT
    assert choice == next(candidate_formats(structure(tools))), "the same each time"
    larger = [*choice.loosened_tools[1:]]
    tight = (
        len(structural_tag_of(choice.format))
        + len(json.dumps(wide(first)))
        - len(json.dumps(ANY_OBJECT))
    )
    assert tight > MAX_STRUCTURAL_TAG_BYTES and larger, "none gives way in vain"


def test_strict_tools_that_are_too_large_are_refused() -> None:
    tools = {f"tool_{i}": wide(110) for i in range(256)}
    assert len(next(candidate_formats(structure(tools, ("tool_3",)))).loosened_tools) < 256
    with pytest.raises(
        RequestError, match="bytes larger than the 65536 that are possible"
    ) as error:
        next(candidate_formats(structure(tools, tuple(tools))))
    assert error.value.parameter == "tools"


def test_each_step_frees_half_of_the_tools_that_are_left() -> None:
    tools = {f"tool_{i}": wide(i + 1) for i in range(8)}
    steps = [choice.loosened_tools for choice in candidate_formats(structure(tools, ("tool_7",)))]
    assert [len(names) for names in steps] == [0, 4, 6, 7]
    assert steps[1] == ("tool_3", "tool_4", "tool_5", "tool_6")
    assert all("tool_7" not in names for names in steps)


class FullCompiler:
    """Refuses as many grammars as it is told to."""

    def __init__(self, error: Exception, num_refused: int) -> None:
        self.error, self.num_left = error, num_refused

    def check(self, structural_tag: str, *, compiles: bool) -> bytes:
        self.num_left -= 1
        if self.num_left >= 0:
            raise self.error
        return structural_tag.encode()


def test_a_grammar_that_takes_too_much_gives_way_to_the_next_one(
    builder: RequestBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_large = RequestError("it takes too many bytes", "structured_outputs")
    params = SamplingParams(structured_outputs=structure(TOOLS))
    real = builder._grammar_compiler
    assert isinstance(real, GrammarCompiler)
    monkeypatch.setattr(builder, "_grammar_compiler", FullCompiler(too_large, 2))
    assert len(builder.build("x", params, None).loosened_tools) == 18
    monkeypatch.setattr(builder, "_grammar_compiler", FullCompiler(too_large, 99))
    with pytest.raises(RequestError, match="it takes too many bytes"):
        builder.build("x", params, None)
    monkeypatch.setattr(builder, "_grammar_compiler", FullCompiler(OverloadedError("busy"), 1))
    with pytest.raises(OverloadedError):
        builder.build("x", params, None)
