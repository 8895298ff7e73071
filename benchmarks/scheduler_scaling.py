"""The time that the scheduler adds to a decode step: `python -m benchmarks.scheduler_scaling
[--sizes 1 16 256 1024]`.

For each number of running sequences the median time of `schedule` and `apply` for one step and the
size of its pickled plan, without a model: results are invented. Rounds over the sizes alternate.
The limit: 1 ms for 256 sequences, so that the host is ready before the fastest device.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import statistics
import time
from typing import Any

from benchmarks.common import alternate, median, write_result
from scheduler.limits import SchedulerLimits
from scheduler.messages import Request, StepPlan, StepResult, int32_array
from scheduler.params import ResolvedSampling
from scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
LIMIT = "256 running sequences: schedule_ms + apply_ms below 1"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024], help="running sequences"
    )
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=4 * BLOCK_SIZE)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    write_result(
        "scheduler_scaling", LIMIT, measure(args.sizes, args.context, args.steps, args.repeats)
    )


def measure(sizes: list[int], context: int, steps: int, repeats: int) -> dict[str, Any]:
    """Rows by number of running sequences; milliseconds and bytes per step."""
    total = context + steps * repeats + 2
    schedulers = {size: decoding(size, context, total) for size in sizes}
    gc.collect()
    gc.freeze()
    gc.disable()
    runs = {
        str(size): (lambda s=scheduler: time_steps(s, steps))
        for size, scheduler in schedulers.items()
    }
    values = alternate(runs, repeats)
    gc.enable()
    gc.unfreeze()
    rows = [
        {
            "num_running": size,
            "schedule_ms": median([1000 * v[0] for v in values[str(size)]]),
            "apply_ms": median([1000 * v[1] for v in values[str(size)]]),
            "plan_bytes": round(median([v[2] for v in values[str(size)]])),
        }
        for size in sizes
    ]
    return {"context": context, "rows": rows}


def decoding(num_running: int, context: int, total: int) -> Scheduler:
    """A scheduler whose sequences have all run their prompts and will grow to `total` tokens."""
    limits = SchedulerLimits(
        num_blocks=num_running * (-(-total // BLOCK_SIZE) + 1),
        block_size=BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * context,
        max_model_len=total,
        vocab_size=1000,
    )
    scheduler = Scheduler(limits)
    for i in range(num_running):
        tokens = int32_array((i * 31 + p) % 1000 for p in range(context))
        sampling = ResolvedSampling(seed=0, max_tokens=total - context)
        scheduler.add(
            Request(
                request_id=str(i), token_ids=tokens, num_prompt_tokens=context, sampling=sampling
            )
        )
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.apply(made_up_result(plan))
    return scheduler


def time_steps(scheduler: Scheduler, steps: int) -> tuple[float, float, float]:
    """Median seconds of `schedule` and of `apply`, and bytes of a pickled plan."""
    schedule_s, apply_s, sizes = [], [], []
    for _ in range(steps):
        started = time.perf_counter()
        plan = scheduler.schedule()
        schedule_s.append(time.perf_counter() - started)
        assert plan is not None and len(plan.slots) == len(scheduler.running)
        sizes.append(len(pickle.dumps(plan, protocol=5)))
        result = made_up_result(plan)
        started = time.perf_counter()
        scheduler.apply(result)
        apply_s.append(time.perf_counter() - started)
    return statistics.median(schedule_s), statistics.median(apply_s), statistics.median(sizes)


def made_up_result(plan: StepPlan) -> StepResult:
    """The same token for every row."""
    return StepResult(
        step_id=plan.step_id,
        epoch=plan.epoch,
        token_ids=int32_array([9]) * sum(plan.sampling_flags),
    )


if __name__ == "__main__":
    main()
