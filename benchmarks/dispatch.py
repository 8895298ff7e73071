"""What Ray and the driver add to a decode step: `python -m benchmarks.dispatch [--model DIR]
[--batch-sizes 1 16]`.

For each number of ranks and each batch size, the median time between two decode steps, measured in
three ways in turn:

    ahead1, ahead0   between results in the driver actor, with a step submitted beyond the unread
                     one, and without
    no_ray           the same ranks as plain processes; with one rank, scheduler and model in one
                     process, step by step; with more, between steps that a rank has finished, with
                     every later plan already in its pipe

At tp 1, once with all cores for the rank, as engines run, and once with one core, which leaves the
others to the driver and Ray; and `sleeping`: the real driver and rank actors with ranks that only
wait for a simulated device with 3 ms per step; whatever a step takes beyond 3 ms is time that a GPU
would spend waiting. The limit: `no_ray`, and 0 beyond the 3 ms.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

from benchmarks.common import alternate, median, model_or_random, write_result
from benchmarks.dispatch_actors import DEVICE_STEP_S, OneCoreDriver, SleepingDriver, TimedDriver
from benchmarks.dispatch_ways import Measure, with_ray, without_ray
from configs.paths import DEFAULT_MODEL_DIR


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        help="directory; random weights in the shape of 60 million parameters if left out",
    )
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4, 48])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    measured: dict[str, Any] = {
        "model": "60m shape" if args.model is None else args.model.rsplit("/", 1)[-1]
    }
    with model_or_random(args.model) as model:
        for tp in args.tp:
            measured[f"tp{tp}"] = _computing(model, tp, args, TimedDriver)
        measured["tp1_one_core"] = _computing(model, 1, args, OneCoreDriver)
    for tp in args.tp:
        measured[f"sleeping_tp{tp}"] = _sleeping(tp, args)
    write_result("dispatch", "ms_no_ray: the same ranks without Ray; beyond_3ms: 0", measured)


# The engines stand idle in turn, and would make their spares just then.
NO_SPARES = {"spares": "off"}


def _computing(
    model: str, tp: int, args: argparse.Namespace, driver: type[TimedDriver]
) -> list[dict[str, float]]:
    options = {
        "model": model,
        "tensor_parallel_size": tp,
        "device": "cpu",
        "max_num_seqs": max(args.batch_sizes),
        "max_model_len": 1024,
        "enable_prefix_caching": False,
        **NO_SPARES,
    }
    with ExitStack() as stack:
        ways: dict[str, Measure] = {
            "no_ray": stack.enter_context(
                without_ray(options, args.steps, one_core=driver is OneCoreDriver)
            )
        }
        for ahead in (1, 0):
            ways[f"ahead{ahead}"] = stack.enter_context(
                with_ray(driver, ahead, args.steps, options)
            )
        rows = []
        for size in args.batch_sizes:
            ms = _medians(ways, size, args.repeats)
            ratios = {
                f"ratio_{name}": round(ms[name] / ms["no_ray"], 4)
                for name in ms
                if name != "no_ray"
            }
            rows.append(
                {
                    "batch_size": size,
                    **{f"ms_{name}": value for name, value in ms.items()},
                    **ratios,
                }
            )
    return rows


def _sleeping(tp: int, args: argparse.Namespace) -> list[dict[str, float]]:
    options = {
        "model": str(DEFAULT_MODEL_DIR),
        "tensor_parallel_size": tp,
        "device": "cpu",
        "max_num_seqs": max(args.batch_sizes),
        "enable_prefix_caching": False,
        **NO_SPARES,
    }
    with ExitStack() as stack:
        ways = {
            f"ahead{ahead}": stack.enter_context(
                with_ray(SleepingDriver, ahead, 3 * args.steps, options)
            )
            for ahead in (1, 0)
        }
        rows = []
        for size in args.batch_sizes:
            ms = _medians(ways, size, args.repeats)
            beyond = {
                f"ms_beyond_3ms_{name}": round(v - 1000 * DEVICE_STEP_S, 4)
                for name, v in ms.items()
            }
            rows.append({"batch_size": size, **beyond})
    return rows


def _medians(ways: dict[str, Measure], size: int, repeats: int) -> dict[str, float]:
    runs = {name: (lambda measure=measure: measure(size)) for name, measure in ways.items()}
    return {name: median(values) for name, values in alternate(runs, repeats).items()}


if __name__ == "__main__":
    main()
