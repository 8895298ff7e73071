"""Instructor: objects by tools and by JSON schema."""

from __future__ import annotations

import instructor
from checks import KEY, MODEL, V1, equal, run
from openai import OpenAI
from pydantic import BaseModel

ASKED = '[[call Sum {"sum": 85}]] [[call PartialSum {"sum": 85}]] [[say {"sum": 85}]]'


class Sum(BaseModel):
    """A sum."""

    sum: int


def _ask(mode: str) -> None:
    client = instructor.from_openai(
        OpenAI(base_url=V1, api_key=KEY, max_retries=0), mode=instructor.Mode[mode]
    )
    found = client.create(
        model=MODEL, response_model=Sum, messages=[{"role": "user", "content": ASKED}]
    )
    equal(found.sum, 85)


def stream() -> None:
    client = instructor.from_openai(OpenAI(base_url=V1, api_key=KEY), mode=instructor.Mode.TOOLS)
    *_, last = client.create_partial(
        model=MODEL, response_model=Sum, messages=[{"role": "user", "content": ASKED}]
    )
    equal(last.sum, 85)


def tool() -> None:
    _ask("TOOLS")


def json_schema() -> None:
    _ask("JSON_SCHEMA")


def json_object() -> None:
    _ask("JSON")


run(stream, tool, json_schema, json_object)
