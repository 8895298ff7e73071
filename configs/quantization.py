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
    found = raw.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where}: quantization_config must be an object")
    if found.get("quant_method") == "gptq":
        return None

    def check(name: str, value: object, wanted: object) -> None:
        if value != wanted:
            raise ConfigError(
                f"{where}: quantization_config has {name} {value!r}; of quantized checkpoints only"
                f" 8-bit integers of compressed-tensors, with {wanted!r} there, and GPTQ are"
                " supported. Use such a checkpoint, or a plain one with quantization 'int8'"
            )

    check("quant_method", found.get("quant_method"), "compressed-tensors")
    check("format", found.get("format"), "int-quantized")
    groups = found.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, Mapping) else []
    check("number of config_groups", len(groups), 1)
    group = groups[0] if isinstance(groups[0], Mapping) else {}
    check("targets", group.get("targets"), ["Linear"])
    for part, wanted in (("weights", _WEIGHTS), ("input_activations", _INPUTS)):
        values = group.get(part)
        values = values if isinstance(values, Mapping) else {}
        for name, value in wanted.items():
            check(f"{part}.{name}", values.get(name), value)
    check("output_activations", group.get("output_activations"), None)
    check("kv_cache_scheme", found.get("kv_cache_scheme"), None)
    check("ignore", found.get("ignore"), ["lm_head"])
    return Quantization(stored=True, vocabulary=False)
