"""Checkpoints whose matrices are packed by AWQ, in the layout "gemm". Keys and tensors:
github.com/casper-hansen/AutoAWQ.
"""

from __future__ import annotations

from configs.formats.stored import INT32, Section, StoredFormat

QUANT_METHOD = "awq"  # in config.json
FORMAT_NAME = "AWQ"  # in messages
SUPPORTED_VARIANTS = "AWQ (version 'gemm', 4 bits, any group size)"
# Of eight consecutive rows, from the lowest bits of a word on.
_CODE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def read(config: Section) -> StoredFormat:
    """The format that `quantization_config` describes. Raises `ConfigError`."""
    config.require("version", "gemm", "GEMM", default="gemm")
    config.require("zero_point", True, False, default=True)  # zero points are stored either way
    config.require("lm_head", False, default=False)
    return StoredFormat(
        name="AWQ",
        codes_suffix="qweight",
        dtype=INT32,
        bits=config.require("bits", 4),
        code_order=_CODE_ORDER,
        words_span_rows=True,
        is_transposed=True,
        scales_suffix="scales",
        zeros_suffix="qzeros",
        group_size=config.group_size(default=128),
    )
