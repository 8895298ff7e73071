"""`launch.py doctor`: packages, devices, the kernels that would run, and what is wrong."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import platform
import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from cluster.client.model_files import find_directory
from cluster.resources.addresses import ray_temp_root
from configs.engine import EngineConfig
from configs.formats.table import SUPPORTED_VARIANTS
from configs.model import ModelConfig
from configs.paths import IS_INSTALLED, SOURCE_ROOT
from configs.shapes import SHAPES
from scheduler.errors import ConfigError
from workers.configuration import find_kernels, has_cuda, resolve_config
from workers.loading import HeldForm, empty_model, held_form
from workers.models.size import parameters_line
from workers.models.weights import PlainWeight
from workers.parallel.group import TensorParallelGroup
from workers.toolchain import toolchain_problems

PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "ray", "xxhash", "numpy"),
    *("flash-attn", "fa3-fwd"),
)

MIN_SHM_BYTES = 2**30
MIN_RAY_FOLDER_BYTES = 2**28


def examine(model: str | None = None) -> tuple[list[str], list[str]]:
    """The lines of the report, and the problems found. `model`: a directory, or a name of
    `configs.shapes`, whose size is reported too. Raises `ConfigError` for other models.
    """
    lines = [f"python {platform.python_version()} on {platform.platform()}"]
    lines += [f"{package} {_version(package) or 'not installed'}" for package in PACKAGES]
    lines += [*_device_lines(), _ray_address_line()]
    model_lines, model_problems = _examine_model(model) if model is not None else ([], [])
    return [*lines, *model_lines], [*_problems(), *model_problems]


def _examine_model(name: str) -> tuple[list[str], list[str]]:
    """The parameters of a model, the bytes of each rank's weights, and where those fit; and the
    problem where that is nowhere.
    """
    model_dir = None
    if name in SHAPES:
        model = ModelConfig.from_dict(SHAPES[name])
    elif (model_dir := find_directory(name, option="--model")) is not None:
        model = ModelConfig.from_dir(model_dir)
    else:
        raise ConfigError(
            f"--model {name!r} is neither a directory nor a shape; shapes are {', '.join(SHAPES)}"
        )
    lines = [f"model {name}: {parameters_line(model)}"]
    if model_dir is not None and not any(model_dir.glob("*.safetensors")):
        lines.append(f"{name} has no *.safetensors: the sizes are those that config.json tells of")
        model_dir = None
    rank_bytes_by_num_ranks = {}
    for num_ranks in model.possible_tensor_parallel_sizes():
        weights = _rank_weights(name, model, model_dir, num_ranks)
        rank_bytes_by_num_ranks[num_ranks] = weights.num_bytes
        lines.append(f"a rank with --tp {num_ranks}: {weights.text}")
    fit_lines, fits = _examine_fit(rank_bytes_by_num_ranks)
    problem = (
        f"model {name} fits neither the memory of this machine nor its GPUs: use more machines, or"
        " a smaller model"
    )
    return [*lines, *fit_lines], [] if fits else [problem]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankWeights:
    """The bytes of the weights of a rank, once they are packed, and what to say of them."""

    num_bytes: int
    text: str


def _rank_weights(
    name: str, model: ModelConfig, model_dir: Path | None, num_ranks: int
) -> _RankWeights:
    """Those of the first of `num_ranks` ranks, which has the most, with the default options: of a
    model as the rank makes it, without memory. Raises `ConfigError`.
    """
    import torch

    engine_config = EngineConfig(model=name, tensor_parallel_size=num_ranks)
    device = "cuda" if has_cuda() else "cpu"
    config = resolve_config(engine_config, model, model_dir or Path(name), device)
    form = held_form(config, model_dir)
    group = TensorParallelGroup(0, num_ranks, torch.device("meta"))
    rank_model = empty_model(config, form, group, find_kernels(config))
    bytes_by_part: dict[str, int] = defaultdict(int)
    slices = itertools.chain.from_iterable(part.slices() for part in rank_model.parts())
    for piece in slices:
        bytes_by_part["experts" if ".experts." in piece.name else "other"] += piece.nbytes
    vocabulary = rank_model.embedding.weight
    is_tied = rank_model.head.is_tied
    if is_tied and isinstance(vocabulary, PlainWeight) and vocabulary.is_copied_by_packing:
        bytes_by_part["copy"] = vocabulary.values_YX.nbytes
    num_bytes = sum(bytes_by_part.values())
    text = f"{_gigabytes(num_bytes)} of weights in {_form_text(form)}"
    if model.experts:
        text += f", {_gigabytes(bytes_by_part['experts'])} of experts"
    if "copy" in bytes_by_part:
        text += f", {_gigabytes(bytes_by_part['copy'])} of a second copy of the tied embedding"
    if form.reason_to_unpack is not None:
        text += f"; unpacked, because {form.reason_to_unpack}"
    return _RankWeights(num_bytes=num_bytes, text=text)


def _form_text(form: HeldForm) -> str:
    dtype_name = str(form.dtype).removeprefix("torch.")
    if form.quantization is None:
        return dtype_name
    return f"{form.quantization.name}, as they are stored, and of the vocabulary in {dtype_name}"


def _examine_fit(rank_bytes_by_num_ranks: dict[int, int]) -> tuple[list[str], bool]:
    """Where weights fit, of so many bytes per rank for each number of ranks; and whether they fit
    anywhere.
    """
    import torch

    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    num_ranks_by_verdict: dict[str, list[int]] = defaultdict(list)
    for num_ranks, num_bytes in rank_bytes_by_num_ranks.items():
        num_ranks_by_verdict[_verdict(num_ranks * num_bytes, memory_bytes)].append(num_ranks)
    lines = []
    for verdict, possible_num_ranks in num_ranks_by_verdict.items():
        sizes_text = ", ".join(map(str, possible_num_ranks))
        condition = "" if len(num_ranks_by_verdict) == 1 else f"with --tp {sizes_text} "
        lines.append(f"memory of this machine, {_gigabytes(memory_bytes)}: {condition}{verdict}")
    num_gpus = torch.cuda.device_count()
    gpu_bytes = [torch.cuda.get_device_properties(i).total_memory for i in range(num_gpus)]
    share = EngineConfig().gpu_memory_utilization
    fits = any(
        num_ranks * num_bytes < memory_bytes
        or sum(num_bytes < share * each for each in gpu_bytes) >= num_ranks
        for num_ranks, num_bytes in rank_bytes_by_num_ranks.items()
    )
    for i, gpu_memory_bytes in enumerate(gpu_bytes):
        usable_bytes = share * gpu_memory_bytes
        verdict = "too little for a part of such weights"
        for num_ranks, num_bytes in rank_bytes_by_num_ranks.items():
            if num_bytes < usable_bytes:
                verdict = f"enough with --tp {num_ranks}"
                if num_ranks > num_gpus:
                    verdict += f", on {num_ranks} GPUs like this one; there are {num_gpus}"
                break
        lines.append(f"memory of cuda:{i}, {_gigabytes(gpu_memory_bytes)}: {verdict}")
    return lines, fits


def _verdict(weight_bytes: int, memory_bytes: int) -> str:
    """Whether all ranks fit into the memory of one machine without a GPU."""
    if 2 * weight_bytes < memory_bytes:
        return "enough for such weights of all ranks"
    if weight_bytes < memory_bytes:
        return (
            "enough for such weights of all ranks with --spares off; a start with spares takes"
            " them twice"
        )
    return "too little for such weights of all ranks"


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def _device_lines() -> list[str]:
    """The devices, the backend for each kind of device, and the forms that checkpoints may have."""
    import torch

    from kernels.select import choose_capabilities

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
        backend = choose_capabilities(device_type)
        block_size = backend.default_block_size
        lines.append(
            f"on {device_type} the kernels would be {backend.description}, block size {block_size}"
        )
    formats = "; ".join(("bfloat16", "float16", "float32", *SUPPORTED_VARIANTS))
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
    problems = [] if IS_INSTALLED else _name_clashes()
    shm_path = Path("/dev/shm")
    free_shm_bytes = shutil.disk_usage(shm_path).free if shm_path.exists() else MIN_SHM_BYTES
    if free_shm_bytes < MIN_SHM_BYTES:
        problems.append(
            f"/dev/shm has {free_shm_bytes / 2**20:.0f} MiB free; Ray's object store wants 1 GiB"
            " (docker: --shm-size)"
        )
    folder = ray_temp_root()
    free_bytes = shutil.disk_usage(folder).free if folder.exists() else MIN_RAY_FOLDER_BYTES
    if free_bytes < MIN_RAY_FOLDER_BYTES:
        problems.append(
            f"{folder} has {free_bytes / 2**20:.0f} MiB free; without room there, no process of Ray"
            " can start. Make room, or name another folder in RAY_TMPDIR"
        )
    if has_cuda():
        problems += (f"GPU kernels: {missing_tool}" for missing_tool in toolchain_problems())
    return problems


def _name_clashes() -> list[str]:
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
        or Path(spec.origin).resolve().parent != SOURCE_ROOT / "kernels"
    ):
        problems.append(
            f"`import kernels` finds {spec and spec.origin}; run from the checkout {SOURCE_ROOT}"
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
