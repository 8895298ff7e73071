"""CUDA graphs of steps with prompts in them: one per captured number of tokens, for steps that the
GPU would otherwise finish before the host has launched the next one.

A step of a few hundred tokens is about ten launches per layer, which take the host longer than the
GPU computes. So each size is captured with bounds where an eager step has its own numbers: room for
decode rows at the front and for prompts behind them, the longest possible row, and attention whose
programs find their row on the device. A step is padded to the next larger size (`StepRows.padded`).
Larger steps are launched kernel by kernel, while the GPU computes the ones before. Logits and
sampling are not part of a graph. Owns its static tensors. Legend: T tokens of a captured step, B
its rows with padding, R sampling rows, E hidden size.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from configs.engine import ResolvedConfig
from configs.model import ModelConfig
from workers.batch.kv_cache import KVCache
from workers.batch.state import BatchState, StepInputs, StepRows
from workers.device import Device, Graph, Put, StepUploads
from workers.models.qwen3 import Qwen3
from workers.roofline import layer_parameters

logger = logging.getLogger(__name__)

# Tokens: finer where a step is bound by arithmetic, so that padding costs less than launching did.
_SIZES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
# Rows behind the decode rows. A step with more of them is launched eagerly.
_MOST_PROMPTS = 64
# What one layer's launches take of the host, and the rate at which a GPU multiplies, in order of
# magnitude: they decide up to which size graphs are worth their memory and the time to capture.
_LAUNCHING_S_PER_LAYER = 1.5e-4
_FLOPS_PER_S = 4e14


def mixed_sizes(model: ModelConfig, num_ranks: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens to capture: those whose layers one of `num_ranks` GPUs computes faster than
    a host launches them.
    """
    launching_s = _LAUNCHING_S_PER_LAYER * model.num_hidden_layers
    s_per_token = 2 * layer_parameters(model) / num_ranks / _FLOPS_PER_S
    max_tokens = min(max_num_batched_tokens, launching_s / s_per_token)
    return tuple(size for size in _SIZES if size <= max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """One size: its graph, and where the next tokens of the rows that sample go."""

    graph: Graph
    slots_B: torch.Tensor
    positions_B: torch.Tensor


class MixedGraphs:
    """The graphs of one model over one cache and one batch state. Call `capture` first."""

    def __init__(
        self,
        config: ResolvedConfig,
        model: Qwen3,
        cache: KVCache,
        state: BatchState,
        device: Device,
        uploads: StepUploads,
    ) -> None:
        """`uploads`: those of each step, which begin with what `stage` puts."""
        self._model, self._cache, self._state, self._device = model, cache, state, device
        self._uploads = uploads
        self._max_seqs, self._max_seq_len = config.max_num_seqs, config.max_model_len
        self._num_prompts = min(config.max_num_seqs, _MOST_PROMPTS)
        self.sizes = mixed_sizes(
            config.model, config.engine.tensor_parallel_size, config.max_num_batched_tokens
        )
        self._hidden_BE: torch.Tensor | None = None
        self._captured: dict[int, _Captured] = {}  # by number of tokens

    @torch.inference_mode()
    def capture(self) -> Graph | None:
        """Record every size, the largest first: the others share its memory. Returns the first
        graph, if any. Waits for the device.
        """
        began = time.perf_counter()
        largest: Graph | None = None
        for size in reversed(self.sizes):
            make_inputs = self._state.stage(self._padded(_no_rows(), size), self._uploads.put)
            self._uploads.send()
            self._captured[size] = self._capture(make_inputs, largest)
            largest = largest or self._captured[size].graph
        logger.info(
            "%d graphs of steps with prompts captured in %.1f s, for up to %d tokens",
            len(self._captured),
            time.perf_counter() - began,
            max(self.sizes, default=0),
        )
        return largest

    def fit(self, rows: StepRows) -> bool:
        """Whether a step can be replayed."""
        num_prompts = len(rows.slots_B) - rows.num_decode_rows
        fits = num_prompts <= self._num_prompts
        return fits and len(rows.slots_T) <= max(self.sizes, default=0)

    def stage(
        self, rows: StepRows, put: Put
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Put what the graph of these rows reads; nothing else of the step may be put before it.
        Returns a function that replays the graph and returns the hidden states of the last token of
        each of the R sampling rows, valid until the next call, and the slots and positions that
        their next tokens go to.
        """
        size = self.sizes[bisect.bisect_left(self.sizes, len(rows.slots_T))]
        self._state.stage(self._padded(rows, size), put)
        captured, num_sampling = self._captured[size], len(rows.sampling_slots_R)

        def replay() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            captured.graph.replay()
            assert self._hidden_BE is not None
            return (
                self._hidden_BE[:num_sampling],
                captured.slots_B[:num_sampling],
                captured.positions_B[:num_sampling],
            )

        return replay

    def _padded(self, rows: StepRows, size: int) -> StepRows:
        num_decode_rows = min(size, self._max_seqs)
        num_rows = num_decode_rows + self._num_prompts + 1  # for the tokens of padding
        return rows.padded(size, num_decode_rows, num_rows, self._max_seq_len)

    def _capture(self, make_inputs: Callable[[], StepInputs], largest: Graph | None) -> _Captured:
        slots_B = positions_B = torch.empty(0)

        def run() -> None:
            nonlocal slots_B, positions_B
            inputs = make_inputs()
            slots_B, positions_B = inputs.sampled_slots_R, inputs.sampled_positions_R
            self._run(inputs)

        graph = self._device.capture(run, largest)
        return _Captured(graph=graph, slots_B=slots_B, positions_B=positions_B)

    def _run(self, inputs: StepInputs) -> None:
        hidden_TE = self._model.forward(
            inputs.token_ids_T, inputs.positions_T, inputs.attn, self._cache.layers
        )
        hidden_BE = hidden_TE.index_select(0, inputs.logits_indices_R)
        if self._hidden_BE is None:  # the largest size comes first
            self._hidden_BE = torch.empty_like(hidden_BE)
        self._hidden_BE[: len(hidden_BE)].copy_(hidden_BE)


def _no_rows() -> StepRows:
    """A step without rows, to be padded."""
    none, start = np.zeros(0, np.int32), np.zeros(1, np.int32)
    return StepRows(
        slots_T=none,
        positions_T=none,
        num_cached_T=none,
        query_start_B1=start,
        seq_start_B1=start,
        seq_lens_B=none,
        slots_B=none,
        logits_indices_R=none,
        sampling_slots_R=none,
        sampling_positions_R=none,
        num_decode_rows=0,
        max_query_len=0,
        max_seq_len=0,
        max_decode_len=0,
    )
