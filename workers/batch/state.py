"""The rows of a rank's batch: a fixed table of slots on the device, updated with the changes in
each plan.

Owns the tokens and block table of every slot on the device, and on the host what is known without
the device: counts, never the value of a sampled token. So step k+1 is prepared while step k still
runs; the device itself writes the tokens that step k samples into the table (`write_sampled`),
before step k+1 reads them. Never talks to peers. All ranks apply the same plans. Laws: `check`; a
plan that breaks one raises `WorkerError`. One thread. Legend: S slots, L token columns, W blocks in
a row's table, P block size, T tokens of the step, B rows of the step, R its sampling rows, A
admitted rows, N flat entries, K KV heads of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from configs.engine import ResolvedConfig
from kernels.decode_parts import part_starts
from kernels.interface import Kernels
from kernels.metadata import AttentionMetadata, DecodeParts
from scheduler.errors import WorkerError
from scheduler.messages import AdmittedRows, StepPlan
from workers.device import Device, Int32Array, PutFunction

_Entries = tuple[Int32Array, Int32Array, Int32Array]  # rows, columns and values to write to a table


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """What one step computes, as int32 arrays on the host.

    slots_T, positions_T, num_stored_tokens_T : per token: its slot, its position, and how many of
        the slot's first tokens had their KV in the cache when the row was admitted: it is not
        written again.
    query_start_B1, seq_start_B1, seq_lens_B : as in `AttentionMetadata`.
    slots_B : slot of each row.
    logits_indices_R : last token of each sampling row.
    sampling_slots_R, sampling_positions_R : slot and absolute position of each token to be sampled.
    num_decode_rows : how many rows at the front have one token each, or are padding.
    max_query_len, max_seq_len, max_decode_len : bounds of the lengths of queries, of rows, and of
        the rows at the front.
    """

    slots_T: Int32Array
    positions_T: Int32Array
    num_stored_tokens_T: Int32Array
    query_start_B1: Int32Array
    seq_start_B1: Int32Array
    seq_lens_B: Int32Array
    slots_B: Int32Array
    logits_indices_R: Int32Array
    sampling_slots_R: Int32Array
    sampling_positions_R: Int32Array
    num_decode_rows: int
    max_query_len: int
    max_seq_len: int
    max_decode_len: int

    def padded(
        self, num_tokens: int, num_decode_rows: int, num_rows: int, max_seq_len: int
    ) -> StepRows:
        """The same step with the shape of a graph: `num_tokens` tokens and `num_rows` rows, of
        which `num_decode_rows` are at the front, and as many `logits_indices_R` as rows.

        A row of padding has no tokens to attend to; it follows the decode rows, or all rows. The
        last row is always padding. It owns the tokens of padding, which follow all others and count
        as stored, so that they are never written. The other rows of padding have no queries.
        """
        num_live_decode_rows = self.num_decode_rows

        def pad(numbers: Int32Array, length: int, value: int = 0) -> Int32Array:
            return np.pad(numbers, (0, length - len(numbers)), constant_values=value)

        def pad_rows(numbers_B: Int32Array) -> Int32Array:
            front, others = numbers_B[:num_live_decode_rows], numbers_B[num_live_decode_rows:]
            return np.concatenate(
                (pad(front, num_decode_rows), pad(others, num_rows - num_decode_rows))
            )

        seq_lens_B = pad_rows(self.seq_lens_B)
        query_lens_B = pad_rows(np.diff(self.query_start_B1))
        query_lens_B[-1] = num_tokens - len(self.slots_T)
        return replace(
            self,
            slots_T=pad(self.slots_T, num_tokens),
            positions_T=pad(self.positions_T, num_tokens),
            num_stored_tokens_T=pad(self.num_stored_tokens_T, num_tokens, 1),
            query_start_B1=_running_sum(query_lens_B),
            seq_start_B1=_running_sum(seq_lens_B),
            seq_lens_B=seq_lens_B,
            slots_B=pad_rows(self.slots_B),
            logits_indices_R=pad(self.logits_indices_R, num_rows),
            num_decode_rows=num_decode_rows,
            max_query_len=num_tokens,
            max_seq_len=max_seq_len,
            max_decode_len=max_seq_len,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What one step computes, on the device.

    token_ids_T, positions_T : int32. logits_indices_R : int32.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    attn: AttentionMetadata
    logits_indices_R: Tensor


class BatchState:
    """`max_num_seqs` slots of up to `max_model_len` tokens, for attention over `num_kv_heads`
    heads.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        num_blocks: int,
        device: Device,
        kernels: Kernels,
        num_kv_heads: int,
    ) -> None:
        num_slots = config.max_num_seqs
        self._kernels = kernels
        self._num_kv_heads = num_kv_heads
        self.block_size = config.block_size
        self.num_blocks = num_blocks
        self.max_tokens = config.max_model_len
        self.device = device
        self.tokens_SL = torch.zeros(
            num_slots, self.max_tokens, dtype=torch.int32, device=device.torch_device
        )
        self.block_table_SW = torch.zeros(
            num_slots, config.max_blocks_per_sequence, dtype=torch.int32, device=device.torch_device
        )
        # By row of the step, of which there are at most as many as slots.
        self._num_arrived_parts_BK = torch.zeros(
            num_slots, num_kv_heads, dtype=torch.int32, device=device.torch_device
        )
        self.is_used_S = np.zeros(num_slots, np.bool_)
        # Of tokens: all that are known or in flight, those of the prompt, those in the cache when
        # the row was admitted, and those in it now or in flight; of blocks.
        self._counts_5S = np.zeros((5, num_slots), np.int32)
        self.num_tokens_S, self.num_prompt_tokens_S, self.num_stored_tokens_S = self._counts_5S[:3]
        self.num_computed_tokens_S, self.num_table_blocks_S = self._counts_5S[3:]

    def apply(self, plan: StepPlan) -> None:
        """Release rows, admit rows, then append blocks."""
        self._release(_ints(plan.released_slots))
        tokens: list[_Entries] = []
        blocks: list[_Entries] = []
        if plan.admitted_rows is not None:
            tokens.append(self._admit(plan.admitted_rows))
            admitted_slots_N = np.repeat(
                _ints(plan.admitted_rows.slots), _ints(plan.admitted_rows.num_blocks)
            )
            blocks.append(self._append(admitted_slots_N, _ints(plan.admitted_rows.block_ids)))
        if len(plan.appended_slots):
            appended = _ints(plan.appended_slots), _ints(plan.appended_block_ids)
            blocks.append(self._append(*appended))
        self._write((self.tokens_SL, tokens), (self.block_table_SW, blocks))

    def take(self, plan: StepPlan) -> StepRows:
        """The rows of the next step, at least one. Their tokens count as computed from here on."""
        slots_B, num_new_tokens_B = _ints(plan.slots), _ints(plan.num_new_tokens)
        samples_B = np.frombuffer(plan.sampling_flags, np.uint8).astype(np.bool_)
        self._check_rows(slots_B, num_new_tokens_B, samples_B)
        num_computed_tokens_B = self.num_computed_tokens_S[slots_B]
        seq_lens_B = num_computed_tokens_B + num_new_tokens_B
        query_start_B1 = _running_sum(num_new_tokens_B)
        num_stored_tokens_B = self.num_stored_tokens_S[slots_B]
        max_query_len = int(num_new_tokens_B.max())
        if max_query_len == 1:
            num_decode_rows = len(slots_B)
            slots_T = slots_B
            positions_T = num_computed_tokens_B
            num_stored_tokens_T = num_stored_tokens_B
        else:
            num_decode_rows = int((num_new_tokens_B > 1).argmax())
            slots_T = np.repeat(slots_B, num_new_tokens_B)
            num_stored_tokens_T = np.repeat(num_stored_tokens_B, num_new_tokens_B)
            positions_T = np.arange(query_start_B1[-1], dtype=np.int32)
            positions_T += np.repeat(num_computed_tokens_B - query_start_B1[:-1], num_new_tokens_B)
        rows = StepRows(
            slots_T=slots_T,
            positions_T=positions_T,
            num_stored_tokens_T=num_stored_tokens_T,
            query_start_B1=query_start_B1,
            seq_start_B1=_running_sum(seq_lens_B),
            seq_lens_B=seq_lens_B,
            slots_B=slots_B,
            logits_indices_R=query_start_B1[1:][samples_B] - 1,
            sampling_slots_R=slots_B[samples_B],
            sampling_positions_R=seq_lens_B[samples_B],
            num_decode_rows=num_decode_rows,
            max_query_len=max_query_len,
            max_seq_len=int(seq_lens_B.max()),
            max_decode_len=int(seq_lens_B[:num_decode_rows].max(initial=0)),
        )
        self.num_computed_tokens_S[slots_B] = seq_lens_B
        self.num_tokens_S[rows.sampling_slots_R] += 1
        return rows

    def stage(self, rows: StepRows, put: PutFunction) -> Callable[[], StepInputs]:
        """Put what a step needs. Returns a function that makes the inputs; call it after the upload
        has been sent.
        """
        slots_T, positions_T, num_stored_tokens_T, slots_B = map(
            put, (rows.slots_T, rows.positions_T, rows.num_stored_tokens_T, rows.slots_B)
        )
        query_start_B1, seq_start_B1, seq_lens_B = map(
            put, (rows.query_start_B1, rows.seq_start_B1, rows.seq_lens_B)
        )
        logits_indices_R = put(rows.logits_indices_R)
        num_decode_rows = rows.num_decode_rows
        # Without padding, which has no queries.
        num_live_decode_rows = int(rows.query_start_B1[num_decode_rows])
        max_parts = self.max_decode_parts(num_decode_rows, rows.max_decode_len)
        live_decode_lens_B = rows.seq_lens_B[:num_live_decode_rows]
        decode_parts = self.stage_decode(live_decode_lens_B, max_parts, put, num_decode_rows)

        def make_inputs() -> StepInputs:
            token_ids_T, kv_places_T = self.look_up_tokens(
                slots_T, positions_T, num_stored_tokens_T
            )
            num_columns = -(-rows.max_seq_len // self.block_size)
            return StepInputs(
                token_ids_T=token_ids_T,
                positions_T=positions_T,
                attn=AttentionMetadata(
                    query_start_B1=query_start_B1,
                    seq_start_B1=seq_start_B1,
                    seq_lens_B=seq_lens_B,
                    block_table_BW=self.block_table_SW[:, :num_columns].index_select(0, slots_B),
                    kv_places_T=kv_places_T,
                    max_query_len=rows.max_query_len,
                    max_seq_len=rows.max_seq_len,
                    decode_parts=decode_parts,
                ),
                logits_indices_R=logits_indices_R,
            )

        return make_inputs

    def max_decode_parts(self, num_rows: int, max_seq_len: int) -> int:
        """See `Kernels.max_decode_parts`."""
        if num_rows == 0:
            return 0
        return self._kernels.max_decode_parts(
            num_rows, self._num_kv_heads, max_seq_len, self.device.torch_device
        )

    def stage_decode(
        self, seq_lens_B: Int32Array, max_parts: int, put: PutFunction, num_rows: int
    ) -> DecodeParts | None:
        """Put the parts of decode rows, of which those past `seq_lens_B` have none; None
        without parts.
        """
        if max_parts == 0:
            return None
        part_start_B1 = self.part_starts(seq_lens_B, max_parts, num_rows)
        return self.decode_parts(num_rows, max_parts, put(part_start_B1))

    def part_starts(self, seq_lens_B: Int32Array, max_parts: int, num_rows: int) -> Int32Array:
        """Where the parts of `num_rows` decode rows begin, of which those past `seq_lens_B` have
        none.
        """
        # Without more parts than rows, each row is one part, as the kernel expects.
        num_usable_parts = max_parts if max_parts > num_rows else max(1, len(seq_lens_B))
        starts = part_starts(seq_lens_B, num_usable_parts)
        return np.pad(starts, (0, num_rows - len(seq_lens_B)), mode="edge")

    def decode_parts(self, num_rows: int, max_parts: int, part_start_B1: Tensor) -> DecodeParts:
        """The parts with the counters of this batch, which one step after another uses."""
        return DecodeParts(
            num_rows=num_rows,
            max_parts=max_parts,
            part_start_B1=part_start_B1,
            num_arrived_parts_BK=self._num_arrived_parts_BK,
        )

    def look_up_tokens(
        self, slots_T: Tensor, positions_T: Tensor, num_stored_tokens_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(token ids, where each token's KV goes), see `Kernels.look_up_tokens`."""
        return self._kernels.look_up_tokens(
            self.tokens_SL,
            self.block_table_SW,
            slots_T,
            positions_T,
            num_stored_tokens_T,
            self.block_size,
        )

    def write_sampled(self, slots_R: Tensor, positions_R: Tensor, token_ids_R: Tensor) -> None:
        """Write the tokens of a step where the next step reads them, without a trip to the host."""
        self._kernels.write_tokens(self.tokens_SL, slots_R, positions_R, token_ids_R)

    def check(self) -> None:
        """Raise `WorkerError` unless every law holds. Waits for the device."""
        is_used_S, table = self.is_used_S, self.block_table_SW.cpu().numpy()
        _demand(self._counts_5S[:, ~is_used_S] == 0, "a free slot holds nothing")
        _demand(
            self.num_computed_tokens_S <= self.num_tokens_S, "a row computes only tokens it has"
        )
        _demand(self.num_tokens_S <= self.max_tokens, "a row has at most max_model_len tokens")
        _demand(self.num_prompt_tokens_S[is_used_S] >= 1, "a row in use has a prompt")
        capacity_tokens_S = self.num_table_blocks_S * self.block_size
        _demand(
            self.num_computed_tokens_S <= capacity_tokens_S,
            "computed tokens lie within the block table",
        )
        _demand(
            self.num_stored_tokens_S <= capacity_tokens_S,
            "stored tokens lie within the block table",
        )
        _demand((table >= 0) & (table < self.num_blocks), "block tables name blocks of the cache")

    def _release(self, slots_N: Int32Array) -> None:
        if not len(slots_N):
            return
        self._check_slots(slots_N, "released")
        _demand(self.is_used_S[slots_N], "a released slot is in use", slots_N)
        self.is_used_S[slots_N] = False
        self._counts_5S[:, slots_N] = 0

    def _admit(self, rows: AdmittedRows) -> _Entries:
        """Admit rows. Returns the entries to write to the token table. The caller appends the
        blocks.
        """
        slots_A = _ints(rows.slots)
        num_tokens_A = _ints(rows.num_tokens)
        num_blocks_A = _ints(rows.num_blocks)
        num_stored_tokens_A = _ints(rows.num_stored_tokens)
        num_prompt_tokens_A = _ints(rows.num_prompt_tokens)
        self._check_slots(slots_A, "admitted")
        _demand(~self.is_used_S[slots_A], "an admitted slot is free", slots_A)
        fits_A = (num_tokens_A >= 1) & (num_tokens_A < self.max_tokens)
        _demand(fits_A, "a row has 1 to max_model_len - 1 tokens", num_tokens_A)
        prompt_fits_A = (num_prompt_tokens_A >= 1) & (num_prompt_tokens_A <= num_tokens_A)
        _demand(prompt_fits_A, "the prompt is part of the tokens", num_prompt_tokens_A)
        stored_fits_A = (num_stored_tokens_A >= 0) & (num_stored_tokens_A <= num_tokens_A)
        _demand(stored_fits_A, "stored tokens are part of the tokens", num_stored_tokens_A)
        blocks_fit_A = num_stored_tokens_A <= num_blocks_A * self.block_size
        _demand(blocks_fit_A, "stored tokens lie in the row's blocks", num_stored_tokens_A)
        _demand(int(num_tokens_A.sum()) == len(rows.token_ids), "token_ids holds num_tokens each")
        _demand(int(num_blocks_A.sum()) == len(rows.block_ids), "block_ids holds num_blocks each")
        self.is_used_S[slots_A] = True
        self.num_tokens_S[slots_A] = num_tokens_A
        self.num_prompt_tokens_S[slots_A] = num_prompt_tokens_A
        self.num_stored_tokens_S[slots_A] = num_stored_tokens_A
        # If even the last token is stored, it runs again, as a query only.
        self.num_computed_tokens_S[slots_A] = np.minimum(num_stored_tokens_A, num_tokens_A - 1)
        self.num_table_blocks_S[slots_A] = 0
        return np.repeat(slots_A, num_tokens_A), _ranges(num_tokens_A), _ints(rows.token_ids)

    def _append(self, slots_N: Int32Array, block_ids_N: Int32Array) -> _Entries:
        """Put each block at the end of its slot's table, in the order given. Returns the entries to
        write to the table on the device.
        """
        _demand(len(slots_N) == len(block_ids_N), "each appended block names a slot")
        _demand(self.is_used_S[slots_N], "blocks are appended to slots in use", slots_N)
        exists_N = (block_ids_N >= 0) & (block_ids_N < self.num_blocks)
        _demand(exists_N, "blocks are of the cache", block_ids_N)
        columns_N = self.num_table_blocks_S[slots_N] + _occurrences(slots_N)
        np.add.at(self.num_table_blocks_S, slots_N, 1)
        width = self.block_table_SW.shape[1]
        _demand(columns_N < width, f"a block table has at most {width} blocks", slots_N)
        return slots_N, columns_N, block_ids_N

    def _write(self, *changes: tuple[Tensor, list[_Entries]]) -> None:
        """Write entries to tables on the device, with one upload."""
        table_changes = [(table, entries) for table, entries in changes if entries]
        if not table_changes:
            return
        flat_arrays = [
            np.concatenate(part)
            for _, entries in table_changes
            for part in zip(*entries, strict=True)
        ]
        device_tensors = self.device.upload(*flat_arrays)
        for i, (table, _) in enumerate(table_changes):
            rows_N, columns_N, values_N = device_tensors[3 * i : 3 * i + 3]
            table[rows_N, columns_N] = values_N

    def _check_rows(
        self, slots_B: Int32Array, num_new_tokens_B: Int32Array, samples_B: npt.NDArray[np.bool_]
    ) -> None:
        _demand(
            len(slots_B) == len(num_new_tokens_B) == len(samples_B),
            "slots, num_new_tokens and sampling_flags have one entry per row",
        )
        self._check_slots(slots_B, "scheduled")
        _demand(self.is_used_S[slots_B], "a scheduled slot is in use", slots_B)
        _demand(num_new_tokens_B >= 1, "a scheduled row has a token to compute", num_new_tokens_B)
        end_B = self.num_computed_tokens_S[slots_B] + num_new_tokens_B
        num_tokens_B = self.num_tokens_S[slots_B]
        _demand(end_B <= num_tokens_B, "a row computes only tokens it has", slots_B)
        is_at_end_R = end_B[samples_B] == num_tokens_B[samples_B]
        _demand(is_at_end_R, "a row samples at the end of its tokens", slots_B)
        _demand(num_tokens_B[samples_B] < self.max_tokens, "a row has room for its token", slots_B)
        capacity_tokens_B = self.num_table_blocks_S[slots_B] * self.block_size
        _demand(end_B <= capacity_tokens_B, "computed tokens lie within the block table", slots_B)

    def _check_slots(self, slots_N: Int32Array, kind: str) -> None:
        _demand((slots_N >= 0) & (slots_N < len(self.is_used_S)), f"{kind} slots exist", slots_N)
        is_present_S = np.zeros(len(self.is_used_S), np.bool_)
        is_present_S[slots_N] = True
        num_present = np.count_nonzero(is_present_S)
        _demand(num_present == len(slots_N), f"{kind} slots are distinct", slots_N)


def _ints(values: Iterable[int]) -> Int32Array:
    """A flat `array` from a message as a numpy array, without a copy."""
    return np.asarray(values, np.int32)


def _running_sum(values_B: Int32Array) -> Int32Array:
    """0, then the running sum."""
    return np.concatenate((np.zeros(1, np.int32), np.cumsum(values_B, dtype=np.int32)))


def _ranges(lengths_A: Int32Array) -> Int32Array:
    """0 to n - 1 for each n, one after the other."""
    starts_A = np.cumsum(lengths_A) - lengths_A
    return (np.arange(lengths_A.sum()) - np.repeat(starts_A, lengths_A)).astype(np.int32)


def _occurrences(values_N: Int32Array) -> Int32Array:
    """For each entry, how many equal entries come before it."""
    order_N = np.argsort(values_N, kind="stable")
    _, counts = np.unique(values_N, return_counts=True)
    out_N = np.empty(len(values_N), np.int32)
    out_N[order_N] = _ranges(counts.astype(np.int32))
    return out_N


def _demand(holds: npt.ArrayLike, law: str, values: Int32Array | None = None) -> None:
    if not np.all(holds):
        detail = "" if values is None else f": {values[:16].tolist()}"
        raise WorkerError(f"batch state: {law}, but this plan or table breaks it{detail}")
