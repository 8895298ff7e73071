"""Builds what `pip install .` installs: the folders of the checkout as one package, `eagleray`.

In the checkout they are packages of their own, with names that many programs have too, such as
`configs` or `workers`. So the wheel has them inside `eagleray`, and the build changes their imports
of each other: `from configs.engine import ...` becomes `from eagleray.configs.engine import ...`.
An editable installation leaves the files where they are, under their own names.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGE = "eagleray"
FOLDERS = ("cluster", "configs", "kernels", "scheduler", "workers")
LAUNCH = "launch"
_NAMES = "|".join((*FOLDERS, LAUNCH))
_FROM_IMPORT = re.compile(rf"^([ \t]*from )(?=(?:{_NAMES})\b)", re.MULTILINE)
_PLAIN_IMPORT = re.compile(rf"^[ \t]*import (?:{_NAMES})\b.*", re.MULTILINE)
# How `configs/serve.yaml` names the application.
_APPLICATION = re.compile(r"^( *import_path: )(?=cluster\.)", re.MULTILINE)


def inside_package(source: str, path: Path) -> str:
    """A module as it is inside the package. Raises `ValueError` for `import configs.engine`, which
    would need another name in the code that uses it.
    """
    if plain := _PLAIN_IMPORT.search(source):
        raise ValueError(f"{path}: write '{plain[0].strip()}' as 'from ... import ...'")
    return _FROM_IMPORT.sub(rf"\g<1>{PACKAGE}.", source)


class BuildOnePackage(build_py):
    """Moves the folders into the package after they were collected."""

    def run(self) -> None:
        """Runs the usual build into an empty folder first."""
        if self.editable_mode:
            super().run()
            return
        built = Path(self.build_lib)
        shutil.rmtree(built, ignore_errors=True)
        super().run()
        for name in (*FOLDERS, f"{LAUNCH}.py"):
            (built / name).rename(built / PACKAGE / name)
        for path in sorted((built / PACKAGE).rglob("*.py")):
            path.write_text(inside_package(path.read_text(encoding="utf-8"), path), "utf-8")
        serve = built / PACKAGE / "configs" / "serve.yaml"
        text, num_changed = _APPLICATION.subn(rf"\g<1>{PACKAGE}.", serve.read_text("utf-8"))
        assert num_changed == 1, f"{serve} names no application"
        serve.write_text(text, "utf-8")


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildOnePackage})
