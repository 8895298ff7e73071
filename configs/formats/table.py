"""The formats in which a checkpoint may store its matrices: one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from configs.formats import awq, compressed_tensors, fp8, gptq
from configs.formats.stored import Section, StoredFormat
from scheduler.errors import ConfigError

_FORMATS = (awq, gptq, fp8, compressed_tensors)
# By `quant_method` of config.json.
READERS: dict[str, Callable[[Section], StoredFormat]] = {
    format_module.QUANT_METHOD: format_module.read for format_module in _FORMATS
}
# How messages call each.
_FORMAT_NAMES: dict[str, str] = {
    format_module.QUANT_METHOD: format_module.FORMAT_NAME for format_module in _FORMATS
}
SUPPORTED_VARIANTS = tuple(format_module.SUPPORTED_VARIANTS for format_module in _FORMATS)


def read_format(raw_config: Mapping[str, Any], source_name: str) -> StoredFormat | None:
    """The format in a `config.json`, None if it is not quantized. Raises `ConfigError`."""
    config = raw_config.get("quantization_config")
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ConfigError(f"{source_name}: quantization_config must be an object")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        raise ConfigError(
            f"{source_name}: quantization_config has quant_method {method!r}; possible are"
            f" {'; '.join(SUPPORTED_VARIANTS)}. Use such a checkpoint, or one that is not quantized"
        )
    section = Section(values=config, source_name=source_name, format_name=_FORMAT_NAMES[method])
    return READERS[method](section)
