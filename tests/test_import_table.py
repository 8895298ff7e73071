"""Which package may import which: the table of CONTRIBUTING.md, compared with what is really
loaded.
"""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("scheduler", "kernels", "workers", "cluster", "configs", "eagleray", "launch", "tests")
ALLOWED = {
    "scheduler": {"scheduler"},
    "kernels": {"kernels"},
    "workers": {
        "workers",
        "kernels",
        "configs",
        "scheduler.messages",
        "scheduler.params",
        "scheduler.errors",
        "scheduler.bounds",
    },
    "configs": {"configs", "scheduler.errors"},
    "cluster": {"cluster", "workers", "kernels", "configs", "scheduler"},
    "eagleray": {"eagleray", "cluster", "scheduler.messages", "scheduler.params", "launch"},
    "launch": {"cluster", "configs", "scheduler.errors", "scheduler.params"},
}
NEVER = {
    "kernels": {"ray", "transformers"},
    "workers": {"ray", "transformers"},
    "configs": {"ray", "transformers"},
}

LOAD_ALL = """
import importlib, json, pkgutil, sys
before = set(sys.modules)
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def loaded_by(package: str) -> set[str]:
    """Every module that importing all modules of a package loads, in a separate process."""
    command = [sys.executable, "-W", "ignore", "-c", LOAD_ALL, package]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def is_within(module: str, allowed: set[str]) -> bool:
    """Whether a module is among those allowed, is inside one of them, or is a package that contains
    one.
    """
    return any(
        f"{module}.".startswith(f"{name}.") or f"{name}.".startswith(f"{module}.")
        for name in allowed
    )


def imports_in(package: str) -> Iterator[tuple[str, str]]:
    """File and module of each import statement of a package, including those inside functions."""
    files = [ROOT / "launch.py"] if package == "launch" else sorted((ROOT / package).rglob("*.py"))
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: a relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((str(path.relative_to(ROOT)), name) for name in names)


@pytest.mark.parametrize("package", ["scheduler", "kernels", "workers", "configs"])
def test_package_loads_of_ours_only_what_the_table_allows(package: str) -> None:
    loaded = loaded_by(package)
    assert package in loaded
    ours = {module for module in loaded if module.split(".")[0] in OURS}
    assert [module for module in sorted(ours) if not is_within(module, ALLOWED[package])] == []
    assert sorted({module.split(".")[0] for module in loaded} & NEVER.get(package, set())) == []


def test_scheduler_loads_only_the_standard_library_and_xxhash() -> None:
    top_level = {module.split(".")[0] for module in loaded_by("scheduler")}
    assert sorted(top_level - sys.stdlib_module_names) == ["scheduler", "xxhash"]


@pytest.mark.parametrize("package", ALLOWED)
def test_import_inside_a_function_obeys_the_table_too(package: str) -> None:
    wrong = [
        (path, name)
        for path, name in imports_in(package)
        if name.split(".")[0] in OURS and not is_within(name, ALLOWED[package])
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["kernels", "workers"])
def test_what_runs_in_a_rank_never_imports_ray_or_transformers(package: str) -> None:
    assert [
        found for found in imports_in(package) if found[1].split(".")[0] in NEVER[package]
    ] == []


def modules() -> dict[str, Path]:
    """Every module of ours, by its dotted name."""
    paths = [
        path for package in (*ALLOWED, "benchmarks") for path in (ROOT / package).rglob("*.py")
    ]
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (*paths, ROOT / "launch.py")
    ]
    return dict(
        zip(
            (name.removesuffix(".__init__") for name in names),
            (*paths, ROOT / "launch.py"),
            strict=True,
        )
    )


def test_no_module_imports_itself_through_others_not_even_inside_functions() -> None:
    known = modules()
    names = {str(path.relative_to(ROOT)): name for name, path in known.items()}
    graph: dict[str, set[str]] = {name: set() for name in known}
    for package in {name.split(".")[0] for name in known}:
        for file, imported in imports_in(package):
            # "from a.b import c" may import the module a.b.c or a name of the module a.b.
            target = imported if imported in known else imported.rpartition(".")[0]
            if target in known:
                graph[names[file]].add(target)
    assert len(graph) > 60 and "kernels.select" in graph["workers.configuration"]
    # Raises CycleError, which shows the cycle.
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(
    "module", ["cluster.llm", "cluster.engine.driver", "cluster.commands.generate"]
)
def test_client_and_driver_load_neither_torch_nor_numba_nor_transformers(module: str) -> None:
    program = (
        f"import sys, {module}; print(sorted({{'torch', 'numba', 'transformers'}} &"
        " set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_room_is_part_of_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(settings["tool"]["setuptools"]["packages"])
    rooms = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for folder in ("scheduler", "kernels", "workers", "cluster", "configs")
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert rooms <= packages
