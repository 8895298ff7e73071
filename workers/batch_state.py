"""The rows of a rank's batch: a fixed table of slots on the device, changed by what each plan says has changed.

Owns the tokens and block table of every slot on the device, and on the host what can be known without the device:
counts, never the value of a sampled token. So step k+1 is prepared while step k still runs; the tokens step k samples
are written to the table by the device itself (`write_sampled`) before step k+1 reads them. Never talks to peers.
All ranks apply the same plans. Laws: `check`; a plan that breaks one raises `WorkerError`. One thread.
Legend: S slots, L token columns, W blocks in a row's table, P block size, T tokens of the step, B rows of the step,
R its sampling rows, A admitted rows, N flat entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from configs.engine import ResolvedConfig
from kernels.metadata import AttentionMetadata
from scheduler.errors import WorkerError
from scheduler.messages import AdmittedRows, StepPlan

Ints = npt.NDArray[np.int32]
_ALIGN = 4  # pieces of one upload start at multiples of 16 bytes, which GPU kernels are specialised on


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What one step computes. Host arrays are for building the sampling batch; tensors lie on the device.

    token_ids_T, positions_T : int32. logits_indices_R : int32, last token of each sampling row.
    sampling_slots_R, sampling_positions_R : host int32, slot and absolute position of the token to be sampled.
    sampled_places_R : int64 on the device, where in the flat token table that token goes.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    attn: AttentionMetadata
    logits_indices_R: torch.Tensor
    sampling_slots_R: Ints
    sampling_positions_R: Ints
    sampled_places_R: torch.Tensor


class BatchState:
    """`max_num_seqs` slots of up to `max_model_len` tokens, and one more that a step run ahead may add."""

    def __init__(self, config: ResolvedConfig, num_blocks: int, device: torch.device) -> None:
        slots = config.engine.max_num_seqs
        self.block_size = config.block_size
        self.num_blocks = num_blocks
        self.max_tokens = config.max_model_len + 1
        self.device = device
        self.tokens_SL = torch.zeros(slots, self.max_tokens, dtype=torch.int32, device=device)
        self.block_table_SW = torch.zeros(slots, config.blocks_per_sequence, dtype=torch.int32, device=device)
        self.used_S = np.zeros(slots, np.bool_)
        self.num_tokens_S = np.zeros(slots, np.int32)  # known or in flight
        self.num_prompt_S = np.zeros(slots, np.int32)
        self.num_cached_S = np.zeros(slots, np.int32)
        self.num_computed_S = np.zeros(slots, np.int32)
        self.num_table_S = np.zeros(slots, np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Rows released, admitted, and grown by blocks, in this order."""
        self._release(_ints(plan.released))
        if plan.admitted is not None:
            self._admit(plan.admitted)
        if len(plan.appended_slots):
            self._append(_ints(plan.appended_slots), _ints(plan.appended_block_ids))

    def prepare(self, plan: StepPlan) -> StepInputs:
        """The inputs of a step of at least one row; its tokens count as computed from here on."""
        slots_B, new_B = _ints(plan.slots), _ints(plan.num_new_tokens)
        samples_B = np.frombuffer(plan.samples, np.uint8).astype(np.bool_)
        self._check_rows(slots_B, new_B, samples_B)
        start_B = self.num_computed_S[slots_B]
        seq_lens_B = start_B + new_B
        query_start_B1 = np.zeros(len(slots_B) + 1, np.int32)
        np.cumsum(new_B, out=query_start_B1[1:])
        positions_T = np.arange(query_start_B1[-1], dtype=np.int32) + np.repeat(start_B - query_start_B1[:-1], new_B)
        sampling_R = slots_B[samples_B]
        on_device = self._upload(
            np.repeat(slots_B, new_B), positions_T, np.repeat(self.num_cached_S[slots_B], new_B), query_start_B1,
            seq_lens_B, slots_B, query_start_B1[1:][samples_B] - 1, sampling_R, seq_lens_B[samples_B],
        )  # fmt: skip
        tokens_slots_T, tokens_positions_T, cached_T, starts_B1, lens_B, rows_slots_B, last_R, slots_R, ends_R = (
            on_device
        )
        max_seq_len = int(seq_lens_B.max())
        attn = AttentionMetadata(
            query_start_B1=starts_B1,
            seq_lens_B=lens_B,
            block_table_BW=self.block_table_SW[:, : -(-max_seq_len // self.block_size)].index_select(0, rows_slots_B),
            slot_mapping_T=self._slot_mapping(tokens_slots_T, tokens_positions_T, cached_T),
            max_query_len=int(new_B.max()),
            max_seq_len=max_seq_len,
        )
        self.num_computed_S[slots_B] = seq_lens_B
        self.num_tokens_S[sampling_R] += 1
        return StepInputs(
            token_ids_T=self.tokens_SL[tokens_slots_T, tokens_positions_T],
            positions_T=tokens_positions_T,
            attn=attn,
            logits_indices_R=last_R,
            sampling_slots_R=sampling_R,
            sampling_positions_R=seq_lens_B[samples_B],
            sampled_places_R=slots_R.to(torch.int64) * self.max_tokens + ends_R,
        )

    def write_sampled(self, inputs: StepInputs, token_ids_R: torch.Tensor) -> None:
        """Put the tokens of a step where the next one reads them; the host does not see them."""
        self.tokens_SL.view(-1).index_copy_(0, inputs.sampled_places_R, token_ids_R.to(torch.int32))

    def clear(self) -> None:
        """Free every slot, for a new epoch."""
        for counts in (self.num_tokens_S, self.num_prompt_S, self.num_cached_S, self.num_computed_S, self.num_table_S):
            counts.fill(0)
        self.used_S.fill(False)

    def check(self) -> None:
        """Raise `WorkerError` unless every law holds. Waits for the device."""
        used, table = self.used_S, self.block_table_SW.cpu().numpy()
        counts = (self.num_tokens_S, self.num_prompt_S, self.num_cached_S, self.num_computed_S, self.num_table_S)
        _demand([not count[~used].any() for count in counts], "a free slot holds nothing")
        _demand(self.num_computed_S <= self.num_tokens_S, "a row computes only tokens it has")
        _demand(self.num_tokens_S <= self.max_tokens, "a row has at most max_model_len + 1 tokens")
        _demand(self.num_prompt_S[used] >= 1, "a row in use has a prompt")
        room_S = self.num_table_S * self.block_size
        _demand(self.num_computed_S <= room_S, "computed tokens lie within the block table")
        _demand(self.num_cached_S <= room_S, "cached tokens lie within the block table")
        _demand((table >= 0) & (table < self.num_blocks), "block tables name blocks of the cache")

    def _release(self, slots_N: Ints) -> None:
        self._check_slots(slots_N, "released")
        _demand(self.used_S[slots_N], "a released slot is in use", slots_N)
        self.used_S[slots_N] = False
        for counts in (self.num_tokens_S, self.num_prompt_S, self.num_cached_S, self.num_computed_S, self.num_table_S):
            counts[slots_N] = 0

    def _admit(self, rows: AdmittedRows) -> None:
        slots_A, tokens_A, blocks_A = _ints(rows.slots), _ints(rows.num_tokens), _ints(rows.num_blocks)
        cached_A, prompt_A = _ints(rows.num_cached_tokens), _ints(rows.num_prompt_tokens)
        self._check_slots(slots_A, "admitted")
        _demand(~self.used_S[slots_A], "an admitted slot is free", slots_A)
        _demand((tokens_A >= 1) & (tokens_A < self.max_tokens), "a row has 1 to max_model_len tokens", tokens_A)
        _demand((prompt_A >= 1) & (prompt_A <= tokens_A), "the prompt is part of the tokens", prompt_A)
        _demand((cached_A >= 0) & (cached_A <= tokens_A), "cached tokens are part of the tokens", cached_A)
        _demand(cached_A <= blocks_A * self.block_size, "cached tokens lie in the row's blocks", cached_A)
        _demand(int(tokens_A.sum()) == len(rows.token_ids), "token_ids holds num_tokens each")
        _demand(int(blocks_A.sum()) == len(rows.block_ids), "block_ids holds num_blocks each")
        self.used_S[slots_A] = True
        self.num_tokens_S[slots_A], self.num_prompt_S[slots_A] = tokens_A, prompt_A
        self.num_cached_S[slots_A] = cached_A
        # A row cached to its last token runs that one again, as a query only.
        self.num_computed_S[slots_A] = np.minimum(cached_A, tokens_A - 1)
        places_N = np.repeat(slots_A, tokens_A), _ranges(tokens_A)
        self._scatter(self.tokens_SL, *places_N, _ints(rows.token_ids))
        self.num_table_S[slots_A] = 0
        self._append(np.repeat(slots_A, blocks_A), _ints(rows.block_ids))

    def _append(self, slots_N: Ints, block_ids_N: Ints) -> None:
        """Put each block at the end of its slot's table, in the order given."""
        _demand(len(slots_N) == len(block_ids_N), "appended blocks name a slot each")
        _demand(self.used_S[slots_N], "blocks are appended to slots in use", slots_N)
        _demand((block_ids_N >= 0) & (block_ids_N < self.num_blocks), "blocks are of the cache", block_ids_N)
        columns_N = self.num_table_S[slots_N] + _occurrences(slots_N)
        np.add.at(self.num_table_S, slots_N, 1)
        width = self.block_table_SW.shape[1]
        _demand(columns_N < width, f"a block table has at most {width} blocks", slots_N)
        self._scatter(self.block_table_SW, slots_N, columns_N, block_ids_N)

    def _scatter(self, table: torch.Tensor, rows_N: Ints, columns_N: Ints, values_N: Ints) -> None:
        rows, columns, values = self._upload(rows_N, columns_N, values_N)
        table[rows, columns] = values

    def _slot_mapping(self, slots_T: torch.Tensor, positions_T: torch.Tensor, cached_T: torch.Tensor) -> torch.Tensor:
        """Where each token's KV goes; -1 for positions in shared blocks, which are never written."""
        blocks_T = self.block_table_SW[slots_T, positions_T // self.block_size].to(torch.int64)
        places_T = blocks_T * self.block_size + positions_T % self.block_size
        return torch.where(positions_T < cached_T, -1, places_T)

    def _check_rows(self, slots_B: Ints, new_B: Ints, samples_B: npt.NDArray[np.bool_]) -> None:
        _demand(len(slots_B) == len(new_B) == len(samples_B), "slots, num_new_tokens and samples have one entry a row")
        self._check_slots(slots_B, "scheduled")
        _demand(self.used_S[slots_B], "a scheduled slot is in use", slots_B)
        _demand(new_B >= 1, "a scheduled row has a token to compute", new_B)
        end_B, known_B = self.num_computed_S[slots_B] + new_B, self.num_tokens_S[slots_B]
        _demand(end_B <= known_B, "a row computes only tokens it has", slots_B)
        _demand(end_B[samples_B] == known_B[samples_B], "a row samples at the end of its tokens", slots_B)
        _demand(known_B[samples_B] < self.max_tokens, "a row has room for its token", slots_B)
        room_B = self.num_table_S[slots_B] * self.block_size
        _demand(end_B <= room_B, "computed tokens lie within the block table", slots_B)

    def _check_slots(self, slots_N: Ints, kind: str) -> None:
        _demand((slots_N >= 0) & (slots_N < len(self.used_S)), f"{kind} slots exist", slots_N)
        _demand(len(np.unique(slots_N)) == len(slots_N), f"{kind} slots come once each", slots_N)

    def _upload(self, *arrays: Ints) -> list[torch.Tensor]:
        """The arrays on the device, in one copy the host does not wait for."""
        if self.device.type == "cpu":
            return [torch.from_numpy(np.ascontiguousarray(array, np.int32)) for array in arrays]
        lengths = [-(-len(array) // _ALIGN) * _ALIGN for array in arrays]
        # Fresh pinned memory from torch's cache, which reuses it only when the copy has run.
        staging = torch.empty(sum(lengths), dtype=torch.int32, pin_memory=True)
        offsets = np.cumsum([0, *lengths])
        for offset, array in zip(offsets, arrays, strict=False):
            staging.numpy()[offset : offset + len(array)] = array
        flat = staging.to(self.device, non_blocking=True)
        return [flat[offset : offset + len(array)] for offset, array in zip(offsets, arrays, strict=False)]


def _ints(values: Iterable[int]) -> Ints:
    """A flat `array` of a message as numpy, without a copy."""
    return np.asarray(values, np.int32)


def _ranges(lengths_A: Ints) -> Ints:
    """0 to n - 1 for each n, one after the other."""
    starts_A = np.cumsum(lengths_A) - lengths_A
    return (np.arange(lengths_A.sum()) - np.repeat(starts_A, lengths_A)).astype(np.int32)


def _occurrences(values_N: Ints) -> Ints:
    """For each entry, how many equal ones come before it."""
    order_N = np.argsort(values_N, kind="stable")
    _, counts = np.unique(values_N, return_counts=True)
    out_N = np.empty(len(values_N), np.int32)
    out_N[order_N] = _ranges(counts.astype(np.int32))
    return out_N


def _demand(holds: npt.ArrayLike, law: str, values: Ints | None = None) -> None:
    if not np.all(holds):
        detail = "" if values is None else f": {values[:16].tolist()}"
        raise WorkerError(f"batch state: {law}, but this plan or table breaks it{detail}")
