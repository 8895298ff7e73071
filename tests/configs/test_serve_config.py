"""Options of a served application."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cluster.api.admission import ApiLimits
from cluster.api.endpoints import ServedModel
from cluster.serve.application import _autoscaling
from configs.engine import EngineConfig
from configs.serve import ServeConfig
from scheduler.bounds import HTTP_BOUNDS, field_limit
from scheduler.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_replicas": 0}, "max_replicas must be"),
        ({"api_replicas": 0}, "api_replicas must be"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas 2 is below replicas 3"),
        ({"target_ongoing_requests": 4}, "give max_replicas with it"),
        ({"upscale_delay_s": 0}, "upscale_delay_s must be"),
        ({"unknown_fields": "maybe"}, "unknown_fields must be one of ignore, refuse"),
        ({"engine": 3}, "engine must be a mapping"),
        ({"api_key": " \n"}, r"api_key \(--api-key or EAGLERAY_API_KEY\) must not be empty"),
        ({"api_key": "a\nb"}, "EAGLERAY_API_KEY\\) must consist of printable ASCII"),
        ({"api_key": "schl\u00fcssel"}, "must consist of printable ASCII"),
        ({"api_key": "a\udcff"}, "must consist of printable ASCII"),
        ({"model": "x"}, "unknown serving option 'model'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeConfig.from_dict(options)


def test_a_key_from_a_file_has_no_end_of_line() -> None:
    assert ServeConfig(api_key=" my key\r\n").api_key == "my key"


def test_a_fixed_number_of_replicas_is_not_scaled() -> None:
    assert _autoscaling(ServeConfig(replicas=2), "cpu") is None
    assert ServeConfig().has_single_engine
    assert not ServeConfig(replicas=2).has_single_engine
    assert not ServeConfig(max_replicas=2).has_single_engine


def test_the_limit_of_open_outputs_is_divided_only_where_it_cannot_be_shared() -> None:
    config = ServeConfig(api_replicas=3, replicas=2, max_open_requests=100)
    assert config.max_open_outputs == 67
    assert dataclasses.replace(config, shared_port_path="/tmp/port").max_open_outputs == 200
    assert ServeConfig(max_open_requests=100).max_open_outputs == 100


def test_an_engine_is_in_the_process_of_the_api_only_if_both_are_alone() -> None:
    assert ServeConfig().api_has_engine
    assert not ServeConfig(api_replicas=2).api_has_engine
    assert not ServeConfig(replicas=2).api_has_engine


def test_replicas_follow_ongoing_requests() -> None:
    config = ServeConfig(
        engine=EngineConfig(max_num_seqs=10), replicas=2, max_replicas=5, upscale_delay_s=6.0
    )
    scaling = _autoscaling(config, "cpu")
    assert scaling is not None
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 5)
    assert scaling.target_ongoing_requests == 5
    assert (scaling.upscale_delay_s, scaling.look_back_period_s) == (6.0, 6.0)
    given = ServeConfig(max_replicas=5, target_ongoing_requests=3)
    assert (found := _autoscaling(given, "cpu")) and found.target_ongoing_requests == 3


@pytest.mark.parametrize(("device", "target"), [("cpu", 32), ("cuda", 128)])
def test_replicas_are_added_when_half_of_the_sequences_run(device: str, target: int) -> None:
    scaling = _autoscaling(ServeConfig(max_replicas=5), device)
    assert scaling is not None and scaling.target_ongoing_requests == target


def test_the_bounds_that_can_be_configured_are_those_of_the_table_at_first() -> None:
    config, limits = ServeConfig(), ApiLimits()
    assert config.max_body_bytes == limits.max_body_bytes == HTTP_BOUNDS["body"].maximum
    [max_messages] = [
        field for field in dataclasses.fields(ServedModel) if field.name == "max_messages"
    ]
    assert config.max_messages == max_messages.default == field_limit("messages")
    assert config.slow_reader_timeout_s == limits.slow_reader_timeout_s


def test_names_are_separated_by_commas() -> None:
    assert ServeConfig.split_names(" a.example, b.example:80,") == ("a.example", "b.example:80")
    assert ServeConfig.split_names(None) == ()
    with pytest.raises(ConfigError, match="allowed_hosts must be text"):
        ServeConfig.from_dict({"allowed_hosts": ["a"]})
