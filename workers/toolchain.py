"""What Triton needs on a machine to launch its first kernel: a C compiler, Python's headers and the
CUDA driver's library. Triton compiles a small extension at that moment, and slim images lack all
three. Checked before weights are loaded; the places are those of Triton's `runtime/build.py` and
`backends/nvidia/driver.py`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sysconfig
from pathlib import Path

COMPILERS = ("gcc", "clang")
LIBCUDA = "libcuda.so.1"


def toolchain_problems() -> list[str]:
    """What is missing, and what to do about each; empty on a machine that has everything."""
    problems = _compiler_problem(), _headers_problem(), _libcuda_problem()
    return [problem for problem in problems if problem]


def _compiler_problem() -> str:
    command = os.environ.get("CC")
    if command is not None:
        if shutil.which(command.split()[0] if command.split() else command):
            return ""
        return f"the C compiler that CC names, {command!r}, is not there: install it, or unset CC"
    if any(map(shutil.which, COMPILERS)):
        return ""
    return "there is no C compiler: install gcc (Debian, Ubuntu: apt-get install gcc), or set CC"


def _headers_problem() -> str:
    scheme = sysconfig.get_default_scheme()
    paths = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)
    header = Path(paths["include"]) / "Python.h"
    if header.is_file():
        return ""
    return (
        f"{header} is missing: install Python's headers (Debian, Ubuntu: apt-get install"
        " python3-dev, of the same version)"
    )


def _libcuda_problem() -> str:
    folder = os.environ.get("TRITON_LIBCUDA_PATH")
    if folder is not None:
        if (Path(folder) / LIBCUDA).exists():
            return ""
        return f"TRITON_LIBCUDA_PATH is {folder!r}, which has no {LIBCUDA}: correct it, or unset it"
    try:
        ctypes.CDLL(LIBCUDA)
    except OSError:
        return (
            f"{LIBCUDA} is not found: install NVIDIA's driver, start the container with GPUs"
            " (docker: --gpus all), or run ldconfig"
        )
    return ""
