"""Checkpoints of compressed-tensors, which llm-compressor writes, in three of its formats. Keys and
tensors: github.com/neuralmagic/compressed-tensors.

- int-quantized: 8-bit codes with a scale per row, inputs quantized per token ("W8A8"): these are
  kept and multiplied as codes.
- pack-quantized: 4 or 8 bits in 32-bit words, a scale per row or group of inputs ("W4A16").
- float-quantized: 8-bit floating-point numbers, a scale per matrix, row or block.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from configs.formats.stored import F8_E4M3, I8, INT32, Section, StoredFormat, sequential_order

QUANT_METHOD = "compressed-tensors"  # in config.json
FORMAT_NAME = "compressed-tensors"  # in messages
SUPPORTED_VARIANTS = (
    "compressed-tensors (int-quantized: 8 bits per channel; pack-quantized: 4 or 8 bits, any group"
    " size, symmetric or not; float-quantized: e4m3, per tensor, channel or block)"
)
_SCALE = "weight_scale"


def read(config: Section) -> StoredFormat:
    """The format that `quantization_config` describes. Raises `ConfigError`."""
    reader = _READERS[config.require("format", *_READERS)]
    config_group_names = list(config.section("config_groups").values)
    if len(config_group_names) != 1:
        raise config.error("number of config_groups", len(config_group_names), "1")
    config_group = config.section("config_groups").section(config_group_names[0])
    config_group.require("targets", ["Linear"])
    config_group.require("output_activations", None)
    # Checked here, since not every reader below looks at these.
    weights = config_group.section("weights")
    weights.require("actorder", None, "group", "dynamic", "weight", "static", False, True)
    if weights.values.get("group_size") is not None:
        weights.group_size()
    config.require("kv_cache_scheme", None)
    config.require("transform_config", None, {})  # rotations that a rank would have to compute
    config.section("sparsity_config").require("format", "dense", default="dense")
    return reader(config_group, config)


def _int_quantized(config_group: Section, config: Section) -> StoredFormat:
    config.require("ignore", ["lm_head"])  # codes and values cannot be in one product
    weights, inputs = config_group.section("weights"), config_group.section("input_activations")
    weights.require("num_bits", 8)
    inputs.require("num_bits", 8)
    for operand in (weights, inputs):
        operand.require("type", "int")
        operand.require("symmetric", True)
    weights.require("strategy", "channel")
    inputs.require("strategy", "token")
    weights.require("dynamic", False)
    inputs.require("dynamic", True)
    return StoredFormat(
        name="compressed-tensors (int-quantized)",
        codes_suffix="weight",
        dtype=I8,
        bits=8,
        scales_suffix=_SCALE,
    )


def _pack_quantized(config_group: Section, config: Section) -> StoredFormat:
    weights = config_group.section("weights")
    weights.require("type", "int")
    weights.require("dynamic", False, default=False)
    config_group.require("input_activations", None)
    bits = weights.require("num_bits", 4, 8)
    is_grouped = weights.require("strategy", "group", "channel") == "group"
    activation_order = weights.values.get("actorder")
    has_group_index = activation_order in ("group", "dynamic", True)
    return StoredFormat(
        name="compressed-tensors (pack-quantized)",
        codes_suffix="weight_packed",
        dtype=INT32,
        bits=bits,
        code_order=sequential_order(bits),
        scales_suffix=_SCALE,
        zeros_suffix=None if weights.require("symmetric", True, False) else "weight_zero_point",
        # Both are stored with this added, so that they are not negative; it cancels out.
        zero_offset=2 ** (bits - 1) if weights.values["symmetric"] else 0,
        group_index_suffix="weight_g_idx" if has_group_index else None,
        redundant_index_suffix=None if has_group_index else "weight_g_idx",
        reason_for_order=(
            f'by config.json actorder is {json.dumps(activation_order)}: set it to "group"'
        ),
        group_size=weights.group_size() if is_grouped else -1,
        ignored_suffixes=("weight_shape", "weight_g_idx"),
    )


def _float_quantized(config_group: Section, config: Section) -> StoredFormat:
    weights = config_group.section("weights")
    weights.require("num_bits", 8)
    weights.require("type", "float")
    weights.require("symmetric", True)
    weights.require("dynamic", False, default=False)
    block_rows, group_size = {"tensor": (-1, -1), "channel": (1, -1), "block": (128, 128)}[
        weights.require("strategy", "tensor", "channel", "block")
    ]
    if group_size != -1:
        weights.require("block_structure", [block_rows, group_size])
    return StoredFormat(
        name="compressed-tensors (float-quantized)",
        codes_suffix="weight",
        dtype=F8_E4M3,
        bits=8,
        scales_suffix=_SCALE,
        block_rows=block_rows,
        group_size=group_size,
        has_whole_groups=False,
        ignored_suffixes=("input_scale",),
    )


_READERS: dict[str, Callable[[Section, Section], StoredFormat]] = {
    "int-quantized": _int_quantized,
    "pack-quantized": _pack_quantized,
    "float-quantized": _float_quantized,
}
