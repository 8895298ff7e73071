"""CUDA graphs of the decode step: one per captured batch size, replayed instead of launching
kernels.

A graph reads four numbers per row from one static tensor and everything else from tables that never
move: the batch state's tokens and blocks, the weights, the KV cache. Where an eager step uses its
own maxima, a graph uses bounds. A batch uses the next larger graph; padding rows have length 0 and
write nothing. Logits and sampling are not part of a graph.
Owns its static tensors. Legend: B rows of a captured batch, S rows of the largest, R rows of a
step, E hidden size; a decode step has as many tokens as rows.
"""

from __future__ import annotations

import bisect
import logging
import time
from functools import partial

import numpy as np
import torch

from configs.engine import ResolvedConfig
from kernels.metadata import AttentionMetadata
from workers.batch.kv_cache import KVCache
from workers.batch.state import BatchState, StepRows
from workers.device import Device, Graph
from workers.models.qwen3 import Qwen3

logger = logging.getLogger(__name__)

_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8
# A padding row: any slot, the first position, which counts as cached and so is never written, and
# no tokens to attend to.
_PADDING = np.array([0, 0, 1, 0], np.int32)


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24 and on in steps of 8, always ending in `max_num_seqs`."""
    sizes = {*_SMALL_SIZES, *range(_SIZE_STEP, max_num_seqs, _SIZE_STEP), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


class DecodeGraphs:
    """The graphs of one model over one cache and one batch state. Call `capture` first."""

    def __init__(
        self,
        config: ResolvedConfig,
        model: Qwen3,
        cache: KVCache,
        state: BatchState,
        device: Device,
    ) -> None:
        self._config, self._model, self._cache, self._state, self._device = (
            config,
            model,
            cache,
            state,
            device,
        )
        self.sizes = graph_sizes(config.engine.max_num_seqs)
        largest = self.sizes[-1]
        self._rows_S4 = torch.from_numpy(np.tile(_PADDING, (largest, 1))).to(device.torch)
        self._starts_S1 = torch.arange(largest + 1, dtype=torch.int32, device=device.torch)
        self._hidden_SE: torch.Tensor | None = None
        self._graphs: dict[int, Graph] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Record every size, the largest first: the others share its memory. Waits for
        the device.
        """
        began = time.perf_counter()
        largest: Graph | None = None
        for size in reversed(self.sizes):
            self._graphs[size] = self._device.capture(partial(self._run, size), largest)
            largest = largest or self._graphs[size]
        seconds = time.perf_counter() - began
        logger.info(
            "CUDA graphs of %d batch sizes up to %d in %.1f s",
            len(self.sizes),
            self.sizes[-1],
            seconds,
        )

    def fit(self, rows: StepRows) -> bool:
        """Whether a step can be replayed: every row has one token, and its next one is to be
        sampled.
        """
        num_rows = len(rows.slots_B)
        return rows.max_query_len == 1 and len(rows.sampling_slots_R) == num_rows <= self.sizes[-1]

    def run(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden states of the R rows, valid until the next call; int64, where each row's next
        token goes).
        """
        num_rows = len(rows.slots_B)
        size = self.sizes[bisect.bisect_left(self.sizes, num_rows)]
        rows_B4 = np.tile(_PADDING, (size, 1))
        rows_B4[:num_rows] = np.stack(
            (rows.slots_T, rows.positions_T, rows.num_cached_T, rows.seq_lens_B), axis=1
        )
        self._device.upload_into(self._rows_S4[:size], rows_B4)
        self._graphs[size].replay()
        assert self._hidden_SE is not None
        places_R = self._state.token_places(
            self._rows_S4[:num_rows, 0], self._rows_S4[:num_rows, 3]
        )
        return self._hidden_SE[:num_rows], places_R

    def _run(self, size: int) -> None:
        slots_B, positions_B, cached_B, seq_lens_B = self._rows_S4[:size].t().contiguous()
        token_ids_B, slot_mapping_B = self._state.look_up(slots_B, positions_B, cached_B)
        starts_B1 = self._starts_S1[: size + 1]
        attn = AttentionMetadata(
            query_start_B1=starts_B1,
            seq_start_B1=starts_B1,  # a decode step does not read it
            seq_lens_B=seq_lens_B,
            block_table_BW=self._state.block_table_SW.index_select(0, slots_B),
            slot_mapping_T=slot_mapping_B,
            max_query_len=1,
            max_seq_len=self._config.max_model_len,
        )
        hidden_BE = self._model.forward(token_ids_B, positions_B, attn, self._cache.layers)
        if self._hidden_SE is None:  # the largest size comes first
            self._hidden_SE = torch.empty_like(hidden_BE)
        self._hidden_SE[:size].copy_(hidden_BE)
