"""Counts, without a GPU, what a decode step of Qwen3-0.6B asks of one: `python -m
benchmarks.gpu_launches [--bound 40960] [--tokens 512]`.

For each number of rows: launches inside the graph and outside (rows that sample greedily, then with
the model's own settings), copies from the host per step that is drawn, the programs of the Triton
kernels in the graph and how many of them have no work, the bytes that must be moved, the time these
take at the memory speed of an H100 and an H200, and an estimate.

Nothing computes: a launch of a Triton kernel, or of a product, is noted and its outputs are zeros;
every other operation of torch that writes memory counts as a launch. The estimate is a model, not a
measurement: each launch takes its bytes at `_SUSTAINED` of the memory's speed, and no less than
`_LAUNCH_US`, which is about what back-to-back launches in a graph take.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from benchmarks.common import QWEN3_0_6B
from configs.engine import EngineConfig, ResolvedConfig, resolve
from configs.model import ModelConfig
from kernels.decode_parts import part_starts
from kernels.gpu import backend
from kernels.gpu.capabilities import TRITON
from scheduler.messages import AdmittedRows, StepPlan, ints
from scheduler.params import Sampling
from workers.device import BufferedUploads, Device, Graph, StepUploads
from workers.model_runner import ModelRunner
from workers.models.qwen3 import Qwen3
from workers.parallel.group import TensorParallelGroup

BATCHES = (1, 16, 64, 256)
MEMORY_TB_PER_S = (3.35, 4.8)
SETTINGS = {
    "greedy": Sampling(seed=0, max_tokens=1000, temperature=0.0),
    "drawn": Sampling(seed=0, max_tokens=1000, temperature=0.6, top_k=20, top_p=0.95),
}
_SUSTAINED = 0.85
_LAUNCH_US = 2.5
# Kernels read only some rows of these tensors.
_TABLES = {"k_cache", "v_cache", "k_cache_NPKD", "v_cache_NPKD", "tokens_SL", "cos_sin_LD"}
_TABLES |= {"block_table_SW", "block_table_BW", "acc_XHD"}


@dataclass(slots=True)
class Counts:
    """Launches by name; programs of Triton's kernels; bytes of each launch."""

    names: dict[str, int] = field(default_factory=dict)
    programs: int = 0
    bytes: list[int] = field(default_factory=list)

    def add(self, name: str, num_bytes: int, programs: int = 0) -> None:
        self.names[name] = self.names.get(name, 0) + 1
        self.programs += programs
        self.bytes.append(num_bytes)

    def __iadd__(self, other: Counts) -> Counts:
        for name, number in other.names.items():
            self.names[name] = self.names.get(name, 0) + number
        self.programs += other.programs
        self.bytes += other.bytes
        return self

    @property
    def launches(self) -> int:
        return len(self.bytes)

    def floor_ms(self, tb_per_s: float) -> float:
        return sum(self.bytes) / tb_per_s / 1e9

    def estimate_ms(self, tb_per_s: float) -> float:
        """See the docstring of the module."""
        rate = 1e6 * tb_per_s * _SUSTAINED  # bytes per microsecond
        return sum(max(_LAUNCH_US, num_bytes / rate) for num_bytes in self.bytes) / 1000


class _Noting(TorchDispatchMode):
    """Counts operations of torch, and gives new memory zeros."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("empty"):
            out.zero_()
        else:
            made = [tensor for tensor in _flat(out) if isinstance(tensor, torch.Tensor)]
            given = {_memory(t) for t in _flat(list(args)) if isinstance(t, torch.Tensor)}
            is_view = made and not func._schema.is_mutable and _memory(made[0]) in given
            if made and not is_view:
                self.counts.add(name, 2 * sum(tensor.nbytes for tensor in made))
        return out


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _flat(value: Any) -> list[Any]:
    return (
        [each for part in value for each in _flat(part)]
        if isinstance(value, list | tuple)
        else [value]
    )


class CountingGpu(Device):
    """A device whose graphs count, when replayed, what was launched during their capture."""

    has_graphs = True

    def __init__(self, num_kv_bytes: int) -> None:
        super().__init__(torch.device("cpu"))
        self.inside, self.outside = Counts(), Counts()
        self.counts: Counts | None = None
        self.num_kv_bytes = num_kv_bytes
        self.num_uploads = 0

    @contextmanager
    def counting(self, counts: Counts) -> Iterator[None]:
        before, self.counts = self.counts, counts
        with _Noting(counts):
            yield
        self.counts = before

    def note_kernel(self, kernel: JITFunction[Any], grid: Any, args: Any) -> None:
        if self.counts is None:
            return
        named = dict(zip(kernel.arg_names, args, strict=False))
        tensors = {
            tensor.data_ptr(): tensor.nbytes
            for name, tensor in named.items()
            if isinstance(tensor, torch.Tensor) and name not in _TABLES
        }
        num_bytes = sum(tensors.values())
        name = kernel.__name__
        if name == "decode_kernel":
            num_bytes += self.num_kv_bytes
        self.counts.add(name, num_bytes, int(np.prod(grid)))

    def upload(self, *arrays: Any) -> list[torch.Tensor]:
        self.num_uploads += 1
        return super().upload(*arrays)

    def step_uploads(self, num_bytes: int) -> StepUploads:
        return BufferedUploads(torch.zeros(num_bytes, dtype=torch.uint8), self._copy)

    def _copy(self, target: torch.Tensor, fill: Any) -> None:
        self.num_uploads += 1
        fill(target.numpy())

    def capture(self, run: Any, beside: Graph | None = None) -> Graph:
        counts, device = Counts(), self
        with self.counting(counts):
            run()

        class Counted:
            def replay(self) -> None:
                device.inside += counts

        return Counted()


class _Kernels(backend.TritonKernels):
    """Triton's kernels; products are counted, not computed."""

    def __init__(self, device: CountingGpu) -> None:
        def linear(
            x_TE: torch.Tensor, weight_YE: torch.Tensor, bias_Y: torch.Tensor | None
        ) -> torch.Tensor:
            with torch.utils._python_dispatch._disable_current_modes():
                out_TY = torch.zeros(len(x_TE), len(weight_YE), dtype=x_TE.dtype)
            if device.counts is not None:
                device.counts.add("linear", x_TE.nbytes + weight_YE.nbytes + out_TY.nbytes)
            return out_TY

        self.linear = linear  # type: ignore[assignment]


def count(
    rows: int, tokens: int, bound: int, sampling: Sampling
) -> tuple[CountingGpu, ModelRunner]:
    """Count one decode step with this many rows of this many tokens."""
    config = _config(rows, bound)
    kv_row = 2 * 2 * config.model.num_key_value_heads * config.model.head_dim
    device = CountingGpu(rows * tokens * kv_row)

    def noted(kernel: Any, *args: Any, grid: Any, warmup: bool, **_: Any) -> None:
        device.note_kernel(kernel, grid, args)

    with mock.patch.object(JITFunction, "run", noted), torch.inference_mode():
        kernels: Any = _Kernels(device)
        group = TensorParallelGroup(0, 1, device.torch)
        model = Qwen3(config.model, group, kernels, torch.bfloat16, config.max_model_len)
        blocks_per_row = -(-(tokens + 1) // config.block_size)
        runner = ModelRunner(config, model, group, kernels, device, blocks_per_row)
        slots = ints(range(rows))
        admitted = AdmittedRows(
            slots=slots,
            token_ids=ints([1] * rows * tokens),
            num_tokens=ints([tokens] * rows),
            num_prompt_tokens=ints([1] * rows),
            block_ids=ints(list(range(blocks_per_row)) * rows),
            num_blocks=ints([blocks_per_row] * rows),
            num_cached_tokens=ints([tokens] * rows),
            sampling=(sampling,) * rows,
        )
        for step, new in enumerate((admitted, None)):
            plan = StepPlan(
                step_id=step,
                epoch=0,
                released=ints(),
                admitted=new,
                appended_slots=ints(),
                appended_block_ids=ints(),
                slots=slots,
                num_new_tokens=ints([1] * rows),
                samples=bytes([1] * rows),
                masked=b"",
            )
            device.num_uploads, device.inside, device.outside = 0, Counts(), Counts()
            with device.counting(device.outside):
                runner.run(plan)
    return device, runner


def _idle(runner: ModelRunner, rows: int, tokens: int) -> int:
    """Programs of attention at places that no row has taken; all others have work."""
    assert runner.graphs is not None
    bound = min(each for each in runner.graphs.bounds if each >= tokens)
    places = runner.state.decode_places(rows, bound)
    taken = int(part_starts(np.full(rows, tokens, np.int32), places)[-1])
    return (places - taken) * runner.model.num_kv_heads * len(runner.model.layers)


def _config(rows: int, bound: int) -> ResolvedConfig:
    return resolve(
        EngineConfig(model="none", max_num_seqs=rows, max_model_len=bound, device="cuda"),
        ModelConfig.from_dict(QWEN3_0_6B),
        Path("none"),
        "cuda",
        TRITON,
    )


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bound", type=int, default=40960, help="max_model_len")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per row")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set: unset it, an interpreted kernel is not launched")
    if not 1 <= args.tokens < args.bound <= 40960:
        parser.error(f"--tokens must be from 1 to below --bound, at most 40960; got {args.tokens}")
    torch.set_num_threads(1)  # tensors are only filled with zeros
    print("rows  inside  outside (drawn)  uploads  programs  idle  GB  floor ms  estimate ms")
    for rows in BATCHES:
        drawn, _ = count(rows, args.tokens, args.bound, SETTINGS["drawn"])
        device, runner = count(rows, args.tokens, args.bound, SETTINGS["greedy"])
        both = Counts(bytes=device.inside.bytes + device.outside.bytes)
        floors = " ".join(f"{both.floor_ms(speed):.2f}" for speed in MEMORY_TB_PER_S)
        estimates = " ".join(f"{both.estimate_ms(speed):.2f}" for speed in MEMORY_TB_PER_S)
        print(
            f"{rows:4}  {device.inside.launches:6}  {device.outside.launches:7}"
            f" ({drawn.outside.launches})  {drawn.num_uploads}  {device.inside.programs}"
            f"  {_idle(runner, rows, args.tokens)}"
            f"  {sum(both.bytes) / 1e9:.2f}  {floors}  {estimates}",
            flush=True,
        )
        print("     ", device.inside.names, device.outside.names, file=sys.stderr)


if __name__ == "__main__":
    main()
