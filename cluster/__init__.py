"""Everything that knows Ray. Users start here: `from cluster import LLM, SamplingParams`.

Names are loaded on first use: importing this package loads neither Ray nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cluster.resources.authentication import use_auth_token_if_there_is_one
from cluster.resources.surroundings import set_missing_variables
from configs.paths import PACKAGE_PREFIX

if TYPE_CHECKING:
    from cluster.client.outputs import Chunk, CompletionOutput, RequestOutput
    from cluster.llm import LLM
    from scheduler.messages import EngineStats
    from scheduler.params import SamplingParams, StructuredOutputs

__all__ = [
    "LLM",
    "Chunk",
    "CompletionOutput",
    "EngineStats",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
]

_MODULE_OF_NAME = {
    "LLM": "cluster.llm",
    "Chunk": "cluster.client.outputs",
    "CompletionOutput": "cluster.client.outputs",
    "RequestOutput": "cluster.client.outputs",
    "EngineStats": "scheduler.messages",
    "SamplingParams": "scheduler.params",
    "StructuredOutputs": "scheduler.params",
}

set_missing_variables()
use_auth_token_if_there_is_one()  # before anything imports Ray


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(PACKAGE_PREFIX + _MODULE_OF_NAME[name]), name)
