"""Checkpoints whose matrices are packed by AWQ, in the layout "gemm". Keys and tensors:
github.com/casper-hansen/AutoAWQ.
"""

from __future__ import annotations

from configs.formats.stored import WORDS, Section, StoredFormat

METHOD = "awq"
POSSIBLE = "AWQ (version 'gemm', 4 bits, any group size)"
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight consecutive rows, from the lowest bits of a word on


def read(config: Section) -> StoredFormat:
    """The format that `quantization_config` describes. Raises `ConfigError`."""
    config.choose("version", "gemm", "GEMM", default="gemm")
    config.choose("zero_point", True, False, default=True)  # zero points are stored either way
    config.choose("lm_head", False, default=False)
    return StoredFormat(
        name="AWQ",
        codes="qweight",
        dtype=WORDS,
        bits=config.choose("bits", 4),
        order=_ORDER,
        packs_rows=True,
        is_transposed=True,
        scales="scales",
        zeros="qzeros",
        group_size=config.group_size(default=128),
    )
