"""A stand-in for what only a GPU can do: graphs that replay operations on fixed tensors, and memory
that is counted.

`FakeGpu.capture` records every operation of torch that is dispatched, and every call of a kernel
made through `recordable`, with the tensors they got. `replay` runs them again on those very
tensors: whatever a graph reads must stay in its place in memory, and Python code is not run again.
Graphs share the memory of what they compute, so a replay spoils what the others have left there.
As in a capture on a GPU, an operation whose result the host needs is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.interface import Kernels, SamplingKernels
from tests.kernels.replaced import Replaced, functions_of
from workers.device import (
    Array,
    BufferedUploads,
    ByteArray,
    Device,
    DeviceMemory,
    Event,
    Graph,
    StepUploads,
    aligned_bytes,
)

WAITING = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::is_nonzero",
    "aten::equal",
    "aten::masked_select",
    "aten::bincount",
    "aten::lift_fresh",  # torch.tensor, which copies from the host
}
_SPOILED = 0x7F  # large integers, and floats near the largest or NaN
Operation = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]


class FakeGraph:
    """`others`: all graphs of the device."""

    def __init__(self, operations: list[Operation], others: list[FakeGraph]) -> None:
        self._operations, self._others = operations, others
        self.num_replays = 0
        self.own_memory = _computed(operations)

    @torch.inference_mode()
    def replay(self) -> None:
        self.num_replays += 1
        for graph in self._others:
            if graph is not self:
                for memory in graph.own_memory:
                    memory.fill_(_SPOILED)
        for function, args, kwargs, old in self._operations:
            new = function(*args, **kwargs)
            for before, after in zip(_tensors(old), _tensors(new), strict=True):
                if before.data_ptr() != after.data_ptr():
                    before.copy_(after)


class _Recorder(TorchDispatchMode):
    def __init__(self, operations: list[Operation]) -> None:
        super().__init__()
        self._operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        indices = (
            args[1]
            if name.startswith("aten::index") and len(args) > 1 and isinstance(args[1], list)
            else []
        )
        if name in WAITING or any(
            index is not None and index.dtype == torch.bool for index in indices
        ):
            raise AssertionError(f"{name} waits for the device in the middle of a capture")
        out = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, out))
        return out


class LateEvent:
    """An event that passes when the test says so, at `at_s` by the device's clock."""

    def __init__(self, at_s: float = 0.0) -> None:
        self.at_s = at_s
        self.passed = False
        self.num_looks = 0

    def query(self) -> bool:
        self.num_looks += 1
        return self.passed


class FakeGpu(Device):
    """CPU tensors with graphs. Its memory is what the tests set: `reserved`, and `free` of
    `total`.
    """

    has_graphs = True

    def __init__(
        self, total: int = 1000, free: int = 1000, reserved: int = 0, peak: int = 0
    ) -> None:
        super().__init__(torch.device("cpu"))
        self.graphs: list[FakeGraph] = []
        self.uploads: list[int] = []  # bytes of each copy to the device
        self.total, self.free, self.reserved, self.peak = total, free, reserved, peak
        self.late: LateEvent | None = None
        self.moments_s: list[float] = []  # times of the coming events
        self._operations: list[Operation] | None = None

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        uploads = self.step_uploads(sum(map(aligned_bytes, arrays)))
        tensors = [uploads.put(array) for array in arrays]
        uploads.send()
        return tensors

    def step_uploads(self, num_bytes: int) -> StepUploads:
        return BufferedUploads(torch.full((num_bytes,), 0x7F, dtype=torch.uint8), self._copy)

    def _copy(self, target: torch.Tensor, fill: Callable[[ByteArray], None]) -> None:
        assert self._operations is None, "a copy from the host cannot be part of a graph"
        self.uploads.append(len(target))
        fill(target.numpy())

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def record_event(self) -> Event | None:
        if self.late is not None or not self.moments_s:
            return self.late
        event = LateEvent(self.moments_s.pop(0))
        event.passed = True
        return event

    def seconds_between(self, first: Any, last: Any) -> float:
        assert first.passed and last.passed, "the time of an event is known once it has passed"
        return float(last.at_s - first.at_s)

    def capture(self, run: Callable[[], object], pool_graph: Graph | None = None) -> FakeGraph:
        assert pool_graph is (self.graphs[0] if self.graphs else None), (
            "all graphs share the memory of the first"
        )
        run()  # as a GPU does, before it records
        operations: list[Operation] = []
        self._operations = operations
        with _Recorder(operations):
            run()
        self._operations = None
        graph = FakeGraph(operations, self.graphs)
        self.graphs.append(graph)
        return graph

    def memory(self) -> DeviceMemory:
        return DeviceMemory(total=self.total, free=self.free, reserved=self.reserved)

    def peak_during(self, run: Callable[[], None]) -> int:
        run()
        return self.peak

    def recordable(self, kernels: Kernels) -> Kernels:
        """The same kernels, such that a capture records each of their calls as one operation."""

        def recorded(part: Any, names: Iterable[str]) -> Replaced:
            return Replaced(part, **{name: self._recordable(getattr(part, name)) for name in names})

        parts: dict[str, Any] = {
            "sampling": recorded(kernels.sampling, functions_of(SamplingKernels)),
            "experts": recorded(kernels.experts, ("route", "mlp")),
        }
        parts["quantized"] = {
            form: recorded(products, ("linear",)) for form, products in kernels.quantized.items()
        }
        # What `call` calls is recorded by itself.
        names = [name for name in functions_of(Kernels) if name != "call"]
        return cast(Kernels, Replaced(recorded(kernels, names), **parts))

    def _recordable(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self._operations is None:
                return kernel(*args)
            with torch.utils._python_dispatch._disable_current_modes():
                out = kernel(*args)
            self._operations.append((kernel, args, {}, out))
            return out

        return call


def _computed(operations: list[Operation]) -> list[torch.Tensor]:
    """The memory that the operations allocate, as bytes: what they return and did not get from
    outside.
    """
    outside: set[int] = set()
    computed: dict[int, torch.UntypedStorage] = {}
    for _, args, kwargs, out in operations:
        outside |= {
            tensor.untyped_storage().data_ptr()
            for tensor in _tensors([*args, *kwargs.values()])
            if tensor.untyped_storage().data_ptr() not in computed
        }
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in outside:
                computed[storage.data_ptr()] = storage
    return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in computed.values()]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return (
        [tensor for item in value for tensor in _tensors(item)]
        if isinstance(value, list | tuple)
        else []
    )
