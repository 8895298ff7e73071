"""Eagleray by its own name: `from eagleray import LLM, SamplingParams`.

Where it was installed by `pip install .`, all of it is inside this package, so that a program may
have a `configs.py` or a folder `tests` of its own. In a checkout this package only leads to the
folders beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster import __all__ as __all__
from cluster import __getattr__ as __getattr__

if TYPE_CHECKING:
    from cluster.client.outputs import Chunk as Chunk
    from cluster.client.outputs import CompletionOutput as CompletionOutput
    from cluster.client.outputs import RequestOutput as RequestOutput
    from cluster.llm import LLM as LLM
    from scheduler.messages import EngineStats as EngineStats
    from scheduler.params import SamplingParams as SamplingParams
    from scheduler.params import StructuredOutputs as StructuredOutputs
