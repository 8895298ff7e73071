"""`launch.py top`: a running server live in the terminal, read from its `/metrics`."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.table import Table

from scheduler.errors import ConfigError

ANSWER_TIMEOUT_S = 10.0
REFRESH_PERIOD_S = 1.0
# Counters of the seconds of steps, and the label by which each is divided.
STEP_LABELS = {
    "eagleray_step_part_seconds_total": "part",
    "eagleray_rank_step_seconds_total": "rank",
}


@dataclass(slots=True)
class MetricsReading:
    """The metrics of a server at one time. totals: by name, added up over labels; step_seconds: of
    all steps, by "part" or "rank" and its value.
    """

    time_s: float
    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    step_seconds: dict[str, dict[str, float]] = field(
        default_factory=lambda: {label: {} for label in STEP_LABELS.values()}
    )


def run_top(url: str, *, once: bool) -> None:
    """Show the server until Ctrl-C, or once. Raises `ConfigError` if there is none."""
    reading = read_metrics(url)
    if once:
        Console().print(metrics_table(url, None, reading))
        return
    with Live(metrics_table(url, None, reading), auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_PERIOD_S)
            previous, reading = reading, read_metrics(url)
            live.update(metrics_table(url, previous, reading), refresh=True)


def read_metrics(url: str) -> MetricsReading:
    """The metrics of the server at `url`. Raises `ConfigError`."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=ANSWER_TIMEOUT_S) as answer:
            text = answer.read().decode()
    except (OSError, ValueError, HTTPException) as error:
        raise no_server_error(url, error) from None
    reading = MetricsReading(time.monotonic())
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if label := STEP_LABELS.get(sample.name):
                reading.step_seconds[label][sample.labels[label]] = sample.value
            elif "le" not in sample.labels:
                reading.totals[sample.name] += sample.value
    if "eagleray_http_outputs_open" not in reading.totals:
        raise ConfigError(f"what answers at {url!r} is not Eagleray; name its address with --url")
    return reading


def no_server_error(url: str, error: Exception) -> ConfigError:
    """The error for an address at which no server answers."""
    return ConfigError(
        f"no server answers at {url!r}: {error}. Start one with 'python launch.py serve', or name"
        " its address with --url, such as http://127.0.0.1:8000"
    )


def metrics_table(url: str, previous: MetricsReading | None, reading: MetricsReading) -> Table:
    """A table of the server's state, totals, and rates and means since the previous reading. If
    there is none, there are no rates, and means are those since the start.
    """
    baseline = previous or MetricsReading(reading.time_s)
    totals, seconds = reading.totals, reading.time_s - baseline.time_s

    def increase(name: str) -> float:
        return totals[name] - baseline.totals[name]

    def rate(name: str) -> str:
        total_text = f"{totals[name]:.0f} since the start"
        return f"{increase(name) / seconds:.1f} per s, {total_text}" if seconds else total_text

    def mean_ms(name: str) -> str:
        count = increase(f"{name}_count")
        return f"{1e3 * increase(f'{name}_sum') / count:.1f} ms" if count else "-"

    def step_ms(label: str, prefix: str = "") -> str:
        if not num_steps:
            return "-"
        baseline_seconds = baseline.step_seconds[label]
        return ", ".join(
            f"{prefix}{value} {1e3 * (total_s - baseline_seconds.get(value, 0.0)) / num_steps:.1f}"
            " ms"
            for value, total_s in reading.step_seconds[label].items()
        )

    num_steps = increase("eagleray_steps_total")
    num_used_blocks = totals["eagleray_kv_blocks"] - totals["eagleray_kv_blocks_free"]
    num_prompt_tokens = increase("eagleray_prompt_tokens_total")
    num_hit_tokens = increase("eagleray_prefix_cache_hit_tokens_total")
    rows = {
        "engines ready": f"{totals['eagleray_ready']:.0f}",
        "recoveries": f"{totals['eagleray_recoveries_total']:.0f}",
        "running / waiting": f"{totals['eagleray_num_requests_running']:.0f} /"
        f" {totals['eagleray_num_requests_waiting']:.0f}",
        "output tokens": rate("eagleray_output_tokens_total"),
        "requests answered": rate("eagleray_http_requests_total"),
        "time in the queue": mean_ms("eagleray_queue_seconds"),
        "time to first token": mean_ms("eagleray_time_to_first_token_seconds"),
        "between tokens": mean_ms("eagleray_inter_token_seconds"),
        "KV cache in use": f"{num_used_blocks / max(1.0, totals['eagleray_kv_blocks']):.0%}",
        "prefix cache hits": f"{num_hit_tokens / num_prompt_tokens:.0%} of prompt tokens"
        if num_prompt_tokens
        else "-",
        "preemptions": rate("eagleray_preemptions_total"),
        "steps": rate("eagleray_steps_total"),
        "a step": step_ms("part"),
        "a step by rank": step_ms("rank", "rank "),
    }
    period = f"the last {seconds:.0f} s" if previous else "since its start"
    result = Table(title=f"Eagleray at {url}, {period}", show_header=False)
    for title, value in rows.items():
        result.add_row(title, value)
    return result
