"""Checkpoints of compressed-tensors, which llm-compressor writes, in three of its formats. Keys and
tensors: github.com/neuralmagic/compressed-tensors.

- int-quantized: 8-bit codes with a scale per row, inputs quantized per token ("W8A8"): these are
  kept and multiplied as codes.
- pack-quantized: 4 or 8 bits in 32-bit words, a scale per row or group of inputs ("W4A16").
- float-quantized: 8-bit floating-point numbers, a scale per matrix, row or block.
"""

from __future__ import annotations

from collections.abc import Callable

from configs.formats.stored import F8_E4M3, I8, WORDS, Section, StoredFormat, in_sequence

METHOD = "compressed-tensors"
POSSIBLE = (
    "compressed-tensors (int-quantized: 8 bits per channel; pack-quantized: 4 or 8 bits, any group"
    " size, symmetric or not; float-quantized: e4m3, per tensor, channel or block)"
)
_SCALE = "weight_scale"


def read(config: Section) -> StoredFormat:
    """The format that `quantization_config` describes. Raises `ConfigError`."""
    reader = _READERS[config.choose("format", *_READERS)]
    groups = list(config.section("config_groups").values)
    if len(groups) != 1:
        raise config.error("number of config_groups", len(groups), "those with 1")
    group = config.section("config_groups").section(groups[0])
    group.choose("targets", ["Linear"])
    group.choose("output_activations", None)
    config.choose("kv_cache_scheme", None)
    config.choose("transform_config", None, {})  # rotations that a rank would have to compute
    config.section("sparsity_config").choose("format", "dense", default="dense")
    return reader(group, config)


def _int_quantized(group: Section, config: Section) -> StoredFormat:
    config.choose("ignore", ["lm_head"])  # codes and values cannot be in one product
    weights, inputs = group.section("weights"), group.section("input_activations")
    weights.choose("num_bits", 8)
    inputs.choose("num_bits", 8)
    for operand in (weights, inputs):
        operand.choose("type", "int")
        operand.choose("symmetric", True)
    weights.choose("strategy", "channel")
    inputs.choose("strategy", "token")
    weights.choose("dynamic", False)
    inputs.choose("dynamic", True)
    return StoredFormat(
        name="compressed-tensors (int-quantized)",
        codes="weight",
        dtype=I8,
        bits=8,
        scales=_SCALE,
    )


def _pack_quantized(group: Section, config: Section) -> StoredFormat:
    weights = group.section("weights")
    weights.choose("type", "int")
    weights.choose("dynamic", False, default=False)
    group.choose("input_activations", None)
    bits = weights.choose("num_bits", 4, 8)
    in_groups = weights.choose("strategy", "group", "channel") == "group"
    order = weights.choose("actorder", "group", "dynamic", "weight", "static", "", default="")
    return StoredFormat(
        name="compressed-tensors (pack-quantized)",
        codes="weight_packed",
        dtype=WORDS,
        bits=bits,
        order=in_sequence(bits),
        scales=_SCALE,
        zeros=None if weights.choose("symmetric", True, False) else "weight_zero_point",
        # Both are stored with this added, so that they are not negative; it cancels out.
        zero_offset=2 ** (bits - 1) if weights.values["symmetric"] else 0,
        index="weight_g_idx" if order in ("group", "dynamic") else None,
        group_size=weights.group_size() if in_groups else -1,
        ignored=("weight_shape", "weight_g_idx"),
    )


def _float_quantized(group: Section, config: Section) -> StoredFormat:
    weights = group.section("weights")
    weights.choose("num_bits", 8)
    weights.choose("type", "float")
    weights.choose("symmetric", True)
    weights.choose("dynamic", False, default=False)
    block_rows, group_size = {"tensor": (-1, -1), "channel": (1, -1), "block": (128, 128)}[
        weights.choose("strategy", "tensor", "channel", "block")
    ]
    if group_size != -1:
        weights.choose("block_structure", [block_rows, group_size])
    return StoredFormat(
        name="compressed-tensors (float-quantized)",
        codes="weight",
        dtype=F8_E4M3,
        bits=8,
        scales=_SCALE,
        block_rows=block_rows,
        group_size=group_size,
        has_whole_groups=False,
        ignored=("input_scale",),
    )


_READERS: dict[str, Callable[[Section, Section], StoredFormat]] = {
    "int-quantized": _int_quantized,
    "pack-quantized": _pack_quantized,
    "float-quantized": _float_quantized,
}
