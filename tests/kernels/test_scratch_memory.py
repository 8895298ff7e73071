"""Kernels keep their scratch memory as long as they use it. What a kernel frees too early usually
stays its own for a while, because each thread takes memory from an arena of its own; in a process
with one arena, the thread beside it gets that memory at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

from kernels.cpu import pool
from kernels.cpu.mixed import CpuMixedPrecision
from tests.kernels.test_grouped import CPU, KINDS, drawn
from tests.kernels.test_mixed import make_weight

SIZE_OUT, SIZE_IN, GROUP_SIZE = 2048, 1024, 128  # panels enough that a second thread takes part
LIMIT_S, HELPER_LIMIT_S = 500.0, 60.0  # on busy cores the helper comes late


def products_differ(case: str, num_rows: int, repeats: int, dtype: torch.dtype) -> int:
    """How many products on two threads have other bits than on one."""
    torch.manual_seed(0)
    x = torch.randn(num_rows, SIZE_IN).to(dtype)
    if case == "mixed":
        mixed = CpuMixedPrecision()
        panels = mixed.pack_weight(make_weight(SIZE_OUT, SIZE_IN))
        product = partial(mixed.linear, x, panels, SIZE_OUT, None)
    else:
        grouped = CPU[KINDS[case][0]]
        codes = grouped.pack_weight(drawn(SIZE_OUT, SIZE_IN, GROUP_SIZE, KINDS[case]))
        product = partial(grouped.linear, x, codes, None)
    pool.set_num_threads(1)
    expected = product()
    pool.set_num_threads(2)
    _, entered_before = pool.helper_counts()
    num_different = sum(not torch.equal(product(), expected) for _ in range(repeats))
    until = time.monotonic() + HELPER_LIMIT_S
    while pool.helper_counts()[1] == entered_before:
        assert time.monotonic() < until, "the second thread never took part"
        num_different += not torch.equal(product(), expected)
    return num_different


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has arenas")
def test_threads_that_share_an_arena_do_not_share_scratch_memory() -> None:
    """Of products of 6 rows up to a third was wrong when a buffer was freed too early."""
    subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_scratch_memory"],
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
        check=True,
        timeout=LIMIT_S,
    )


if __name__ == "__main__":
    for kernel_case in ("mixed", *KINDS):
        for number_of_rows, number_of_products in ((2, 60), (6, 300), (33, 60)):
            for element in (torch.float32, *([torch.bfloat16] if kernel_case != "mixed" else [])):
                differing = products_differ(
                    kernel_case, number_of_rows, number_of_products, element
                )
                assert not differing, (
                    f"{kernel_case}, {number_of_rows} rows of {element}: {differing} of"
                    f" {number_of_products} differ"
                )
