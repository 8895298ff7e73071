"""The sampling parameters of every slot, and the part of them that one step needs.

Owns tables on the host with one entry per slot; nothing here needs the value of a sampled token, so
the engine may run a step ahead. `batch` picks the rows of a step and gathers those that use the
same stages into one draw: a stage that no row uses is absent from the batch and costs nothing. All
ranks build the same draws, so that their all-reduces pair up; only the entries of `bias` and
`masked_N` differ, because each rank holds those of its own shard. Legend: B sampling rows of the
step, R rows of one draw, or with penalties, L rows that report logprobs, N flat entries, S rows of
the largest batch that graphs sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.reference.sampling import MAX_LISTED_TOP_K, TOP_P_ONE
from scheduler.params import ResolvedSampling
from workers.device import PutFunction
from workers.sampling.shard import Int64Array, VocabularyShard


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Top-k, top-p and min-p of one draw.

    top_k_R           : int64, 0 keeps all; `max_top_k` is a bound of them, known to the host.
    top_p_R           : int64 in units of 2**-30, `TOP_P_ONE` keeps all; `uses_top_p` where some row
        may not.
    min_p_gap_limit_R : float32, how large (largest logit - logit) / temperature may be, by
        `min_p`: -log(min_p); infinite where the row has none.
    top_p_bound_R     : float32, a gap beyond which top-p keeps no token.
    uses_list         : every row has a top-k of at most `MAX_LISTED_TOP_K`.
    """

    top_k_R: Tensor
    max_top_k: int
    top_p_R: Tensor
    uses_top_p: bool
    min_p_gap_limit_R: Tensor
    top_p_bound_R: Tensor
    uses_list: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRows:
    """Rows with a temperature above 0. `rows_R` int64 is their index in the batch, None if they are
    the whole batch; in that case `is_drawn_R`, bool, may exempt rows, which take the best token.

    seeds_R, positions_R: int64, the seed of the output and the absolute index of the token to be
        sampled.
    temperature_R: float32.
    """

    rows_R: Tensor | None
    seeds_R: Tensor
    positions_R: Tensor
    temperature_R: Tensor
    filters: Filters | None
    is_drawn_R: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyRows:
    """Rows with any penalty: their index in the batch and their slot (int64), and the penalties
    (float32).
    """

    rows_R: Tensor
    slots_R: Tensor
    repetition_R: Tensor
    presence_R: Tensor
    frequency_R: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitBias:
    """What is added to individual logits of this shard. A flat index (int64) is the row in the
    batch times the number of columns, plus the column.
    """

    flat_indices_N: Tensor
    values_N: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """Rows that report logprobs: index in the batch on the device and on the host, and how many
    alternatives each.
    """

    rows_L: Tensor
    rows: tuple[int, ...]
    num_top_logprobs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """What one step samples. At most one draw of each kind (see `_kind`); without any, all rows are
    greedy.

    `masked_N`: flat indices as in `LogitBias`, which nothing may choose.
    """

    num_rows: int
    draws: tuple[DrawRows, ...]
    penalties: PenaltyRows | None = None
    bias: LogitBias | None = None
    masked_N: Tensor | None = None
    logprobs: LogprobRows | None = None


class StaticSamplingRows:
    """The parameters of up to `max_sampling_rows` rows in arrays that never move, and tensors like
    them: the static inputs of the graphs that sample. Rows of padding are sampled with what an
    earlier step wrote for them, or with what is written here: always with numbers that every kind
    takes.
    """

    def __init__(self, max_sampling_rows: int, keep: PutFunction) -> None:
        self.arrays: dict[str, npt.NDArray[Any]] = {
            "position": np.zeros(max_sampling_rows, np.int64),
            "is_drawn": np.zeros(max_sampling_rows, np.bool_),
            "seed": np.zeros(max_sampling_rows, np.int64),
            "top_k": np.ones(max_sampling_rows, np.int64),
            "top_p": np.full(max_sampling_rows, TOP_P_ONE, np.int64),
            "temperature": np.ones(max_sampling_rows, np.float32),
            "min_p_gap_limit": np.full(max_sampling_rows, math.inf, np.float32),
            "top_p_bound": np.full(max_sampling_rows, math.inf, np.float32),
        }
        self._tensors = {name: keep(values_S) for name, values_S in self.arrays.items()}

    def batch(self, num_rows: int, kind: int) -> SamplingBatch:
        """The first `num_rows` rows, of this kind or greedy. Every top-k is 1 to
        `MAX_GRAPH_TOP_K`.
        """
        tensors = {name: tensor[:num_rows] for name, tensor in self._tensors.items()}
        filters = Filters(
            top_k_R=tensors["top_k"],
            max_top_k=MAX_GRAPH_TOP_K,
            top_p_R=tensors["top_p"],
            uses_top_p=True,
            min_p_gap_limit_R=tensors["min_p_gap_limit"],
            top_p_bound_R=tensors["top_p_bound"],
            uses_list=True,
        )
        draw_rows = DrawRows(
            rows_R=None,
            seeds_R=tensors["seed"],
            positions_R=tensors["position"],
            temperature_R=tensors["temperature"],
            filters=filters if kind == LISTED_KIND else None,
            is_drawn_R=tensors["is_drawn"],
        )
        return SamplingBatch(num_rows=num_rows, draws=() if kind == GREEDY_KIND else (draw_rows,))


class SamplingState:
    """Parameters by slot. `shard` is this rank's."""

    def __init__(self, shard: VocabularyShard, max_num_seqs: int, device: torch.device) -> None:
        self._shard = shard
        self._device = device
        self._sampling: list[ResolvedSampling | None] = [None] * max_num_seqs
        # Slots with rare parameters, so that a step without them costs nothing.
        self._bias: dict[int, tuple[Int64Array, npt.NDArray[np.float32]]] = {}
        self._stop_columns: dict[int, Int64Array] = {}
        self.penalized_slots: set[int] = set()
        self._logprob_slots: set[int] = set()
        self._table = np.zeros(max_num_seqs, PARAMETERS_DTYPE)

    def admit(self, slot: int, sampling: ResolvedSampling, num_prompt_tokens: int) -> None:
        """Give `slot` the parameters of a new row, whatever it held before."""
        self.release(slot)
        self._sampling[slot] = sampling
        top_k = sampling.top_k if sampling.top_k < self._shard.vocab_size else 0
        top_p = min(round(sampling.top_p * TOP_P_ONE), TOP_P_ONE)
        min_p_gap_limit = -math.log(sampling.min_p) if sampling.min_p > 0 else math.inf
        kind = _kind(float(np.float32(sampling.temperature)), top_k, top_p, min_p_gap_limit)
        row = {
            "seed": sampling.seed,
            "top_k": top_k,
            "top_p": top_p,
            "kind": kind,
            "min_tokens": sampling.min_tokens,
            "num_prompt_tokens": num_prompt_tokens,
            "logprobs": sampling.logprobs,
            "temperature": sampling.temperature,
            "min_p_gap_limit": min_p_gap_limit,
            "top_p_bound": self._top_p_bound(top_p),
            "repetition": sampling.repetition_penalty,
            "presence": sampling.presence_penalty,
            "frequency": sampling.frequency_penalty,
        }
        self._table[slot] = tuple(row[name] for name in _INT_FIELDS + _FLOAT_FIELDS)
        if (row["repetition"], row["presence"], row["frequency"]) != (1, 0, 0):
            self.penalized_slots.add(slot)
        if sampling.logprobs >= 0:
            self._logprob_slots.add(slot)
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            columns, is_inside = self._shard.columns_of(np.asarray(ids, np.int64))
            self._bias[slot] = columns, np.asarray(values, np.float32)[is_inside]
        if sampling.min_tokens > 0:
            stop_token_ids = np.asarray(sorted(sampling.stop_token_ids), np.int64)
            self._stop_columns[slot] = self._shard.columns_of(stop_token_ids)[0]

    def release(self, slot: int) -> None:
        """Forget what `slot` held."""
        self._sampling[slot] = None
        self._bias.pop(slot, None)
        self._stop_columns.pop(slot, None)
        self.penalized_slots.discard(slot)
        self._logprob_slots.discard(slot)

    def batch(
        self,
        slots: Sequence[int] | Int64Array,
        positions: Sequence[int] | Int64Array,
        put: PutFunction | None = None,
    ) -> SamplingBatch:
        """The batch of the sampling rows at `slots`, in this order; `positions` are the absolute
        indices (in prompt and output) of the tokens to be sampled. `put` takes an array to the
        device, by default at once.
        """
        put = put or self.upload
        slots_B = np.asarray(slots, np.int64)
        positions_B = np.asarray(positions, np.int64)
        kind_B = self._table["kind"][slots_B]
        kinds = [kind for kind in sorted(set(kind_B.tolist())) if kind != GREEDY_KIND]
        return SamplingBatch(
            num_rows=len(slots_B),
            draws=tuple(self._draw_rows(slots_B, positions_B, kind_B, kind, put) for kind in kinds),
            penalties=self._penalty_rows(slots_B, put),
            bias=self._logit_bias(slots_B, put),
            masked_N=self._masked_columns(slots_B, positions_B, put),
            logprobs=self._logprob_rows(slots_B, put),
        )

    def graph_kind(self, slots_B: Int64Array) -> int | None:
        """The kind of the graph that samples these rows, which may be greedy in any: one of
        `GRAPH_KINDS`. None if no graph does: they are of several kinds or of others, are
        `LISTED_KIND` with a top-k above `MAX_GRAPH_TOP_K`, or any slot in use has penalties, a
        bias, a minimum of tokens or logprobs.
        """
        if self.penalized_slots or self._bias or self._stop_columns or self._logprob_slots:
            return None
        kind_B = self._table["kind"][slots_B]
        kind = int(kind_B.max(initial=GREEDY_KIND))
        has_kind_B = kind_B == kind
        fits_graph = kind in GRAPH_KINDS and (has_kind_B | (kind_B == GREEDY_KIND)).all()
        if kind == LISTED_KIND and fits_graph:
            fits_graph = self._table["top_k"][slots_B[has_kind_B]].max() <= MAX_GRAPH_TOP_K
        return kind if fits_graph else None

    def fill(
        self, static_rows: StaticSamplingRows, slots_B: Int64Array, positions_B: Int64Array
    ) -> None:
        """Write the parameters of these rows, which a graph samples."""
        arrays = {name: values_S[: len(slots_B)] for name, values_S in static_rows.arrays.items()}
        arrays["position"][:] = positions_B
        for name in arrays.keys() - {"position", "is_drawn"}:
            arrays[name][:] = self._table[name][slots_B]
        arrays["is_drawn"][:] = arrays["temperature"] > 0
        # Greedy rows, and later the padding in their place, go through the filters of the others
        # and need numbers that filters take.
        arrays["temperature"][~arrays["is_drawn"]] = 1
        np.clip(arrays["top_k"], 1, MAX_GRAPH_TOP_K, out=arrays["top_k"])

    def check(self) -> None:
        """Laws: a free slot holds no bias, no stop ids and is in no set; every column lies in this
        shard; tables agree with the parameters they were made from.
        """
        width = self._shard.num_columns
        for slot, columns in [(s, c) for s, (c, _) in self._bias.items()] + list(
            self._stop_columns.items()
        ):
            if self._sampling[slot] is None:
                raise AssertionError(f"free slot {slot} holds logit entries")
            if len(columns) and (columns.min() < 0 or columns.max() >= width):
                raise AssertionError(
                    f"slot {slot} holds columns {columns} outside a shard of {width}"
                )
        for slot, sampling in enumerate(self._sampling):
            if sampling is None and slot in self.penalized_slots | self._logprob_slots:
                raise AssertionError(
                    f"free slot {slot} is recorded as having penalties or logprobs"
                )
            if sampling is not None and self._table["seed"][slot] != sampling.seed:
                raise AssertionError(
                    f"slot {slot} has seed {self._table['seed'][slot]}, admitted with"
                    f" {sampling.seed}"
                )

    def _top_p_bound(self, top_p: int) -> float:
        """The gap beyond which top-p keeps nothing: all tokens beyond it together weigh less than 1
        - top_p of the best token's weight. The slack covers the rounding of the exponentials.
        """
        if top_p >= TOP_P_ONE:
            return math.inf
        return math.log(self._shard.vocab_size / (1 - top_p / TOP_P_ONE)) * 1.0001 + 0.01

    def _draw_rows(
        self,
        slots_B: Int64Array,
        positions_B: Int64Array,
        kind_B: Int64Array,
        kind: int,
        put: PutFunction,
    ) -> DrawRows:
        rows = (kind_B == kind).nonzero()[0]
        is_all = len(rows) == len(slots_B)
        slots = slots_B if is_all else slots_B[rows]
        return DrawRows(
            rows_R=None if is_all else put(rows),
            seeds_R=put(self._table["seed"][slots]),
            positions_R=put(positions_B if is_all else positions_B[rows]),
            temperature_R=put(self._table["temperature"][slots]),
            filters=None
            if kind == UNFILTERED_KIND
            else self._filters(slots, kind == LISTED_KIND, put),
        )

    def _filters(self, slots: Int64Array, uses_list: bool, put: PutFunction) -> Filters:
        top_k = self._table["top_k"][slots]
        top_p = self._table["top_p"][slots]
        return Filters(
            top_k_R=put(top_k),
            max_top_k=int(top_k.max()),
            top_p_R=put(top_p),
            uses_top_p=int(top_p.min()) < TOP_P_ONE,
            min_p_gap_limit_R=put(self._table["min_p_gap_limit"][slots]),
            top_p_bound_R=put(self._table["top_p_bound"][slots]),
            uses_list=uses_list,
        )

    def _penalty_rows(self, slots_B: Int64Array, put: PutFunction) -> PenaltyRows | None:
        if not self.penalized_slots:
            return None
        repetition, presence, frequency = (
            self._table[n][slots_B] for n in ("repetition", "presence", "frequency")
        )
        rows = ((repetition != 1) | (presence != 0) | (frequency != 0)).nonzero()[0]
        if not len(rows):
            return None
        return PenaltyRows(
            rows_R=put(rows),
            slots_R=put(slots_B[rows]),
            repetition_R=put(repetition[rows]),
            presence_R=put(presence[rows]),
            frequency_R=put(frequency[rows]),
        )

    def _logit_bias(self, slots_B: Int64Array, put: PutFunction) -> LogitBias | None:
        if not self._bias:
            return None
        slots = slots_B.tolist()
        bias_of_rows = [
            (i, *self._bias[slot]) for i, slot in enumerate(slots) if slot in self._bias
        ]
        flat_indices_N = self._flat_indices([(i, columns) for i, columns, _ in bias_of_rows], put)
        if flat_indices_N is None:
            return None
        return LogitBias(
            flat_indices_N=flat_indices_N,
            values_N=put(np.concatenate([values for *_, values in bias_of_rows])),
        )

    def _masked_columns(
        self, slots_B: Int64Array, positions_B: Int64Array, put: PutFunction
    ) -> Tensor | None:
        """Flat indices of the stop ids of rows with fewer than `min_tokens` of output; a row's
        output so far follows from its position.
        """
        if not self._stop_columns:
            return None
        num_output_tokens_B = positions_B - self._table["num_prompt_tokens"][slots_B]
        rows = (num_output_tokens_B < self._table["min_tokens"][slots_B]).nonzero()[0].tolist()
        return self._flat_indices([(i, self._stop_columns[int(slots_B[i])]) for i in rows], put)

    def _flat_indices(
        self, columns_of_rows: list[tuple[int, Int64Array]], put: PutFunction
    ) -> Tensor | None:
        """Flat indices of columns in rows of the batch; None if there are no columns."""
        width = self._shard.num_columns
        indices = [row * width + columns for row, columns in columns_of_rows]
        return put(np.concatenate(indices)) if sum(map(len, indices)) else None

    def _logprob_rows(self, slots_B: Int64Array, put: PutFunction) -> LogprobRows | None:
        if not self._logprob_slots:
            return None
        num_top_logprobs = self._table["logprobs"][slots_B]
        rows = (num_top_logprobs >= 0).nonzero()[0]
        if not len(rows):
            return None
        num_top_L = np.minimum(num_top_logprobs[rows], self._shard.vocab_size)
        return LogprobRows(
            rows_L=put(rows), rows=tuple(rows.tolist()), num_top_logprobs=tuple(num_top_L.tolist())
        )

    def upload(self, values: npt.NDArray[np.generic]) -> Tensor:
        """The array on the device: on a GPU a copy, asynchronously; on a CPU the same memory."""
        tensor = torch.from_numpy(values)
        if self._device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _kind(temperature: float, top_k: int, top_p: int, min_p_gap_limit: float) -> int:
    """The kind of draw that a row needs."""
    if temperature == 0:
        return GREEDY_KIND
    if 0 < top_k <= MAX_LISTED_TOP_K:
        return LISTED_KIND
    keeps_all = top_k == 0 and top_p == TOP_P_ONE and min_p_gap_limit == math.inf
    return UNFILTERED_KIND if keeps_all else DESCENT_KIND


# Kinds of rows: the best token; any token; filters whose limits follow from a list of the nearest
# tokens; any other filters.
GREEDY_KIND, UNFILTERED_KIND, LISTED_KIND, DESCENT_KIND = range(4)
# Those that graphs sample, and the largest top-k with which they do: a longer list takes longer.
GRAPH_KINDS = (GREEDY_KIND, UNFILTERED_KIND, LISTED_KIND)
MAX_GRAPH_TOP_K = 32
_INT_FIELDS = ("seed", "top_k", "top_p", "kind", "min_tokens", "num_prompt_tokens", "logprobs")
_FLOAT_FIELDS = (
    "temperature",
    "min_p_gap_limit",
    "top_p_bound",
    "repetition",
    "presence",
    "frequency",
)
# What is kept of each slot.
PARAMETERS_DTYPE = np.dtype(
    [*((name, np.int64) for name in _INT_FIELDS), *((name, np.float32) for name in _FLOAT_FIELDS)]
)
