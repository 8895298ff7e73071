"""LiteLLM's library: chats, messages and responses."""

from __future__ import annotations

from typing import Any

import litellm
from checks import ADD, KEY, MODEL, SUM, URL, V1, equal, run

OPENAI: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": V1, "api_key": KEY}
OPENAI["max_retries"] = 0
TOOLS: list[Any] = [{"type": "function", "function": ADD}]


def ask_with_tool(**options: Any) -> Any:
    """The first answer of a streamed conversation with a tool."""
    messages: list[Any] = [{"role": "user", "content": SUM}]
    answers = []
    for _ in range(2):
        chunks = list(litellm.completion(messages=messages, tools=TOOLS, stream=True, **options))
        answers.append(litellm.stream_chunk_builder(chunks).choices[0].message)
        messages.append(answers[-1])
        for call in answers[-1].tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "85"})
    equal(answers[1].content.strip(), "It is 85.")
    return answers[0]


def stream() -> None:
    messages = [{"role": "user", "content": "[[say It is 85.]]"}]
    chunks = litellm.completion(messages=messages, stream=True, **OPENAI)
    equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), "It is 85.")


def tool() -> None:
    ask_with_tool(**OPENAI)


def history() -> None:
    messages: list[Any] = [{"role": "user", "content": "[[say One.]]"}]
    messages.append(litellm.completion(messages=messages, **OPENAI).choices[0].message)
    messages.append({"role": "user", "content": "[[say Two.]]"})
    equal(litellm.completion(messages=messages, **OPENAI).choices[0].message.content, "Two.")


def thinking() -> None:
    allowed = ["reasoning_effort"]
    first = ask_with_tool(**OPENAI, reasoning_effort="high", allowed_openai_params=allowed)
    assert first.reasoning_content


def messages() -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    allowed = ["thinking"]  # LiteLLM does not know the model
    anthropic: dict[str, Any] = {
        "model": f"anthropic/{MODEL}",
        "api_base": URL,
        "api_key": KEY,
        "max_retries": 0,
    }
    assert ask_with_tool(
        **anthropic, max_tokens=4000, thinking=thinking, allowed_openai_params=allowed
    ).reasoning_content


def responses() -> None:
    answer = litellm.responses(input="[[say It is 85.]]", **OPENAI)
    equal(answer.output[-1].content[0].text, "It is 85.")


run(stream, tool, history, thinking, messages, responses)
