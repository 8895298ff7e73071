"""Imported first, in a process of its own: kernels are compiled for a processor that has AVX2 and
nothing newer, on one that has more. oneDNN, where it is used, still sees the real one.
"""

from __future__ import annotations

import os

import llvmlite.binding as llvm

NAME = "haswell"  # the first of them
_NEWER = ("avx10", "avx512", "avxvnni", "amx", "gfni", "vaes", "vpclmul")

features = llvm.get_host_cpu_features()
for feature in [name for name in features if name.startswith(_NEWER)]:
    features[feature] = False
llvm.get_host_cpu_features = lambda: features
os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = NAME, features.flatten()
