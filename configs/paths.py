"""Where things are in the checkout."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
DEFAULT_MODEL_DIR = CHECKOUT / "configs" / "default_model"
