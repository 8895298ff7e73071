"""What an API process counts, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from cluster.api.metrics import TOKEN_SECONDS, ApiMetrics, Timing, merge, render


def samples_of(*processes: ApiMetrics) -> dict[tuple[str, str], float]:
    """Values by name and bucket."""
    text = render(merge([metrics.families() for metrics in processes])).decode()
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_tokens_and_the_gaps_between_them_are_counted() -> None:
    metrics = ApiMetrics()
    metrics.tokens.add(5)
    metrics.tokens.observe(0.002, 3)
    metrics.tokens.observe(TOKEN_SECONDS[0], 1)  # a bucket has its bound
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
    timing = Timing(metrics)
    timing.tokens(0, 4)
    timing.tokens(0, 3)
    timing.tokens(1, 1)
    samples = samples_of(metrics)
    assert samples["eagleray_output_tokens_total", ""] == 8
    assert samples["eagleray_inter_token_seconds_count", ""] == 3
    assert samples["eagleray_time_to_first_token_seconds_count", ""] == 1


def test_processes_are_added_up() -> None:
    processes = [ApiMetrics(), ApiMetrics()]
    for metrics in processes:
        metrics.tokens.add(2)
        metrics.tokens.observe(0.02, 2)
    samples = samples_of(*processes)
    assert samples["eagleray_output_tokens_total", ""] == 4
    assert samples["eagleray_inter_token_seconds_bucket", "0.025"] == 4
    assert samples["eagleray_inter_token_seconds_bucket", "0.01"] == 0
