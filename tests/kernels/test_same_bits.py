"""Kernels give the same bits on every processor: they use no instruction whose result depends on
the chip.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Compiles each function anew: the assembly of functions from the cache is not available.
SHOW_ASSEMBLY = """
import torch
from kernels.cpu import elementwise
from kernels.select import select_backend

kernels = select_backend("cpu", "cpu")
kernels.set_num_threads(1)
x = torch.zeros(1, 16)
kernels.rms_norm(x, x[0], 1e-6)
kernels.qk_norm_rope_store(
    torch.zeros(1, 3, 16), x[0], x[0], 1e-6, x, torch.zeros(1, dtype=torch.int32),
    *(torch.zeros(shape) for shape in kernels.kv_cache_shapes(1, 16, 1, 16)),
    torch.zeros(1, dtype=torch.int64),
)
for value in vars(elementwise).values():
    if hasattr(value, "inspect_asm"):
        print(*value.inspect_asm().values())
"""


def test_norms_take_no_approximate_square_root(tmp_path: Path) -> None:
    """Intel's and AMD's `rsqrt` instructions give different bits."""
    compiled = subprocess.run(
        [sys.executable, "-c", SHOW_ASSEMBLY],
        env=os.environ | {"EAGLERAY_CACHE_DIR": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    assert "sqrt" in compiled and "rsqrt" not in compiled
