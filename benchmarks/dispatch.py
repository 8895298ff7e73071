"""What Ray and the driver add to a decode step: `python -m benchmarks.dispatch [--model DIR]
[--batch-sizes 1 16]`.

For each number of ranks and each batch size, the median time between two decode steps (of
`sleeping`: the mean), measured in three ways in turn:

    ahead1, ahead0   between results in the driver actor, with a step submitted beyond the unread
                     one, and without
    no_ray           the same ranks as plain processes; with one rank, scheduler and model in one
                     process, step by step; with more, between steps that a rank has finished, with
                     every later plan already in its pipe

At tp 1, once with all cores for the rank, as engines run by default, and once with one core, which
leaves the others to the driver and Ray; and `sleeping`: the real driver and rank actors with ranks
that only wait for a simulated device, with 0 to 4 steps ahead, for steps of several lengths and for
launches that keep a core of the rank busy. The time of a step beyond that of the device is time
that a GPU would spend waiting. The limits: `no_ray`, and the step of the device.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

from benchmarks.common import alternate, median, model_or_random, write_result
from benchmarks.dispatch_actors import OneCoreDriver, TimedDriver, sleeping_driver
from benchmarks.dispatch_ways import Measure, mean_step_ms, with_ray, without_ray
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
    parser.add_argument("--step-ms", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--launch-ms", type=float, nargs="+", default=[0.0, 0.6])
    parser.add_argument("--only", choices=("computing", "sleeping"))
    args = parser.parse_args()
    measured: dict[str, Any] = {}
    if args.only != "sleeping":
        measured["model"] = "60m shape" if args.model is None else args.model.rsplit("/", 1)[-1]
        with model_or_random(args.model) as model:
            for tp in args.tp:
                measured[f"tp{tp}"] = _computing(model, tp, args, TimedDriver)
            measured["tp1_one_core"] = _computing(model, 1, args, OneCoreDriver)
    for tp in args.tp if args.only != "computing" else ():
        measured[f"sleeping_tp{tp}"] = [
            row
            for step_ms in args.step_ms
            for launch_ms in args.launch_ms
            for row in _sleeping(tp, step_ms, launch_ms, args)
        ]
    name = f"dispatch_{args.only}" if args.only else "dispatch"
    limit = "ms_no_ray: the same ranks without Ray; ratios of sleeping: 1"
    write_result(name, limit, measured, module="dispatch")


# Each engine is idle while the others run, and would make its spares during that time.
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


_AHEAD = (0, 1, 2, 3, 4)


def _sleeping(
    tp: int, step_ms: float, launch_ms: float, args: argparse.Namespace
) -> list[dict[str, float]]:
    """One row per batch size: the time of a step as a multiple of the device's."""
    options = {
        "model": str(DEFAULT_MODEL_DIR),
        "tensor_parallel_size": tp,
        "device": "cpu",
        "max_num_seqs": max(args.batch_sizes),
        "enable_prefix_caching": False,
        **NO_SPARES,
    }
    driver = sleeping_driver(step_ms / 1000, launch_ms / 1000)
    with ExitStack() as stack:
        ways = {
            f"ahead{ahead}": stack.enter_context(
                with_ray(driver, ahead, 3 * args.steps, options, mean_step_ms)
            )
            for ahead in _AHEAD
        }
        rows = []
        for size in args.batch_sizes:
            ratios = {
                f"ratio_{name}": round(ms / step_ms, 4)
                for name, ms in _medians(ways, size, args.repeats).items()
            }
            rows.append({"step_ms": step_ms, "launch_ms": launch_ms, "batch_size": size, **ratios})
    return rows


def _medians(ways: dict[str, Measure], size: int, repeats: int) -> dict[str, float]:
    runs = {name: (lambda measure=measure: measure(size)) for name, measure in ways.items()}
    return {name: median(values) for name, values in alternate(runs, repeats).items()}


if __name__ == "__main__":
    main()
