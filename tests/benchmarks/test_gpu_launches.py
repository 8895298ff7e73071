"""What a decode step asks of a GPU: the counts in the docs are those of the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_of_the_page_is_what_is_counted() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu_launches"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    counted = [re.findall(r"[\d.]+", line) for line in done.stdout.splitlines()[1:]]
    assert [row[0] for row in counted] == ["1", "16", "64", "256"]
    page = (ROOT / "docs" / "kernels.md").read_text()
    for column, title in enumerate(
        (
            "launches in the graph",
            "launches outside, greedy",
            "launches outside, Qwen3's own settings",
            "copies from the host, Qwen3's own settings",
            "programs of our kernels in the graph",
            "of these, without work",
        ),
        start=1,
    ):
        [line] = [line for line in page.splitlines() if line.startswith(f"| {title} |")]
        told = [cell.split("(")[0].replace(",", "").strip() for cell in line.split("|")[2:-1]]
        assert told == [row[column] for row in counted], title
