"""What the sections of the GPU check share: where results go, the backends, attention over shuffled
blocks, and time.

Legend: T tokens of the step, B rows, W blocks of a row.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kernels.decode_parts import part_starts
from kernels.interface import Kernels
from kernels.metadata import AttentionMetadata, DecodeParts
from workers.device import CudaDevice
from workers.roofline import Machine

Row = dict[str, Any]
Call = Callable[[], object]

# Together, the sets of inputs used in turn have this many bytes, several times the second-level
# cache, if that many sets are possible.
_ROTATED_BYTES = 256 * 2**20
_MOST_SETS = 64
# If the GPU's clock has slowed down meanwhile, it recovers within the first repetitions.
_WARMED_US = 30_000.0
_TIMED_US = 50_000.0
_FEWEST_REPLAYS = 3


@dataclass(slots=True, kw_only=True)
class Check:
    """One run. `backends`: Triton's, and flash-attn's where there is one. `ceilings`: what this
    machine can sustain; an H200's data sheet until it is measured.

    `small`: tiny shapes, for any device. `rows` are the results of the running section; `on_row` is
    called after each. `family`: the kernels that `numerics` checks, None for all of them.
    """

    device: torch.device
    small: bool
    backends: dict[str, Kernels]
    ceilings: Machine = field(
        default_factory=lambda: Machine(memory_bytes_per_s=4.8e12, flops_per_s=9.9e14)
    )
    rows: list[Row] = field(default_factory=list)
    on_row: Callable[[], object] = lambda: None
    family: str | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16, or float16 in the interpreter, whose products of bfloat16 are wrong."""
        return torch.bfloat16 if self.on_gpu else torch.float16

    def add(self, name: str, measure: Callable[[], Row]) -> bool:
        """Append the row that `measure` gives. If it raises, the row has not passed, and the answer
        is False.
        """
        raised = False
        try:
            row = measure()
        except Exception as error:
            traceback.print_exc()
            raised = True
            row = {
                "error": f"{type(error).__name__}: {error}".splitlines()[0][:200],
                "passed": False,
            }
        self.rows.append({"name": name, **row})
        self.on_row()
        return not raised

    def floor_us(self, num_bytes: float, flops: float = 0.0) -> float:
        """Lower bound in microseconds on this machine."""
        seconds = max(
            num_bytes / self.ceilings.memory_bytes_per_s, flops / self.ceilings.flops_per_s
        )
        return 1e6 * seconds

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Random numbers on the device, in the dtype of the check unless told otherwise."""
        return torch.randn(shape, dtype=dtype or self.dtype, device=self.device)


def rounded(value: float, digits: int = 4) -> float | str:
    """Rounded to this many significant digits; a word for values that JSON cannot represent."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)


def refusal(kernels: Kernels, head_dim: int, block_size: int | None = None) -> str | None:
    """Why a backend cannot compute this shape, None if it can. `block_size` None: its default."""
    capabilities = kernels.capabilities
    try:
        capabilities.check_shape(head_dim, block_size or capabilities.default_block_size)
    except ValueError as error:
        return str(error)
    return None


def attention_of(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    block_ids: torch.Tensor,
    block_size: int,
    device: torch.device,
    max_seq_len: int | None = None,
) -> AttentionMetadata:
    """Rows whose blocks are consecutive `block_ids`. Table entries past the end of a row name the
    first block.

    `max_seq_len`: a bound wider than the longest row, in which case the table is wider too. Every
    token's slot is its place in these blocks.
    """
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    width = max(1, *counts, -(-(max_seq_len or 0) // block_size))
    table_BW = torch.full((len(counts), width), int(block_ids[0]), dtype=torch.int32)
    slots: list[torch.Tensor] = []
    used = block_ids[: sum(counts)].split(counts)
    for row, (blocks, seq_len, query_len) in enumerate(
        zip(used, seq_lens, query_lens, strict=True)
    ):
        table_BW[row, : len(blocks)] = blocks
        positions = torch.arange(seq_len - query_len, seq_len)
        inside = positions.clamp(min=0)
        places = (
            table_BW[row].to(torch.int64)[inside // block_size] * block_size + inside % block_size
        )
        slots.append(torch.where(positions >= 0, places, -1))
    return AttentionMetadata(
        query_start_B1=running_sum(query_lens).to(device),
        seq_start_B1=running_sum(seq_lens).to(device),
        seq_lens_B=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table_BW=table_BW.to(device),
        kv_places_T=torch.cat(slots).to(device),
        max_query_len=max(query_lens),
        max_seq_len=max_seq_len or max(seq_lens),
    )


def with_parts(
    attn: AttentionMetadata,
    query_lens: Sequence[int],
    kernels: Kernels,
    kv_heads: int,
    num_rows: int | None = None,
) -> AttentionMetadata:
    """The metadata with the decode rows at the front divided into parts as the backend needs it.
    `num_rows`: these with rows of padding, which have no parts (`BatchState.stage_decode`).
    """
    device = attn.seq_lens_B.device
    num_live = next((row for row, n in enumerate(query_lens) if n != 1), len(query_lens))
    num_rows = num_live if num_rows is None else num_rows
    max_parts = kernels.max_decode_parts(num_rows, kv_heads, attn.max_seq_len, device)
    if max_parts == 0:
        return attn
    starts = part_starts(attn.seq_lens_B[:num_live].cpu().numpy(), max_parts)
    starts = np.pad(starts, (0, num_rows - num_live), mode="edge")
    decode_parts = DecodeParts(
        num_rows=num_rows,
        max_parts=max_parts,
        part_start_B1=torch.from_numpy(starts).to(device),
        num_arrived_parts_BK=torch.zeros(num_rows, kv_heads, dtype=torch.int32, device=device),
    )
    return dataclasses.replace(attn, decode_parts=decode_parts)


def running_sum(lengths: Iterable[int]) -> torch.Tensor:
    """0, then the sum up to each, int32."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def num_sets(check: Check, num_bytes: int) -> int:
    """How many sets of inputs to use in turn, so that none is still in the cache when its turn
    comes again; see `share`.
    """
    return max(1, min(_MOST_SETS, -(-_ROTATED_BYTES // num_bytes))) if check.on_gpu else 1


def share(check: Check, num_bytes: int, floor_us: float, us: float) -> Row:
    """The floor as a fraction of the time; None for inputs so small that all sets stay in the
    cache, which is faster than the memory that the floor assumes.
    """
    if check.on_gpu:
        cache_bytes = torch.cuda.get_device_properties(check.device).L2_cache_size
        if num_sets(check, num_bytes) * num_bytes < cache_bytes:
            return {"cached": True}
    return {"share": rounded(floor_us / us, 3)}


def median_us(check: Check, calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one of `calls`, which do the same to different inputs: the median over
    replays of a graph of all of them, in device time. Without a GPU, the host time of one round,
    which means nothing.
    """

    def run() -> None:
        kept = [call() for call in calls]  # so that each call writes its own memory
        del kept

    if not check.on_gpu:
        began = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - began) / len(calls)
    graph = CudaDevice(check.device).capture(run)
    return _median_replay_us(graph.replay) / len(calls)


def _median_replay_us(replay: Callable[[], None]) -> float:
    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        return 1000.0 * float(start.elapsed_time(end))

    warmed_us = 0.0
    while warmed_us < _WARMED_US:
        warmed_us += once()
    times = [once() for _ in range(_FEWEST_REPLAYS)]
    while sum(times) < _TIMED_US:
        times.append(once())
    return statistics.median(times)


def timed(
    check: Check, name: str, make: Callable[[], Call], num_bytes: int, flops: float = 0.0
) -> None:
    """Add a row with the time of a call and its floor. `make` returns a call on its own inputs."""

    def measure() -> Row:
        us = median_us(check, [make() for _ in range(num_sets(check, num_bytes))])
        floor = check.floor_us(num_bytes, flops)
        return {"us": rounded(us), "floor_us": rounded(floor)} | share(check, num_bytes, floor, us)

    check.add(name, measure)


def free_memory(check: Check) -> None:
    """Free the memory that nothing holds any more."""
    gc.collect()
    if check.on_gpu:
        torch.cuda.empty_cache()
