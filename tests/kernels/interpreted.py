"""Runs a program of kernels in Triton's interpreter, in less time than by itself:
`python -m tests.kernels.interpreted MODULE [ARGUMENT ...]`.
"""

import os
import runpy
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import tests.kernels.triton_interpreter  # noqa: F401

if __name__ == "__main__":
    module, sys.argv = sys.argv[1], sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
