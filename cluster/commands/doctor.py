"""What is installed here, which devices there are, which backend would run, and what is wrong."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from pathlib import Path

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
    """Lines of the report, and what is wrong; the second is empty on a sound machine."""
    lines = [f"python {platform.python_version()} on {platform.platform()}"]
    lines += [f"{name} {_version(name) or 'not installed'}" for name in PACKAGES]
    devices, backends = _devices()
    return lines + devices + backends + [_ray_line()], _problems()


def _devices() -> tuple[list[str], list[str]]:
    import torch

    from kernels.select import select_backend

    found = [f"device cpu: {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"]
    names = ["cpu"]
    if torch.cuda.is_available():
        names.append("cuda")
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            found.append(
                f"device cuda:{i}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
            )
    else:
        found.append("device cuda: none")
    backends = []
    for name in names:
        kernels = select_backend(name).capabilities
        block_size = kernels.default_block_size
        backends.append(
            f"on {name} the kernels would be {kernels.description}, block size {block_size}"
        )
    return found, backends


def _ray_line() -> str:
    address = os.environ.get("RAY_ADDRESS")
    if address:
        return f"ray: RAY_ADDRESS is {address}"
    return (
        "ray: RAY_ADDRESS is not set: a cluster of `ray start` on this machine is joined, else a"
        " local one started"
    )


def _problems() -> list[str]:
    wrong = [] if IS_INSTALLED else _clashes()
    shm = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else MIN_SHM_BYTES
    if shm < MIN_SHM_BYTES:
        wrong.append(
            f"/dev/shm has {shm / 2**20:.0f} MiB free; Ray's object store wants 1 GiB (docker:"
            " --shm-size)"
        )
    if has_cuda():
        wrong += (f"GPU kernels: {each}" for each in missing())
    return wrong


def _clashes() -> list[str]:
    """Packages of the names of our folders, which are not inside a package in a checkout."""
    wrong = []
    if _version("kernels"):
        wrong.append(
            f"the package `kernels` {_version('kernels')} is installed: Eagleray's folder of that"
            " name shadows it, and transformers may fail to import. `pip uninstall kernels`"
        )
    spec = importlib.util.find_spec("kernels")
    if (
        spec is None
        or spec.origin is None
        or Path(spec.origin).resolve().parent != CHECKOUT / "kernels"
    ):
        wrong.append(
            f"`import kernels` finds {spec and spec.origin}; run from the checkout {CHECKOUT}"
        )
    try:
        import transformers.integrations.hub_kernels  # noqa: F401
    except ImportError as error:
        wrong.append(f"transformers does not import beside our `kernels`: {error}")
    return wrong


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
