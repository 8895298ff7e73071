"""The client programs that are run against the server, each with a pinned version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NODE = "node@24.21.0"  # the programs need 22 or newer, which systems may not have
SCRIPTED, MODEL = "scripted", "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program.

    packages: pinned, the first is the program itself. driver: a file in `drivers/`, run by the
    environment's Python or node. engine: what answers, a script that calls tools on request or the
    default model. limit_s: for one run.
    """

    name: str
    kind: Literal["python", "node"]
    packages: tuple[str, ...]
    driver: str
    does: str  # what is run, for the matrix
    engine: Literal["scripted", "model"] = "scripted"
    limit_s: float = 120.0

    @property
    def version(self) -> str:
        """Name and version of the program's own package."""
        return self.packages[0].replace("==", " ")


def _python(name: str, *packages: str, does: str, **options: object) -> Program:
    driver = f"{name.replace('-', '_')}.py"
    return Program(name=name, kind="python", packages=packages, driver=driver, does=does, **options)  # type: ignore[arg-type]


def _node(name: str, *packages: str, does: str, **options: object) -> Program:
    driver = f"{name.replace('-', '_')}.mjs"
    return Program(name=name, kind="node", packages=packages, driver=driver, does=does, **options)  # type: ignore[arg-type]


PROGRAMS: tuple[Program, ...] = (
    _python("openai-python", "openai==3.57.0", does="chats, completions, responses"),
    _python("anthropic-python", "anthropic==2.14.0", does="messages, counted tokens"),
    _node("openai-node", "openai@7.57.0", does="chats, responses"),
    _node("anthropic-node", "@anthropic-ai/sdk@1.14.0", does="messages"),
    _node(
        "vercel-ai",
        *("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/anthropic@4.0.105"),
        *("@ai-sdk/openai@4.0.118", "zod@4.6.7"),
        does="chats, messages and responses with a loop of tools",
    ),
    _python(
        "langchain",
        *("langchain==1.5.2", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10"),
        does="an agent over chats, over responses and over messages",
    ),
    _python(
        "llama-index",
        *("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"),
        does="chats and an agent with functions",
    ),
    _python("litellm", "litellm==1.110.2", does="the library: chats, messages, responses"),
    _python("litellm-proxy", "litellm[proxy]==1.106.12", does="the proxy in front of the server"),
    _python("instructor", "instructor==1.17.0", does="objects by tools and by JSON schema"),
    _python(
        "pydantic-ai",
        "pydantic-ai-slim[openai,anthropic]==2.68.0",
        does="agents over chats, responses and messages",
    ),
    _python("openai-agents", "openai-agents==0.24.0", does="agents over chats and responses"),
    _python(
        "smolagents", "smolagents[openai]==1.26.0", does="agents that call tools, that write code"
    ),
    _python("aider", "aider-chat==0.86.2", does="one edit of a file", limit_s=240),
    _python("lm-eval", "lm-eval[api]==0.4.13", does="a task of chats", engine="model", limit_s=240),
    _python(
        "inspect-ai",
        "inspect-ai==0.3.285",
        "openai==3.57.0",
        "anthropic==2.14.0",
        does="an evaluation with a tool",
    ),
    _python(
        "guidellm",
        "guidellm==0.8.1",
        "torch==2.13.0",
        does="a benchmark of chats",
        engine="model",
        limit_s=240,
    ),
    _node(
        "claude-code",
        "@anthropic-ai/claude-code@2.1.332",
        does="five turns with tools",
        limit_s=240,
    ),
    _node("codex", "@openai/codex@0.171.0", does="five turns with tools", limit_s=240),
    _node("opencode", "opencode-ai@1.18.33", does="turns with tools", limit_s=240),
    _node("qwen-code", "@qwen-code/qwen-code@0.24.4", does="turns with tools", limit_s=240),
    _node("cline", "cline@3.0.65", does="turns with tools", limit_s=240),
    _node("pi", "@earendil-works/pi-coding-agent@1.5.2", does="turns with tools", limit_s=240),
)
