"""Checkpoints whose matrices are packed by GPTQ. Keys, tensors: github.com/ModelCloud/GPTQModel."""

from __future__ import annotations

from configs.formats.stored import INT32, Section, StoredFormat, sequential_order

QUANT_METHOD = "gptq"  # in config.json
FORMAT_NAME = "GPTQ"  # in messages
SUPPORTED_VARIANTS = "GPTQ (4 or 8 bits, any group size, with or without desc_act)"
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # by `checkpoint_format`; added to stored zeros


def read(config: Section) -> StoredFormat:
    """The format that `quantization_config` describes. Raises `ConfigError`."""
    bits = config.require("bits", 4, 8)
    fallback_format = config.require("format", *_ZERO_OFFSETS, default="gptq")
    checkpoint_format = config.require("checkpoint_format", *_ZERO_OFFSETS, default=fallback_format)
    config.require("pack_dtype", "int32", default="int32")
    config.require("lm_head", False, default=False)
    _check_dynamic_rules(config)
    has_group_index = config.require("desc_act", True, False, default=False)
    return StoredFormat(
        name="GPTQ",
        codes_suffix="qweight",
        dtype=INT32,
        bits=bits,
        code_order=sequential_order(bits),
        is_transposed=True,
        scales_suffix="scales",
        zeros_suffix="qzeros",
        zero_offset=_ZERO_OFFSETS[checkpoint_format],
        group_index_suffix="g_idx" if has_group_index else None,
        redundant_index_suffix=None if has_group_index else "g_idx",
        reason_for_order="by config.json desc_act is false: set it to true",
        group_size=config.group_size(default=-1),
        has_whole_groups=False,
        ignored_suffixes=("g_idx",),
    )


def _check_dynamic_rules(config: Section) -> None:
    """`dynamic` may leave matrices as they are, as the files show, but not pack them otherwise."""
    dynamic = config.section("dynamic").values
    if not all(pattern.startswith("-:") for pattern in dynamic):
        raise config.error("dynamic", dict(dynamic), "rules that only leave matrices out ('-:')")
