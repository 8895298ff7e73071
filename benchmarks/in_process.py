"""An executor that runs one rank in this process, without Ray.

Owns its `Worker`. On a CPU `launch` runs the whole step; on a GPU it returns once the step is
launched.
"""

from __future__ import annotations

from configs.engine import ResolvedConfig
from scheduler.errors import ConfigError
from scheduler.messages import StepMask, StepPlan, StepResult
from workers.report import WorkerReport
from workers.worker import Worker


class InProcessExecutor:
    """An `Executor` over one rank. `num_threads` sets torch's threads; None leaves them alone."""

    def __init__(self, config: ResolvedConfig, num_threads: int | None = None) -> None:
        if config.engine.tensor_parallel_size != 1:
            raise ConfigError(
                "one process runs one rank, but tensor_parallel_size is"
                f" {config.engine.tensor_parallel_size}"
            )
        self.worker = Worker(config, rank=0)
        self.report: WorkerReport = self.worker.start(None, num_threads)
        self.worker.allocate_cache(self.report.num_kv_blocks)

    @property
    def num_kv_blocks(self) -> int:
        return self.report.num_kv_blocks

    def launch(self, plan: StepPlan) -> None:
        """Start a step; `result` raises what goes wrong."""
        self.worker.launch(plan)

    def send_mask(self, step_mask: StepMask) -> None:
        """Give a step its mask; on a CPU, before it is launched."""
        self.worker.put_mask(step_mask)

    def wait(self, step_id: int, limit_s: float) -> None:
        """Does not wait: nothing is planned meanwhile."""

    def result(self, step_id: int) -> StepResult:
        """Wait for a launched step of the current epoch. Raises the error of the step."""
        return self.worker.result(step_id, self.worker.epoch)

    def close(self) -> None:
        self.worker.close()
