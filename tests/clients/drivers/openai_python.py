"""OpenAI's client for Python: chats, completions and responses."""

from __future__ import annotations

from typing import Any

from checks import ADD, KEY, MODEL, SUM, V1, equal, run
from openai import OpenAI

client = OpenAI(base_url=V1, api_key=KEY, max_retries=0)
TOOL: Any = {"type": "function", "function": ADD}


def stream() -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "[[say It is 85.]]"}],
        stream_options={"include_usage": True},
    ) as events:
        kinds = {event.type for event in events}
        equal(events.get_final_completion().choices[0].message.content, "It is 85.")
    assert {"content.delta", "content.done"} <= kinds


def tool() -> None:
    messages: list[Any] = [{"role": "user", "content": SUM}]
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    [call] = first.choices[0].message.tool_calls or []
    messages += [
        first.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "85"},
    ]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    equal(second.choices[0].message.content, "It is 85.")


def history() -> None:
    messages: list[Any] = [{"role": "user", "content": "[[say One.]]"}]
    first = client.chat.completions.create(model=MODEL, messages=messages)
    messages.append(first.choices[0].message.model_dump())  # with every field that is null
    messages.append({"role": "user", "content": [{"type": "text", "text": "[[say Two.]]"}]})
    second = client.chat.completions.create(model=MODEL, messages=messages)
    equal(second.choices[0].message.content, "Two.")


def thinking() -> None:
    def reasoning(effort: Any) -> Any:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": SUM}], reasoning_effort=effort
        )
        return getattr(answer.choices[0].message, "reasoning_content", None)

    assert reasoning("high") and not reasoning("none")


def responses() -> None:
    items: list[Any] = [{"role": "user", "content": SUM}]
    function: Any = {"type": "function", "strict": False, **ADD}
    asked: dict[str, Any] = {"model": MODEL, "tools": [function], "store": False}
    asked["include"] = ["reasoning.encrypted_content"]
    for _ in range(2):
        with client.responses.stream(input=items, **asked) as events:
            for _event in events:
                pass
            response = events.get_final_response()
        items += response.output
        for item in response.output:
            if item.type == "function_call":
                done = {"type": "function_call_output", "call_id": item.call_id, "output": "85"}
                items.append(done)
    equal(response.output_text, "It is 85.")


def completions() -> None:
    chunks = client.completions.create(model=MODEL, prompt="One", max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks)


run(stream, tool, history, thinking, responses, completions)
