"""LangChain: agents over chats, responses and messages."""

from __future__ import annotations

from typing import Any

from checks import KEY, MODEL, SUM, URL, V1, equal, run
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool as make_tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

OPENAI: dict[str, Any] = {"base_url": V1, "api_key": KEY, "model": MODEL, "max_retries": 0}
chats = ChatOpenAI(**OPENAI)


class Sum(BaseModel):
    """A sum."""

    sum: int


@make_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def ask_with_tool(model: Any) -> list[Any]:
    """The messages of a streamed conversation with a tool."""
    *_, last = create_agent(model, [add]).stream(
        {"messages": [{"role": "user", "content": SUM}]}, stream_mode="values"
    )
    equal(last["messages"][-1].text.strip(), "It is 85.")
    equal(last["messages"][-2].content, "85")
    return list(last["messages"])


def stream() -> None:
    equal("".join(str(chunk.text) for chunk in chats.stream("[[say It is 85.]]")), "It is 85.")


def tool() -> None:
    ask_with_tool(chats)


def history() -> None:
    messages: list[Any] = [("user", "[[say One.]]")]
    messages += [chats.invoke(messages), ("user", "[[say Two.]]")]
    equal(chats.invoke(messages).text, "Two.")


def thinking() -> None:
    model = ChatAnthropic(
        base_url=URL,
        api_key=KEY,
        model=MODEL,
        max_retries=0,
        max_tokens=4000,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    [_, first, *_] = ask_with_tool(model)
    assert first.content[0]["type"] == "thinking", first.content


def responses() -> None:
    ask_with_tool(ChatOpenAI(**OPENAI, use_responses_api=True, reasoning={"effort": "high"}))


def objects() -> None:
    for method in ("json_schema", "function_calling", "json_mode"):
        model = chats.with_structured_output(Sum, method=method)
        asked = '[[call Sum {"sum": 85}]] [[say {"sum": 85}]] as JSON'
        equal(model.invoke(asked), Sum(sum=85))


run(stream, tool, history, thinking, responses, objects)
