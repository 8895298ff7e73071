"""The program of a pool's process: it holds a `Worker`, calls it, and inspects it for tests."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from array import array
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from configs.engine import ResolvedConfig
from kernels.interface import SamplingKernels
from scheduler.messages import StepPlan
from workers.worker import Worker

_KERNELS = ("paged_attention", "qk_norm_rope_store", "rms_norm", "add_rms_norm", "silu_and_mul")
_VOCABULARY = 50_000  # products of at least this many output features are the head's


class RankProcess:
    """Calls go to a method of this class if there is one, otherwise to the worker."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.worker: Worker | None = None

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        return getattr(self if hasattr(self, name) else self.worker, name)(*args)

    def create(self, config: ResolvedConfig, rank: int) -> None:
        self.worker = Worker(config, rank)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
        self.worker = None

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> tuple[array[float], int]:
        """Logits of all tokens of the plan's row, gathered over the ranks; nothing is sampled."""
        assert (
            self.worker is not None
            and self.worker._runner is not None
            and self.worker._group is not None
        )
        runner, group = self.worker._runner, self.worker._group
        runner.batch_state.apply(plan)
        rows = runner.batch_state.take(plan)
        inputs = runner.batch_state.stage(rows, lambda array: runner.device.upload(array)[0])()
        hidden_TE = runner.model.forward(
            inputs.token_ids_T, inputs.positions_T, inputs.attn, runner.cache.layers
        )
        logits_RTV = group.all_gather(runner.model.logits(hidden_TE).to(torch.float32))
        vocab_size = self.worker.config.model.vocab_size
        logits_TV = logits_RTV.transpose(0, 1).flatten(1)[:, :vocab_size].contiguous()
        return array("f", logits_TV.numpy().tobytes()), vocab_size

    def measure_load(self, address: tuple[str, int] | None) -> dict[str, int]:
        """Anonymous memory in bytes that `start` adds to this process: at its end, at its peak."""
        assert self.worker is not None
        gc.collect()
        # Otherwise memory that an earlier worker left to the allocator is reused.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        before = own_bytes()
        with PeakMemory() as peak:
            self.worker.start(address, 1)
        return {
            "added": own_bytes() - before,
            "peak_added": peak.bytes - before,
            "weights": self.memory_by_purpose()["weights"],
        }

    def memory_by_purpose(self) -> dict[str, int]:
        """Bytes of the weights and, once it is allocated, of the KV cache."""
        assert self.worker is not None and self.worker._loaded_model is not None
        model = self.worker._loaded_model.model
        memory = {"weights": self.worker.progress.loaded_bytes}
        if model.head.is_tied and model.head.weight is not model.embedding.weight:
            # Held twice: as rows for lookup, and packed for the product.
            memory["weights"] += sum(piece.nbytes for piece in model.embedding.slices())
        if self.worker._runner is not None:
            memory["kv_cache"] = self.worker._runner.cache.tensor.nbytes
        return memory

    def start_clocks(self) -> None:
        """From now on add up the seconds of kernels, collective operations and whole launches, and
        replay no recorded layers.
        """
        assert self.worker is not None and self.worker._runner is not None
        kernels, group = self.worker._runner.model.kernels, self.worker._group
        # A replay of recorded layers calls none of the kernels.
        self.worker._runner.layers.max_recorded_rows = 0
        self.seconds = defaultdict[str, float](float)
        for name in ("linear", *_KERNELS):
            self._clock(kernels, name, name)
        # Forms may share their kernels.
        for products in {*kernels.quantized.values(), kernels.mixed_precision}:
            if products is not None:
                self._clock(products, "linear", "linear")
        for name in (name for name in dir(SamplingKernels) if not name.startswith("_")):
            self._clock(kernels.sampling, name, "sampling")
        self.num_read: list[int] = []
        for name in ("route", "mlp"):
            self._clock(kernels.experts, name, "experts")
        self._count_experts(kernels.experts)
        for name in ("all_reduce", "all_reduce_max", "all_gather"):
            self._clock(group, name, "collectives")
        self._clock(self.worker, "launch", "launch")

    def read_clocks(self) -> dict[str, float]:
        """Seconds by part of the step. `other` is the rest of the launches, whose total is included
        too.
        """
        seconds = dict(self.seconds)
        known = sum(value for name, value in seconds.items() if name != "launch")
        return seconds | {"other": seconds["launch"] - known}

    def experts_per_layer(self) -> float:
        """Experts that have tokens, the mean over layers since `start_clocks`; 0 without any."""
        return sum(self.num_read) / max(1, len(self.num_read))

    def _count_experts(self, kernels: Any) -> None:
        route = kernels.route

        def counted(*args: Any) -> Any:
            weights_TK, ids_TK = route(*args)
            self.num_read.append(len(ids_TK.unique()))
            return weights_TK, ids_TK

        kernels.route = counted

    def _clock(self, owner: Any, attribute: str, name: str) -> None:
        function = getattr(owner, attribute)

        def run(*args: Any) -> Any:
            began = time.perf_counter()
            result = function(*args)
            part = name
            if name == "linear":
                part = "products" if result.shape[-1] < _VOCABULARY else "vocabulary head"
            self.seconds[part] += time.perf_counter() - began
            return result

        setattr(owner, attribute, run)


class PeakMemory:
    """The largest `own_bytes` seen while inside, sampled every millisecond."""

    def __enter__(self) -> PeakMemory:
        self.bytes = own_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, own_bytes())


def own_bytes() -> int:
    """RssAnon and RssShmem of this process: its memory without mapped files of a disk."""
    kibibytes = [
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(("RssAnon:", "RssShmem:"))
    ]
    if len(kibibytes) != 2:
        raise RuntimeError("/proc/self/status has no RssAnon and RssShmem")
    return 1024 * sum(kibibytes)
