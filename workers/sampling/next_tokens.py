"""From hidden states to the next tokens: logits, sampling, and the tokens written where the next
step reads them.

Where the device has graphs, all of it is one graph if every row is of a kind that has one:
greedy, with a temperature alone, or with a temperature and a small top-k. Without a graph it is
10 to 30 kernels, and launching them takes the host longer than a small model takes the GPU. A batch
uses the next larger captured size; a row of padding is sampled like the others, and its token is
written nowhere. A step whose rows ask for anything else, such as penalties, masks or log
probabilities, is launched kernel by kernel. Owns its static tensors. Legend: B rows of a captured
batch, S rows of the largest, M rows of the largest graph of steps, padding included, R sampling
rows, E hidden size, V this rank's shard of the vocabulary.
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
from scheduler.messages import StepMask
from workers import faults
from workers.batch.state import BatchState, StepRows
from workers.device import Device, Graph, PutFunction, StepUploads
from workers.models.qwen3 import Qwen3
from workers.sampling.sampler import SampledTokens, Sampler
from workers.sampling.state import GRAPH_KINDS, SamplingBatch, StaticSamplingRows

logger = logging.getLogger(__name__)

WaitForMask = Callable[[], StepMask]
# From the hidden states of the R rows to their tokens.
Sample = Callable[[Tensor], SampledTokens]

_SMALL_SIZES = (1, 2, 4, 8, 16, 32, 64)
_SIZE_STEP = 64


def sampling_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Powers of two up to 64, then steps of 64, always ending in `max_num_seqs`: a row of padding
    costs little beside the product with the vocabulary, which reads the same weights for all.
    """
    sizes = {*_SMALL_SIZES, *range(_SIZE_STEP, max_num_seqs, _SIZE_STEP), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


class NextTokens:
    """The last stage of the steps of one model over one batch state."""

    def __init__(
        self,
        config: ResolvedConfig,
        model: Qwen3,
        sampler: Sampler,
        batch_state: BatchState,
        device: Device,
        uploads: StepUploads,
    ) -> None:
        """`uploads`: those of each step, of which this keeps some bytes per row."""
        self._model = model
        self._sampler = sampler
        self._batch_state = batch_state
        self._device = device
        max_sampling_rows = config.max_num_seqs
        self._slots_S, self._positions_S = (np.zeros(max_sampling_rows, np.int32) for _ in range(2))
        self._device_slots_S = uploads.keep(self._slots_S)
        self._device_positions_S = uploads.keep(self._positions_S)
        self._static_rows = StaticSamplingRows(max_sampling_rows, uploads.keep)
        self.sizes = sampling_sizes(max_sampling_rows)
        self.graphs: dict[tuple[int, int], Graph] = {}  # by size and kind
        self._token_ids_by_graph: dict[tuple[int, int], Tensor] = {}
        self._static_hidden_ME: Tensor | None = None

    @torch.inference_mode()
    def capture(self, static_hidden_ME: Tensor, largest_graph: Graph) -> None:
        """Capture every size and kind over `static_hidden_ME`; all share the memory of
        `largest_graph`. Waits for the device.
        """
        began_s = time.perf_counter()
        self._static_hidden_ME = static_hidden_ME
        for size in reversed(self.sizes):
            for kind in GRAPH_KINDS:
                run = partial(self._run, size, kind)
                self.graphs[size, kind] = self._device.capture(run, largest_graph)
        seconds = time.perf_counter() - began_s
        logger.info("%d graphs of sampling captured in %.1f s", len(self.graphs), seconds)

    def stage(
        self, rows: StepRows, put: PutFunction, wait_for_mask: WaitForMask | None = None
    ) -> Sample:
        """Put what the R sampling rows need. Returns a function that launches it; with masked rows,
        it calls `wait_for_mask` once the logits are launched.
        """
        num_rows = len(rows.sampling_slots_R)
        slots_R = rows.sampling_slots_R.astype(np.int64)
        positions_R = rows.sampling_positions_R.astype(np.int64)
        self._slots_S[:num_rows] = slots_R
        self._positions_S[:num_rows] = positions_R
        may_replay = bool(self.graphs) and wait_for_mask is None
        kind = self._sampler.state.graph_kind(slots_R) if may_replay else None
        if kind is not None:
            size = self.sizes[bisect.bisect_left(self.sizes, num_rows)]
            self._positions_S[num_rows:size] = 0  # where `write_tokens` writes nothing
            self._sampler.state.fill(self._static_rows, slots_R, positions_R)
            return partial(self._replay, size, kind, num_rows)
        batch = self._sampler.state.batch(slots_R, positions_R, put)
        return partial(self._launch, batch, wait_for_mask)

    def _replay(self, size: int, kind: int, num_rows: int, hidden_RE: Tensor) -> SampledTokens:
        faults.reach("sample", self._model.group.rank)
        assert self._static_hidden_ME is not None
        if hidden_RE.data_ptr() != self._static_hidden_ME.data_ptr():
            self._static_hidden_ME[:num_rows].copy_(hidden_RE)
        self.graphs[size, kind].replay()
        return SampledTokens(
            token_ids_B=self._token_ids_by_graph[size, kind][:num_rows], logprobs=None
        )

    def _launch(
        self, batch: SamplingBatch, wait_for_mask: WaitForMask | None, hidden_RE: Tensor
    ) -> SampledTokens:
        faults.reach("sample", self._model.group.rank)
        logits_RV = self._model.logits(hidden_RE)
        masks = None if wait_for_mask is None else self._sampler.row_masks(wait_for_mask())
        sampled_tokens = self._sampler.sample(logits_RV, batch, masks)
        self._write(sampled_tokens.token_ids_B)
        return sampled_tokens

    def _run(self, size: int, kind: int) -> None:
        assert self._static_hidden_ME is not None
        logits_BV = self._model.logits(self._static_hidden_ME[:size])
        sampled_tokens = self._sampler.sample(logits_BV, self._static_rows.batch(size, kind))
        self._write(sampled_tokens.token_ids_B)
        self._token_ids_by_graph[size, kind] = sampled_tokens.token_ids_B

    def _write(self, token_ids_B: Tensor) -> None:
        size = len(token_ids_B)
        self._batch_state.write_sampled(
            self._device_slots_S[:size], self._device_positions_S[:size], token_ids_B
        )
