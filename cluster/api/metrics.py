"""The counters of an API process, in the format of Prometheus.

The numbers of several processes and engines are added up by name and labels (`merge`), so that one
answer covers all of them; of those in `METRICS_MERGED_BY_MAX` it has the largest.
"""

from __future__ import annotations

import functools
import operator
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from scheduler.messages import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
# Metric of the engine, its help, and the field of `EngineStats`; names that end in _total count up.
ENGINE_METRICS = {
    "eagleray_num_requests_running": ("Sequences in the batch.", "num_running"),
    "eagleray_num_requests_waiting": ("Sequences waiting for room.", "num_waiting"),
    "eagleray_kv_blocks": ("Blocks of the KV cache.", "num_blocks"),
    "eagleray_kv_blocks_free": ("Blocks of the KV cache that nobody uses.", "num_free_blocks"),
    "eagleray_steps_total": ("Steps run.", "num_steps"),
    "eagleray_preemptions_total": ("Preemptions; a sequence may have several.", "num_preemptions"),
    "eagleray_prompt_tokens_total": (
        "Tokens of prompts admitted, and of the output of requests that are sent again.",
        "num_prompt_tokens",
    ),
    "eagleray_prefix_cache_hit_tokens_total": (
        "Of these, found in the prefix cache; the last one of a sequence is always computed.",
        "num_cached_tokens",
    ),
    "eagleray_prefix_cache_evictions_total": (
        "Blocks taken from the prefix cache to hold other tokens.",
        "num_evictions",
    ),
    "eagleray_ready": ("Engines whose ranks answer and whose work moves.", "is_ready"),
    "eagleray_step_age_seconds": (
        "Since the last result, while there is work; of the engine that waits longest.",
        "step_age_s",
    ),
    "eagleray_recoveries_total": ("Times that lost ranks were replaced.", "num_recoveries"),
    "eagleray_recomputed_tokens_total": (
        "Tokens computed again after ranks were lost, without those of steps in flight.",
        "num_recomputed_tokens",
    ),
}
# Of several engines, the largest: a sum of these says nothing about any of them.
METRICS_MERGED_BY_MAX = frozenset({"eagleray_step_age_seconds"})
PART_HELP = (
    "Time of steps by part, on rank 0: prepare, forward, sample, mask (waiting for those of"
    " grammars), wait (for the result)."
)
RANK_HELP = "Time of steps by rank, including waiting for the other ranks."
Sample = tuple[str, tuple[tuple[str, str], ...], float]  # name, labels, value


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFamily:
    """One metric with its samples, as plain data."""

    name: str
    kind: str
    help: str
    samples: list[Sample] = field(default_factory=list)


class ApiMetrics:
    """Counters of one API process. Used from one event loop only."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self.requests = Counter(
            "eagleray_http_requests",
            "Requests answered, by path and HTTP status; 499 when the client left. A stream that"
            " failed midway has the status of its error.",
            ["path", "status"],
            registry=self._registry,
        )
        self.request_counter = functools.cache(self.requests.labels)  # which takes its time
        self.ignored_fields = Counter(
            "eagleray_api_ignored_fields",
            "Unknown fields of requests that were ignored; other: those that no table lists.",
            ["field"],
            registry=self._registry,
        )
        self.open_outputs = Gauge(
            "eagleray_http_outputs_open",
            "Outputs of requests that have not been answered yet.",
            registry=self._registry,
        )
        self.ttft = Histogram(
            "eagleray_time_to_first_token_seconds",
            "From the arrival of a request that streams to its first token.",
            buckets=REQUEST_BUCKETS_S,
            registry=self._registry,
        )
        self.tokens = _TokenMetrics()
        self._registry.register(self.tokens)
        self.duration = Histogram(
            "eagleray_request_seconds",
            "From a request's arrival to the last token of its answer.",
            buckets=REQUEST_BUCKETS_S,
            registry=self._registry,
        )

    def families(self) -> list[MetricFamily]:
        """Everything counted."""
        return [_family(metric) for metric in self._registry.collect()]


def engine_families(stats: EngineStats) -> list[MetricFamily]:
    """The numbers of an engine."""
    families = []
    for name, (help, attribute) in ENGINE_METRICS.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        samples: list[Sample] = [(name, (), float(getattr(stats, attribute)))]
        base_name = name.removesuffix("_total")
        families.append(MetricFamily(name=base_name, kind=kind, help=help, samples=samples))
    name, help = (
        "eagleray_queue_seconds",
        "From a request's arrival at the engine to its first step.",
    )
    queue_samples: list[Sample] = [
        (f"{name}_sum", (), stats.queue_s),
        (f"{name}_count", (), float(stats.num_admitted)),
    ]
    families.append(MetricFamily(name=name, kind="summary", help=help, samples=queue_samples))
    seconds_by_rank = {str(rank): seconds for rank, seconds in enumerate(stats.rank_seconds)}
    for name, label, help, seconds_by_label in (
        ("eagleray_step_part_seconds", "part", PART_HELP, stats.step_seconds),
        ("eagleray_rank_step_seconds", "rank", RANK_HELP, seconds_by_rank),
    ):
        sums = seconds_by_label.items()
        samples = [(f"{name}_total", ((label, label_value),), sum_s) for label_value, sum_s in sums]
        families.append(MetricFamily(name=name, kind="counter", help=help, samples=samples))
    return families


class _TokenMetrics(Collector):
    """What is counted per token, without the locks of Prometheus' own counters."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._bucket_counts = [0] * (len(TOKEN_BUCKETS_S) + 1)  # by bucket
        self._interval_sum_s = 0.0

    def add(self, count: int) -> None:
        """Count output tokens."""
        self._num_tokens += count

    def observe(self, interval_s: float, count: int) -> None:
        """Count times of this length between tokens."""
        self._bucket_counts[bisect_left(TOKEN_BUCKETS_S, interval_s)] += count
        self._interval_sum_s += interval_s * count

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("eagleray_output_tokens", "Tokens generated.", self._num_tokens)
        bounds = [*(floatToGoString(bound_s) for bound_s in TOKEN_BUCKETS_S), "+Inf"]
        yield HistogramMetricFamily(
            "eagleray_inter_token_seconds",
            "Between the tokens of an output that streams.",
            list(zip(bounds, accumulate(self._bucket_counts), strict=True)),
            self._interval_sum_s,
        )


class RequestTimer:
    """Measures the times of one request for the metrics; of one that arrived at `arrival_s`, by
    `time.perf_counter`.
    """

    def __init__(self, metrics: ApiMetrics, arrival_s: float) -> None:
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._last_token_s: dict[int, float] = {}

    def add_tokens(self, choice_index: int, count: int) -> None:
        """New tokens of an output."""
        if not count:
            return
        now_s = time.perf_counter()
        last_s = self._last_token_s.get(choice_index)
        if last_s is not None:
            self._metrics.tokens.observe((now_s - last_s) / count, count)
        elif not self._last_token_s:
            self._metrics.ttft.observe(now_s - self._arrival_s)
        self._last_token_s[choice_index] = now_s
        self._metrics.tokens.add(count)

    def has_begun(self, choice_index: int) -> bool:
        """Whether an output has tokens."""
        return choice_index in self._last_token_s

    def end(self) -> None:
        """All tokens of the answer are there."""
        self._metrics.duration.observe(time.perf_counter() - self._arrival_s)


def merge(family_lists: Iterable[list[MetricFamily]]) -> list[MetricFamily]:
    """The families of several processes, added up by name and labels, or the largest value."""
    family_by_name: dict[str, MetricFamily] = {}
    values_by_family: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for families in family_lists:
        for family in families:
            family_by_name.setdefault(family.name, family)
            combine = max if family.name in METRICS_MERGED_BY_MAX else operator.add
            family_values = values_by_family.setdefault(family.name, {})
            for name, labels, value in family.samples:
                family_values[name, labels] = combine(family_values.get((name, labels), 0.0), value)
    return [
        MetricFamily(
            name=name,
            kind=family.kind,
            help=family.help,
            samples=[(n, labels, value) for (n, labels), value in values_by_family[name].items()],
        )
        for name, family in family_by_name.items()
    ]


def render(families: list[MetricFamily]) -> bytes:
    """The text that Prometheus reads."""
    registry = CollectorRegistry()
    registry.register(_FamilyCollector(families))
    return generate_latest(registry)


class _FamilyCollector(Collector):
    def __init__(self, families: list[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.help, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric


def _family(metric: Metric) -> MetricFamily:
    samples: list[Sample] = [
        (sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for sample in metric.samples
        if not sample.name.endswith("_created")
    ]
    return MetricFamily(
        name=metric.name, kind=metric.type, help=metric.documentation, samples=samples
    )
