"""Kernels that Triton has compiled, carried from one machine to the next.

Compiling all kernels of the GPU check takes a minute or more. With `--triton-cache DIR` the check
begins with those in `DIR/triton_cache.tar.xz`, if there is one. If it compiles others, it leaves an
archive with all of them beside its results.

Triton finds a kernel again on another machine, in any folder, if all this is the same: the version
and build of Triton and its ptxas, the chip, the source of the kernel and the line it begins at, its
types, constants and options. Of the files of a kernel it needs the binary and its description;
what came before the binary is left out. The small modules that launch kernels travel too.
"""

from __future__ import annotations

import json
import lzma
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ARCHIVE = "triton_cache.tar.xz"
# The binary of a kernel, its description and the list of its files, modules in C.
_NEEDED = (".cubin", ".json", ".so")
_LIST = "__grp__"
# Twice as fast as the default, and the archive is a few percent larger.
_PRESET: Final = 3


@dataclass(slots=True, kw_only=True)
class KernelCache:
    """Triton's cache. `folder`: where Triton keeps it. `archive`: where `pack` writes it."""

    folder: Path
    archive: Path
    _packed: frozenset[Path] = field(default_factory=frozenset)

    @property
    def num_kernels(self) -> int:
        return sum(1 for _ in self.folder.glob("*/*.cubin"))

    def unpack(self, archive: Path) -> None:
        """Add the kernels of an archive. One that cannot be read is reported, and left alone."""
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(self.folder, filter="data")
        except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
            print(f"{archive} cannot be read, so kernels are compiled: {error}", file=sys.stderr)
        for listed in self.folder.glob(f"*/{_LIST}*.json"):
            self._list_here(listed)
        self._packed = frozenset(self._needed())

    def _list_here(self, listed: Path) -> None:
        """Triton lists the files of a kernel by their full paths, which change with the folder."""
        names = json.loads(listed.read_text())["child_paths"]
        here = {name: str(listed.parent / name) for name in names}
        listed.write_text(json.dumps({"child_paths": here}))

    def pack(self) -> None:
        """Write the archive, whole or not at all, if there is anything new in the cache."""
        needed = frozenset(self._needed())
        if needed == self._packed:
            return
        self.archive.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.archive.with_suffix(".unfinished")
        with tarfile.open(str(unfinished), mode="w:xz", preset=_PRESET) as tar:
            for path in sorted(needed):
                tar.add(path, path.relative_to(self.folder))
        unfinished.replace(self.archive)
        self._packed = needed

    def _needed(self) -> list[Path]:
        return [path for path in self.folder.glob("*/*") if path.suffix in _NEEDED]


@contextmanager
def kernel_cache(brought: Path, out: Path) -> Iterator[KernelCache]:
    """The cache of all processes that are started meanwhile, which begins with the archive in the
    folder `brought`, if it has one; `pack` writes to the folder `out`.

    It is in Triton's `TRITON_CACHE_DIR` if that is set, and otherwise in a folder that is removed
    at the end.
    """
    with tempfile.TemporaryDirectory(prefix="triton_cache_") as temporary:
        folder = Path(os.environ.setdefault("TRITON_CACHE_DIR", temporary))
        try:
            cache = KernelCache(folder=folder, archive=out / ARCHIVE)
            if (brought / ARCHIVE).exists():
                cache.unpack(brought / ARCHIVE)
            print(f"{cache.num_kernels} compiled kernels to begin with", flush=True)
            yield cache
        finally:
            if folder == Path(temporary):
                del os.environ["TRITON_CACHE_DIR"]
