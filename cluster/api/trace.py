"""Step records as a trace that chrome://tracing and Perfetto show.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from typing import Any

from scheduler.records import StepRecord

STEPS_ROW, PARTS_ROW = 1, 2  # rows of the diagram


def chrome_trace(records: list[StepRecord]) -> dict[str, Any]:
    """The trace of these steps; times in microseconds since the first."""
    origin_s = records[0].launched_s if records else 0.0
    events: list[dict[str, Any]] = [
        _row_name_event(STEPS_ROW, "steps, from launch to result"),
        _row_name_event(PARTS_ROW, "parts of a step on rank 0"),
    ]
    for record in records:
        start_us = 1e6 * (record.launched_s - origin_s)
        args = {
            "epoch": record.epoch,
            "rows": record.num_rows,
            "tokens": record.num_tokens,
            "admitted": record.num_admitted,
            "preempted": record.num_preempted,
            "computed again": record.num_recomputed_tokens,
            "first in line waits for": record.head_wait_reason or "nobody is in line",
        }
        if not record.done_s:
            events.append(
                _event("i", f"step {record.step_id}: no result", start_us, args=args, s="t")
            )
            continue
        end_us = 1e6 * (record.done_s - origin_s)
        name = f"step {record.step_id}"
        events.append(_event("X", name, start_us, dur=end_us - start_us, args=args))
        part_start_us = end_us - 1e6 * sum(record.seconds.values())
        for part, seconds in record.seconds.items():
            events.append(_event("X", part, part_start_us, tid=PARTS_ROW, dur=1e6 * seconds))
            part_start_us += 1e6 * seconds
        for counter, value in (
            ("sequences", {"running": record.num_running, "waiting": record.num_waiting}),
            ("free KV blocks", {"blocks": record.num_free_blocks}),
        ):
            events.append(_event("C", counter, start_us, args=value))
        if record.num_preempted:
            events.append(_event("i", f"{record.num_preempted} preempted", start_us, s="t"))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(
    phase: str, name: str, timestamp_us: float, tid: int = STEPS_ROW, **fields: Any
) -> dict[str, Any]:
    return {"ph": phase, "name": name, "ts": round(timestamp_us, 1), "pid": 1, "tid": tid, **fields}


def _row_name_event(tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
