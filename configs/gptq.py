"""Checkpoints whose layer matrices are stored as GPTQ packs them, as their `quantization_config`
describes it.

This is a way to store weights, not to compute with them: the matrices are unpacked while they are
loaded, and held as the engine holds others (see workers/models/gptq.py). Keys and formats:
github.com/ModelCloud/GPTQModel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.errors import ConfigError

BITS = (4, 8)  # that divide the 32 bits of a stored word evenly and are in use
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # by `checkpoint_format`


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq:
    """Codes of `bits` bits. group_size: inputs in a row that share a scale and a zero point, -1 for
    all of them. has_index: the checkpoint tells the group of each input, which otherwise follow one
    another. zero_offset: what to add to the stored zero points.
    """

    bits: int
    group_size: int
    has_index: bool
    zero_offset: int

    def num_groups(self, size_in: int) -> int:
        """Groups of a matrix with that many inputs."""
        return 1 if self.group_size == -1 else -(-size_in // self.group_size)

    def num_words(self, num_codes: int) -> int:
        """32-bit words that hold `num_codes` codes."""
        return -(-num_codes // (32 // self.bits))


def read_gptq(raw: Mapping[str, Any], where: str) -> Gptq | None:
    """The format in a decoded `config.json`, None if it is another one or none. Raises
    `ConfigError`.
    """
    quantization_config = raw.get("quantization_config")
    if (
        not isinstance(quantization_config, Mapping)
        or quantization_config.get("quant_method") != "gptq"
    ):
        return None

    def check(name: str, value: object, *supported_values: object) -> None:
        if value not in supported_values:
            raise ConfigError(
                f"{where}: quantization_config has {name} {value!r}; of GPTQ checkpoints, those"
                f" with {' or '.join(map(repr, supported_values))} there are supported. Use such a"
                " checkpoint, or one that is not quantized"
            )

    bits, group_size = quantization_config.get("bits", 0), quantization_config.get("group_size", -1)
    check("bits", bits, *BITS)
    if type(group_size) is not int or (group_size < 1 and group_size != -1):
        raise ConfigError(
            f"{where}: quantization_config has group_size {group_size!r}; it must be at least 1, or"
            " -1 for one group per row"
        )
    checkpoint_format = quantization_config.get("checkpoint_format", "gptq")
    check("checkpoint_format", checkpoint_format, *_ZERO_OFFSETS)
    check("pack_dtype", quantization_config.get("pack_dtype", "int32"), "int32")
    check("lm_head", quantization_config.get("lm_head") or False, False)
    check("dynamic", quantization_config.get("dynamic") or None, None)
    return Gptq(
        bits=int(bits),
        group_size=group_size,
        has_index=bool(quantization_config.get("desc_act")),
        zero_offset=_ZERO_OFFSETS[checkpoint_format],
    )
