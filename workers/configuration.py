"""Options, checkpoint and kernels put together: the configuration that the driver and the workers
run.

Used by clients before anything starts, so it loads no kernels, and torch only if the question is
about a GPU.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from configs.engine import (
    DEFAULT_MAX_MODEL_LEN,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_STEPS_AHEAD,
    EngineConfig,
    ResolvedConfig,
    resolve_max_num_seqs,
)
from configs.formats.stored import INT32
from configs.model import ModelConfig, rope_max_length
from configs.quantization import INT8, Quantization, computed_quantization, stored_quantization
from kernels.interface import Capabilities, Kernels
from kernels.select import choose_capabilities, quantization_backends_text, select_backend
from scheduler.errors import ConfigError


def resolve_config(
    engine_config: EngineConfig, model: ModelConfig, model_dir: Path, device: str
) -> ResolvedConfig:
    """`resolve` with the backend chosen for `device` ("cpu" or "cuda").

    "auto" depends on what is installed where this is called; the ranks run what was chosen here.
    Raises `ConfigError`.
    """
    dtype = model.dtype if engine_config.dtype == "auto" else engine_config.dtype
    try:
        backend = choose_capabilities(
            device,
            engine_config.attention_backend,
            dtype=dtype,
            head_dim=model.head_dim,
            block_size=engine_config.block_size,
            kv_cache_dtype=engine_config.kv_cache_dtype,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return resolve(engine_config, model, model_dir, device, backend)


def resolve(
    engine_config: EngineConfig,
    model: ModelConfig,
    model_dir: Path,
    device: str,
    backend: Capabilities,
) -> ResolvedConfig:
    """Check the options against the checkpoint, the device ("cpu" or "cuda") and the backend, and
    fill in those that were left unset. Raises `ConfigError`.
    """
    model.check_tensor_parallel_size(engine_config.tensor_parallel_size)
    if device == "cuda" and not (backend.fits_graphs or engine_config.enforce_eager):
        raise ConfigError(
            f"attention_backend {backend.name!r} runs on a GPU only without graphs: set"
            " enforce_eager, or choose another attention_backend"
        )
    if model.experts is not None and engine_config.quantization is not None:
        raise ConfigError(
            f"quantization {engine_config.quantization!r} is not possible for a model with experts"
            " (model_type 'qwen3_moe'): leave it out"
        )
    dtype = _dtype(engine_config, model, device, backend)
    keeps_checkpoint_dtype = dtype == "float32" and model.dtype in backend.weight_dtypes
    max_num_seqs = resolve_max_num_seqs(engine_config, device)
    num_steps_ahead = engine_config.num_steps_ahead
    return ResolvedConfig(
        engine=engine_config,
        model=model,
        model_dir=str(model_dir),
        device=device,
        dtype=dtype,
        weight_dtype=model.dtype if keeps_checkpoint_dtype else dtype,
        quantization=_quantization(engine_config, model, device, backend),
        kv_cache_dtype=_kv_cache_dtype(engine_config, dtype, backend),
        attention_backend=backend.name,
        block_size=engine_config.block_size or backend.default_block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=engine_config.max_num_batched_tokens
        # Where nearly all sequences decode, a prompt has at least half of a step.
        or max(DEFAULT_MAX_NUM_BATCHED_TOKENS[device], 2 * max_num_seqs),
        max_model_len=_max_model_len(engine_config, model),
        num_steps_ahead=DEFAULT_STEPS_AHEAD[device] if num_steps_ahead is None else num_steps_ahead,
    )


def preview_config(
    engine_config: EngineConfig, model: ModelConfig, model_dir: Path
) -> ResolvedConfig:
    """What the engine will run, as far as that is known before Ray is started.

    With device "auto", it is that of a CPU, or of a GPU if only a GPU can run it. Raises
    `ConfigError` if neither can.
    """
    errors: list[ConfigError] = []
    for device in ("cpu", "cuda") if engine_config.device == "auto" else (engine_config.device,):
        previewed_config = engine_config
        needs_package = engine_config.attention_backend in ("flash_attn", "hybrid")
        if device == "cuda" and needs_package and not has_cuda():
            # The ranks may have what is missing here.
            previewed_config = dataclasses.replace(engine_config, attention_backend="auto")
        try:
            return resolve_config(previewed_config, model, model_dir, device)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def find_kernels(config: ResolvedConfig) -> Kernels:
    """The backend that was chosen. Raises `ConfigError` if this machine lacks what it needs."""
    try:
        return select_backend(
            config.device,
            config.attention_backend,
            head_dim=config.model.head_dim,
            block_size=config.block_size,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def has_cuda() -> bool:
    """Whether torch can use a GPU here. Imports torch, which takes a second."""
    import torch

    return torch.cuda.is_available()


def _max_model_len(engine_config: EngineConfig, model: ModelConfig) -> int:
    rope_max_len = rope_max_length(model)
    max_model_len = engine_config.max_model_len or min(rope_max_len, DEFAULT_MAX_MODEL_LEN)
    if max_model_len > rope_max_len:
        rope_type = model.rope.rope_type
        raise ConfigError(
            f"max_model_len {max_model_len} is beyond the {rope_max_len} positions this checkpoint"
            " serves" + ("" if rope_type == "default" else f" (rope scaling {rope_type!r})")
        )
    return max_model_len


def _dtype(
    engine_config: EngineConfig, model: ModelConfig, device: str, backend: Capabilities
) -> str:
    """The dtype to compute in: float32 in place of a checkpoint's that the device has no
    instructions for.
    """
    auto_dtype = model.dtype if model.dtype in backend.fast_dtypes else "float32"
    dtype = auto_dtype if engine_config.dtype == "auto" else engine_config.dtype
    if dtype not in backend.dtypes:
        raise ConfigError(
            f"dtype {dtype!r} is not possible on device {device!r} with these kernels; possible are"
            f" {', '.join(backend.dtypes)}. Choose one of them, or another attention_backend"
        )
    return dtype


def reason_to_unpack(config: ResolvedConfig) -> str | None:
    """Why a rank holds none of the checkpoint's codes; None if it does, or there are none."""
    model, stored = config.model, config.model.stored_format
    if stored is None or (config.quantization is not None and config.quantization.is_stored):
        return None
    if model.experts is not None:
        return "the model has experts"
    if stored.dtype == INT32 and stored.bits != 4:
        return f"codes have {stored.bits} bits"
    if stored.group_index_suffix is not None:
        return "inputs of a group do not follow one another (desc_act, actorder)"
    kept_quantization = stored_quantization(
        stored, model.input_sizes(config.engine.tensor_parallel_size)
    )
    if kept_quantization is None:
        return "groups of a rank are not whole words of codes"
    if config.engine.quantization not in (None, kept_quantization.name):
        return f"quantization {config.engine.quantization!r} was asked for"
    return (
        f"kernel backend {config.attention_backend!r} has no products with"
        f" {kept_quantization.name!r} on device {config.device!r}"
    )


def _quantization(
    engine_config: EngineConfig, model: ModelConfig, device: str, backend: Capabilities
) -> Quantization | None:
    requested_quantization, kept_quantization = engine_config.quantization, None
    input_sizes = model.input_sizes(engine_config.tensor_parallel_size)
    if model.stored_format is not None:
        kept_quantization = stored_quantization(model.stored_format, input_sizes)
    if kept_quantization is not None and kept_quantization.name == INT8:
        if requested_quantization not in (None, INT8):
            raise ConfigError(
                f"quantization {requested_quantization!r} is not possible for this checkpoint: it"
                " holds 8-bit codes ('int8'), which are kept as they are. Leave quantization out"
            )
    elif kept_quantization is not None:
        # Otherwise the codes are unpacked, on any backend.
        is_possible = kept_quantization.name in backend.quantizations and model.experts is None
        if not is_possible or requested_quantization not in (None, kept_quantization.name):
            kept_quantization = None
    quantization = kept_quantization
    if quantization is None and requested_quantization is not None:
        quantization = computed_quantization(requested_quantization)
    if quantization is None:
        return None
    if quantization.name not in backend.quantizations:
        raise ConfigError(
            f"quantization {quantization.name!r} is not possible on device {device!r} with kernel"
            f" backend {backend.name!r}; backends that support it here:"
            f" {quantization_backends_text(quantization.name)}."
            f" {_advice(['one of them'], quantization, input_sizes, backend)}"
        )
    if not quantization.fits(input_sizes):
        is_split = engine_config.tensor_parallel_size > 1
        choices = ["a smaller tensor_parallel_size"] if is_split else []
        raise ConfigError(
            f"quantization {quantization.name!r} is not possible for matrices of"
            f" {', '.join(map(str, input_sizes))} inputs on a rank: these must be multiples of"
            f" {quantization.group_multiple}."
            f" {_advice(choices, quantization, input_sizes, backend)}"
        )
    return quantization


def _advice(
    choices: list[str],
    refused_quantization: Quantization,
    input_sizes: tuple[int, ...],
    backend: Capabilities,
) -> str:
    """What to do about a quantization that is not possible: one of the choices, or what the backend
    can do instead.
    """
    if refused_quantization.is_stored:
        return f"Choose {', or '.join([*choices, 'weights that are not quantized'])}"
    names = [
        repr(name)
        for name in backend.quantizations
        if name != refused_quantization.name and computed_quantization(name).fits(input_sizes)
    ]
    choices = [*choices, *([f"quantization {' or '.join(names)}"] if names else [])]
    if not choices:
        return "Leave quantization out"
    return f"Choose {', or '.join(choices)}, or leave quantization out"


def _kv_cache_dtype(engine_config: EngineConfig, dtype: str, backend: Capabilities) -> str:
    possible_dtypes = ("auto", *backend.kv_cache_dtypes)
    if engine_config.kv_cache_dtype not in possible_dtypes:
        raise ConfigError(
            f"kv_cache_dtype {engine_config.kv_cache_dtype!r} is not possible with kernel backend"
            f" {backend.name!r}; possible are {' and '.join(possible_dtypes)}. Choose one of them,"
            " or another attention_backend"
        )
    return dtype if engine_config.kv_cache_dtype == "auto" else engine_config.kv_cache_dtype
