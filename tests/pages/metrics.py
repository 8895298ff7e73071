"""Prints docs/metrics.md from what is counted: `python -m tests.pages.metrics`."""

from __future__ import annotations

from cluster.api.metrics import METRICS_MERGED_BY_MAX, ApiMetrics, MetricFamily, engine_families
from cluster.serve.gathered import MAX_REMEMBERED_PROCESSES
from scheduler.messages import EngineStats

INTRODUCTION = f"""\
# Metrics

What `/metrics` answers in the format of Prometheus; Ray's own metrics have it too, without buckets,
as gauges of each replica. This page is made from [what is counted](../cluster/api/metrics.py).

- A histogram has `_bucket`, `_sum` and `_count`, a summary the last two.
- The numbers of all API processes and of all engines are added up. Not added up, but the largest:
  {", ".join(f"`{name}`" for name in sorted(METRICS_MERGED_BY_MAX))}.
- What an API process, or the driver of one of several engines, had counted when `/metrics` was last
  read stays in the sums when it is lost. The API remembers the last {MAX_REMEMBERED_PROCESSES}.
  The counters of a single engine begin anew with its driver.
- What a request and a sequence are: [words](architecture.md#words).
"""


def page() -> str:
    """The text of docs/metrics.md."""
    api_metrics = ApiMetrics()
    # A metric with labels has samples only once something was counted.
    api_metrics.requests.labels("", "")
    api_metrics.ignored_fields.labels("")
    stats = EngineStats(
        num_running=0,
        num_waiting=0,
        num_free_blocks=0,
        num_blocks=0,
        num_steps=0,
        num_preemptions=0,
        num_prompt_tokens=0,
        num_cached_tokens=0,
        step_seconds={"": 0.0},
        rank_seconds=(0.0,),
    )
    sections = [
        INTRODUCTION,
        "## Of the API\n\n" + _table(api_metrics.families()),
        "## Of the engines\n\n" + _table(engine_families(stats)),
    ]
    return "\n".join(sections)


def _table(families: list[MetricFamily]) -> str:
    lines = ["| name | labels | kind | |", "|---|---|---|---|"]
    for family in families:
        assert family.samples, f"{family.name} needs a value for each label, as others above"
        name = f"{family.name}_total" if family.kind == "counter" else family.name
        label_names = {label: None for _, labels, _ in family.samples for label, _ in labels}
        label_names.pop("le", None)  # of buckets
        labels_text = ", ".join(f"`{label}`" for label in label_names)
        lines.append(f"| `{name}` | {labels_text} | {family.kind} | {family.help} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(page(), end="")
