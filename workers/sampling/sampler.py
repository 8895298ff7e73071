"""The sampler of one rank: turns this rank's shard of the logits into tokens, the same ones on
every rank.

Owns the token counts of rows with penalties, on the device; allocated when the first such row is
admitted.
Logits are never gathered: ranks exchange maxima, integer weights, lists of the nearest tokens and
histograms (see `kernels/reference/sampling.py`); the backend's kernels read the logits. On a GPU,
nothing here makes the host wait for the device. All ranks call in the same order, from one thread.
Order of the stages: penalties, `logit_bias`, `min_tokens` mask, mask of the grammar, temperature,
top-k, top-p, min-p, pick. Filters compare gaps: by how much a token's logit, divided by the
temperature, is below the row's largest. Logprobs are of the raw logits.
Legend: B sampling rows, R rows of one draw, with penalties, or with a mask, L rows with logprobs, V
columns of this rank's shard, X blocks of columns or histogram bins, S slots, M alternatives, N
ranks, O tokens of a row's output, K the largest top-k, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.interface import GapRows, SamplingKernels
from kernels.reference import sampling
from scheduler.messages import StepMask, TokenLogprobs
from scheduler.params import ResolvedSampling
from workers.sampling.shard import Group, Int64Array, LogprobTensors, VocabularyShard
from workers.sampling.state import (
    DrawRows,
    Filters,
    LogprobRows,
    PenaltyRows,
    SamplingBatch,
    SamplingState,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledLogprobs:
    """Logprobs of the rows that asked for them."""

    rows: LogprobRows
    tensors: LogprobTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMasks:
    """Which tokens rows of the batch may choose, in the form that `mask_columns` takes."""

    rows_R: Tensor
    words_RW: Tensor
    first_bit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Tokens of the batch, int64 [B], on the device and equal on every rank."""

    token_ids_B: Tensor
    logprobs: SampledLogprobs | None


def to_logprobs(
    logprobs: SampledLogprobs | None, num_rows: int
) -> tuple[TokenLogprobs | None, ...] | None:
    """The logprobs as in the message, one entry per row of the batch; None if no row asked for
    them. Waits for the device.
    """
    if logprobs is None:
        return None
    out: list[TokenLogprobs | None] = [None] * num_rows
    lists = [tensor.tolist() for tensor in logprobs.tensors]
    for row, num_top_logprobs, logprob, ids, values, _ in zip(
        logprobs.rows.rows, logprobs.rows.num_top_logprobs, *lists, strict=True
    ):
        out[row] = TokenLogprobs(
            logprob=logprob,
            top_token_ids=tuple(ids[:num_top_logprobs]),
            top_logprobs=tuple(values[:num_top_logprobs]),
        )
    return tuple(out)


class Sampler:
    """Samples for the rows of one engine.

    `vocab_start` to `vocab_end` is this rank's shard of the padded vocabulary; ids from
    `vocab_size` on are padding and are never sampled.
    """

    def __init__(
        self,
        group: Group,
        kernels: SamplingKernels,
        vocab_size: int,
        vocab_start: int,
        vocab_end: int,
        max_num_seqs: int,
        device: torch.device | str,
    ) -> None:
        self._group = group
        self._kernels = kernels
        device = torch.device(device)
        self.shard = VocabularyShard(group, kernels, vocab_size, vocab_start, vocab_end, device)
        self.state = SamplingState(self.shard, max_num_seqs, device)
        self._counts = _TokenCounts(self.shard, max_num_seqs, device, self.state.upload)

    def admit(
        self,
        slot: int,
        sampling: ResolvedSampling,
        token_ids: Sequence[int] | Int64Array | Tensor,
        num_prompt_tokens: int,
    ) -> None:
        """A row enters `slot` with these tokens, the first `num_prompt_tokens` of them its
        prompt.
        """
        self.state.admit(slot, sampling, num_prompt_tokens)
        if slot in self.state.penalized_slots:
            self._counts.admit(slot, np.asarray(token_ids, np.int64), num_prompt_tokens)

    def row_masks(self, step_mask: StepMask) -> RowMasks | None:
        """This shard's part of a mask, on the device; None if that says nothing about any row."""
        if not step_mask.masks or self.shard.num_columns == 0:
            return None
        first_word, first_bit = divmod(self.shard.start, 32)
        end_word = -(-(self.shard.start + self.shard.num_columns) // 32)
        words_RW = np.stack(
            [
                np.frombuffer(mask_bytes, np.int32)[first_word:end_word]
                for mask_bytes in step_mask.masks
            ]
        )
        return RowMasks(
            rows_R=self.state.upload(np.asarray(step_mask.rows, np.int64)),
            words_RW=self.state.upload(words_RW),
            first_bit=first_bit,
        )

    def sample(
        self, logits_BV: Tensor, batch: SamplingBatch, masks: RowMasks | None = None
    ) -> SampledTokens:
        """One token per row. `logits_BV`: this rank's shard of the raw logits, any float dtype,
        left unchanged.
        """
        assert logits_BV.shape[0] == batch.num_rows, (logits_BV.shape, batch.num_rows)
        raw_logits_BV = self.shard.unpadded_logits(logits_BV)
        adjusted_BV = self._adjust(raw_logits_BV, batch, masks)
        max_B, token_ids_B, block_max_BX = self._best(adjusted_BV)
        for rows in batch.draws:
            drawn_token_ids_R = self._draw(_gap_rows(adjusted_BV, block_max_BX, max_B, rows), rows)
            if rows.rows_R is not None:
                token_ids_B = token_ids_B.index_copy(0, rows.rows_R, drawn_token_ids_R)
            elif rows.is_drawn_R is not None:
                token_ids_B = torch.where(rows.is_drawn_R, drawn_token_ids_R, token_ids_B)
            else:
                token_ids_B = drawn_token_ids_R
        # NaN logits must not end the engine.
        token_ids_B = token_ids_B.clamp(0, self.shard.vocab_size - 1)
        if batch.penalties is not None:
            self._counts.add(batch.penalties, token_ids_B)
        logprobs = None
        if batch.logprobs is not None:
            logprobs = self._logprobs(raw_logits_BV, token_ids_B, batch.logprobs)
        return SampledTokens(token_ids_B=token_ids_B, logprobs=logprobs)

    def _logprobs(
        self, logits_BV: Tensor, token_ids_B: Tensor, rows: LogprobRows
    ) -> SampledLogprobs:
        tensors = self.shard.logprobs(
            logits_BV.index_select(0, rows.rows_L),
            token_ids_B.index_select(0, rows.rows_L),
            max(1, *rows.num_top_logprobs),
        )
        return SampledLogprobs(rows=rows, tensors=tensors)

    def _adjust(self, logits_BV: Tensor, batch: SamplingBatch, masks: RowMasks | None) -> Tensor:
        """Apply penalties, bias and masks, if there are any, to a copy: in float32, unless there
        are only masks, whose minus infinity any dtype has.
        """
        adjustments = (batch.penalties, batch.bias, batch.masked_N, masks)
        if self.shard.num_columns == 0 or all(adjustment is None for adjustment in adjustments):
            return logits_BV
        only_masked = batch.penalties is None and batch.bias is None
        logits_BV = logits_BV.to(logits_BV.dtype if only_masked else torch.float32, copy=True)
        if (rows := batch.penalties) is not None:
            for part in self.shard.parts(len(rows.rows_R)):
                logits_BV.index_copy_(
                    0, rows.rows_R[part], self._counts.penalize(logits_BV, rows, part)
                )
        if batch.bias is not None:
            logits_BV.view(-1).scatter_add_(0, batch.bias.flat_indices_N, batch.bias.values_N)
        if batch.masked_N is not None:
            logits_BV.view(-1).scatter_(0, batch.masked_N, -torch.inf)
        if masks is not None:
            self._kernels.mask_columns(logits_BV, masks.rows_R, masks.words_RW, masks.first_bit)
        return logits_BV

    def _best(self, logits_BV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(largest logit, its token, lowest id among equals) over all ranks, then the largest of
        each block of this rank.
        """
        max_B, columns_B, block_max_BX = self._kernels.row_best(logits_BV)
        best_B = self._group.all_reduce_max(
            self._kernels.pack_value_and_id(max_B, columns_B + self.shard.start)
        )
        return *self._kernels.unpack_value_and_id(best_B), block_max_BX

    def _draw(self, gap_rows: GapRows, rows: DrawRows) -> Tensor:
        gap_limit_R, kept_weight_NR = self._gap_limits(gap_rows, rows.filters)
        sums_RX, kept_weight_R = self._kernels.block_weights(gap_rows, gap_limit_R)
        if kept_weight_NR is None:
            kept_weight_NR = self._group.all_gather(kept_weight_R)
        target_weight_R = self._kernels.target_weight(
            rows.seeds_R, rows.positions_R, kept_weight_NR, self._group.rank
        )
        column_R = self._kernels.pick_column(gap_rows, gap_limit_R, sums_RX, target_weight_R)
        return self._group.all_reduce_max(
            torch.where(column_R >= 0, column_R + self.shard.start, -1)
        )

    def _gap_limits(
        self, gap_rows: GapRows, filters: Filters | None
    ) -> tuple[Tensor, Tensor | None]:
        """(limit of all filters; the weight each rank keeps, [N, R], if it is already known)."""
        if filters is None:
            return torch.full_like(gap_rows.max_R, torch.inf), None
        if not filters.uses_list:
            return self._descend(gap_rows, filters), None
        lists_RK = self._kernels.list_nearest(gap_rows, filters.top_k_R, filters.max_top_k)
        lists_NRK = self._group.all_gather(lists_RK)
        return self._kernels.gap_limits_from_lists(
            lists_NRK, filters.top_k_R, filters.top_p_R, filters.min_p_gap_limit_R
        )

    def _descend(self, gap_rows: GapRows, filters: Filters) -> Tensor:
        """Limits of rows that may keep any number of tokens. A row without the filter searches
        within a gap of -1, where there is no token.
        """
        infinite_gap_limit_R = torch.full_like(gap_rows.max_R, torch.inf)
        empty_gap_limit_R = torch.full_like(gap_rows.max_R, -1.0)
        top_k_gap_limit_R, gap_limit_R = infinite_gap_limit_R, filters.min_p_gap_limit_R
        if filters.max_top_k > 0:
            has_top_k_R = filters.top_k_R > 0
            bound_R = torch.where(has_top_k_R, infinite_gap_limit_R, empty_gap_limit_R)
            found_gap_limit_R = self._find_gap_limit(
                gap_rows, bound_R, filters.top_k_R, by_weight=False
            )
            top_k_gap_limit_R = torch.where(has_top_k_R, found_gap_limit_R, infinite_gap_limit_R)
        if filters.uses_top_p:
            has_top_p_R = filters.top_p_R < sampling.TOP_P_ONE
            bound_R = torch.where(
                has_top_p_R,
                torch.minimum(top_k_gap_limit_R, filters.top_p_bound_R),
                empty_gap_limit_R,
            )
            _, kept_weight_R = self._kernels.block_weights(
                gap_rows, torch.where(has_top_p_R, top_k_gap_limit_R, empty_gap_limit_R)
            )
            target_R = sampling.top_p_target(self._group.all_reduce(kept_weight_R), filters.top_p_R)
            top_p_gap_limit_R = self._find_gap_limit(gap_rows, bound_R, target_R, by_weight=True)
            gap_limit_R = torch.minimum(
                gap_limit_R, torch.where(has_top_p_R, top_p_gap_limit_R, infinite_gap_limit_R)
            )
        return torch.minimum(gap_limit_R, top_k_gap_limit_R)

    def _find_gap_limit(
        self, gap_rows: GapRows, search_gap_limit_R: Tensor, target_R: Tensor, by_weight: bool
    ) -> Tensor:
        """The smallest gap within which there are `target_R` tokens, or that much weight, over all
        ranks.
        """
        prefix_R = torch.zeros_like(search_gap_limit_R, dtype=torch.int32)
        for radix_pass, (_, num_bits) in enumerate(sampling.RADIX_PASSES):
            histogram_RX = self._kernels.gap_histogram(
                gap_rows, search_gap_limit_R, prefix_R, radix_pass, by_weight
            )
            digit_R, target_R = sampling.next_digit(self._group.all_reduce(histogram_RX), target_R)
            prefix_R = (prefix_R << num_bits) + digit_R.to(torch.int32)
        # Infinite where there are fewer tokens than wanted.
        return prefix_R.clamp(max=sampling.INFINITY_BITS).view(torch.float32)


def _gap_rows(logits_BV: Tensor, block_max_BX: Tensor, max_B: Tensor, rows: DrawRows) -> GapRows:
    rows_R = rows.rows_R
    return GapRows(
        logits_BV=logits_BV,
        block_max_BX=block_max_BX,
        rows_R=torch.arange(len(logits_BV), device=logits_BV.device) if rows_R is None else rows_R,
        max_R=max_B if rows_R is None else max_B.index_select(0, rows_R),
        temperature_R=rows.temperature_R,
    )


class _TokenCounts:
    """Which tokens of this shard occur in a slot's prompt, and how often each occurs in its output;
    meaningful only for slots in use whose row has a penalty.
    """

    def __init__(
        self,
        shard: VocabularyShard,
        max_num_seqs: int,
        device: torch.device,
        upload: Callable[[Int64Array], Tensor],
    ) -> None:
        self._shard = shard
        self._upload = upload
        self._shape = (max_num_seqs, max(1, shard.num_columns))
        self._device = device
        self._tables: tuple[Tensor, Tensor] | None = None

    def admit(self, slot: int, token_ids: Int64Array, num_prompt_tokens: int) -> None:
        """Reset `slot` to these tokens."""
        if self._tables is None:
            with torch.inference_mode(
                False
            ):  # so that they can be written both inside and outside inference mode
                self._tables = (
                    torch.zeros(self._shape, dtype=torch.bool, device=self._device),
                    torch.zeros(self._shape, dtype=torch.int32, device=self._device),
                )
        prompt_SV, counts_SV = self._tables
        prompt_SV[slot].zero_().scatter_(0, self._columns(token_ids[:num_prompt_tokens]), 1)
        columns_O = self._columns(token_ids[num_prompt_tokens:])
        counts_SV[slot].zero_().scatter_add_(
            0, columns_O, columns_O.new_ones(len(columns_O), dtype=torch.int32)
        )

    def add(self, rows: PenaltyRows, token_ids_B: Tensor) -> None:
        """Count the sampled tokens, each on the rank that has it in its shard."""
        assert self._tables is not None
        columns_R = token_ids_B.index_select(0, rows.rows_R) - self._shard.start
        is_in_shard_R = (columns_R >= 0) & (columns_R < self._shard.num_columns)
        flat_indices_R = rows.slots_R * self._shape[1] + columns_R.clamp(0, self._shape[1] - 1)
        self._tables[1].view(-1).scatter_add_(0, flat_indices_R, is_in_shard_R.to(torch.int32))

    def penalize(self, logits_BV: Tensor, rows: PenaltyRows, part: slice) -> Tensor:
        """Penalized logits of some of the rows, [R, V]."""
        assert self._tables is not None
        return sampling.penalize(
            logits_BV.index_select(0, rows.rows_R[part]),
            self._tables[0].index_select(0, rows.slots_R[part]),
            self._tables[1].index_select(0, rows.slots_R[part]),
            rows.repetition_R[part],
            rows.presence_R[part],
            rows.frequency_R[part],
        )

    def _columns(self, token_ids: Int64Array) -> Tensor:
        """The columns of those tokens that are in this shard, int64, on the device."""
        return self._upload(self._shard.columns_of(token_ids)[0])
