"""Ray's token authentication, chosen before Ray is imported, which is when it reads the choice.

A cluster that `ray.init` starts uses a token; one that `ray start` starts uses it if there is one.
A process that joins does not look for it by itself, and would be turned away: here it does.
RAY_AUTH_MODE, where set, stays as it is, and so does everything in a program that has imported Ray
before us.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def use_token_if_there_is_one() -> None:
    if "ray" in sys.modules:
        return
    default = Path.home() / ".ray" / "auth_token"
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or default)
    if os.environ.get("RAY_AUTH_TOKEN") or path.is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
