"""What a container may leave out, filled in before Ray and torch are imported, which look for it.

A user id without an entry in the system's list has no name and no home directory, and a home
directory may not be writable: Docker sets HOME=/ for such a user. The stand-ins are variables of
the environment, so the processes that this one starts have them too. What is set is left alone,
except for a HOME that Ray could not use.
"""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from pathlib import Path

# Caches of compiled code, by the variable that moves each, and where it is in the home directory.
_CACHE_FOLDERS = {"EAGLERAY_CACHE_DIR": ".cache/eagleray", "TRITON_CACHE_DIR": ".triton/cache"}
# These choose another place for the first of them.
_OVERRIDING_VARIABLES = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")


def set_missing_variables() -> None:
    """Set HOME, LOGNAME and the folders of caches where the system gives none that can be used."""
    user_id = os.getuid()
    try:
        pwd.getpwuid(user_id)
    except KeyError:
        os.environ.setdefault("HOME", str(_private_folder("home") or "/"))
        os.environ.setdefault("LOGNAME", f"user{user_id}")
    home = Path.home()
    if (
        _needs_token_file()
        and not _can_hold_token(home)
        and (stand_in := _private_folder("home")) is not None
    ):
        os.environ["HOME"] = str(stand_in)
        hub_folder = home / ".cache" / "huggingface"
        if os.access(hub_folder, os.R_OK | os.X_OK) and "XDG_CACHE_HOME" not in os.environ:
            os.environ.setdefault("HF_HOME", str(hub_folder))  # models that are there stay in use
    for variable, cache_path in _CACHE_FOLDERS.items():
        overriding = _OVERRIDING_VARIABLES if variable == "EAGLERAY_CACHE_DIR" else ()
        if variable in os.environ or any(map(os.environ.get, overriding)):
            continue
        folder = home if _can_be_made(home / cache_path) else _private_folder("cache")
        if folder is not None and folder != Path.home():
            os.environ[variable] = str(folder / cache_path)


def _needs_token_file() -> bool:
    """Whether Ray looks for its token in the home directory."""
    has_token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return not has_token and os.environ.get("RAY_AUTH_MODE") != "disabled"


def _can_hold_token(home: Path) -> bool:
    """Whether Ray can read its token in a home directory, or write a new one there."""
    return os.access(home / ".ray" / "auth_token", os.R_OK) or _can_be_made(home / ".ray")


def _can_be_made(path: Path) -> bool:
    """Whether a folder is there and can be written, or could be made. What this user may not even
    look at, such as anything in the home directory of root, cannot.
    """
    try:
        while not path.exists():
            path = path.parent
        return path.is_dir() and os.access(path, os.W_OK | os.X_OK)
    except PermissionError:
        return False


def _private_folder(name: str) -> Path | None:
    """A temporary folder that only this user can write; None if there cannot be one. Code is loaded
    from it, so one that somebody else has made is not used.
    """
    try:
        path = Path(tempfile.gettempdir()) / f"eagleray-{name}-{os.getuid()}"
        path.mkdir(mode=0o700, exist_ok=True)
        folder_status = path.lstat()
    except OSError:
        return None
    is_ours = stat.S_ISDIR(folder_status.st_mode) and folder_status.st_uid == os.getuid()
    return path if is_ours and not folder_status.st_mode & 0o022 else None
