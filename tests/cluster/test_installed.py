"""What `pip install .` installs works for a program that has files with the names of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from configs.paths import SOURCE_ROOT
from setup import inside_package
from tests.cluster.processes import ray_folder

# One process installs the copy for all of them.
pytestmark = [pytest.mark.engine, pytest.mark.programs]

NOT_NEEDED = (
    *(".venv*", ".git", ".*_cache", "__pycache__", "*.egg-info", "build"),
    *("tests", "benchmarks", "docs"),
)
PROGRAM = """
import sys

import configs
import tests
import workers
from eagleray import LLM, SamplingParams, StructuredOutputs

QUESTION = [{"role": "user", "content": "What is 47 + 38?"}]


def ask(**options):
    with LLM(tensor_parallel_size=2, device="cpu", **options) as llm:
        form = StructuredOutputs(choice=["85", "86"])
        [output] = llm.chat(QUESTION, SamplingParams(structured_outputs=form))
        num_nodes = len({place.node_id for place in llm._engine_processes.places()})
        print("answer", output.text, "from", num_nodes)


if __name__ == "__main__":
    assert (configs.OWNER, workers.OWNER, tests.OWNER) == ("me", "me", "me")
    ask(ray_address="local")

    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1)
    ask(ray_address=cluster.address)
    cluster.shutdown()
    ours = {"cluster", "scheduler", "kernels", "launch"} & set(sys.modules)
    print("top-level modules of ours", sorted(ours))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment in which a copy of the checkout was installed."""
    folder = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(
        SOURCE_ROOT, folder / "source", ignore=shutil.ignore_patterns(*NOT_NEEDED)
    )
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True
    )
    python = folder / "venv" / "bin" / "python"
    packages = sysconfig.get_path("purelib", vars={"base": str(folder / "venv")})
    # The packages that we need, without what else this environment puts on the path.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (Path(packages) / "others.pth").write_text("\n".join(others))
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
    install = [str(python), "-m", "pip", "install", *options, str(source)]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(source)
    return python


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """A program's folder."""
    for name in ("configs.py", "workers.py", "tests/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("OWNER = 'me'\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def test_a_program_with_files_of_the_same_names_gets_answers(
    python: Path, own_folder: Path
) -> None:
    """From a Ray of its own, then from a cluster of two nodes."""
    with ray_folder() as variables:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(python), "program.py"],
            cwd=own_folder,
            env=inherited | variables,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answer 85 from 1" in done.stdout and "answer 85 from 2" in done.stdout
    assert "top-level modules of ours []" in done.stdout


def test_the_command_line_is_a_module_of_the_package(python: Path, own_folder: Path) -> None:
    command = [str(python), "-m", "eagleray", "generate", "--help"]
    done = subprocess.run(command, cwd=own_folder, capture_output=True, text=True, check=True)
    assert "--tp" in done.stdout


def test_the_file_for_ray_serve_names_a_module_of_the_package(
    python: Path, own_folder: Path
) -> None:
    program = (
        "import importlib, yaml; from eagleray.configs.paths import SOURCE_ROOT\n"
        "[app] = yaml.safe_load((SOURCE_ROOT / 'configs/serve.yaml').read_text())['applications']\n"
        "module, name = app['import_path'].split(':')\n"
        "print(getattr(importlib.import_module(module), name).__module__)"
    )
    command = [str(python), "-c", program]
    done = subprocess.run(command, cwd=own_folder, capture_output=True, text=True, check=True)
    assert done.stdout == "eagleray.cluster.serve.application\n"


def test_programs_are_checked_against_our_types(python: Path, own_folder: Path) -> None:
    """mypy and others look for this file."""
    program = "import eagleray.configs.paths as p; print((p.SOURCE_ROOT / 'py.typed').exists())"
    command = [str(python), "-c", program]
    done = subprocess.run(command, cwd=own_folder, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_our_folders_hide_no_packages_from_the_programs_that_we_start(
    python: Path, own_folder: Path
) -> None:
    program = (
        "import subprocess; from eagleray.configs.paths import SOURCE_ROOT, module_command\n"
        "print(subprocess.check_output(module_command('site'), cwd=SOURCE_ROOT,"
        " text=True))"
    )
    command = [str(python), "-c", program]
    done = subprocess.run(command, cwd=own_folder, capture_output=True, text=True, check=True)
    assert "/site-packages'," in done.stdout and "/site-packages/eagleray" not in done.stdout


def test_only_imports_of_our_folders_change() -> None:
    source = "from configs import x\n    from cluster.llm import LLM\nfrom configsparser import y\n"
    assert inside_package(source, Path("a.py")) == (
        "from eagleray.configs import x\n"
        "    from eagleray.cluster.llm import LLM\n"
        "from configsparser import y\n"
    )


def test_an_import_that_cannot_change_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a\.py: write 'import configs.engine' as"):
        inside_package("import configs.engine\n", Path("a.py"))
