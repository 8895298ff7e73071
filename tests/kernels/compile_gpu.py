"""Compiles every case of `tests/kernels/compile_cases` for every supported chip, without a GPU.

    python -m tests.kernels.compile_gpu [--table] [TEXT ...]

One JSON line per case and chip, or a table; with TEXT, only cases whose names contain one of the
texts. Needs a process without `TRITON_INTERPRET`. Pointers are compiled as aligned to 16 bytes, as
all memory from torch is; an integer that is a multiple of 16 where it matters is written "i32:16"
in a signature, as in Triton's own tools. What was compiled before comes from Triton's cache.

Registers and stack are read from the cubin. Registers spill to the stack: if there is no stack,
none did. Both ptxas and cuobjdump tell its size, while cuobjdump's LOCAL is 0 even then. Shared
memory is what Triton asks for at the launch; the 1024 bytes in cubins of sm_90 and later are the
system's, beside what a block may ask for.

Hopper's matrix instructions (wgmma) run behind each other and behind loads. Where ptxas cannot
allow that it waits after each, and says so in its log as C7515. Triton writes that log while it
compiles, so what has these instructions and comes from the cache is compiled again without it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels import compile_cases
from tests.kernels.compile_cases import CompileCase

_PROCESSES = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What one case needs on one chip: registers per thread, bytes of stack per thread, bytes of
    shared memory per block; and whether its matrix instructions wait for each other.
    """

    name: str
    chip: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    serialized: bool


def all_cases() -> dict[str, CompileCase]:
    """Every case by its name, in the order of the modules."""
    cases: dict[str, CompileCase] = {}
    for module in pkgutil.iter_modules(compile_cases.__path__):
        for case in importlib.import_module(f"{compile_cases.__name__}.{module.name}").CASES:
            if case.name in cases:
                raise ValueError(f"two cases are called {case.name!r}")
            cases[case.name] = case
    return cases


def compile_case(name: str, chip: int) -> Compiled:
    case = all_cases()[name]
    signature = {
        parameter: type_.removesuffix(":16") for parameter, type_ in case.signature.items()
    }
    attrs = {
        (index,): [["tt.divisibility", 16]]
        for index, type_ in enumerate(case.signature.values())
        if type_.startswith("*") or type_.endswith(":16")
    }
    compile_ = functools.partial(
        triton.compile,
        ASTSource(fn=case.kernel, signature=signature, constexprs=case.constexprs, attrs=attrs),
        target=GPUTarget("cuda", chip, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )
    compiled, log = _with_ptxas_log(compile_)
    # The PTX is there unless the kernel came from an archive of `benchmarks.gpu_check_cache`.
    has_wgmma = "wgmma.mma_async" in compiled.asm.get("ptx", "")
    if has_wgmma and not log:
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.always_compile = True
            _, log = _with_ptxas_log(compile_)
    assert "registers" in log or not has_wgmma, "ptxas has told nothing"
    usage = _resource_usage(compiled.asm["cubin"])
    return Compiled(
        name=name,
        chip=chip,
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        shared_bytes=compiled.metadata.shared,
        serialized=has_wgmma and "C7515" in log,
    )


def _with_ptxas_log(compile_: Callable[[], Any]) -> tuple[Any, str]:
    """The compiled kernel, and what ptxas says while it compiles, "ptxas info : Used 178 registers
    ..." among it: nothing if the kernel comes from the cache.
    """
    log = io.StringIO()
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = compile_()
    return compiled, log.getvalue()


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """As cuobjdump prints it, "REG:32 STACK:0 SHARED:0 LOCAL:0 ...", of the one function in the
    cubin.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (line,) = re.findall(r"^ *REG:.*$", text, re.MULTILINE)
    return {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}


def compile_all(names: list[str]) -> Iterator[Compiled]:
    cases = all_cases()
    jobs = [(name, chip) for name in names for chip in cases[name].chips]
    with ProcessPoolExecutor(_PROCESSES, get_context("fork")) as pool:
        yield from pool.map(compile_case, *zip(*jobs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the GPU kernels without a GPU.")
    parser.add_argument("text", nargs="*", help="only cases whose names contain one of these")
    parser.add_argument(
        "--table", action="store_true", help="a readable table instead of JSON lines"
    )
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET=1 is set: unset it, an interpreted kernel cannot be compiled")
    names = [
        name for name in all_cases() if not args.text or any(text in name for text in args.text)
    ]
    if not names:
        sys.exit(f"no case has one of {args.text} in its name")
    if args.table:
        print(f"{'case':48} {'chip':>6} {'registers':>9} {'stack':>6} {'shared':>7}  wgmma")
    for compiled in compile_all(names):
        if args.table:
            print(
                f"{compiled.name:48} {f'sm_{compiled.chip}':>6} {compiled.registers:9}"
                f" {compiled.stack_bytes:6} {compiled.shared_bytes:7}"
                f"{'  serialized' if compiled.serialized else ''}"
            )
        else:
            print(json.dumps(asdict(compiled)), flush=True)


if __name__ == "__main__":
    main()
