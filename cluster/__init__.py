"""Everything that knows Ray. Users start here: `from cluster import LLM, SamplingParams`."""

from cluster.frontend import Chunk, CompletionOutput
from cluster.llm import LLM, RequestOutput
from scheduler.params import SamplingParams

__all__ = ["LLM", "Chunk", "CompletionOutput", "RequestOutput", "SamplingParams"]
