"""CUDA graphs of steps with prompts in them: one per captured number of tokens, for steps that the
GPU would otherwise finish before the host has launched the next one.

A step of a few hundred tokens is about ten launches per layer, which take the host longer than the
GPU computes. So each size is captured with bounds where an eager step has its own numbers: room for
decode rows at the front and for prompts behind them, the longest possible row, and attention whose
programs find their row on the device. A step is padded to the next larger size (`StepRows.padded`).
Larger steps are launched kernel by kernel, while the GPU computes the ones before. What follows the
hidden states is in `workers/sampling/next_tokens.py`. Owns its static tensors. Legend: T tokens of
a captured step, B its rows with padding, M rows of the largest graph, padding included, R sampling
rows, E hidden size.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from configs.engine import ResolvedConfig
from configs.model import ModelConfig
from workers.batch.kv_cache import KVCache
from workers.batch.state import BatchState, StepInputs, StepRows
from workers.device import Device, Graph, PutFunction, StepUploads
from workers.models.qwen3 import Qwen3
from workers.roofline import active_layer_parameters

logger = logging.getLogger(__name__)

# Tokens: finer where a step is bound by arithmetic, so that padding costs less than launching did.
_SIZES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
# Rows behind the decode rows. A step with more of them is launched eagerly.
_MAX_PROMPTS = 64
# What one layer's launches take of the host, and the rate at which a GPU multiplies: they decide up
# to which size graphs are worth their memory and the time to capture. Measured with an H200 in a
# virtual machine, where a layer took the host 0.4 to 1 ms.
_LAUNCHING_S_PER_LAYER = 6e-4
_FLOPS_PER_S = 7e14


def mixed_sizes(model: ModelConfig, num_ranks: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens to capture: those whose layers one of `num_ranks` GPUs computes faster than
    a host launches them.
    """
    launching_s = _LAUNCHING_S_PER_LAYER * model.num_hidden_layers
    s_per_token = 2 * active_layer_parameters(model) / num_ranks / _FLOPS_PER_S
    max_tokens = min(max_num_batched_tokens, launching_s / s_per_token)
    return tuple(size for size in _SIZES if size <= max_tokens)


class MixedGraphs:
    """The graphs of one model over one cache and one batch state. Call `capture` first."""

    def __init__(
        self,
        config: ResolvedConfig,
        model: Qwen3,
        cache: KVCache,
        batch_state: BatchState,
        device: Device,
        uploads: StepUploads,
        static_hidden_ME: Tensor,
    ) -> None:
        """`uploads`: those of each step, in which what `stage` puts comes right after what is kept.
        `static_hidden_ME` gets the hidden states.
        """
        self._model = model
        self._cache = cache
        self._batch_state = batch_state
        self._device = device
        self._uploads = uploads
        self._static_hidden_ME = static_hidden_ME
        self._max_seqs = config.max_num_seqs
        self._max_seq_len = config.max_model_len
        self._max_num_prompts = _max_prompts(config)
        self.sizes = mixed_sizes(
            config.model, config.engine.tensor_parallel_size, config.max_num_batched_tokens
        )
        self._graphs: dict[int, Graph] = {}  # by number of tokens

    @torch.inference_mode()
    def capture(self) -> Graph | None:
        """Record every size, the largest first: the others share its memory. Returns the first
        graph, if any. Waits for the device.
        """
        began_s = time.perf_counter()
        largest_graph: Graph | None = None
        for size in reversed(self.sizes):
            make_inputs = self._batch_state.stage(self._padded(_no_rows(), size), self._uploads.put)
            self._uploads.send()
            self._graphs[size] = self._device.capture(
                partial(self._run, make_inputs), largest_graph
            )
            largest_graph = largest_graph or self._graphs[size]
        logger.info(
            "%d graphs of steps with prompts captured in %.1f s, for up to %d tokens",
            len(self._graphs),
            time.perf_counter() - began_s,
            max(self.sizes, default=0),
        )
        return largest_graph

    def can_replay(self, rows: StepRows) -> bool:
        """Whether a step can be replayed."""
        num_prompts = len(rows.slots_B) - rows.num_decode_rows
        fits = num_prompts <= self._max_num_prompts
        return fits and len(rows.slots_T) <= max(self.sizes, default=0)

    def stage(self, rows: StepRows, put: PutFunction) -> Callable[[], None]:
        """Put what the graph of these rows reads; nothing else of the step may be put before it.
        Returns a function that replays the graph, after which the hidden states of the last tokens
        of the sampling rows are the first rows of `static_hidden_ME`, until the next step.
        """
        size = self.sizes[bisect.bisect_left(self.sizes, len(rows.slots_T))]
        self._batch_state.stage(self._padded(rows, size), put)
        return self._graphs[size].replay

    def _padded(self, rows: StepRows, size: int) -> StepRows:
        num_decode_rows = min(size, self._max_seqs)
        num_rows = num_decode_rows + self._max_num_prompts + 1  # for the tokens of padding
        return rows.padded(size, num_decode_rows, num_rows, self._max_seq_len)

    def _run(self, make_inputs: Callable[[], StepInputs]) -> None:
        inputs = make_inputs()
        # The last row has the tokens of padding.
        attn = replace(inputs.attn, num_live_tokens_1=inputs.attn.query_start_B1[-2:-1])
        hidden_TE = self._model.forward(
            inputs.token_ids_T, inputs.positions_T, attn, self._cache.layers
        )
        hidden_BE = hidden_TE.index_select(0, inputs.logits_indices_R)
        self._static_hidden_ME[: len(hidden_BE)].copy_(hidden_BE)


def max_graph_rows(config: ResolvedConfig) -> int:
    """Rows of the largest graph, padding included."""
    return config.max_num_seqs + _max_prompts(config) + 1


def _max_prompts(config: ResolvedConfig) -> int:
    return min(config.max_num_seqs, _MAX_PROMPTS)


def _no_rows() -> StepRows:
    """A step without rows, to be padded."""
    empty, start = np.zeros(0, np.int32), np.zeros(1, np.int32)
    return StepRows(
        slots_T=empty,
        positions_T=empty,
        num_stored_tokens_T=empty,
        query_start_B1=start,
        seq_start_B1=start,
        seq_lens_B=empty,
        slots_B=empty,
        logits_indices_R=empty,
        sampling_slots_R=empty,
        sampling_positions_R=empty,
        num_decode_rows=0,
        max_query_len=0,
        max_seq_len=0,
        max_decode_len=0,
    )
