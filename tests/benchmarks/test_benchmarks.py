"""The benchmarks that run without an engine, in small."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, plot, scheduler_scaling, throughput

RESULTS: dict[str, dict[str, Any]] = {
    "throughput_m": {
        "model": "m",
        "tp1": throughput.summary(
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
        ),
    },
    "latency": {
        "model": "m",
        "tp": 1,
        "rates": [
            {
                "rate": 1,
                "ttft_s": {"p50": 0.1, "p99": 0.2},
                "inter_token_s": {"p50": 0.01, "p99": 0.02},
            }
        ],
        "chunks": [
            {"max_num_batched_tokens": 64, "ratio_p99": 1.5, "arriving": {"prompt_ttft_p50_s": 0.3}}
        ],
    },
    "dispatch": {
        "model": "m",
        "tp1": [{"batch_size": 4, "ms_no_ray": 9.0, "ms_ahead1": 9.1, "ms_ahead0": 11.0}],
        "sleeping_tp1": [
            {"batch_size": 4, "ms_beyond_3ms_ahead1": 0.0, "ms_beyond_3ms_ahead0": 2.0}
        ],
    },
    "prefix_cache": {
        "model": "m",
        "num_seqs": 64,
        "prefix": 2000,
        "on": {"ttft_p50_s": 0.1, "ttft_p99_s": 0.1, "total_s": 0.2},
        "off": {"ttft_p50_s": 1.0, "ttft_p99_s": 2.0, "total_s": 2.0},
        "times_faster": {"ttft_p50_s": 10.0, "ttft_p99_s": 20.0, "total_s": 10.0},
    },
    "scheduler_scaling": {"rows": [{"num_running": 4, "schedule_ms": 0.01, "apply_ms": 0.01}]},
}


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
    row = RESULTS["throughput_m"]["tp1"]
    assert row["tokens_per_s"] == {"eagleray": 100.0, "peer": 50.0}
    assert row["ratio"] == {"peer": 2.0}
    assert row["share_of_roofline"] == {"eagleray": 0.5, "peer": 0.25}


@pytest.mark.parametrize("names", [[name] for name in RESULTS] + [list(RESULTS)])
def test_the_picture_shows_whichever_results_there_are(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / f"{name}.json").write_text(json.dumps(RESULTS[name]))
    text = plot.plot(tmp_path).read_text()
    assert text.lstrip().startswith("<?xml")
    assert text.count('id="axes_') >= len(names)


def test_no_results_are_no_picture(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no results"):
        plot.plot(tmp_path)
