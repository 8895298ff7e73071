"""Where compiled CPU kernels are cached: by the content of their sources, so every clone of a
version shares them.

numba keys its cache by the path of the source file and does not notice changes in functions inlined
from other files. Here each entry is stamped with a hash of all sources that compiled code may come
from, and stored in the user's cache directory. Set `EAGLERAY_CACHE_DIR` to move that directory, or
`NUMBA_CACHE_DIR` to use numba's own scheme instead.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding as llvm
from numba.core import caching, codegen

logger = logging.getLogger(__name__)

_NumbaIndexFile = caching.IndexDataCacheFile
_optimize_final_module = codegen.CPUCodeLibrary._optimize_final_module
_OUR_PACKAGE = "7kernels3cpu"  # in mangled names
_CPU_KERNELS_DIR = Path(__file__).resolve().parent
_CHECKOUT_DIR = _CPU_KERNELS_DIR.parent.parent
# Functions and constants of these files are compiled into functions of other files.
_SHARED_SOURCES = (
    *sorted(_CPU_KERNELS_DIR.glob("*.py")),
    *sorted((_CPU_KERNELS_DIR.parent / "reference").glob("*.py")),
)
_NUMBA_LOCATORS = ("UserProvidedCacheLocator", "InTreeCacheLocator", "UserWideCacheLocator")


class ContentCacheLocator:
    """A numba cache locator (`numba.core.caching`) for the compiled functions of one file of this
    checkout.
    """

    def __init__(self, function: Callable[..., Any], path: Path) -> None:
        self._first_line = function.__code__.co_firstlineno
        self._stamp = source_hash(path)

    @classmethod
    def from_function(cls, function: Callable[..., Any], path: str) -> ContentCacheLocator | None:
        """A locator, or None where numba's own schemes should be used."""
        source_path = Path(path).resolve()
        if numba.config.CACHE_DIR or not source_path.is_relative_to(_CHECKOUT_DIR):
            return None
        locator = cls(function, source_path)
        try:
            locator.ensure_cache_path()
        except OSError:  # no home directory, or a read-only one
            return None
        return locator

    def ensure_cache_path(self) -> None:
        """Raises `OSError` when the directory cannot be made or written to."""
        path = self.get_cache_path()
        Path(path).mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(path)

    def get_cache_path(self) -> str:
        """One directory per version of the sources."""
        return str(cache_dir() / "numba" / self._stamp)

    def get_source_stamp(self) -> str:
        """A stamp that changes whenever the compiled code may change."""
        return self._stamp

    def get_disambiguator(self) -> str:
        """Distinguishes functions of the same name in one file."""
        return str(self._first_line)


def version_dir() -> Path:
    """A directory for notes about the cache of this version of the kernels on this kind of
    processor. It may not exist, and creating it may fail.
    """
    return (
        cache_dir()
        / "numba"
        / source_hash(_CPU_KERNELS_DIR / "jit.py")
        / str(llvm.get_host_cpu_name())
    )


def cache_dir() -> Path:
    """Where compiled kernels are kept."""
    configured_dir = os.environ.get("EAGLERAY_CACHE_DIR")
    if configured_dir:
        return Path(configured_dir).expanduser()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagleray"
    except RuntimeError:  # a user without a home directory, as in some containers
        return _CHECKOUT_DIR / "build" / "cache"


@functools.cache
def source_hash(path: Path) -> str:
    """Hash of a file with compiled functions and of everything that may be inlined into them."""
    sources = sorted({*_SHARED_SOURCES, path})
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


class FilePerSignature(caching.IndexDataCacheFile):
    """A file per signature, named by it. numba numbers the files and keeps an index, so of two
    processes that save the first signatures of a function at once, one would later run the code
    that the other has compiled for other types.
    """

    def load(self, key: object) -> object | None:
        """What was saved with `key`, the signature and all that its code depends on. None also if
        the file is damaged or belongs to somebody else.
        """
        with suppress(OSError, EOFError, pickle.UnpicklingError):
            saved_key, data = self._load_data(self._name(key))
            return data if saved_key == key else None  # types may look alike
        return None

    def save(self, key: object, data: object) -> None:
        """Replaces, at once, what was saved with `key`. If that is not possible, the code is
        compiled again next time.
        """
        try:
            self._save_data(self._name(key), (key, data))
        except OSError as error:
            logger.warning("compiled kernels cannot be kept: %s", error)

    def _name(self, key: object) -> str:
        identity = repr((key, self._source_stamp, self._version)).encode()
        return str(self._data_name(int(hashlib.sha256(identity).hexdigest()[:16], 16)))


def _cache_file(
    cache_path: str, filename_base: str, source_stamp: str
) -> caching.IndexDataCacheFile:
    """Replaces numba's class for the functions of this checkout; those of others keep it."""
    is_ours = Path(cache_path).is_relative_to(cache_dir() / "numba")
    return (FilePerSignature if is_ours else _NumbaIndexFile)(
        cache_path, filename_base, source_stamp
    )


def _internalize_callees(library: codegen.CPUCodeLibrary) -> None:
    """Optimize a library whose copies of our functions that it calls are its own. By default they
    have the names of the originals, and a process runs whichever copy it has loaded first, though
    the optimizer may have added in another order in each.
    """
    for function in library._final_module.functions:
        if function.linkage is llvm.Linkage.linkonce_odr and _OUR_PACKAGE in function.name:
            function.linkage = "internal"
    _optimize_final_module(library)


def use_content_cache() -> None:
    """Make numba ask `ContentCacheLocator` first, save our signatures each for itself, and keep the
    libraries of our functions apart. Call before any function is compiled.
    """
    codegen.CPUCodeLibrary._optimize_final_module = _internalize_callees
    caching.IndexDataCacheFile = _cache_file
    locator_name = f"{__name__}.{ContentCacheLocator.__name__}"
    numba.config.CACHE_LOCATOR_CLASSES = ",".join((locator_name, *_NUMBA_LOCATORS))
