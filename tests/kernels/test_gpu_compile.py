"""Every GPU kernel compiles for every supported chip: without spilling, within the shared memory of
a block, and with matrix instructions that do not wait for each other.
"""

from __future__ import annotations

import ast
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.compile_gpu import Compiled, all_cases

ROOT = Path(__file__).parents[2]

# Bytes that a block may ask for: CUDA C++ programming guide, technical specifications per compute
# capability.
MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
MAX_REGISTERS = 255


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Compiled]:
    """Results by case and chip. Among several test processes, the first compiles with all cores
    while the others wait.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    lines = shared / "compiled.jsonl"
    with (shared / "compiling").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not lines.exists():
            lines.write_text(_compile_all())
    results = [Compiled(**json.loads(line)) for line in lines.read_text().splitlines()]
    return {(result.name, result.chip): result for result in results}


def _compile_all() -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_gpu"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize(
    ("name", "chip"),
    [(name, chip) for name, case in all_cases().items() for chip in case.chips],
)
def test_kernel_fits_the_chip_and_neither_spills_nor_serializes(
    compiled: dict[tuple[str, int], Compiled], name: str, chip: int
) -> None:
    result = compiled[name, chip]
    assert result.stack_bytes == 0
    assert 0 < result.registers <= MAX_REGISTERS
    assert result.shared_bytes <= MAX_SHARED_BYTES[chip]
    assert not result.serialized


def test_every_kernel_that_is_launched_has_a_case() -> None:
    compiled_kernels = {
        (case.kernel.fn.__module__, case.kernel.fn.__name__) for case in all_cases().values()
    }
    assert launched_kernels() - compiled_kernels == set()


def test_every_parameter_that_is_not_specialized_on_exists() -> None:
    """Triton ignores unknown names in these lists."""
    for case in all_cases().values():
        options = getattr(case.kernel, "kwargs", vars(case.kernel))  # interpreted, or compiled
        names = [
            *(options["do_not_specialize"] or []),
            *(options["do_not_specialize_on_alignment"] or []),
        ]
        assert set(names) <= set(case.kernel.arg_names), case.name


def launched_kernels() -> set[tuple[str, str]]:
    """(module, name) of the jitted functions under `kernels/gpu` that are launched with a grid or
    that no other one calls.
    """
    functions: list[tuple[str, ast.FunctionDef]] = []
    launched: set[str] = set()
    called: set[str] = set()
    for path in sorted((ROOT / "kernels" / "gpu").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(d) for d in node.decorator_list
            ):
                functions.append((module, node))
                called |= {
                    ast.unparse(n.func).rpartition(".")[2]
                    for n in ast.walk(node)
                    if isinstance(n, ast.Call)
                }
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value).rpartition(".")[2])
    return {
        (module, node.name)
        for module, node in functions
        if node.name in launched or node.name not in called
    }
