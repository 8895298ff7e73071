"""What an API process counts, as Prometheus reads it."""

from __future__ import annotations

import time

from prometheus_client.parser import text_string_to_metric_families

from cluster.api.metrics import (
    TOKEN_BUCKETS_S,
    ApiMetrics,
    MetricFamily,
    RequestTimer,
    engine_families,
    merge,
    render,
)
from scheduler.messages import EngineStats


def samples_of(*processes: ApiMetrics) -> dict[tuple[str, str], float]:
    """Values by name and bucket."""
    return merged_samples([metrics.families() for metrics in processes])


def merged_samples(by_process: list[list[MetricFamily]]) -> dict[tuple[str, str], float]:
    """Values by name and bucket, as Prometheus reads them from the answer for all processes."""
    text = render(merge(by_process)).decode()
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_tokens_and_the_gaps_between_them_are_counted() -> None:
    metrics = ApiMetrics()
    metrics.tokens.add(5)
    metrics.tokens.observe(0.002, 3)
    metrics.tokens.observe(TOKEN_BUCKETS_S[0], 1)  # a bucket has its bound
    metrics.tokens.observe(99.0, 2)
    samples = samples_of(metrics)
    assert samples["eagleray_output_tokens_total", ""] == 5
    name = "eagleray_inter_token_seconds"
    assert samples[f"{name}_count", ""] == samples[f"{name}_bucket", "+Inf"] == 6
    assert samples[f"{name}_bucket", "0.001"] == 1 and samples[f"{name}_bucket", "0.0025"] == 4
    assert samples[f"{name}_bucket", "2.5"] == 4
    assert abs(samples[f"{name}_sum", ""] - (3 * 0.002 + 0.001 + 2 * 99.0)) < 1e-9


def test_tokens_that_come_together_share_their_gap_and_the_first_have_none() -> None:
    metrics = ApiMetrics()
    timing = RequestTimer(metrics, time.perf_counter() - 1.0)
    timing.add_tokens(0, 4)
    timing.add_tokens(0, 3)
    timing.add_tokens(1, 1)
    samples = samples_of(metrics)
    assert samples["eagleray_output_tokens_total", ""] == 8
    assert samples["eagleray_inter_token_seconds_count", ""] == 3
    assert samples["eagleray_time_to_first_token_seconds_count", ""] == 1
    assert 1.0 <= samples["eagleray_time_to_first_token_seconds_sum", ""] < 10.0


def test_processes_are_added_up() -> None:
    processes = [ApiMetrics(), ApiMetrics()]
    for metrics in processes:
        metrics.tokens.add(2)
        metrics.tokens.observe(0.02, 2)
    samples = samples_of(*processes)
    assert samples["eagleray_output_tokens_total", ""] == 4
    assert samples["eagleray_inter_token_seconds_bucket", "0.025"] == 4
    assert samples["eagleray_inter_token_seconds_bucket", "0.01"] == 0


def stats_of_engine(step_age_s: float) -> EngineStats:
    return EngineStats(
        num_running=3,
        num_waiting=0,
        num_free_blocks=10,
        num_blocks=20,
        num_steps=7,
        num_preemptions=0,
        num_prompt_tokens=100,
        num_cached_tokens=50,
        num_evictions=4,
        step_age_s=step_age_s,
    )


def test_the_age_of_a_step_is_that_of_the_engine_that_waits_longest() -> None:
    engines = [engine_families(stats_of_engine(step_age_s)) for step_age_s in (0.5, 2.0, 0.25)]
    samples = merged_samples(engines)
    assert samples["eagleray_step_age_seconds", ""] == 2.0
    assert samples["eagleray_steps_total", ""] == 3 * 7, "what is counted is added up"
    assert samples["eagleray_prefix_cache_evictions_total", ""] == 3 * 4
    assert samples["eagleray_ready", ""] == 3, "the number of engines that are ready"
