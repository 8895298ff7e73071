"""The promises of `CudaDevice`, which `FakeGpu` replaces in other tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from scheduler.errors import StepTimeoutError
from workers.device import CudaDevice

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LONG = 2_000_000_000  # cycles, about a second
MIB = 2**20


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(torch.device("cuda", 0))


def test_arrays_arrive_aligned_in_one_piece(device: CudaDevice) -> None:
    arrays = [np.arange(n, dtype=np.int32) for n in (1, 4, 7, 0, 300)]
    for array, tensor in zip(arrays, device.upload(*arrays), strict=True):
        assert tensor.is_cuda and tensor.dtype == torch.int32 and tensor.tolist() == array.tolist()
        assert tensor.data_ptr() % 16 == 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # it is new, it says
def test_nothing_but_wait_waits(device: CudaDevice) -> None:
    """With a second of work queued, copies in both directions return at once, and their content is
    right after waiting.
    """
    uploads = device.step_uploads(64)

    def steps() -> list[Any]:
        pending = []
        for step in range(3):
            target = uploads.put(np.full(8, step, np.int32))
            uploads.send()
            pending.append((device.to_host(target + 1), device.record_event()))
        return pending

    first = steps()  # loads the kernel and allocates host memory, which may both wait
    torch.cuda.synchronize()
    del first
    try:
        torch.cuda.set_sync_debug_mode("error")
        torch.cuda._sleep(LONG)
        pending = steps()
        event = pending[-1][1]
        assert event is not None and not event.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(StepTimeoutError, match=r"step 7 did not finish on cuda:0 within 0.05 s"):
        device.wait(event, 0.05, "step 7")
    for step, (copied, event) in enumerate(pending):
        device.wait(event, 20.0, "the copy")
        assert copied.tolist() == [step + 1] * 8


def test_time_between_events_is_that_of_the_device(device: CudaDevice) -> None:
    first = device.record_event()
    torch.cuda._sleep(LONG // 10)
    last = device.record_event()
    assert not last.query(), "recording does not wait"
    device.wait(last, 20.0, "the end")
    assert 0.02 < device.seconds_between(first, last) < 1.0


def test_graphs_read_what_stands_in_their_tensors_and_share_memory(device: CudaDevice) -> None:
    inputs = torch.ones(MIB, device=device.torch_device)
    output = torch.zeros_like(inputs)

    def run(size: int) -> None:
        output[:size].copy_(inputs[:size] * 2 + 1)

    large = device.capture(lambda: run(MIB))
    held = device.memory().reserved
    small = device.capture(lambda: run(MIB // 2), large)
    assert device.memory().reserved == held
    for graph, size, value in ((large, MIB, 3.0), (small, MIB // 2, 5.0), (large, MIB, 7.0)):
        inputs.fill_(value)
        output.zero_()
        graph.replay()
        assert (output[:size] == 2 * value + 1).all() and not output[size:].any()


def test_peak_counts_what_was_alive_at_once(device: CudaDevice) -> None:
    def run() -> None:
        for _ in range(3):
            torch.zeros(64 * MIB, dtype=torch.uint8, device=device.torch_device)

    assert device.peak_during(run) == 64 * MIB
    memory = device.memory()
    assert 0 < memory.free <= memory.total
