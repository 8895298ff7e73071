"""Ray's token authentication, chosen before Ray is imported, which is when it reads the choice.

A cluster started by `ray.init` uses a token; one started by `ray start` uses a token if there is
one. A process that joins a cluster does not look for the token by itself and would be rejected, so
this module looks for it. A RAY_AUTH_MODE that is set is left alone, and so is a program that
imported Ray before us.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def use_auth_token_if_there_is_one() -> None:
    if "ray" in sys.modules:
        return
    default = Path.home() / ".ray" / "auth_token"
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or default)
    if os.environ.get("RAY_AUTH_TOKEN") or os.access(path, os.R_OK):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
