"""Triton's interpreter in less time: import this where kernels are interpreted.

At each launch, and whenever a kernel calls another function, the interpreter prepares the language
anew by looking at every name there is, which takes 40% of the time of our kernels. Here it does so
once per process, which cannot compile a kernel after that.

Of the rest, a third went into overflow checks, each computed and then dropped (only a builder with
`debug` asserts them), and a fifth into the shape of every new tensor and a table of dtypes that was
made again for every operation.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from triton import language
from triton.runtime import interpreter

_prepare = interpreter._patch_lang
_SCOPE = interpreter._LangPatchScope()  # an empty list of changes, so nothing is restored


@functools.cache
def _languages(function: Callable[..., Any]) -> list[ModuleType]:
    """The modules by which `function` refers to the language: all of it, or only its core in
    Triton's own functions.
    """
    known = (language, language.core)
    return [module for module in known if any(v is module for v in function.__globals__.values())]


def _prepare_once(function: Callable[..., Any]) -> interpreter._LangPatchScope:
    if any(language.core.is_builtin(module.load) for module in _languages(function)):
        _prepare(function)
    return _SCOPE


interpreter._patch_lang = _prepare_once


interpreter.interpreter_builder.options = dataclasses.replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)
_np_dtype_of_number = functools.cache(interpreter._get_np_dtype)
_np_dtype_of_pointer = np.dtype(np.uint64)


def _np_dtype(type: Any) -> np.dtype[Any]:
    """`interpreter._get_np_dtype`; types of pointers and blocks cannot be keys of a cache."""
    scalar = type.scalar
    is_pointer = isinstance(scalar, language.pointer_type)
    return _np_dtype_of_pointer if is_pointer else _np_dtype_of_number(scalar)


interpreter._get_np_dtype = _np_dtype


@functools.cache
def _shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """The shape and the number of elements of a tensor, as its attributes hold them."""
    constants = [language.constexpr(size) for size in sizes]
    return language.tuple(constants), language.constexpr(math.prod(sizes))


def _make_tensor(tensor: Any, handle: Any, type: Any) -> None:
    """`language.tensor.__init__`."""
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    tensor.shape, tensor.numel = _shape(type.shape if type.is_block() else ())


language.tensor.__init__ = _make_tensor
