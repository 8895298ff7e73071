"""The formats in which a checkpoint may store its matrices: one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from configs.formats import awq, compressed_tensors, fp8, gptq
from configs.formats.stored import Section, StoredFormat
from scheduler.errors import ConfigError

# By `quant_method`.
READERS: dict[str, Callable[[Section], StoredFormat]] = {
    awq.METHOD: awq.read,
    gptq.METHOD: gptq.read,
    fp8.METHOD: fp8.read,
    compressed_tensors.METHOD: compressed_tensors.read,
}
POSSIBLE = (awq.POSSIBLE, gptq.POSSIBLE, fp8.POSSIBLE, compressed_tensors.POSSIBLE)


def read_format(raw: Mapping[str, Any], where: str) -> StoredFormat | None:
    """The format in a decoded `config.json`, None if matrices are not quantized. Raises
    `ConfigError`.
    """
    config = raw.get("quantization_config")
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: quantization_config must be an object")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        raise ConfigError(
            f"{where}: quantization_config has quant_method {method!r}; possible are"
            f" {'; '.join(POSSIBLE)}. Use such a checkpoint, or one that is not quantized"
        )
    return READERS[method](Section(values=config, where=where, format_name=method))
