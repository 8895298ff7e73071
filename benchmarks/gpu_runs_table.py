"""The table that a GPU run ends with: one line a step, then engines on the same workload."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_PEER = "nano-vLLM"
# Of the last JSON line of a step, what the table shows.
_SHOWN = 4
# Characters of a status; all of it is in summary.json.
_STATUS = 50
_BENCH = "ray_bench_"
_COMPARED = ("nano_vllm", "transformers")


def table(summary: dict[str, Any], out: Path) -> str:
    """`summary` as `run_steps` leaves it; `out` holds the results of the GPU check."""
    lines = [["step", "status", "seconds", "left", ""]]
    for result in summary["steps"]:
        left = [*result.get("left", ())]
        left_mib = result.get("gpu_mib_left")
        what = " ".join(
            [
                *([f"processes: {len(left)}"] if left else []),
                *([f"{left_mib:.0f} MiB"] if left_mib is not None else []),
            ]
        )
        seconds = f"{result['seconds']:.1f}"
        lines.append([result["name"], result["status"][:_STATUS], seconds, what, _headline(result)])
    text = _aligned(lines)
    engines = list(engines_of(summary, out))
    return text if not engines else f"{text}\n\n{_aligned(compared(engines))}"


def engines_of(summary: dict[str, Any], out: Path) -> Iterator[dict[str, Any]]:
    """Each engine on the common workload: "engine", "attention", "tokens_per_s"."""
    with suppress(OSError, KeyError):
        sections = json.loads((out / "gpu_check.json").read_text())["sections"]
        for row in sections["throughput"]["rows"]:
            if "total_s" in row:
                attention = row["name"].split()[-1]
                yield {"engine": "Eagleray, in one process", "attention": attention} | {
                    "tokens_per_s": row["tokens_per_s"]
                }
    for result in summary["steps"]:
        for line in result["lines"] if _is_compared(result["name"]) else ():
            if "output_tokens_per_s" in line:
                ours = line["engine"] == "eagleray"
                yield {
                    "engine": "Eagleray, through Ray" if ours else line["engine"],
                    "attention": result["name"].removeprefix(_BENCH) if ours else line["attention"],
                    "tokens_per_s": line["output_tokens_per_s"],
                }


def _is_compared(name: str) -> bool:
    return name in _COMPARED or name.startswith(_BENCH)


def compared(engines: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line each, with its speed as a multiple of nano-vLLM's where that was measured."""
    peer = next((e["tokens_per_s"] for e in engines if e["engine"] == _PEER), None)
    lines = [["engine", "tokens/s", f"of {_PEER}", "attention"]]
    for engine in engines:
        speed = engine["tokens_per_s"]
        ratio = f"{speed / peer:.2f}" if peer else ""
        lines.append([engine["engine"], f"{speed:.0f}", ratio, engine["attention"]])
    return lines


def _headline(result: dict[str, Any]) -> str:
    """Some numbers of the last JSON line of a step, speeds first."""
    last = dict(result["lines"][-1]) if result["lines"] else {}
    last |= {name: value["all"] for name, value in last.items() if _has_sum(value)}
    numbers = {name: value for name, value in last.items() if isinstance(value, int | float)}
    names = sorted(numbers, key=lambda name: not name.endswith(("_per_s", "start_s")))
    return ", ".join(f"{name} {numbers[name]}" for name in names[:_SHOWN])


def _has_sum(value: object) -> bool:
    return isinstance(value, dict) and "all" in value


def _aligned(lines: Iterable[Sequence[str]]) -> str:
    rows = list(lines)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
