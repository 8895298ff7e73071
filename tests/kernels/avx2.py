"""Imported before numba, in a process of its own: kernels are compiled for a processor with AVX2,
but without AVX-512, AMX and the like. oneDNN, where it is used, still sees the real processor.

Processes that it starts get the environment alone, which makes numba compile for that processor,
while our modules choose what suits the real one: give each a cache folder of its own.
"""

from __future__ import annotations

import os
import sys

import llvmlite.binding as llvm

assert "numba" not in sys.modules, "it has read its settings already"
NAME = "haswell"  # the first processor with AVX2
_NEWER = ("avx10", "avx512", "avxvnni", "amx", "gfni", "vaes", "vpclmul")

features = llvm.get_host_cpu_features()
for feature in [name for name in features if name.startswith(_NEWER)]:
    features[feature] = False
llvm.get_host_cpu_features = lambda: features
os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = NAME, features.flatten()
