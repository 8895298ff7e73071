"""Triton's interpreter in less time: import this where kernels are interpreted.

At each launch, and whenever a kernel calls another function, the interpreter prepares the language
anew by looking at every name there is, which takes 40% of the time of our kernels. Here it does so
once per process, which cannot compile a kernel after that.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

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
