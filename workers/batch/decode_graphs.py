"""CUDA graphs of the decode step: one per captured batch size, replayed instead of launching
kernels. The smallest sizes have two graphs, for short and for long rows: decode attention splits a
few long rows into parts, and most of those parts would be empty if the rows were short.

A graph reads a few numbers per row that each step sends, and everything else from tables that never
move: the batch state's tokens and blocks, the weights, the KV cache. Where an eager step uses the
maxima of its rows, a graph uses bounds. A batch uses the next larger graph and fills it with
padding rows, which have length 0 and write nothing. What follows the hidden states is in
`workers/sampling/next_tokens.py`. Owns its static tensors. Legend: B rows of a captured batch, S
rows of the largest, M rows of the largest graph of all, padding included (`max_graph_rows` in
`mixed_graphs.py`), R rows of a step, E hidden size; a decode step has as many tokens as rows.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from configs.engine import ResolvedConfig
from kernels.metadata import AttentionMetadata
from workers.batch.kv_cache import KVCache
from workers.batch.state import BatchState, StepRows
from workers.device import Device, Graph, StepUploads
from workers.models.qwen3 import Qwen3

logger = logging.getLogger(__name__)

_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8
# Rows of up to this many tokens are short.
_MAX_SHORT_ROW_TOKENS = 512
# A padding row: any slot, the first position, which counts as stored and so is never written, and
# no tokens to attend to.
_PADDING_ROW = (0, 0, 1, 0)


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24 and so on in steps of 8, always ending in `max_num_seqs`."""
    sizes = {*_SMALL_SIZES, *range(_SIZE_STEP, max_num_seqs, _SIZE_STEP), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


class DecodeGraphs:
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
        """`uploads`: those of each step, of which this keeps some bytes per row. `static_hidden_ME`
        gets the hidden states.
        """
        self._model = model
        self._cache = cache
        self._batch_state = batch_state
        self._device = device
        self._static_hidden_ME = static_hidden_ME
        # With them the number of parts is computed; attention in every graph gets the largest.
        self.seq_len_bounds = sorted(
            {min(_MAX_SHORT_ROW_TOKENS, config.max_model_len), config.max_model_len}
        )
        self.sizes = graph_sizes(config.max_num_seqs)
        max_size = self.sizes[-1]
        self._starts_S1 = torch.arange(max_size + 1, dtype=torch.int32, device=device.torch_device)
        # What a step sends, filled as if all rows were padding: the arrays, and tensors like them.
        self._row_arrays = [np.full(max_size, value, np.int32) for value in _PADDING_ROW]
        self._part_start_S1 = np.arange(max_size + 1, dtype=np.int32)
        self._num_live_tokens_1 = np.zeros(1, np.int32)
        kept_arrays = (*self._row_arrays, self._part_start_S1, self._num_live_tokens_1)
        self._inputs = [uploads.keep(array) for array in kept_arrays]
        self._uploads = uploads
        self._graphs: dict[tuple[int, int], Graph] = {}  # by size and number of parts

    @torch.inference_mode()
    def capture(self, largest_graph: Graph | None = None) -> Graph:
        """Record every size, the largest first: the others share its memory, or all share that of
        `largest_graph`. Returns the graph whose memory is shared. Waits for the device.
        """
        began_s = time.perf_counter()
        self._uploads.send()
        for size in reversed(self.sizes):
            for max_parts in {
                self._batch_state.max_decode_parts(size, bound) for bound in self.seq_len_bounds
            }:
                run = partial(self._run, size, max_parts)
                self._graphs[size, max_parts] = self._device.capture(run, largest_graph)
                largest_graph = largest_graph or self._graphs[size, max_parts]
        seconds = time.perf_counter() - began_s
        logger.info(
            "%d decode graphs captured in %.1f s, for up to %d sequences",
            len(self._graphs),
            seconds,
            self.sizes[-1],
        )
        assert largest_graph is not None
        return largest_graph

    def can_replay(self, rows: StepRows) -> bool:
        """Whether a step can be replayed: every row has one token and samples the next one."""
        num_rows = len(rows.slots_B)
        return rows.max_query_len == 1 and len(rows.sampling_slots_R) == num_rows <= self.sizes[-1]

    def stage(self, rows: StepRows) -> Callable[[], None]:
        """Write what the graph of these rows reads. Returns a function that replays it, after which
        their hidden states are the first rows of `static_hidden_ME`, until the next step.
        """
        num_rows = len(rows.slots_B)
        size = self.sizes[bisect.bisect_left(self.sizes, num_rows)]
        bound = self.seq_len_bounds[bisect.bisect_left(self.seq_len_bounds, rows.max_seq_len)]
        max_parts = self._batch_state.max_decode_parts(size, bound)
        numbers = (rows.slots_T, rows.positions_T, rows.num_stored_tokens_T, rows.seq_lens_B)
        for row_array_S, numbers_R, padding in zip(
            self._row_arrays, numbers, _PADDING_ROW, strict=True
        ):
            row_array_S[:num_rows] = numbers_R
            row_array_S[num_rows:size] = padding
        self._num_live_tokens_1[0] = num_rows
        if max_parts:
            seq_lens_B = self._row_arrays[-1][:size]
            self._part_start_S1[: size + 1] = self._batch_state.part_starts(
                seq_lens_B, max_parts, size
            )
        return self._graphs[size, max_parts].replay

    def _run(self, size: int, max_parts: int) -> None:
        *numbers, part_start_S1, num_live_tokens_1 = self._inputs
        slots_B, positions_B, num_stored_tokens_B, seq_lens_B = (
            kept_tensor[:size] for kept_tensor in numbers
        )
        part_start_B1 = part_start_S1[: size + 1]
        token_ids_B, kv_places_B = self._batch_state.look_up_tokens(
            slots_B, positions_B, num_stored_tokens_B
        )
        starts_B1 = self._starts_S1[: size + 1]
        attn = AttentionMetadata(
            query_start_B1=starts_B1,
            seq_start_B1=starts_B1,  # a decode step does not read it
            seq_lens_B=seq_lens_B,
            block_table_BW=self._batch_state.block_table_SW.index_select(0, slots_B),
            kv_places_T=kv_places_B,
            max_query_len=1,
            max_seq_len=self.seq_len_bounds[-1],
            num_live_tokens_1=num_live_tokens_1,
            decode_parts=(
                self._batch_state.decode_parts(size, max_parts, part_start_B1)
                if max_parts
                else None
            ),
        )
        hidden_BE = self._model.forward(token_ids_B, positions_B, attn, self._cache.layers)
        self._static_hidden_ME[:size].copy_(hidden_BE)
