"""The benchmarks that run without an engine, with small sizes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import common, scheduler_scaling, throughput


def test_scheduler_scaling_has_a_row_a_size_and_larger_batches_have_larger_plans() -> None:
    rows = scheduler_scaling.measure([1, 16], context=20, steps=4, repeats=2)["rows"]
    assert [row["num_running"] for row in rows] == [1, 16]
    assert all(row["schedule_ms"] > 0 and row["apply_ms"] > 0 for row in rows)
    assert rows[0]["plan_bytes"] < rows[1]["plan_bytes"]


def test_a_result_says_how_it_was_made_and_holds_no_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(
        "sys.argv", ["x.py", "--model", "/a/b/model", "--peer-command", "/c/python run.py {model}"]
    )
    common.write_result("x", "the limit", {"value": 1})
    record = json.loads((tmp_path / "x.json").read_text())
    assert (
        record["command"]
        == "python -m benchmarks.x --model model --peer-command 'python run.py {model}'"
    )
    assert (record["limit"], record["value"], record["machine"]["cores"] > 0) == (
        "the limit",
        1,
        True,
    )
    assert record["commit"] is None or re.fullmatch(r"[0-9a-f]{7,}\+?", record["commit"])
    assert json.loads(capsys.readouterr().out) == record


def test_throughput_compares_medians_with_the_peer_and_the_roofline() -> None:
    row = throughput.summary(
        {
            "eagleray": [
                {
                    "output_tokens_per_s": speed,
                    "output_tokens": 100,
                    "roofline": {"floor_s": 0.5},
                }
                for speed in (90, 110, 100)
            ],
            "peer": [{"output_tokens_per_s": speed} for speed in (50, 45, 90)],
        }
    )
    assert row["tokens_per_s"] == {"eagleray": 100.0, "peer": 50.0}
    assert row["ratio"] == {"peer": 2.0}
    assert row["share_of_roofline"] == {"eagleray": 0.5, "peer": 0.25}
