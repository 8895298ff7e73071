"""The formats in which a checkpoint may store its matrices: one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from configs.formats import awq, compressed_tensors, fp8, gptq
from configs.formats.stored import Section, StoredFormat
from scheduler.errors import ConfigError

# By `quant_method`.
READERS: dict[str, Callable[[Section], StoredFormat]] = {
    awq.QUANT_METHOD: awq.read,
    gptq.QUANT_METHOD: gptq.read,
    fp8.QUANT_METHOD: fp8.read,
    compressed_tensors.QUANT_METHOD: compressed_tensors.read,
}
SUPPORTED_VARIANTS = (
    awq.SUPPORTED_VARIANTS,
    gptq.SUPPORTED_VARIANTS,
    fp8.SUPPORTED_VARIANTS,
    compressed_tensors.SUPPORTED_VARIANTS,
)


def read_format(raw_config: Mapping[str, Any], where: str) -> StoredFormat | None:
    """The format in a decoded `config.json`, None if matrices are not quantized. Raises
    `ConfigError`.
    """
    config = raw_config.get("quantization_config")
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: quantization_config must be an object")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        raise ConfigError(
            f"{where}: quantization_config has quant_method {method!r}; possible are"
            f" {'; '.join(SUPPORTED_VARIANTS)}. Use such a checkpoint, or one that is not quantized"
        )
    is_acronym = method != compressed_tensors.QUANT_METHOD
    format_name = method.upper() if is_acronym else method
    return READERS[method](Section(values=config, where=where, format_name=format_name))
