"""The chart of the README, from the results: `python -m benchmarks.chart > docs/chart.svg`."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

from configs.paths import SOURCE_ROOT

OURS, THEIRS, ROW, LEFT, RIGHT = "#2f6f4f", "#9aa3ab", 34, 270, 290
TITLE = "Output tokens per second over those of vLLM 0.32's CPU build in bfloat16 (Zen 4)"


def bars() -> list[tuple[str, float]]:
    """(what was run, our median rate over vLLM's), from runs in turn."""
    path = SOURCE_ROOT / "benchmarks" / "results" / "throughput_zen4.json"
    results: dict[str, Any] = json.loads(path.read_text())
    cases = dict(results["other_cases"]["runs"]) | {"0.6b tp 2": results["beside_vllm"]}
    names = {"60m tp 1": "60M, tp 1", "60m tp 2": "60M, tp 2"}
    names |= {"0.6b tp 1": "0.6B, tp 1", "0.6b tp 2": "0.6B, tp 2"}
    rows = [(name, _ratio(cases[case], "bf16")) for case, name in names.items()]
    return [*rows, ("0.6B, tp 2, 8 bits over bfloat16", _ratio(cases["0.6b tp 2"], "int8"))]


def _ratio(runs: dict[str, Any], ours: str) -> float:
    rates: dict[str, float] = {
        name: median(run["output_tokens_per_s"] for run in runs[name]) for name in (ours, "vllm")
    }
    return rates[ours] / rates["vllm"]


def chart() -> str:
    """An SVG picture: one bar per case, and a line where both are as fast."""
    rows, largest = bars(), 2.25
    height = 52 + ROW * len(rows)
    one = LEFT + RIGHT / largest
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="620" height="{height}"'
        ' font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="620" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" fill="#222" font-size="12.5">{TITLE}</text>',
    ]
    for place, (name, ratio) in enumerate(rows):
        top = 42 + ROW * place
        width = RIGHT * ratio / largest
        lines += [
            f'<text x="{LEFT - 10}" y="{top + 15}" text-anchor="end" fill="#222">{name}</text>',
            f'<rect x="{LEFT}" y="{top}" width="{width:.0f}" height="22" rx="3" fill="{OURS}"/>',
            f'<text x="{LEFT + width + 8:.0f}" y="{top + 15}" fill="#222">{ratio:.2f}</text>',
        ]
    bottom = height - 12
    line = f'x1="{one:.0f}" x2="{one:.0f}" y1="36" y2="{bottom}"'
    lines += [f'<line {line} stroke="{THEIRS}" stroke-dasharray="4 3"/>', "</svg>", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(chart(), end="")
