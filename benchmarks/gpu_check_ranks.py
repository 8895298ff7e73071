"""The section of the GPU check with two ranks, each on a GPU of its own: the time of sums between
them, their tokens beside those of one rank, and steps of the 0.6B shape.

No Ray: the process of the section is rank 0, and starts rank 1, which runs this module. Both do the
same work under the same scheduler, whose plans follow from the requests alone, so they need no
messages about what to run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any
from zlib import crc32

import torch

from benchmarks.common import QWEN3_0_6B
from benchmarks.gpu_check_common import Check, Row, rounded
from benchmarks.gpu_check_engine import COMPARED, TINY, near_zero, open_engine, run_all
from benchmarks.gpu_check_steps import decode_step
from benchmarks.gpu_check_tokens import add_ragged
from benchmarks.in_process import InProcessExecutor
from configs.engine import ResolvedConfig
from workers.device import CudaDevice
from workers.models.weights import WeightSlice
from workers.parallel.backend import Address, open_rendezvous
from workers.parallel.group import TensorParallelGroup
from workers.worker import Worker

SIZE = 2
_TIMEOUT_S = 30.0
_SUMS = 20  # per graph
_REPLAYS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How both ranks run. eager, shared_memory: options of the engine. small: as in `Check`.
    addresses: where they meet, for each part of the work.
    """

    small: bool
    eager: bool
    shared_memory: bool
    addresses: tuple[Address, ...] = ()

    @property
    def name(self) -> str:
        return ("eager" if self.eager else "graph") + ("" if self.shared_memory else ", not shared")


def two_ranks(check: Check) -> None:
    """Through graphs, with symmetric memory and with NCCL alone; and eager."""
    if check.on_gpu and torch.cuda.device_count() < SIZE:
        check.add("two ranks", lambda: {"note": "needs two GPUs"})
        return
    ways = ((False, True), (False, False), (True, True)) if check.on_gpu else ((True, True),)
    alone: dict[str, Any] = {}
    for eager, shared in ways:
        run_way(check, Way(small=check.small, eager=eager, shared_memory=shared), alone)


def run_way(check: Check, way: Way, alone: dict[str, Any]) -> None:
    """Add the rows of rank 0, and one that says whether rank 1 sampled the same. `alone` keeps the
    tokens of one rank.
    """
    with ExitStack() as stack:
        rendezvous = [open_rendezvous("127.0.0.1", _TIMEOUT_S) for _ in PARTS]
        addresses = tuple(each.address for each in rendezvous)
        way = replace(way, addresses=addresses)
        other = stack.enter_context(_other_rank(way))
        mine: list[Any] = []
        for address, part in zip(addresses, PARTS, strict=True):
            part(check, way, 0, address, mine)

        def compare() -> Row:
            # Its standard input stays open meanwhile. The section's limit bounds this.
            assert other.stdout is not None
            said = other.stdout.read()
            if code := other.wait(_TIMEOUT_S):
                return {"error": f"exit code {code}", "passed": False}
            return {"passed": json.loads(said) == mine}

        check.add(f"{way.name}: both ranks sample the same", compare)
    compare_with_one_rank(check, way, mine, alone)


def compare_with_one_rank(check: Check, way: Way, mine: list[Any], alone: dict[str, Any]) -> None:
    """Add a row that says whether the ranks sampled what one rank does."""
    if "tokens" not in alone:
        alone["tokens"] = _tokens(check, way, InProcessExecutor)
    check.add(f"{way.name}: as one rank", lambda: {"passed": mine == [alone["tokens"]]})


@contextmanager
def _other_rank(way: Way) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.gpu_check_ranks", json.dumps(asdict(way))]
    # It ends when its standard input is closed, so it ends even if this process is killed.
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        try:
            yield other
        finally:
            other.kill()


def sums(check: Check, way: Way, rank: int, address: Address, outputs: list[Any]) -> None:
    """Adds one row per size: microseconds of a sum, on a GPU within a graph."""
    group = TensorParallelGroup(rank, SIZE, check.device)
    group.join(address, _TIMEOUT_S)
    try:
        group.share_memory(_TIMEOUT_S, way.shared_memory)
        for kib in (2, 32) if way.small else (2, 32, 512, 1024, 4096):
            tensor = torch.ones(512 * kib, dtype=torch.bfloat16, device=check.device)
            check.add(f"{way.name}: sum of {kib} KiB", partial(_sum, check, group, tensor))
    finally:
        group.close()


def _sum(check: Check, group: TensorParallelGroup, tensor: torch.Tensor) -> Row:
    """Both ranks sum equally often, whatever the clock says. The time of a sum includes a
    multiplication, which keeps the numbers from growing.
    """

    def run() -> None:
        for _ in range(_SUMS):
            group.all_reduce(tensor).mul_(1 / SIZE)

    if not check.on_gpu:
        began = time.perf_counter()
        run()
        us = 1e6 * (time.perf_counter() - began)
    else:
        graph = CudaDevice(check.device).capture(run)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        us = 1e3 * start.elapsed_time(end) / _REPLAYS
    passed = bool((tensor == 1).all())
    return {"us": rounded(us / _SUMS), "way": group.transport, "passed": passed}


class _OneOfRanks(InProcessExecutor):
    """An `Executor` over one of two ranks that run the same plans."""

    def __init__(self, rank: int, address: Address, config: ResolvedConfig) -> None:
        self.worker = Worker(config, rank)
        self.report = self.worker.start(address, gpu_index=rank)
        self.worker.allocate_cache(self.report.num_kv_blocks)


def tokens(check: Check, way: Way, rank: int, address: Address, outputs: list[Any]) -> None:
    """Tokens in float32, sampled in every way. Adds them to `outputs`."""
    make = partial(_OneOfRanks, rank, address)
    outputs.append(_tokens(check, way, make, tensor_parallel_size=SIZE))


def _tokens(
    check: Check,
    way: Way,
    make_executor: Callable[[ResolvedConfig], InProcessExecutor],
    **options: Any,
) -> list[list[int]]:
    with open_engine(
        check,
        TINY if way.small else COMPARED,
        _backend(check),
        by_name,
        make_executor,
        dtype="float32",
        enforce_eager=way.eager,
        shared_memory=way.shared_memory,
        num_kv_blocks=960,
        max_num_seqs=4 if way.small else 20,
        max_num_batched_tokens=64 if way.small else 512,
        max_model_len=64 if way.small else 1024,
        **options,
    ) as (engine, _, _):
        count = add_ragged(check, engine)
        found = run_all(engine)
    return [list(found[str(number)]) for number in range(count)]


def decode(check: Check, way: Way, rank: int, address: Address, outputs: list[Any]) -> None:
    """Adds one row per batch, beside half of the floor of one rank."""
    batches, context, steps = ((2,), 8, 2) if way.small else ((1, 64, 256), 512, 40)
    with open_engine(
        check,
        TINY if way.small else QWEN3_0_6B,
        _backend(check),
        near_zero,
        partial(_OneOfRanks, rank, address),
        enforce_eager=way.eager,
        shared_memory=way.shared_memory,
        enable_prefix_caching=False,
        max_num_seqs=batches[-1],
        max_num_batched_tokens=16384,
        max_model_len=64 if way.small else None,
        num_kv_blocks=batches[-1] * (context + 128) // 16,
        tensor_parallel_size=SIZE,
    ) as parts:
        for batch in batches:  # both ranks measure with one engine to the end, whatever fails
            check.add(
                f"{way.name}: {'tiny' if way.small else '0.6B'} step, batch {batch}",
                partial(decode_step, check, batch, context, steps, parts, SIZE),
            )


PARTS = (sums, tokens, decode)


def _backend(check: Check) -> str:
    """The backend. Where there is no GPU, only the work of the ranks is checked, so any backend
    will do.
    """
    return "triton" if check.on_gpu else "cpu"


def by_name(piece: WeightSlice) -> None:
    """Weights for comparing tokens, as `wide`, that do not depend on how they are cut."""
    generator = torch.Generator().manual_seed(crc32(piece.name.encode()))
    full = torch.randn(piece.shape, generator=generator)
    if len(piece.shape) == 1:
        full = 1 + 0.3 * full
    else:
        rows_or_heads = "embed_tokens" in piece.name or "lm_head" in piece.name
        full *= 0.5 if rows_or_heads else 2.0 * piece.shape[1] ** -0.5
    piece.target.copy_(full.narrow(piece.dim, piece.start, piece.target.shape[piece.dim]))


def main() -> None:
    """Rank 1: prints its tokens at the end."""

    def end_with_parent() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    way = Way(**json.loads(sys.argv[1]))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 1) if on_gpu else torch.device("cpu")
    check = Check(device=device, small=way.small, backends={})
    outputs: list[Any] = []
    for (host, port), part in zip(way.addresses, PARTS, strict=True):
        part(check, way, 1, (host, port), outputs)
    print(json.dumps(outputs))
    sys.exit(any("error" in row for row in check.rows))


if __name__ == "__main__":
    main()
