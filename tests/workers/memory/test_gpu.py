"""Memory of a GPU that outlives the process that made it, on a driver that is made up: see
`fake_cuda.c`.
"""

from __future__ import annotations

import dataclasses
import errno
import faulthandler
import gc
import io
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.gpu.backend import TRITON_KERNELS
from tests.cluster.processes import open_files
from tests.workers.memory import fake_cuda, holder
from tests.workers.memory.holder import Form
from workers.memory import cuda_driver
from workers.memory.descriptors import DescriptorServer, take_descriptors
from workers.memory.gpu import GpuMemoryHandle, SharedGpuMemory
from workers.memory.inheritance import InheritedMemory, RankMemoryHandles, handle_of
from workers.memory.weights import (
    WeightsFile,
    _ModelPickler,
    _objects_of_own_process,
    adopt_weights,
)
from workers.models.qwen3 import Qwen3
from workers.progress import Progress

pytestmark = pytest.mark.skipif(not fake_cuda.is_possible, reason="needs gcc and Linux")
PIECE = 2 * 2**20  # the granularity of the driver
FORK: Any = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def driver() -> Iterator[None]:
    with fake_cuda.installed():
        yield


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("fake-cuda")


def test_who_opens_memory_reads_what_its_maker_writes() -> None:
    memory = SharedGpuMemory.create(PIECE + 1)
    assert memory.num_bytes == 2 * PIECE
    opened = SharedGpuMemory.open(memory.handle)
    mine, theirs = memory.tensor(), opened.tensor()
    mine[5000] = 7
    assert theirs[5000] == 7 and len(theirs) == 2 * PIECE
    opened.allow_writing()
    theirs[5001] = 8
    assert mine[5001] == 8
    assert opened.handle.identity == memory.handle.identity


def test_pieces_follow_one_another_and_count_as_progress() -> None:
    progress = Progress()
    memory = SharedGpuMemory.create(0, max_bytes=4 * PIECE)
    first = memory.address
    for num_bytes in (PIECE, PIECE, 2 * PIECE + 1):
        memory.grow(num_bytes, progress)
    assert memory.address == first and progress.allocated_bytes == memory.num_bytes == 3 * PIECE
    assert memory.handle.piece_bytes == (PIECE, 2 * PIECE)
    memory.tensor(PIECE - 2, 4)[:] = 5  # over the border of two pieces
    theirs = SharedGpuMemory.open(memory.handle).tensor()
    assert theirs[PIECE - 3 : PIECE + 3].tolist() == [0, 5, 5, 5, 5, 0]


def test_memory_does_not_grow_beyond_its_addresses_and_what_it_has_stays() -> None:
    memory = SharedGpuMemory.create(PIECE, max_bytes=2 * PIECE)
    before = open_files()
    with pytest.raises(OSError, match=f"only {2 * PIECE} addresses are reserved"):
        memory.grow(3 * PIECE)
    assert memory.num_bytes == PIECE and not open_files() - before
    memory.grow(2 * PIECE)


def _hold(pipe: Connection, num_bytes: int) -> None:
    with fake_cuda.installed():
        memory = SharedGpuMemory.create(num_bytes)
        memory.tensor()[:] = 3
        pipe.send(memory.handle)
        pipe.recv()


def other_process(target: Any, *args: Any) -> tuple[Any, Connection]:
    mine, theirs = FORK.Pipe()
    process = FORK.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, mine


def test_memory_outlives_its_maker_for_whoever_has_opened_it() -> None:
    """Opened only, as a spare does before it has a GPU."""
    process, pipe = other_process(_hold, PIECE)
    handle: GpuMemoryHandle = pipe.recv()
    memory = SharedGpuMemory.open(handle)
    process.kill()
    process.join()
    assert memory.tensor().eq(3).all()
    after = SharedGpuMemory.open(memory.handle)  # who opened it can hand it on
    assert after.handle.identity == handle.identity and after.tensor()[-1] == 3
    with pytest.raises(OSError, match="refused"):
        SharedGpuMemory.open(handle)


def _write(pipe: Connection, handle: GpuMemoryHandle, may_write: bool) -> None:
    faulthandler.disable()
    with fake_cuda.installed():
        memory = SharedGpuMemory.open(handle)
        tensor = memory.tensor()
        if may_write:
            memory.allow_writing()
        tensor[0] = 9


@pytest.mark.parametrize(("may_write", "exit_code"), [(True, 0), (False, -signal.SIGSEGV)])
def test_who_opens_memory_cannot_write_before_it_is_allowed(
    may_write: bool, exit_code: int
) -> None:
    memory = SharedGpuMemory.create(PIECE)
    process, _ = other_process(_write, memory.handle, may_write)
    process.join(20.0)
    assert process.exitcode == exit_code
    assert memory.tensor()[0] == (9 if may_write else 0)


def _write_after_it_is_forbidden(pipe: Connection) -> None:
    faulthandler.disable()
    with fake_cuda.installed():
        memory = SharedGpuMemory.create(PIECE)
        tensor = memory.tensor()
        tensor[0] = 1
        memory.forbid_writing()
        pipe.send(memory.handle)
        pipe.recv()
        tensor[0] = 2


def test_its_maker_cannot_write_once_that_is_forbidden() -> None:
    process, pipe = other_process(_write_after_it_is_forbidden)
    memory = SharedGpuMemory.open(pipe.recv())
    pipe.send(None)
    process.join(20.0)
    assert process.exitcode == -signal.SIGSEGV and memory.tensor()[0] == 1


def test_a_lack_of_memory_is_told_from_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_FREE_BYTES", str(PIECE))
    before = open_files()
    with pytest.raises(OSError, match="cuMemCreate: out of memory") as caught:
        SharedGpuMemory.create(2 * PIECE)
    assert caught.value.errno == errno.ENOMEM and not open_files() - before
    with pytest.raises(OSError, match="cuMemMap: invalid argument"):
        cuda_driver.map_memory(cuda_driver.allocate(PIECE, 0), cuda_driver.reserve(PIECE), 1)


def test_nothing_stays_mapped_or_open_once_nobody_has_it() -> None:
    gc.collect()  # what other tests have left
    before, num_mapped = open_files(), mappings()
    memory = SharedGpuMemory.create(PIECE)
    opened = SharedGpuMemory.open(memory.handle)
    descriptors = (*memory._descriptors, *opened._descriptors)
    assert not any(map(os.get_inheritable, descriptors)), "a program that is started keeps it"
    tensor = opened.tensor()
    del memory, opened
    gc.collect()
    assert mappings() == num_mapped + 1 and tensor[0] == 0, "a tensor keeps it"
    del tensor
    gc.collect()
    until_s = time.monotonic() + 20.0  # for the thread of the server
    while open_files() - before and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not open_files() - before and mappings() == num_mapped


def test_more_descriptors_than_a_message_takes_are_handed_over() -> None:
    descriptors = [os.memfd_create(str(index)) for index in range(450)]
    server = DescriptorServer(descriptors)
    taken = take_descriptors(server.address, 450)
    names = [Path(f"/proc/self/fd/{descriptor}").readlink() for descriptor in taken]
    assert [str(name) for name in names] == [f"/memfd:{index} (deleted)" for index in range(450)]
    before = open_files()
    with pytest.raises(OSError, match="450 descriptors were handed over, not 451"):
        take_descriptors(server.address, 451)
    assert not open_files() - before
    for descriptor in (*descriptors, *taken):
        os.close(descriptor)


def test_whoever_cannot_serve_descriptors_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = open_files()
    with pytest.raises(OSError, match="Bad file descriptor"):
        DescriptorServer([0, 1, -1])
    monkeypatch.setattr(threading.Thread, "start", _refuse_a_thread)
    with pytest.raises(OSError, match="can't start new thread"):
        DescriptorServer([0])
    assert not open_files() - before


def _refuse_a_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_another_user_gets_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.memory.descriptors._user_of", lambda _: os.getuid() + 1)
    server = DescriptorServer([0])
    with pytest.raises(OSError, match="0 descriptors were handed over, not 1"):
        take_descriptors(server.address, 1)


def _refuse(*_: object) -> None:
    raise OSError("no sockets")


def test_memory_of_a_gpu_is_inherited(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, cache = SharedGpuMemory.create(PIECE), SharedGpuMemory.create(PIECE)
    handles = RankMemoryHandles(weights=weights.handle, cache=cache.handle, weights_hash="a")
    inherited = InheritedMemory.open(handles)
    assert isinstance(inherited.cache, SharedGpuMemory) and inherited.weights_hash == "a"
    cache.tensor()[4] = 6
    assert inherited.cache.tensor()[4] == 6
    monkeypatch.setattr(DescriptorServer, "__init__", _refuse)
    assert handle_of(weights) == weights.handle and handle_of(SharedGpuMemory.create(PIECE)) is None
    assert "the memory of a rank cannot be shared: no sockets" in caplog.text
    elsewhere = dataclasses.replace(cache.handle, host="another")
    assert InheritedMemory.open(dataclasses.replace(handles, cache=elsewhere)) == InheritedMemory()
    assert "the memory of a rank cannot be shared: it is on another host" in caplog.text


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        Form(dtype=torch.bfloat16),
        Form(dtype=torch.bfloat16, quantization="int4"),
        Form(dtype=torch.bfloat16, quantization="fp8"),
        Form(dtype=torch.bfloat16, experts=8),
    ],
    ids=lambda form: f"{form.quantization}-{form.experts}",
)
def test_all_weights_of_a_gpu_are_the_same_in_the_other_process(
    form: Form, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its kernels hold them; each byte once, over several pieces."""
    monkeypatch.setattr(
        "workers.memory.weight_stores._MAX_GPU_PIECES", fake_cuda.TOTAL_BYTES // PIECE
    )
    state = holder.State()
    holder.load(state, dataclasses.replace(form, tied=tied, hidden=512), TRITON_KERNELS)
    model = state.model
    assert model is not None
    before = [tensor.clone() for tensor in tensors_of(model)]
    weights_file = WeightsFile("", model.group, model.kernels)
    for part in model.parts():
        weights_file.move(part)
    memory = weights_file.finish(model)
    assert isinstance(memory, SharedGpuMemory) and len(memory.handle.piece_bytes) > 1
    assert memory.num_bytes < sum(tensor.nbytes for tensor in before) + PIECE
    theirs = SharedGpuMemory.open(memory.handle)
    adopted = adopt_weights(theirs, model.model_config, model.group, model.kernels)
    for after in (tensors_of(model), tensors_of(adopted)):
        for tensor, other in zip(after, before, strict=True):
            assert tensor.dtype == other.dtype and tensor.equal(other)


def tensors_of(model: Qwen3) -> list[torch.Tensor]:
    pickler = _ModelPickler(io.BytesIO(), _objects_of_own_process(model.kernels, model.group))
    pickler.dump(model)
    return pickler.tensors
