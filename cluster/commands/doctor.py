"""`launch.py doctor`: what is installed, which devices there are, which kernels would run, and what
is wrong.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path

from configs.formats.table import POSSIBLE
from configs.paths import CHECKOUT, IS_INSTALLED
from workers.configuration import has_cuda
from workers.toolchain import missing

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "ray",
    "xxhash",
    "numpy",
    "flash-attn",
    "fa3-fwd",
)

MIN_SHM_BYTES = 2**30


def examine() -> tuple[list[str], list[str]]:
    """The lines of the report, and the problems found."""
    lines = [f"python {platform.python_version()} on {platform.platform()}"]
    lines += [f"{package} {_version(package) or 'not installed'}" for package in PACKAGES]
    return [*lines, *_device_lines(), _ray_address_line()], _problems()


def _device_lines() -> list[str]:
    """The devices, then the backend for each kind of device."""
    import torch

    from kernels.select import choose

    lines = [f"device cpu: {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"]
    device_types = ["cpu"]
    if torch.cuda.is_available():
        device_types.append("cuda")
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            lines.append(
                f"device cuda:{i}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
            )
    else:
        lines.append("device cuda: none")
    for device_type in device_types:
        kernels = choose(device_type)
        block_size = kernels.default_block_size
        lines.append(
            f"on {device_type} the kernels would be {kernels.description}, block size {block_size}"
        )
    formats = "; ".join(("bfloat16", "float16", "float32", *POSSIBLE))
    return [*lines, f"checkpoints may store their matrices as {formats}"]


def _ray_address_line() -> str:
    address = os.environ.get("RAY_ADDRESS")
    if address:
        return f"ray: RAY_ADDRESS is {address}"
    return (
        "ray: RAY_ADDRESS is not set: a cluster of `ray start` on this machine is joined, else a"
        " local one started"
    )


def _problems() -> list[str]:
    problems = [] if IS_INSTALLED else _clashes()
    shm_path = Path("/dev/shm")
    free_shm_bytes = shutil.disk_usage(shm_path).free if shm_path.exists() else MIN_SHM_BYTES
    if free_shm_bytes < MIN_SHM_BYTES:
        problems.append(
            f"/dev/shm has {free_shm_bytes / 2**20:.0f} MiB free; Ray's object store wants 1 GiB"
            " (docker: --shm-size)"
        )
    if has_cuda():
        problems += (f"GPU kernels: {missing_tool}" for missing_tool in missing())
    return problems


def _clashes() -> list[str]:
    """Problems with packages named like our folders, which are top-level modules in a checkout."""
    problems = []
    if _version("kernels"):
        problems.append(
            f"the package `kernels` {_version('kernels')} is installed: Eagleray's folder of that"
            " name shadows it, and transformers may fail to import. `pip uninstall kernels`"
        )
    spec = importlib.util.find_spec("kernels")
    if (
        spec is None
        or spec.origin is None
        or Path(spec.origin).resolve().parent != CHECKOUT / "kernels"
    ):
        problems.append(
            f"`import kernels` finds {spec and spec.origin}; run from the checkout {CHECKOUT}"
        )
    try:
        import transformers.integrations.hub_kernels  # noqa: F401
    except ImportError as error:
        problems.append(f"transformers does not import beside our `kernels`: {error}")
    return problems


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
