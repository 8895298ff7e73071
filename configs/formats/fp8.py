"""Checkpoints of 8-bit floating-point numbers as Qwen publishes them: one scale for each block of
rows and inputs. Keys: transformers, `FineGrainedFP8Config`.
"""

from __future__ import annotations

from configs.formats.stored import F8_E4M3, Section, StoredFormat

QUANT_METHOD = "fp8"  # in config.json
FORMAT_NAME = "FP8"  # in messages
SUPPORTED_VARIANTS = "FP8 (e4m3, blocks of 128 x 128)"
BLOCK_SIZE = 128


def read(config: Section) -> StoredFormat:
    """The format that `quantization_config` describes. Raises `ConfigError`."""
    config.require("fmt", "e4m3", default="e4m3")
    config.require("activation_scheme", "dynamic", default="dynamic")
    config.require("weight_block_size", [BLOCK_SIZE, BLOCK_SIZE])
    return StoredFormat(
        name="FP8",
        codes_suffix="weight",
        dtype=F8_E4M3,
        bits=8,
        scales_suffix="weight_scale_inv",
        block_rows=BLOCK_SIZE,
        group_size=BLOCK_SIZE,
        has_whole_groups=False,
    )
