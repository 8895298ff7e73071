"""What a checkpoint directory holds, according to the headers of its safetensors files, and whether
that fits the model.

Runs before any actor starts, so it must never import torch or read more than samples of weights.
`check_checkpoint` raises `ConfigError` naming the file, the tensor and what to do. Format:
github.com/huggingface/safetensors, "Format": eight bytes of header length, a JSON header with
`data_offsets` of each tensor, the data.

What loads in transformers loads here: an index decides which files are read, and their headers
decide which tensor is where.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.formats.stored import BFLOAT16, F8_E4M3, FLOAT16, I8, INT32, tensor_name
from configs.formats.table import SUPPORTED_VARIANTS
from configs.model import ModelConfig, read_json
from configs.quantization import FP8, INT8, Quantization
from scheduler.errors import ConfigError, UnreadableError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_FILE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_FLOAT_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}  # bytes of each
_ITEM_BYTES = _FLOAT_ITEM_BYTES | {I8: 1, F8_E4M3: 1, INT32: 4, "I64": 8}
_EMBEDDING_NAME, _HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"
# The experts of a layer: a tensor for each matrix of each, or, as transformers holds them, all in
# two tensors, of which the first one has of each expert the gate, then up.
_EXPERT_MATRIX_PATTERN = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_MERGED_GATE_UP_NAME, _MERGED_DOWN_NAME = "gate_up_proj", "down_proj"
# Computed from config.json; old versions of transformers stored them.
_COMPUTED_SUFFIX = ".rotary_emb.inv_freq"
# Of tensors that only quantized checkpoints have: codes in words, scales, and the dtypes of others.
_QUANTIZED_SUFFIXES = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")
_QUANTIZED_DTYPES = (I8, F8_E4M3)
_NUM_SAMPLES, _SAMPLE_BYTES = 16, 4096
_MAX_LISTED_NAMES = 4  # names of tensors in a message
_DOWNLOAD_AGAIN = "download or copy the checkpoint again"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is stored: the file, its name in there, its first byte. `dtype` is spelled as
    in safetensors ("BF16").
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    first_byte: int
    num_bytes: int


def expected_tensors(
    model: ModelConfig,
    *,
    has_merged_experts: bool = False,
    plain_names: Collection[str] = (),
    source_name: str = "config.json",
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of this model must hold, in one of the two ways
    of storing experts. plain_names: matrices that are stored as they are in a quantized checkpoint.
    Raises `ConfigError`, beginning with `source_name`, for a matrix that the checkpoint's format
    cannot store.
    """
    hidden_size, q_size = model.hidden_size, model.num_attention_heads * model.head_dim
    kv_size = model.num_key_value_heads * model.head_dim
    tensors: dict[str, tuple[int, ...]] = {
        _EMBEDDING_NAME: (model.vocab_size, hidden_size),
        "model.norm.weight": (hidden_size,),
    }
    if not model.tie_word_embeddings:
        tensors[_HEAD_NAME] = (model.vocab_size, hidden_size)
    matrix_tensors = functools.partial(_matrix_tensors, model, plain_names, source_name)
    matrices = {
        "self_attn.q_proj": (q_size, hidden_size),
        "self_attn.k_proj": (kv_size, hidden_size),
        "self_attn.v_proj": (kv_size, hidden_size),
        "self_attn.o_proj": (hidden_size, q_size),
    }
    for index in range(model.num_hidden_layers):
        layer = f"model.layers.{index}"
        shape_by_matrix = matrices
        if model.has_experts(index):
            tensors |= _expert_tensors(model, f"{layer}.mlp", has_merged_experts, matrix_tensors)
        else:
            shape_by_matrix = matrices | _mlp_matrices("mlp", hidden_size, model.intermediate_size)
        for name, shape in shape_by_matrix.items():
            tensors |= matrix_tensors(f"{layer}.{name}.weight", shape)
            if model.attention_bias and name.startswith("self_attn"):
                tensors[f"{layer}.{name}.bias"] = shape[:1]
        for name in ("q_norm", "k_norm"):
            tensors[f"{layer}.self_attn.{name}.weight"] = (model.head_dim,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = (hidden_size,)
    return tensors


def _mlp_matrices(name: str, hidden_size: int, features: int) -> dict[str, tuple[int, int]]:
    """The matrices of an MLP."""
    gate, up, down = (f"{name}.{matrix}_proj" for matrix in ("gate", "up", "down"))
    return {
        gate: (features, hidden_size),
        up: (features, hidden_size),
        down: (hidden_size, features),
    }


def _expert_tensors(
    model: ModelConfig,
    mlp: str,
    is_merged: bool,
    matrix_tensors: Callable[[str, tuple[int, int]], dict[str, tuple[int, ...]]],
) -> dict[str, tuple[int, ...]]:
    """The router of a layer, which is never quantized, and its experts."""
    experts_config, hidden_size = model.experts, model.hidden_size
    assert experts_config is not None
    num_experts, features = experts_config.num_experts, experts_config.intermediate_size
    tensors: dict[str, tuple[int, ...]] = {f"{mlp}.gate.weight": (num_experts, hidden_size)}
    if is_merged:
        tensors[f"{mlp}.experts.{_MERGED_GATE_UP_NAME}"] = (num_experts, 2 * features, hidden_size)
        tensors[f"{mlp}.experts.{_MERGED_DOWN_NAME}"] = (num_experts, hidden_size, features)
        return tensors
    for expert in range(num_experts):
        for name, shape in _mlp_matrices(f"{mlp}.experts.{expert}", hidden_size, features).items():
            tensors |= matrix_tensors(f"{name}.weight", shape)
    return tensors


def merged_place(name: str) -> tuple[str, int, bool] | None:
    """Where the matrix `name` of an expert is in a checkpoint of merged experts: (name of the
    tensor, expert, whether it follows another matrix of that expert); None if it is of no expert.
    """
    if not (match := _EXPERT_MATRIX_PATTERN.fullmatch(name)):
        return None
    experts_prefix, expert, matrix = match.groups()
    merged_part = _MERGED_DOWN_NAME if matrix == "down" else _MERGED_GATE_UP_NAME
    return f"{experts_prefix}.{merged_part}", int(expert), matrix == "up"


def _matrix_tensors(
    model: ModelConfig,
    plain_names: Collection[str],
    source_name: str,
    name: str,
    shape: tuple[int, int],
) -> dict[str, tuple[int, ...]]:
    """The tensors that hold a matrix of a decoder layer."""
    if model.stored_format is None or name in plain_names:
        return {name: shape}
    model.stored_format.check(source_name, name, shape)
    return model.stored_format.tensor_shapes(name, shape)


def is_layer_tensor(name: str) -> bool:
    """Whether a tensor belongs to a decoder layer; vocabulary and last norm do not."""
    return name.startswith("model.layers.")


def is_quantized(model: ModelConfig, name: str, tensors: Collection[str]) -> bool:
    """Whether the matrix `name` of a checkpoint of these tensors has scales."""
    return (
        model.stored_format is not None
        and tensor_name(name, model.stored_format.scales_suffix) in tensors
    )


def _plain_matrices(model: ModelConfig, stored_tensors: Mapping[str, StoredTensor]) -> set[str]:
    """Matrices that a quantized checkpoint stores as they are. The files decide, since every format
    has rules of its own about which it leaves out.
    """
    if model.stored_format is None or model.stored_format.is_int8:
        return set()
    return {
        name
        for name, tensor in stored_tensors.items()
        if name.endswith("_proj.weight")
        and tensor.dtype in _FLOAT_ITEM_BYTES
        and not is_quantized(model, name, stored_tensors)
    }


def _dtypes_of_codes(model: ModelConfig, expected_shapes: Collection[str]) -> dict[str, str]:
    """The dtype that a tensor of codes, zero points or group numbers must have, by its name."""
    dtypes: dict[str, str] = {}
    if (stored_format := model.stored_format) is not None:
        for name in expected_shapes:
            if name.endswith(f".{stored_format.scales_suffix}"):
                dtypes |= stored_format.code_dtypes(
                    name.removesuffix(stored_format.scales_suffix) + "weight"
                )
    return dtypes


def check_checkpoint(model_dir: Path, model: ModelConfig) -> dict[str, StoredTensor]:
    """Where each tensor of the model lies, and each index of groups that is stored without need.
    Raises `ConfigError` unless the directory holds exactly what `model` needs.

    Of tied embeddings either one may be stored, or both if they are equal.
    """
    stored_tensors = read_headers(model_dir)
    if model.stored_format is None:
        _check_not_quantized(model_dir, stored_tensors)
    merged_suffix = f".mlp.experts.{_MERGED_GATE_UP_NAME}"
    is_merged = any(name.endswith(merged_suffix) for name in stored_tensors)
    expected_shapes = expected_tensors(
        model,
        has_merged_experts=is_merged,
        plain_names=_plain_matrices(model, stored_tensors),
        source_name=str(model_dir / "config.json"),
    )
    ignored_suffixes = (
        model.stored_format.ignored_suffixes if model.stored_format is not None else ()
    )
    ignored_ends = _COMPUTED_SUFFIX, *(f".{suffix}" for suffix in ignored_suffixes)
    ignored_names = {name for name in stored_tensors if name.endswith(ignored_ends)}
    if model.tie_word_embeddings and _HEAD_NAME in stored_tensors:
        ignored_names.add(_HEAD_NAME)
        _check_tied(
            stored_tensors[_HEAD_NAME],
            stored_tensors.setdefault(_EMBEDDING_NAME, stored_tensors[_HEAD_NAME]),
        )
    if missing_names := expected_shapes.keys() - stored_tensors.keys():
        hint = ""
        if missing_names == {_HEAD_NAME}:
            hint = "; if it shares its embeddings, set tie_word_embeddings in config.json"
        raise ConfigError(
            f"{model_dir} lacks {_listing(missing_names)}, which its config.json calls for:"
            f" {_DOWNLOAD_AGAIN}, or correct config.json{hint}"
        )
    if unexpected_names := stored_tensors.keys() - expected_shapes.keys() - ignored_names:
        files = sorted({stored_tensors[name].path.name for name in unexpected_names})
        raise ConfigError(
            f"{model_dir} ({_listing(files)}) holds {_listing(unexpected_names)}, which a Qwen3"
            " model of its config.json does not have: is this checkpoint of another architecture,"
            " quantized, or does config.json belong to another one?"
        )
    dtypes_of_codes = _dtypes_of_codes(model, expected_shapes)
    for name, shape in expected_shapes.items():
        tensor = stored_tensors[name]
        if tensor.shape != shape:
            raise ConfigError(
                f"{tensor.path}: {name} has shape {list(tensor.shape)}, but config.json"
                f" calls for {list(shape)}; they do not belong together"
            )
        dtype, code_dtype = tensor.dtype, dtypes_of_codes.get(name)
        if code_dtype != (None if dtype in _FLOAT_ITEM_BYTES else dtype):
            raise ConfigError(
                f"{tensor.path}: {name} is of dtype {dtype}, but according to config.json it holds"
                f" {'real numbers' if code_dtype is None else f'codes of dtype {code_dtype}'}; they"
                " do not belong together"
            )
    index_names = _redundant_indexes(model, stored_tensors)
    return {name: stored_tensors[name] for name in (*expected_shapes, *index_names)}


def _check_not_quantized(model_dir: Path, stored_tensors: Mapping[str, StoredTensor]) -> None:
    """Raise `ConfigError` for files of codes, of which config.json says nothing."""
    quantized_names = {
        name
        for name, tensor in stored_tensors.items()
        if name.endswith(_QUANTIZED_SUFFIXES) or tensor.dtype in _QUANTIZED_DTYPES
    }
    if quantized_names:
        raise ConfigError(
            f"{model_dir} holds {_listing(quantized_names)}: its files are quantized, but its"
            " config.json has no quantization_config, which says how. Use a checkpoint whose"
            " config.json has one"
        )


def _redundant_indexes(model: ModelConfig, names: Iterable[str]) -> list[str]:
    """Tensors that say in which group each input is, though config.json says it too."""
    if model.stored_format is None or model.stored_format.redundant_index_suffix is None:
        return []
    end = f".{model.stored_format.redundant_index_suffix}"
    return [name for name in names if name.endswith(end)]


def quantization_of_files(
    model_dir: Path,
    model: ModelConfig,
    quantization: Quantization | None,
    *,
    is_asked_for: bool = False,
) -> tuple[Quantization | None, str | None]:
    """`quantization`, with what it must know of the files; or None, and why all must be unpacked:
    these have matrices or scales of another kind. Raises `ConfigError` for that if the user asked
    for the quantization (and see `check_checkpoint`).
    """
    if quantization is None or quantization.name == INT8 or not quantization.is_stored:
        return quantization, None
    assert model.stored_format is not None
    tensors = check_checkpoint(model_dir, model)
    scale_dtypes = {
        tensor.dtype
        for name, tensor in tensors.items()
        if name.endswith(model.stored_format.scales_suffix)
    }
    plain_names = sorted(
        name
        for name in tensors
        if name.endswith("_proj.weight") and not is_quantized(model, name, tensors)
    )
    if quantization.name == FP8 and not plain_names:
        return quantization, None
    for scale_dtype in (FLOAT16, BFLOAT16):
        if scale_dtypes == {scale_dtype} and not plain_names:
            return dataclasses.replace(quantization, scale_dtype=scale_dtype), None
    reason = f"scales are {sorted(scale_dtypes)}"
    if plain_names:
        reason = f"{plain_names[0]} is not quantized"
    if is_asked_for:
        raise ConfigError(
            f"quantization {quantization.name!r} is not possible for {model_dir}: {reason}. Leave"
            " it out, and the matrices are unpacked"
        )
    return None, reason


def _check_tied(head: StoredTensor, embedding: StoredTensor) -> None:
    """Raise `ConfigError` if both are stored and differ, as far as samples show: transformers would
    not tie them then.
    """
    is_same_kind = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    if not is_same_kind or list(_samples(head)) != list(_samples(embedding)):
        raise ConfigError(
            f"{head.path} holds {_HEAD_NAME}, which differs from {_EMBEDDING_NAME}, though"
            " config.json says that they are one (tie_word_embeddings): set that to false to use"
            f" both, or remove {_HEAD_NAME}"
        )


def _samples(tensor: StoredTensor) -> Iterator[bytes]:
    """Some of the data, evenly spaced."""
    with tensor.path.open("rb") as file:
        for part in range(_NUM_SAMPLES):
            sample_offset = tensor.num_bytes * part // _NUM_SAMPLES
            file.seek(tensor.first_byte + sample_offset)
            yield file.read(min(_SAMPLE_BYTES, tensor.num_bytes - sample_offset))


def read_headers(model_dir: Path) -> dict[str, StoredTensor]:
    """Every tensor of the files of the checkpoint. Raises `ConfigError` for a file that is missing
    or damaged, and for a tensor in two files unless the index names one of them.
    """
    index_path = model_dir / INDEX_NAME
    # As in transformers, one file of the usual name makes an index stale.
    has_index = index_path.exists() and not (model_dir / SINGLE_FILE_NAME).exists()
    weight_map = _read_index(index_path) if has_index else {}
    paths = [model_dir / name for name in sorted(set(weight_map.values()))]
    paths = paths or _find_files(model_dir)
    stored_tensors: dict[str, StoredTensor] = {}
    for path in paths:
        for name, tensor in read_header(path).items():
            earlier_tensor = stored_tensors.setdefault(name, tensor)
            if earlier_tensor is tensor:
                continue
            if weight_map.get(name) not in (path.name, earlier_tensor.path.name):
                raise ConfigError(
                    f"{name} is in both {earlier_tensor.path} and {path}: remove the stale files"
                )
            if weight_map[name] == path.name:
                stored_tensors[name] = tensor
    return stored_tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, whose size must be what its header says. Raises
    `ConfigError`, of which `UnreadableError` may pass.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise ConfigError(
                    f"{path} is truncated or not a safetensors file ({size} bytes):"
                    f" {_DOWNLOAD_AGAIN}"
                )
            header = json.loads(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        data_end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in entries.items()}
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist, though the index names it: {_DOWNLOAD_AGAIN}"
        ) from None
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{path} has a header that cannot be read ({error!r}): {_DOWNLOAD_AGAIN}"
        ) from None
    if 8 + length + data_end != size:
        raise ConfigError(
            f"{path} has {size} bytes, but its header describes {8 + length + data_end}:"
            f" {_DOWNLOAD_AGAIN}"
        )
    return tensors


def _entry(path: Path, name: str, entry: Mapping[str, Any], data_begin: int) -> StoredTensor:
    dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
    if dtype not in _ITEM_BYTES:
        raise ConfigError(
            f"{path}: {name} is of dtype {dtype}; possible are {', '.join(_ITEM_BYTES)}. The"
            " formats of quantized checkpoints that are supported are"
            f" {'; '.join(SUPPORTED_VARIANTS)}"
        )
    start, end = entry["data_offsets"]
    num_bytes = _ITEM_BYTES[dtype]
    for extent in shape:
        num_bytes *= extent
    if end - start != num_bytes:
        raise ConfigError(
            f"{path}: {name} takes {end - start} bytes, but its shape {list(shape)} needs"
            f" {num_bytes}"
        )
    return StoredTensor(path, name, dtype, shape, data_begin + start, num_bytes)


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{path} has no weight_map: {_DOWNLOAD_AGAIN}")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ConfigError(
                f"{path} places {name} in {file_name!r}, which is not a file name in this directory"
            )
    return weight_map


def _find_files(model_dir: Path) -> list[Path]:
    if (model_dir / SINGLE_FILE_NAME).exists():
        return [model_dir / SINGLE_FILE_NAME]
    paths = sorted(model_dir.glob("*.safetensors"))
    if not paths:
        others = sorted(path.name for path in model_dir.glob("*.bin"))
        raise ConfigError(
            f"{model_dir} holds no *.safetensors file"
            + (f" ({_listing(others)} must be converted first)" if others else "")
            + "; a model directory holds config.json and the weights as safetensors"
        )
    return paths


def _listing(names: Iterable[str]) -> str:
    sorted_names = sorted(names)
    first_names = ", ".join(sorted_names[:_MAX_LISTED_NAMES])
    num_others = len(sorted_names) - _MAX_LISTED_NAMES
    return first_names if num_others <= 0 else f"{first_names} and {num_others} more"
