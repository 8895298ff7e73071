"""One rank's part of the vocabulary, and log probabilities of tokens over all parts.

Logits are never gathered: ranks exchange integer weights, lists of the best tokens, and the logit
of the token from the rank that has it, so every rank ends with the same bits, at every number of
ranks. On a GPU, nothing here makes the host wait for the device. Legend: L rows, V columns of this
rank's shard, X blocks of them, M alternatives, C those of all ranks.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.interface import GapRows, SamplingKernels
from kernels.reference import sampling

Int64Array = npt.NDArray[np.int64]


class Group(Protocol):
    """The part of the tensor-parallel group that sampling uses. All tensors that it passes are
    int64.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor: ...
    def all_reduce_max(self, tensor: Tensor) -> Tensor: ...
    def all_gather(self, tensor: Tensor) -> Tensor: ...


# With more, the allocator takes fresh pages for every intermediate result, which is three times
# slower at 64 rows of 151,936.
_LOGITS_AT_ONCE = 1 << 20


class LogprobTensors(NamedTuple):
    """Natural-log probabilities under the raw logits: of one token per row, and of the best tokens,
    best first.

    logprob_L float32, top_ids_LM int64, top_logprobs_LM float32; logit_L float32, the raw logit of
    the token.
    """

    logprob_L: Tensor
    top_ids_LM: Tensor
    top_logprobs_LM: Tensor
    logit_L: Tensor


class VocabularyShard:
    """The columns from `start` to `end` of the padded vocabulary; ids from `vocab_size` on are
    padding. All ranks call in the same order, from one thread.
    """

    def __init__(
        self,
        group: Group,
        kernels: SamplingKernels,
        vocab_size: int,
        start: int,
        end: int,
        device: torch.device,
    ) -> None:
        self.vocab_size = vocab_size
        self.start = start
        self.num_columns = max(0, min(end, vocab_size) - start)
        self._group = group
        self._kernels = kernels
        self._device = device

    def columns_of(self, token_ids: Int64Array) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """(columns of those tokens that are in this shard, mask of those tokens)."""
        is_inside = (token_ids >= self.start) & (token_ids < self.start + self.num_columns)
        return token_ids[is_inside] - self.start, is_inside

    def unpadded_logits(self, logits_LV: Tensor) -> Tensor:
        """Logits in a dtype of the kernels, without the padding; a shard that is all padding keeps
        one column that nothing chooses.
        """
        if self.num_columns == 0:
            return torch.full((len(logits_LV), 1), -torch.inf, device=logits_LV.device)
        logits_LV = logits_LV[:, : self.num_columns]
        return (
            logits_LV if logits_LV.dtype is torch.bfloat16 else logits_LV.to(torch.float32)
        ).contiguous()

    def parts(self, num_rows: int) -> list[slice]:
        """The rows in parts small enough for the processor's cache; on a GPU all at once."""
        step = num_rows
        if self._device.type == "cpu":
            step = max(1, _LOGITS_AT_ONCE // max(1, self.num_columns))
        return [slice(start, start + step) for start in range(0, num_rows, step)]

    def logprobs(self, logits_LV: Tensor, ids_L: Tensor, num_top_logprobs: int) -> LogprobTensors:
        """Log probabilities of the tokens `ids_L`, and of the `num_top_logprobs` best ones, at
        least 1. `logits_LV`: the real columns. The sum of exponentials is the same integer sum as
        in a draw.
        """
        logits_LV = logits_LV.to(torch.float32)
        top_logits_LM, top_ids_LM = self._top(logits_LV, num_top_logprobs)
        max_L = top_logits_LM[:, 0].contiguous()
        temperature_L = torch.ones_like(top_logits_LM[:, 0])
        _, _, block_max_LX = self._kernels.row_best(logits_LV)
        gap_rows = GapRows(
            logits_BV=logits_LV,
            block_max_BX=block_max_LX,
            rows_R=torch.arange(len(ids_L), device=ids_L.device),
            max_R=max_L,
            temperature_R=temperature_L,
        )
        _, total_weight_L = self._kernels.block_weights(gap_rows, torch.full_like(max_L, torch.inf))
        columns_L = ids_L - self.start
        is_in_shard_L = (columns_L >= 0) & (columns_L < logits_LV.shape[1])
        own_logit_L = logits_LV.gather(
            1, columns_L.clamp(0, logits_LV.shape[1] - 1)[:, None]
        ).squeeze(1)
        # Only one rank contributes, so the sum has its bits.
        bits_L = torch.where(is_in_shard_L, own_logit_L.view(torch.int32), 0).to(torch.int64)
        total_weight_L, bits_L = self._group.all_reduce(torch.stack((total_weight_L, bits_L)))
        log_total_L = max_L.to(torch.float64) + torch.log(
            total_weight_L.to(torch.float64) / sampling.WEIGHT_ONE
        )
        logit_L = bits_L.to(torch.int32).view(torch.float32)
        return LogprobTensors(
            logprob_L=(logit_L - log_total_L).to(torch.float32),
            top_ids_LM=top_ids_LM,
            top_logprobs_LM=(top_logits_LM - log_total_L[:, None]).to(torch.float32),
            logit_L=logit_L,
        )

    def token_ranks(self, logits_LV: Tensor, logit_L: Tensor) -> Tensor:
        """How many tokens of each row have at least this logit, over all ranks, int64."""
        return self._group.all_reduce((logits_LV >= logit_L[:, None]).sum(dim=1))

    def _top(self, logits_LV: Tensor, num_top_logprobs: int) -> tuple[Tensor, Tensor]:
        """(logits, ids) of the best tokens over all ranks, [L, M], best first, the lower id first
        of equals.
        """
        num_columns = logits_LV.shape[1]
        ids_V = torch.arange(num_columns, device=logits_LV.device) + self.start
        num_local = min(num_top_logprobs, num_columns)
        local_LM = torch.cat(
            [
                sampling.pack_value_and_id(logits_LV[part], ids_V).topk(num_local, dim=1).values
                for part in self.parts(len(logits_LV))
            ]
        )
        local_LM = torch.nn.functional.pad(
            local_LM, (0, num_top_logprobs - num_local), value=torch.iinfo(torch.int64).min
        )
        gathered_LC = self._group.all_gather(local_LM).transpose(0, 1).flatten(1)
        return sampling.unpack_value_and_id(gathered_LC.topk(num_top_logprobs, dim=1).values)
