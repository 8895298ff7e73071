"""Where things are, in a checkout or where `pip install .` has put them."""

from pathlib import Path

# Before the names of our modules: "eagleray." where they were installed as one package.
PREFIX = __name__.removesuffix("configs.paths")
IS_INSTALLED = PREFIX != ""
# The folder that holds `cluster`, `configs` and the others.
CHECKOUT = Path(__file__).resolve().parent.parent
DEFAULT_MODEL_DIR = CHECKOUT / "configs" / "default_model"
