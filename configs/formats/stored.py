"""How a checkpoint stores the matrices of decoder layers: as codes with scales.

A format is described rather than programmed. `StoredFormat` says which tensors hold a matrix, how
its codes are packed, and which of them share a scale; `workers/models/stored.py` reads any of them.
Each format is a module beside this one, which reads what `quantization_config` says of it, and a
row of `table.py`.

Legend: X features in, Y features out (rows), G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.errors import ConfigError

WORD_BITS = 32
INT32, I8, F8_E4M3 = "I32", "I8", "F8_E4M3"  # dtypes of codes, spelled as in safetensors
FLOAT16, BFLOAT16 = "F16", "BF16"
_USUAL_GROUP_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """How a matrix [Y, X] is stored:

        weight[y, x] = (code[y, x] - zero[y, group of x]) * scale[y, group of x]

    name: how messages call the format.
    codes_suffix, scales_suffix, zeros_suffix, group_index_suffix: the last part of the names of the
        tensors that hold the codes, the scales, the zero points and the group of each input.
        Without stored zero points, each is `zero_offset`, which is added to stored ones; without an
        index, the inputs of a group follow one another.
    redundant_index_suffix: of an index that may be stored nevertheless, and then must be in order.
    reason_for_order: why it must, and what to change otherwise.
    dtype: that of codes: 32-bit words of several, or one number each.
    bits: of a code, and of a stored zero point.
    code_order: which of the codes of a word lies there, from the lowest bits on. Words hold zero
        points of consecutive rows, and codes of consecutive inputs, or rows if `words_span_rows`.
    is_transposed: the tensors are [X, Y] and [G, Y].
    block_rows: rows that share a scale, -1 for all.
    group_size: inputs that share a scale, -1 for all.
    has_whole_groups: a matrix cannot end within a group.
    ignored_suffixes: of tensors that may be stored and are not needed.
    """

    name: str
    codes_suffix: str
    dtype: str
    bits: int
    scales_suffix: str
    code_order: tuple[int, ...] = ()
    words_span_rows: bool = False
    is_transposed: bool = False
    zeros_suffix: str | None = None
    zero_offset: int = 0
    group_index_suffix: str | None = None
    redundant_index_suffix: str | None = None
    reason_for_order: str = ""
    block_rows: int = 1
    group_size: int = -1
    has_whole_groups: bool = True
    ignored_suffixes: tuple[str, ...] = ()

    @property
    def is_int8(self) -> bool:
        """Whether these are the codes of quantization "int8", which are kept as they are."""
        return self.dtype == I8

    @property
    def is_fp8(self) -> bool:
        """Whether these are the codes of quantization "fp8"."""
        return self.dtype == F8_E4M3

    def tensor_shapes(self, name: str, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that hold the matrix `name`, which ends in "weight"."""
        size_out, size_in = shape
        num_groups = 1 if self.group_size == -1 else -(-size_in // self.group_size)
        packed_shape = (
            (self._num_words(size_out), size_in) if self.words_span_rows else (size_out, size_in)
        )
        if self.dtype == INT32 and not self.words_span_rows:
            packed_shape = (size_out, self._num_words(size_in))
        shapes = {
            self.codes_suffix: packed_shape,
            self.scales_suffix: (-(-size_out // self.block_rows), num_groups),
        }
        if self.zeros_suffix is not None:
            shapes[self.zeros_suffix] = (self._num_words(size_out), num_groups)
        if self.is_transposed:
            shapes = {suffix: (inputs, rows) for suffix, (rows, inputs) in shapes.items()}
        tensors: dict[str, tuple[int, ...]] = {
            tensor_name(name, suffix): part_shape for suffix, part_shape in shapes.items()
        }
        if self.block_rows == -1:
            tensors[tensor_name(name, self.scales_suffix)] = (1,)
        if self.group_index_suffix is not None:
            tensors[tensor_name(name, self.group_index_suffix)] = (size_in,)
        return tensors

    def code_dtypes(self, name: str) -> dict[str, str]:
        """The tensors of the matrix `name` that hold integers or codes, with their dtypes."""
        dtypes = {
            self.codes_suffix: self.dtype,
            self.zeros_suffix: INT32,
            self.group_index_suffix: INT32,
        }
        return {
            tensor_name(name, suffix): dtype
            for suffix, dtype in dtypes.items()
            if suffix is not None
        }

    def check(self, source_name: str, name: str, shape: tuple[int, int]) -> None:
        """Raise `ConfigError` for a matrix that this format cannot store."""
        size_out, size_in = shape
        if self.has_whole_groups and self.group_size != -1 and size_in % self.group_size:
            possible_sizes = [
                size for size in _USUAL_GROUP_SIZES if size_in % size == 0 and size < size_in
            ]
            raise ConfigError(
                f"{source_name}: {name} has {size_in} inputs, which are not whole groups of"
                f" {self.group_size}; {self.name} can store it in groups of"
                f" {', '.join(map(str, (*possible_sizes, size_in)))}. Use a checkpoint with such"
                " groups"
            )
        if self.words_span_rows and size_out % len(self.code_order):
            raise ConfigError(
                f"{source_name}: {name} has {size_out} outputs; {self.name} stores multiples of"
                f" {len(self.code_order)}. Use a checkpoint of another format"
            )

    def _num_words(self, num_codes: int) -> int:
        return -(-num_codes // len(self.code_order))


def tensor_name(name: str, suffix: str) -> str:
    """The name of the tensor that holds a part of the matrix `name`, which ends in "weight"."""
    return name.removesuffix("weight") + suffix


def sequential_order(bits: int) -> tuple[int, ...]:
    """The order of a word whose first code has the lowest bits."""
    return tuple(range(WORD_BITS // bits))


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of `quantization_config`, of which every value is one that is supported, or is refused
    by name. format_name: how messages call the format. prefix: of the keys in messages.
    """

    values: Mapping[str, Any]
    source_name: str
    format_name: str
    prefix: str = ""

    def require(self, key: str, *supported_values: Any, default: Any = None) -> Any:
        """The value of a key, `default` if it is absent or null. Raises `ConfigError`."""
        value = self.values.get(key)
        value = default if value is None else value
        if not any(type(value) is type(choice) and value == choice for choice in supported_values):
            raise self.error(key, value, " or ".join(map(repr, supported_values)))
        return value

    def group_size(self, default: int | None = None) -> int:
        """Inputs per group, -1 for one group of all; `default` if absent. Raises `ConfigError`."""
        value = self.values.get("group_size", default)
        if type(value) is not int or (value < 1 and value != -1):
            raise self.error("group_size", value, "1 or more, or -1 for all")
        return value

    def section(self, key: str) -> Section:
        """The object under a key, empty if it is absent or null. Raises `ConfigError`."""
        values = self.values.get(key)
        if values is not None and not isinstance(values, Mapping):
            raise self.error(key, values, "that is an object")
        return Section(
            values=values or {},
            source_name=self.source_name,
            format_name=self.format_name,
            prefix=f"{self.prefix}{key}.",
        )

    def error(self, key: str, value: object, supported_text: str) -> ConfigError:
        """What to raise for a value that is not supported."""
        return ConfigError(
            f"{self.source_name}: quantization_config has {self.prefix}{key} {value!r};"
            f" {self.format_name} checkpoints are supported with {key} {supported_text}. Use such a"
            " checkpoint, or one that is not quantized"
        )
