"""Which formats there are."""

from __future__ import annotations

import pytest

from configs.formats.table import READERS, SUPPORTED_VARIANTS, read_format
from scheduler.errors import ConfigError


@pytest.mark.parametrize("raw", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_a_checkpoint_may_not_be_quantized(raw: dict[str, object]) -> None:
    assert read_format(raw, "x") is None


@pytest.mark.parametrize("value", ["int8", [1]])
def test_a_config_that_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="must be an object"):
        read_format({"quantization_config": value}, "config.json")


@pytest.mark.parametrize("method", ["bitsandbytes", None, ["awq"]])
def test_another_method_is_refused_with_those_that_are_possible(method: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read_format({"quantization_config": {"quant_method": method}}, "config.json")
    assert f"quant_method {method!r}; possible are" in str(caught.value)
    assert all(possible in str(caught.value) for possible in SUPPORTED_VARIANTS)


def test_every_format_is_among_those_that_messages_name() -> None:
    assert len(SUPPORTED_VARIANTS) == len(READERS)
