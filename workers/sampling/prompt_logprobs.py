"""Log probabilities of prompt tokens: each given the tokens before it.

The hidden state of a token gives the logits of the one after it, so a chunk gives the log
probabilities of the prompt tokens that follow each of its own. The last of them is the first token
of the next chunk, which the token table has had since the row was admitted. Logits of at most
`POSITIONS_AT_ONCE` positions exist at a time. A step without such rows costs nothing.
Legend: P positions to be scored, S those of one slice, V this rank's shard of the vocabulary, M
alternatives, E hidden size, T tokens of the step. In tables of the batch S is its slots and L their
tokens, as in `workers/batch/state.py`, B its rows, and R the scored ones.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from scheduler.messages import PromptLogprobs, StepPlan
from scheduler.params import ResolvedSampling
from workers.batch.state import BatchState, StepRows
from workers.device import PutFunction
from workers.sampling.shard import LogprobTensors, VocabularyShard

# 39 MB of logits in float32 at 151,936 columns.
POSITIONS_AT_ONCE = 64


class Head(Protocol):
    """The part of the model that is used."""

    def logits(self, hidden_BE: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """What one step is to score. On the host, per row: the index of its first scored token, how
    many follow one another, how many alternatives each; on the device, int64: which of the T
    tokens of the step come before the scored ones, and where those are in the token table.
    """

    first_positions: tuple[int, ...]
    num_scored_tokens: tuple[int, ...]
    num_top_logprobs: tuple[int, ...]
    indices_P: Tensor
    slots_P: Tensor
    positions_P: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTokens:
    """Scores of `rows` in turn; token_rank_P int64: how many tokens are at least as probable."""

    rows: ScoredRows
    tensors: LogprobTensors
    token_rank_P: Tensor

    def messages(self) -> tuple[PromptLogprobs, ...]:
        """One per row. The tensors are on the host."""
        rows = self.rows
        ends = np.cumsum(rows.num_scored_tokens).tolist()
        numbers = zip(
            rows.first_positions, rows.num_scored_tokens, rows.num_top_logprobs, ends, strict=True
        )
        return tuple(
            self._message(first, num_top_logprobs, slice(end - count, end))
            for first, count, num_top_logprobs, end in numbers
        )

    def _message(self, first: int, num_top_logprobs: int, part: slice) -> PromptLogprobs:
        return PromptLogprobs(
            first_position=first,
            num_top_logprobs=num_top_logprobs,
            logprobs=_floats(self.tensors.logprob_L[part]),
            token_ranks=_ints(self.token_rank_P[part]),
            top_token_ids=_ints(self.tensors.top_ids_LM[part, :num_top_logprobs]),
            top_logprobs=_floats(self.tensors.top_logprobs_LM[part, :num_top_logprobs]),
        )


class PromptScorer:
    """Scores the rows of steps over one batch."""

    def __init__(self, head: Head, shard: VocabularyShard, batch_state: BatchState) -> None:
        self._head = head
        self._shard = shard
        self._batch_state = batch_state
        self._num_top_S = np.zeros(len(batch_state.is_used_S), np.int32)

    def admit(self, slot: int, sampling: ResolvedSampling) -> None:
        """A row enters `slot`."""
        self._num_top_S[slot] = max(0, sampling.prompt_logprobs)

    def stage(self, plan: StepPlan, rows: StepRows, put: PutFunction) -> ScoredRows | None:
        """What a step is to score; None without such rows."""
        if not plan.scoring_flags:
            return None
        scored_rows_R = np.frombuffer(plan.scoring_flags, np.uint8).nonzero()[0]
        begin_R = rows.query_start_B1[scored_rows_R].astype(np.int64)
        end_R = rows.query_start_B1[scored_rows_R + 1].astype(np.int64)
        slots_R = rows.slots_B[scored_rows_R].astype(np.int64)
        first_position_R = rows.positions_T[begin_R].astype(np.int64) + 1
        num_scored_tokens_R = np.minimum(
            end_R - begin_R, self._batch_state.num_prompt_tokens_S[slots_R] - first_position_R
        )
        row_start_P = np.repeat(
            np.cumsum(num_scored_tokens_R) - num_scored_tokens_R, num_scored_tokens_R
        )
        index_in_row_P = np.arange(num_scored_tokens_R.sum()) - row_start_P
        num_top_R = np.minimum(self._num_top_S[slots_R], self._shard.vocab_size)
        return ScoredRows(
            first_positions=tuple(first_position_R.tolist()),
            num_scored_tokens=tuple(num_scored_tokens_R.tolist()),
            num_top_logprobs=tuple(num_top_R.tolist()),
            indices_P=put(np.repeat(begin_R, num_scored_tokens_R) + index_in_row_P),
            slots_P=put(np.repeat(slots_R, num_scored_tokens_R)),
            positions_P=put(np.repeat(first_position_R, num_scored_tokens_R) + index_in_row_P),
        )

    def score(self, hidden_TE: Tensor, rows: ScoredRows) -> ScoredTokens:
        """The scores of a step, from the hidden states of all its tokens."""
        ids_P = self._batch_state.tokens_SL[rows.slots_P, rows.positions_P].to(torch.int64)
        num_top_logprobs = max(1, *rows.num_top_logprobs)
        slices = [
            score_slice(
                self._head,
                self._shard,
                hidden_TE.index_select(0, indices_S),
                ids_S,
                num_top_logprobs,
            )
            for indices_S, ids_S in zip(
                rows.indices_P.split(POSITIONS_AT_ONCE), ids_P.split(POSITIONS_AT_ONCE), strict=True
            )
        ]
        tensors_of_slices, token_ranks_of_slices = zip(*slices, strict=True)
        tensors = map(torch.cat, zip(*tensors_of_slices, strict=True))
        return ScoredTokens(
            rows=rows,
            tensors=LogprobTensors(*tensors),
            token_rank_P=torch.cat(token_ranks_of_slices),
        )


def score_slice(
    head: Head, shard: VocabularyShard, hidden_SE: Tensor, ids_S: Tensor, num_top_logprobs: int
) -> tuple[LogprobTensors, Tensor]:
    """(log probabilities, ranks of tokens) of `ids_S`, the tokens that follow S positions."""
    logits_SV = shard.unpadded_logits(head.logits(hidden_SE)).to(torch.float32)
    tensors = shard.logprobs(logits_SV, ids_S, num_top_logprobs)
    return tensors, shard.token_ranks(logits_SV, tensors.logit_L)


def _floats(tensor: Tensor) -> array[float]:
    return array("f", np.ascontiguousarray(tensor.numpy(), np.float32).tobytes())


def _ints(tensor: Tensor) -> array[int]:
    return array("i", np.ascontiguousarray(tensor.numpy(), np.int32).tobytes())
