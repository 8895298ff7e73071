"""Anthropic's client for Python."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from checks import ADD, KEY, MODEL, SUM, URL, equal, run

client = Anthropic(base_url=URL, api_key=KEY, max_retries=0)
TOOL: Any = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": ADD["parameters"],
    "cache_control": {"type": "ephemeral"},
}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


def ask(messages: list[Any], **options: Any) -> Any:
    """One streamed turn; its answer is added to the messages."""
    asked = {"model": MODEL, "max_tokens": 4000, "messages": messages} | options
    with client.messages.stream(**asked) as events:
        for _ in events:
            pass
        message = events.get_final_message()
    messages.append({"role": "assistant", "content": message.content})
    return message


def stream() -> None:
    answer = ask([{"role": "user", "content": "[[say It is 85.]]"}])
    equal(answer.content[0].text, "It is 85.")
    assert answer.usage.output_tokens > 3


def tool() -> None:
    messages: list[Any] = [{"role": "user", "content": SUM}]
    first = ask(messages, tools=[TOOL])
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "85"}
    messages.append({"role": "user", "content": [result]})
    equal(ask(messages, tools=[TOOL]).content[-1].text, "It is 85.")


def history() -> None:
    messages: list[Any] = [{"role": "user", "content": "[[say One.]]"}]
    ask(messages)
    messages.append({"role": "user", "content": [{"type": "text", "text": "[[say Two.]]"}]})
    equal(ask(messages).content[0].text, "Two.")


def thinking() -> None:
    messages: list[Any] = [{"role": "user", "content": SUM}]
    first = ask(messages, tools=[TOOL], thinking=THINKING)
    equal([block.type for block in first.content], ["thinking", "text", "tool_use"])
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "85"}
    messages.append({"role": "user", "content": [result]})
    equal(ask(messages, tools=[TOOL], thinking=THINKING).content[-1].text, "It is 85.")


def count_tokens() -> None:
    counted = client.messages.count_tokens(
        model=MODEL, messages=[{"role": "user", "content": SUM}], tools=[TOOL], system="Be brief."
    )
    assert counted.input_tokens > 50


def structured_output() -> None:
    schema: Any = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    schema |= {"required": ["sum"], "additionalProperties": False}
    asked: Any = {"format": {"type": "json_schema", "schema": schema}}
    answer = ask([{"role": "user", "content": '[[say {"sum": 85}]]'}], output_config=asked)
    equal(answer.content[-1].text, '{"sum": 85}')


run(stream, tool, history, thinking, count_tokens, structured_output)
