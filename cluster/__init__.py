"""Everything that knows Ray. Users start here: `from cluster import LLM, SamplingParams`."""

from cluster.authentication import use_token_if_there_is_one

use_token_if_there_is_one()  # before anything imports Ray

from cluster.frontend import Chunk, CompletionOutput  # noqa: E402
from cluster.llm import LLM, RequestOutput  # noqa: E402
from scheduler.params import SamplingParams  # noqa: E402

__all__ = ["LLM", "Chunk", "CompletionOutput", "RequestOutput", "SamplingParams"]
