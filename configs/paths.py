"""Where things are, in a checkout or where `pip install .` has put them."""

import sys
from pathlib import Path

# Before the names of our modules: "eagleray." where they were installed as one package.
PACKAGE_PREFIX = __name__.removesuffix("configs.paths")
IS_INSTALLED = PACKAGE_PREFIX != ""
# The folder that holds `cluster`, `configs` and the others.
SOURCE_ROOT = Path(__file__).resolve().parent.parent
DEFAULT_MODEL_DIR = SOURCE_ROOT / "configs" / "default_model"


def module_command(module: str) -> list[str]:
    """The command that runs a module of ours, by its full name (with `PACKAGE_PREFIX`), as a
    program, in the working directory `SOURCE_ROOT`.

    In a checkout that is where the module is found. Where we are installed, nothing may be looked
    up there: our folder `kernels` would hide the package of that name, which transformers imports.
    """
    return [sys.executable, *(["-P"] if IS_INSTALLED else []), "-m", module]
