"""The promises of CUDA's driver on which memory that outlives ranks depends, and which
`tests/workers/memory/fake_cuda.c` takes for granted in other tests.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from workers.memory.gpu import GpuMemoryHandle, SharedGpuMemory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NUM_BYTES = 300 * 2**20
LIMIT_S = 60.0
SPAWN: Any = multiprocessing.get_context("spawn")


def start(target: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """A process, and the pipe to it."""
    mine, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, mine


def answer_of(pipe: Connection) -> Any:
    assert pipe.poll(LIMIT_S), "no answer"
    return pipe.recv()


def _hold(pipe: Connection) -> None:
    torch.cuda.set_device(0)
    memory = SharedGpuMemory.create(NUM_BYTES, max_bytes=2 * NUM_BYTES)
    memory.grow(2 * NUM_BYTES)
    memory.tensor().fill_(3)
    torch.cuda.synchronize()
    pipe.send(memory.handle)
    pipe.recv()


def _write(pipe: Connection, handle: GpuMemoryHandle, may_write: bool) -> None:
    torch.cuda.set_device(0)
    memory = SharedGpuMemory.open(handle)
    tensor = memory.tensor()
    if may_write:
        memory.allow_writing()
    try:
        tensor[:1].add_(9)  # by a kernel
        torch.cuda.synchronize()
    except RuntimeError as error:
        pipe.send(str(error))
    else:
        pipe.send("written")


def _write_after_it_is_forbidden(pipe: Connection) -> None:
    torch.cuda.set_device(0)
    memory = SharedGpuMemory.create(NUM_BYTES)
    tensor = memory.tensor()
    tensor.fill_(1)
    torch.cuda.synchronize()
    memory.forbid_writing()
    pipe.send((memory.handle, int(tensor[-1])))
    pipe.recv()
    try:
        tensor[:1].add_(1)
        torch.cuda.synchronize()
    except RuntimeError as error:
        pipe.send(str(error))
    else:
        pipe.send("written")


def test_memory_outlives_its_maker_and_is_free_once_nobody_has_it() -> None:
    torch.cuda.set_device(0)
    free_before, _ = torch.cuda.mem_get_info()
    process, pipe = start(_hold)
    memory = SharedGpuMemory.open(answer_of(pipe))
    process.kill()
    process.join()
    tensor = memory.tensor()
    assert len(tensor) == memory.num_bytes >= 2 * NUM_BYTES
    assert int(tensor.min()) == int(tensor.max()) == 3
    del tensor, memory
    until_s = time.monotonic() + LIMIT_S
    while torch.cuda.mem_get_info()[0] < free_before - NUM_BYTES and time.monotonic() < until_s:
        time.sleep(0.05)
    assert torch.cuda.mem_get_info()[0] >= free_before - NUM_BYTES


@pytest.mark.parametrize("may_write", [True, False])
def test_a_gpu_refuses_a_write_of_who_has_only_opened_memory(may_write: bool) -> None:
    torch.cuda.set_device(0)
    memory = SharedGpuMemory.create(NUM_BYTES)
    memory.tensor().zero_()
    torch.cuda.synchronize()
    _, pipe = start(_write, memory.handle, may_write)
    answer = answer_of(pipe)
    assert (answer == "written") is may_write, answer
    assert int(memory.tensor()[0]) == (9 if may_write else 0)


def test_a_gpu_refuses_a_write_to_memory_that_is_sealed() -> None:
    torch.cuda.set_device(0)
    _, pipe = start(_write_after_it_is_forbidden)
    handle, last = answer_of(pipe)
    memory = SharedGpuMemory.open(handle)
    pipe.send(None)
    answer = answer_of(pipe)
    assert answer != "written" and last == 1
    assert int(memory.tensor()[0]) == 1


def test_graphs_read_memory_that_can_only_be_read() -> None:
    """A spare captures its graphs before it may write, and writes with them afterwards. (Its first
    run, before a capture, writes nothing, as padding rows do not.)
    """
    torch.cuda.set_device(0)
    memory = SharedGpuMemory.create(NUM_BYTES)
    memory.tensor().fill_(2)
    torch.cuda.synchronize()
    opened = SharedGpuMemory.open(memory.handle)
    tensor, is_live = opened.tensor(), torch.zeros(1, dtype=torch.uint8, device="cuda")
    sums = torch.zeros(1, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums.copy_(tensor[:1000].sum())
        tensor[:1].add_(5 * is_live)  # a kernel, as those that write to the cache
    opened.allow_writing()
    is_live.fill_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert int(sums) == 2000 and int(memory.tensor()[0]) == 7
