"""Matrices of 8-bit codes: what the user asks for, or what a checkpoint's `quantization_config`
says.

The one format is "int8": codes with one scale per output feature, multiplied by inputs that are
quantized per token as they come. Quantized checkpoints are read in the format that
compressed-tensors calls int-quantized (github.com/neuralmagic/compressed-tensors). GPTQ is only a
way to store weights here (see gptq.py). Everything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.errors import ConfigError

QUANTIZATIONS = ("int8",)
_WEIGHTS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "channel",
    "dynamic": False,
}
_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The matrices of the decoder layers are codes. stored: the checkpoint holds codes; otherwise
    they are computed as weights are loaded. vocabulary: embedding and head are codes as well.
    """

    stored: bool
    vocabulary: bool


def read_quantization(raw: Mapping[str, Any], where: str) -> Quantization | None:
    """The quantization in a decoded `config.json`, None if there is none or it is GPTQ. Raises
    `ConfigError`.
    """
    quantization_config = raw.get("quantization_config")
    if not quantization_config:
        return None
    if not isinstance(quantization_config, Mapping):
        raise ConfigError(f"{where}: quantization_config must be an object")
    if quantization_config.get("quant_method") == "gptq":
        return None

    def check(name: str, value: object, expected: object) -> None:
        if value != expected:
            raise ConfigError(
                f"{where}: quantization_config has {name} {value!r}; of quantized checkpoints only"
                f" 8-bit integers of compressed-tensors, with {expected!r} there, and GPTQ are"
                " supported. Use such a checkpoint, or a plain one with quantization 'int8'"
            )

    check("quant_method", quantization_config.get("quant_method"), "compressed-tensors")
    check("format", quantization_config.get("format"), "int-quantized")
    config_groups = quantization_config.get("config_groups")
    config_groups = list(config_groups.values()) if isinstance(config_groups, Mapping) else []
    check("number of config_groups", len(config_groups), 1)
    config_group = config_groups[0] if isinstance(config_groups[0], Mapping) else {}
    check("targets", config_group.get("targets"), ["Linear"])
    for operand, expected_format in (("weights", _WEIGHTS), ("input_activations", _INPUTS)):
        operand_format = config_group.get(operand)
        operand_format = operand_format if isinstance(operand_format, Mapping) else {}
        for name, value in expected_format.items():
            check(f"{operand}.{name}", operand_format.get(name), value)
    check("output_activations", config_group.get("output_activations"), None)
    check("kv_cache_scheme", quantization_config.get("kv_cache_scheme"), None)
    check("ignore", quantization_config.get("ignore"), ["lm_head"])
    return Quantization(stored=True, vocabulary=False)
