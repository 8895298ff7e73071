"""Checkpoints whose matrices are packed by GPTQ. Keys and tensors:
github.com/ModelCloud/GPTQModel.
"""

from __future__ import annotations

from configs.formats.stored import WORDS, Section, StoredFormat, in_sequence

METHOD = "gptq"
POSSIBLE = "GPTQ (4 or 8 bits, any group size, with or without desc_act)"
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # by `checkpoint_format`


def read(config: Section) -> StoredFormat:
    """The format that `quantization_config` describes. Raises `ConfigError`."""
    bits = config.choose("bits", 4, 8)
    other_key = config.choose("format", *_ZERO_OFFSETS, default="gptq")
    checkpoint_format = config.choose("checkpoint_format", *_ZERO_OFFSETS, default=other_key)
    config.choose("pack_dtype", "int32", default="int32")
    config.choose("lm_head", False, default=False)
    _check_exceptions(config)
    return StoredFormat(
        name="GPTQ",
        codes="qweight",
        dtype=WORDS,
        bits=bits,
        order=in_sequence(bits),
        is_transposed=True,
        scales="scales",
        zeros="qzeros",
        zero_offset=_ZERO_OFFSETS[checkpoint_format],
        index="g_idx" if config.values.get("desc_act") else None,
        group_size=config.group_size(default=-1),
        has_whole_groups=False,
        ignored=("g_idx",),
    )


def _check_exceptions(config: Section) -> None:
    """`dynamic` may leave matrices as they are, which the files show; it may not pack some in
    another way.
    """
    dynamic = config.section("dynamic").values
    if not all(pattern.startswith("-:") for pattern in dynamic):
        raise config.error("dynamic", dict(dynamic), "those without other settings for some layers")
