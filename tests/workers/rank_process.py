"""What a process of the pool does: holds a `Worker`, calls it, and looks inside it for tests."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import torch

from configs.engine import ResolvedConfig
from scheduler.messages import StepPlan
from workers.loader import load_weights
from workers.worker import Worker


class RankProcess:
    """Calls go to a method here, else to the worker."""

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
        assert self.worker is not None and self.worker._runner is not None and self.worker._group is not None
        runner, group = self.worker._runner, self.worker._group
        runner.state.apply(plan)
        inputs = runner.state.prepare(plan)
        hidden_TE = runner.model.forward(inputs.token_ids_T, inputs.positions_T, inputs.attn, runner.cache.layers)
        logits_RTV = group.all_gather(runner.model.logits(hidden_TE))
        vocab_size = self.worker.config.model.vocab_size
        logits_TV = logits_RTV.transpose(0, 1).flatten(1)[:, :vocab_size].contiguous()
        return array("f", logits_TV.numpy().tobytes()), vocab_size

    def measure_load(self) -> dict[str, int]:
        """Anonymous memory, in bytes, that starting the worker and loading its weights adds to this process."""
        worker = self.worker
        assert worker is not None
        before = anonymous_bytes()
        worker.start(None if worker.config.engine.tensor_parallel_size == 1 else self._address, 1)
        return {"added": anonymous_bytes() - before, **worker.memory_report()}

    def meet_at(self, address: tuple[str, int] | None) -> None:
        self._address = address

    def loaded_again(self) -> int:
        """Load once more into the same parameters; the memory that adds."""
        worker = self.worker
        assert worker is not None and worker._model is not None
        before = anonymous_bytes()
        load_weights(worker._model.slices(), Path(worker.config.model_dir), worker.config.model)
        return anonymous_bytes() - before


def anonymous_bytes() -> int:
    """RssAnon of this process: memory of its own, not that of mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")
