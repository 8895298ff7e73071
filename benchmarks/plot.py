"""One picture of the results that are there: `python -m benchmarks.plot` writes
benchmarks/results/benchmarks.svg.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.common import RESULTS

Result = dict[str, Any]
WAYS = {"no_ray": "tab:gray", "ahead1": "tab:blue", "ahead0": "tab:orange"}


def main() -> None:
    """Draw what there is in the folder of results."""
    print(plot(RESULTS))


def plot(folder: Path) -> Path:
    """Write `benchmarks.svg` beside the results and return its path. Raises `SystemExit` if there
    are none.
    """
    panels = [
        (draw, json.loads(path.read_text()))
        for name, draw in PANELS
        for path in sorted(folder.glob(f"{name}.json"))
    ]
    if not panels:
        raise SystemExit(f"{folder} holds no results; run `make bench` first")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(5.5 * columns, 4 * rows), squeeze=False, layout="constrained"
    )
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    for ax, (draw, result) in zip(axes.flat, panels, strict=False):
        draw(ax, result)
    matplotlib.rcParams["svg.hashsalt"] = "eagleray"  # the same results make the same file
    figure.savefig(folder / "benchmarks.svg", metadata={"Date": None})
    plt.close(figure)
    return folder / "benchmarks.svg"


def throughput(ax: Axes, result: Result) -> None:
    """Bars by engine and size, a mark at the roofline."""
    bars = [
        (f"{name}\n{size}", value, row["roofline_tokens_per_s"])
        for size, row in of_sizes(result)
        for name, value in row["tokens_per_s"].items()
    ]
    drawn = ax.bar(
        [label for label, _, _ in bars], [value for _, value, _ in bars], color="tab:blue"
    )
    ours = {size: row["tokens_per_s"]["eagleray"] for size, row in of_sizes(result)}
    ax.bar_label(
        drawn, [f"{value / ours[label.split()[-1]]:.2f} of ours" for label, value, _ in bars]
    )
    ax.plot(range(len(bars)), [best for _, _, best in bars], "k_", markersize=20, label="roofline")
    finish(ax, f"Throughput, {result['model']}", "", "output tokens/s")
    ax.tick_params(axis="x", labelsize=7)


def rates(ax: Axes, result: Result) -> None:
    """Times to the first token and between tokens over the rate."""
    for key, name in (("ttft_s", "first token"), ("inter_token_s", "between tokens")):
        for quantile, style in (("p50", "-"), ("p99", "--")):
            values = [1000 * row[key][quantile] for row in result["rates"]]
            ax.plot(
                [row["rate"] for row in result["rates"]],
                values,
                "o" + style,
                label=f"{name} {quantile}",
            )
    ax.set_yscale("log")
    finish(ax, f"Latency, {result['model']}, tp {result['tp']}", "requests/s", "ms")


def chunks(ax: Axes, result: Result) -> None:
    """What arriving prompts cost running decodes, over the limit of tokens a step."""
    sizes = [row["max_num_batched_tokens"] for row in result["chunks"]]
    ax.plot(
        sizes,
        [row["ratio_p99"] for row in result["chunks"]],
        "o-",
        label="p99 gap, arriving / alone",
    )
    ax.axhline(1, color="k", linewidth=0.5)
    other = ax.twinx()
    first = [row["arriving"]["prompt_ttft_p50_s"] for row in result["chunks"]]
    other.plot(sizes, first, "s--", color="tab:orange", label="first token of a prompt")
    other.set_ylabel("s")
    other.set_ylim(bottom=0)
    other.legend(loc="upper right", fontsize=7)
    ax.set_xscale("log", base=2)
    finish(ax, "Decodes while prompts arrive", "max_num_batched_tokens", "ratio")


def dispatch(ax: Axes, result: Result) -> None:
    """Step times by way, and those of ranks that sleep."""
    bars = [
        (f"{size}, batch {row['batch_size']}, {way}", row[f"ms_{way}"])
        for size, rows in of_sizes(result)
        for row in rows
        for way in WAYS
    ]
    bars += [
        (
            f"{size.replace('_', ' ')}, batch {row['batch_size']}, {way}",
            3 + row[f"ms_beyond_3ms_{way}"],
        )
        for size, rows in result.items()
        if size.startswith("sleeping_")
        for row in rows
        for way in ("ahead1", "ahead0")
    ]
    bars.reverse()
    names, times = [name for name, _ in bars], [ms for _, ms in bars]
    drawn = ax.barh(names, times, color=[WAYS[name.split(", ")[-1]] for name in names])
    ax.bar_label(drawn, fmt="%.2f", fontsize=6)
    finish(ax, f"A decode step, {result['model']}; ranks that sleep 3 ms", "ms", "")
    ax.set_ylim(-0.6, len(bars) - 0.4)
    ax.tick_params(axis="y", labelsize=6)


def prefix(ax: Axes, result: Result) -> None:
    """Times with and without the cache."""
    keys = ("ttft_p50_s", "ttft_p99_s", "total_s")
    for i, name in enumerate(("off", "on")):
        drawn = ax.bar(
            [x + 0.4 * i for x in range(3)],
            [result[name][key] for key in keys],
            0.4,
            label=f"cache {name}",
        )
        if name == "on":
            ax.bar_label(
                drawn, [f"{result['times_faster'][key]:.1f}x faster" for key in keys], fontsize=7
            )
    ax.set_xticks([0.2, 1.2, 2.2], ["first token p50", "first token p99", "total"])
    finish(
        ax,
        f"{result['num_seqs']} requests, {result['prefix']} tokens shared, {result['model']}",
        "",
        "s",
    )


def scheduler_scaling(ax: Axes, result: Result) -> None:
    """Time of schedule and apply over the number of sequences."""
    sizes = [row["num_running"] for row in result["rows"]]
    ax.plot(
        sizes,
        [row["schedule_ms"] + row["apply_ms"] for row in result["rows"]],
        "o-",
        label="schedule + apply",
    )
    ax.plot([256], [1.0], "k_", markersize=20, label="limit")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    finish(ax, "Scheduler, no model", "running sequences", "ms a step")


def of_sizes(result: Result) -> list[tuple[str, Any]]:
    """The entries of tensor-parallel sizes."""
    return [
        (key, value) for key, value in result.items() if key.startswith("tp") and key[2:].isdigit()
    ]


def finish(ax: Axes, title: str, x: str, y: str) -> None:
    """Names, and a scale from zero unless it is logarithmic."""
    ax.set_title(title, fontsize=9)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if ax.get_yscale() == "linear":
        ax.set_ylim(bottom=0)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=7)


PANELS: list[tuple[str, Callable[[Axes, Result], None]]] = [
    ("throughput_*", throughput),
    ("latency", rates),
    ("latency", chunks),
    ("dispatch", dispatch),
    ("prefix_cache", prefix),
    ("scheduler_scaling", scheduler_scaling),
]


if __name__ == "__main__":
    main()
