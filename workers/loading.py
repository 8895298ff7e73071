"""The model of one rank with its weights: loaded from the checkpoint, or found in the memory of the
rank whose place it may have to take.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.engine import ResolvedConfig
from configs.quantization import Quantization
from kernels.interface import Kernels
from workers.batch.kv_cache import torch_dtype
from workers.configuration import reason_to_unpack
from workers.memory.inheritance import InheritedMemory, LastingMemory
from workers.memory.lasting import has_memfds
from workers.memory.weights import WeightsFile, adopt_weights
from workers.models.checkpoint import quantization_of_files
from workers.models.fingerprint import LoadedWeightsHash, fingerprint
from workers.models.layers import Part
from workers.models.loader import held_dtype, load_weights
from workers.models.local import local_checkpoint
from workers.models.qwen3 import Qwen3
from workers.models.weights import release_freed_memory
from workers.parallel.group import TensorParallelGroup
from workers.progress import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A packed model. memory: where its weights lie, if that outlives this process.
    checkpoint_hash, weights_hash: as in `WorkerReport`.
    """

    model: Qwen3
    memory: LastingMemory | None
    checkpoint_hash: str
    weights_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldForm:
    """How ranks hold the matrices of a model. dtype: of those that `quantization` leaves out.
    reason_to_unpack: why none of the checkpoint's codes are kept; None if they are, or there are
    none.
    """

    quantization: Quantization | None
    dtype: torch.dtype
    reason_to_unpack: str | None


def held_form(config: ResolvedConfig, model_dir: Path | None) -> HeldForm:
    """The form that the files in `model_dir` allow; None if there are none yet, and `config` alone
    decides. Raises `ConfigError`.
    """
    dtype, weight_dtype = torch_dtype(config.dtype), torch_dtype(config.weight_dtype)
    quantization, reason = config.quantization, reason_to_unpack(config)
    if model_dir is not None:
        quantization, reason_of_files = quantization_of_files(
            model_dir,
            config.model,
            quantization,
            is_asked_for=config.engine.quantization is not None,
        )
        reason = reason or reason_of_files
        weight_dtype = held_dtype(model_dir, config.model, dtype, weight_dtype, quantization)
    return HeldForm(quantization=quantization, dtype=weight_dtype, reason_to_unpack=reason)


def empty_model(
    config: ResolvedConfig, form: HeldForm, group: TensorParallelGroup, kernels: Kernels
) -> Qwen3:
    """The model of one rank, whose weights are not loaded. On the device "meta" it takes no memory
    and tells how much it would take.
    """
    return Qwen3(
        config.model,
        group,
        kernels,
        torch_dtype(config.dtype),
        config.max_model_len,
        form.quantization,
        form.dtype,
    )


def load_model(
    config: ResolvedConfig, group: TensorParallelGroup, kernels: Kernels, progress: Progress
) -> LoadedModel:
    """Read this rank's slices of the checkpoint and pack them; where spares stand by, move them to
    memory that outlives the process. One part after the other, so that no more than one is held
    twice. `progress` counts bytes and parts. Raises `ConfigError`.
    """
    model_dir = local_checkpoint(config, progress)
    checkpoint_hash = fingerprint(model_dir)
    form = held_form(config, model_dir)
    if form.reason_to_unpack is not None and group.rank == 0:
        rounding_note = ""
        if form.quantization is not None:
            rounding_note = f" and rounded to other codes ({form.quantization.name})"
        logger.warning("matrices are unpacked%s, because %s", rounding_note, form.reason_to_unpack)
    is_widened = config.engine.dtype == "auto" and config.model.dtype == "float16" != config.dtype
    if is_widened and group.rank == 0 and "bfloat16" in kernels.capabilities.fast_dtypes:
        logger.warning(
            "the checkpoint says float16, which is computed in float32 here; dtype bfloat16 is"
            " faster, takes half the memory where weights are not codes, and is less exact"
        )
    model = empty_model(config, form, group, kernels)
    weights_file = _weights_file(config, model)

    def finish(part: Part) -> None:
        part.pack()
        if weights_file is not None:
            weights_file.move(part)
        release_freed_memory()
        progress.num_packed_parts += 1

    with LoadedWeightsHash() as weights_hash:
        load_weights(model.parts(), model_dir, config.model, finish, progress, weights_hash)
    return LoadedModel(
        model=model,
        memory=None if weights_file is None else _memory_of(weights_file, model),
        checkpoint_hash=checkpoint_hash,
        weights_hash=weights_hash.hexdigest(),
    )


def adopt_model(
    inherited_memory: InheritedMemory,
    weights: LastingMemory,
    config: ResolvedConfig,
    group: TensorParallelGroup,
    kernels: Kernels,
) -> LoadedModel:
    """The model whose `weights` this rank has inherited. Raises as `adopt_weights`."""
    return LoadedModel(
        model=adopt_weights(weights, config.model, group, kernels),
        memory=weights,
        checkpoint_hash=inherited_memory.checkpoint_hash,
        weights_hash=inherited_memory.weights_hash,
    )


def _weights_file(config: ResolvedConfig, model: Qwen3) -> WeightsFile | None:
    """Where the weights of the model move, if spares can share them."""
    if not config.has_standby:
        return None
    if config.device == "cpu" and not has_memfds():
        logger.warning("spares cannot share the weights: this system has no memory files (memfd)")
        return None
    return WeightsFile("eagleray-weights", model.group, model.kernels)


def _memory_of(weights_file: WeightsFile, model: Qwen3) -> LastingMemory | None:
    """The memory of the weights, if all could move."""
    try:
        return weights_file.finish(model)
    except OSError as error:
        logger.warning("spares cannot share the weights: %s", error)
        return None
