"""`launch.py top`: a running server live in the terminal, read from its `/metrics`."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.table import Table

from scheduler.errors import ConfigError

TIMEOUT_S = 10.0
PERIOD_S = 1.0
# Counters of seconds with a label that distinguishes them: the metric, and its label.
STEPS_BY = {"eagleray_step_part_seconds_total": "part", "eagleray_rank_step_seconds_total": "rank"}


@dataclass(slots=True)
class Reading:
    """All numbers of a server at one time. `numbers` adds up over labels, `steps` holds the time of
    steps by part and by rank.
    """

    at_s: float
    numbers: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: dict[str, dict[str, float]] = field(
        default_factory=lambda: {label: {} for label in STEPS_BY.values()}
    )


def run_top(url: str, *, once: bool) -> None:
    """Show the server until Ctrl-C, or once. Raises `ConfigError` if there is none."""
    last = read(url)
    if once:
        Console().print(table(url, None, last))
        return
    with Live(table(url, None, last), auto_refresh=False) as live:
        while True:
            time.sleep(PERIOD_S)
            now = read(url)
            live.update(table(url, last, now), refresh=True)
            last = now


def read(url: str) -> Reading:
    """The numbers of the server at `url`. Raises `ConfigError`."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as answer:
            text = answer.read().decode()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no server answers at {url!r}: {error}. Start one with 'python launch.py serve', or"
            " name its address with --url"
        ) from None
    reading = Reading(time.monotonic())
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if label := STEPS_BY.get(sample.name):
                reading.steps[label][sample.labels[label]] = sample.value
            elif "le" not in sample.labels:
                reading.numbers[sample.name] += sample.value
    if "eagleray_http_outputs_open" not in reading.numbers:
        raise ConfigError(f"what answers at {url!r} is not Eagleray; name its address with --url")
    return reading


def table(url: str, last: Reading | None, now: Reading) -> Table:
    """A table of the server's state now, and of its rates since the last reading or the start."""
    numbers = now.numbers
    before = last.numbers if last is not None else defaultdict(float)
    seconds = now.at_s - last.at_s if last is not None else 0.0

    def grown(name: str) -> float:
        return numbers[name] - before[name]

    def rate(name: str) -> str:
        return f"{grown(name) / seconds:.1f} per s" if seconds else f"{numbers[name]:.0f}"

    def mean_ms(name: str) -> str:
        count = grown(f"{name}_count")
        return f"{1e3 * grown(f'{name}_sum') / count:.1f} ms" if count else "-"

    used = numbers["eagleray_kv_blocks"] - numbers["eagleray_kv_blocks_free"]
    prompt = grown("eagleray_prompt_tokens_total")
    hits = grown("eagleray_prefix_cache_hit_tokens_total")
    steps = grown("eagleray_steps_total")

    def of_a_step(label: str, prefix: str = "") -> str:
        old = last.steps[label] if last is not None else {}
        grown = {name: seconds - old.get(name, 0.0) for name, seconds in now.steps[label].items()}
        of_each = (f"{prefix}{name} {1e3 * s / steps:.1f} ms" for name, s in grown.items())
        return ", ".join(of_each) if steps else "-"

    rows = {
        "engines ready": f"{numbers['eagleray_ready']:.0f}",
        "recoveries": f"{numbers['eagleray_recoveries_total']:.0f}",
        "running / waiting": f"{numbers['eagleray_num_requests_running']:.0f} /"
        f" {numbers['eagleray_num_requests_waiting']:.0f}",
        "output tokens": rate("eagleray_output_tokens_total"),
        "requests answered": rate("eagleray_http_requests_total"),
        "time in the queue": mean_ms("eagleray_queue_seconds"),
        "time to first token": mean_ms("eagleray_time_to_first_token_seconds"),
        "between tokens": mean_ms("eagleray_inter_token_seconds"),
        "KV cache in use": f"{used / max(1.0, numbers['eagleray_kv_blocks']):.0%}",
        "prefix cache hits": f"{hits / prompt:.0%} of prompt tokens" if prompt else "-",
        "preemptions": rate("eagleray_preemptions_total"),
        "steps": rate("eagleray_steps_total"),
        "a step": of_a_step("part"),
        "a step by rank": of_a_step("rank", "rank "),
    }
    shown = Table(title=f"Eagleray at {url}", show_header=False)
    for name, value in rows.items():
        shown.add_row(name, value)
    return shown
