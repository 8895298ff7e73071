"""Inspect: an evaluation with a tool, over chats, responses and messages."""

from __future__ import annotations

from typing import Any

from checks import KEY, MODEL, SUM, URL, V1, equal, run
from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool
from inspect_ai.tool import tool as make_tool


@make_tool
def add() -> Tool:
    async def execute(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return str(a + b)

    return execute


def ask(provider: str, url: str, asked: str, tools: list[Any], **options: Any) -> Any:
    """The messages of the one conversation of an evaluation."""
    config = GenerateConfig(max_retries=0, reasoning_effort="high", max_tokens=4000)
    task = Task(
        dataset=[Sample(input=asked, target="85")],
        solver=[use_tools(tools), generate()],
        scorer=includes(),
    )
    model = get_model(f"{provider}/{MODEL}", base_url=url, api_key=KEY, config=config, **options)
    [log] = evaluate(task, model=model, display="plain", log_dir="logs", log_samples=True)
    assert log.status == "success" and log.samples and log.results, log.error
    equal(log.results.scores[0].metrics["accuracy"].value, 1)
    return log.samples[0].messages


def chat() -> None:
    ask("openai", V1, "[[say It is 85.]]", [], responses_api=False)


def tool() -> None:
    equal(ask("openai", V1, SUM, [add()], responses_api=False)[-2].text, "85")


def thinking() -> None:
    first = ask("openai-api/here", V1, SUM, [add()])[1]
    assert any(part.type == "reasoning" for part in first.content)


def responses() -> None:
    ask("openai", V1, SUM, [add()], responses_api=True)


def messages() -> None:
    ask("anthropic", URL, SUM, [add()])


run(chat, tool, thinking, responses, messages)
