"""Thinking is switched where the chat template can switch it; elsewhere, asking for what is anyway
the case is no error.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster.api.chats import chat_of, tokenize
from cluster.api.endpoints import ServedModel
from cluster.api.reading import read_request
from cluster.api.schema import ChatRequest, TokenizeRequest
from cluster.client.requests import RequestBuilder
from cluster.client.tokenizer import Tokenizer
from configs.paths import DEFAULT_MODEL_DIR
from scheduler.errors import RequestError
from scheduler.params import SamplingParams
from tests.cluster.api.scripted import LIMITS, MODEL

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALWAYS = "{% if add_generation_prompt %}<think>\n{% endif %}"
SWITCHED = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"


def served_with(folder: Path, template: str) -> ServedModel:
    """The default model's tokenizer with another chat template."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(Path(DEFAULT_MODEL_DIR) / name, folder)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(folder)
    builder = RequestBuilder(MODEL, tokenizer, SamplingParams(), LIMITS, 0)
    return ServedModel(name="tiny", builder=builder, tokenizer=tokenizer)


def prompt_of(served_model: ServedModel, fields: dict[str, Any]) -> list[int]:
    body = {"messages": [{"role": "user", "content": "Hi"}]} | fields
    request = read_request(ChatRequest, json.dumps(body).encode())
    ids = served_model.builder.encode(chat_of(request, served_model).prompt)
    same = read_request(TokenizeRequest, json.dumps(body).encode())
    assert tokenize(same, served_model)["tokens"] == ids
    return ids


def switch(value: object) -> dict[str, Any]:
    return {"chat_template_kwargs": {"enable_thinking": value}}


OFF = [{"reasoning_effort": "none"}, switch(False), {"enable_thinking": False}]
EFFORTS = ("minimal", "low", "high", "max")
ON = [switch(True), {"enable_thinking": True}, *({"reasoning_effort": e} for e in EFFORTS)]


@pytest.mark.parametrize("fields", OFF + ON, ids=str)
def test_a_model_that_cannot_think_takes_any_switch(tmp_path: Path, fields: dict[str, Any]) -> None:
    served_model = served_with(tmp_path, TURNS)
    assert prompt_of(served_model, fields) == prompt_of(served_model, {})


@pytest.mark.parametrize("fields", ON, ids=str)
def test_a_model_that_always_thinks_may_be_asked_to(tmp_path: Path, fields: dict[str, Any]) -> None:
    served_model = served_with(tmp_path, TURNS + ALWAYS)
    assert prompt_of(served_model, fields) == prompt_of(served_model, {})


@pytest.mark.parametrize(
    ("fields", "parameter"),
    list(zip(OFF, ("reasoning_effort", "chat_template_kwargs", "enable_thinking"), strict=True)),
    ids=str,
)
def test_a_model_that_always_thinks_cannot_be_kept_from_it(
    tmp_path: Path, fields: dict[str, Any], parameter: str
) -> None:
    served_model = served_with(tmp_path, TURNS + ALWAYS)
    with pytest.raises(RequestError, match=f"^{parameter}: .* always thinks") as refused:
        prompt_of(served_model, fields)
    assert refused.value.parameter == parameter


@pytest.mark.parametrize("fields", OFF, ids=str)
def test_a_template_with_a_switch_gets_it(tmp_path: Path, fields: dict[str, Any]) -> None:
    served_model = served_with(tmp_path, TURNS + SWITCHED)
    assert prompt_of(served_model, fields) != prompt_of(served_model, {})
    assert prompt_of(served_model, {"reasoning_effort": "high"}) == prompt_of(served_model, {})


def test_the_most_explicit_switch_counts(tmp_path: Path) -> None:
    served_model = served_with(tmp_path, TURNS + SWITCHED)
    off = prompt_of(served_model, switch(False))
    assert prompt_of(served_model, switch(False) | {"enable_thinking": True}) == off
    assert prompt_of(served_model, {"enable_thinking": False, "reasoning_effort": "high"}) == off


def test_other_variables_that_a_template_does_not_use_are_refused(tmp_path: Path) -> None:
    served_model = served_with(tmp_path, TURNS)
    with pytest.raises(RequestError, match="does not use 'mood'"):
        prompt_of(served_model, {"chat_template_kwargs": {"mood": 1}})
