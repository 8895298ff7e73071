"""Checkpoints of 8-bit floating-point numbers as Qwen publishes them: one scale for each block of
rows and inputs. Keys: transformers, `FineGrainedFP8Config`.
"""

from __future__ import annotations

from configs.formats.stored import F8_E4M3, Section, StoredFormat

METHOD = "fp8"
POSSIBLE = "FP8 (e4m3, blocks of 128 x 128)"
BLOCK = 128


def read(config: Section) -> StoredFormat:
    """The format that `quantization_config` describes. Raises `ConfigError`."""
    config.choose("fmt", "e4m3", default="e4m3")
    config.choose("activation_scheme", "dynamic", default="dynamic")
    config.choose("weight_block_size", [BLOCK, BLOCK])
    return StoredFormat(
        name="FP8",
        codes="weight",
        dtype=F8_E4M3,
        bits=8,
        scales="weight_scale_inv",
        block_rows=BLOCK,
        group_size=BLOCK,
        has_whole_groups=False,
    )
