"""The kernels of a CPU on older processors, which have AVX2 and registers half as wide."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.paths import SOURCE_ROOT
from kernels.cpu.tile import has_wide_registers

pytestmark = pytest.mark.skipif(
    not has_wide_registers(), reason="without AVX-512 the other tests run this code already"
)
LIMIT_S = 550.0
# Tests of kernels on CPUs; without those whose processes would be compiled for both (`avx2.py`).
FILES = """attention elementwise experts fp8 grouped int8 kv_store linear mixed parallel pool
    recording same_bits sampling sampling_backends"""
REGISTERS = """
import tests.kernels.avx2
import torch
from kernels.cpu import grouped
from tests.kernels.test_grouped import KINDS, drawn, product

product(torch.randn(2, 256), drawn(64, 256, 64, KINDS["int4_float16"]), None)
[code] = grouped._linear.inspect_asm().values()
print("ymm" in code, "zmm" in code)
"""


def run(folder: Path, *command: str) -> str:
    """What a program prints that compiles all kernels anew, into a folder."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=SOURCE_ROOT,
        env=os.environ | {"EAGLERAY_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_no_wider_registers_are_used(tmp_path: Path) -> None:
    assert run(tmp_path, "-c", REGISTERS).split() == ["True", "False"]


def test_kernels_pass_their_tests(tmp_path: Path) -> None:
    paths = [f"tests/kernels/test_{name}.py" for name in FILES.split()]
    out = run(tmp_path, "-m", "pytest", "-p", "tests.kernels.avx2", "-p", "no:xdist", *paths)
    num_passed = int(out.rsplit(" passed", 1)[0].split()[-1])
    assert num_passed > 1000, out
