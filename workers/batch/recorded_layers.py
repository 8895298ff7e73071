"""The layers of decode steps of few rows on a CPU: recorded once for each number of rows, and
replayed by the steps that follow, since calling each kernel takes as long as the small ones run.

Owns the tensors that a recording reads, into which each step copies its own. The embedding before
the layers and the head behind them are not recorded. Used by the model runner; where kernels do not
record, and for all other steps, it just calls the model. Legend: T tokens of the step, B its
rows, W blocks in a row's table, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.engine import ResolvedConfig
from kernels.interface import Recorder
from kernels.metadata import AttentionMetadata
from workers.batch.kv_cache import KVCache
from workers.batch.state import StepInputs
from workers.models.qwen3 import Qwen3

# With more rows, products take so long that calls do not matter.
MAX_RECORDED_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerRecording:
    """A recording of the layers, with what it reads and writes."""

    embedded_TE: Tensor
    positions_T: Tensor
    attn: AttentionMetadata
    hidden_TE: Tensor
    recording: Recorder


class RecordedLayers:
    """One model over one cache. `max_recorded_rows`: of the steps that are recorded; kernels that
    refuse lower it.
    """

    def __init__(self, config: ResolvedConfig, model: Qwen3, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._table_width = config.max_blocks_per_sequence
        self._max_model_len = config.max_model_len
        has_recorder = model.kernels.recorder is not None and config.model.experts is None
        self.max_recorded_rows = MAX_RECORDED_ROWS if has_recorder else 0
        self._recording_by_rows: dict[int, _LayerRecording] = {}

    def forward(self, step: StepInputs) -> Tensor:
        """`Qwen3.forward`; the result may be overwritten by the next step."""
        embedded_TE = self._model.embedding(step.token_ids_T)
        num_rows = len(embedded_TE)
        if not step.attn.is_decode or num_rows > self.max_recorded_rows:
            return self._model.run_layers(
                embedded_TE, step.positions_T, step.attn, self._cache.layers
            )
        layer_recording = self._recording_by_rows.get(num_rows)
        if layer_recording is None:
            return self._record(embedded_TE, step)
        layer_recording.embedded_TE.copy_(embedded_TE)
        layer_recording.positions_T.copy_(step.positions_T)
        layer_recording.attn.seq_lens_B.copy_(step.attn.seq_lens_B)
        layer_recording.attn.kv_places_T.copy_(step.attn.kv_places_T)
        table_BW = step.attn.block_table_BW
        layer_recording.attn.block_table_BW[:, : table_BW.shape[1]] = table_BW
        layer_recording.recording.replay()
        return layer_recording.hidden_TE

    def _record(self, embedded_TE: Tensor, step: StepInputs) -> Tensor:
        """The hidden states of a step. The recording keeps its embedding, and copies of its other
        tensors. If a kernel refuses, no steps of so many rows or more are recorded from then on.
        """
        num_rows, attn = len(embedded_TE), step.attn
        table_BW = torch.zeros(num_rows, self._table_width, dtype=attn.block_table_BW.dtype)
        table_BW[:, : attn.block_table_BW.shape[1]] = attn.block_table_BW
        positions_T = step.positions_T.clone()
        static_attn = AttentionMetadata(
            query_start_B1=attn.query_start_B1.clone(),  # each row has one token
            seq_start_B1=attn.seq_start_B1,  # no kernel that records reads it
            seq_lens_B=attn.seq_lens_B.clone(),
            block_table_BW=table_BW,
            kv_places_T=attn.kv_places_T.clone(),
            max_query_len=1,
            max_seq_len=self._max_model_len,
        )
        assert self._model.kernels.recorder is not None
        with self._model.kernels.recorder() as recording:
            hidden_TE = self._model.run_layers(
                embedded_TE, positions_T, static_attn, self._cache.layers
            )
        if not recording.is_complete:
            self.max_recorded_rows = num_rows - 1
            return hidden_TE
        self._recording_by_rows[num_rows] = _LayerRecording(
            embedded_TE=embedded_TE,
            positions_T=positions_T,
            attn=static_attn,
            hidden_TE=hidden_TE,
            recording=recording,
        )
        return hidden_TE
