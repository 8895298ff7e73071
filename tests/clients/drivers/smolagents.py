"""smolagents: an agent that calls tools, and one that writes code."""

from __future__ import annotations

from checks import KEY, MODEL, V1, equal, run
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent
from smolagents import tool as make_tool

model = OpenAIServerModel(model_id=MODEL, api_base=V1, api_key=KEY)
ASKED = '[[call add {"a": 47, "b": 38}]] [[call final_answer {"answer": "85"}]] [[say 85]]'


@make_tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def stream() -> None:
    chunks = model.generate_stream([{"role": "user", "content": "[[say It is 85.]]"}])
    equal("".join(chunk.content or "" for chunk in chunks), "It is 85.")


def tool() -> None:
    agent = ToolCallingAgent([add], model, stream_outputs=True, verbosity_level=0)
    equal(agent.run(ASKED), "85")


def history() -> None:
    agent = ToolCallingAgent([add], model, verbosity_level=0)
    agent.run(ASKED)
    equal(agent.run('[[call final_answer {"answer": "2"}]] [[say 2]]', reset=False), "2")


def code() -> None:
    agent = CodeAgent([add], model, verbosity_level=0)
    equal(agent.run("[[say <code>\nfinal_answer(add(47, 38))\n</code>]]"), 85)


run(stream, tool, history, code)
