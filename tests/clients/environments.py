"""An environment per program: a folder with a virtual environment or with node's packages."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from tests.clients.programs import NODE, Program

INSTALL_LIMIT_S = 1200


def default_folder() -> Path:
    """Where environments are kept unless a folder is named."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "eagleray" / "clients"


class Environment:
    """The environment of one program below `folder`."""

    def __init__(self, folder: Path, program: Program) -> None:
        self.program = program
        self._folder = folder
        self.path = folder / program.name

    @property
    def commands(self) -> tuple[Path, ...]:
        """Folders of commands, for PATH."""
        if self.program.kind == "python":
            return (self.path / "bin",)
        return (self.path / "node_modules" / ".bin", self._node / "node_modules" / ".bin")

    @property
    def interpreter(self) -> Path:
        """What runs the driver."""
        return self.commands[-1] / self.program.kind

    def is_ready(self) -> bool:
        """Whether the pinned packages have been installed."""
        return _is_marked(self.path, self._wanted)

    def install(self) -> None:
        """Install what is not there yet. Raises `subprocess.SubprocessError`."""
        program = self.program
        if self.is_ready():
            return
        if program.kind == "node":
            if not _is_marked(self._node, NODE):
                _npm(self._node, NODE)
                _mark(self._node, NODE)
            _npm(self.path, *program.packages)
        else:
            _run(sys.executable, "-m", "venv", self.path)
            pip = (self.interpreter, "-m", "pip", "install", "-q", "--disable-pip-version-check")
            _run(*pip, *program.packages)
            if program.bare_packages:
                _run(*pip, "--no-deps", *program.bare_packages)
        _mark(self.path, self._wanted)

    @property
    def _node(self) -> Path:
        return self._folder / "node"

    @property
    def _wanted(self) -> str:
        return " ".join(self.program.packages + self.program.bare_packages)


def _npm(path: Path, *packages: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "package.json").write_text('{"private": true}')
    _run(
        "npm", "install", "--prefix", path, "--no-audit", "--no-fund", "--loglevel=error", *packages
    )


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, timeout=INSTALL_LIMIT_S)


def _mark(path: Path, text: str) -> None:
    (path / ".installed").write_text(_digest(text))


def _is_marked(path: Path, text: str) -> bool:
    mark = path / ".installed"
    return mark.exists() and mark.read_text() == _digest(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
