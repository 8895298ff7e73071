"""What a container leaves out is filled in, without touching what is there, and never with a folder
that somebody else could have prepared.
"""

from __future__ import annotations

import errno
import os
import pwd
import tempfile
from pathlib import Path

import pytest

from cluster.resources.surroundings import set_missing_variables

SET = ("HOME", "LOGNAME", "EAGLERAY_CACHE_DIR", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of an environment without variables."""
    for name in (*SET, "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")  # so that the value of now comes back after the test
        monkeypatch.delenv(name)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def given() -> dict[str, str]:
    return {name: os.environ[name] for name in SET if name in os.environ}


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system does not know this process's user."""

    def unknown(user_id: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {user_id}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_a_known_user_with_a_home_directory_is_left_alone(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    set_missing_variables()
    assert given() == {"HOME": str(tmp_path)} and not any(temporary.iterdir())


def test_an_unknown_user_gets_a_name_and_a_private_home(nobody: None, temporary: Path) -> None:
    set_missing_variables()
    home = temporary / f"eagleray-home-{os.getuid()}"
    assert given() == {"HOME": str(home), "LOGNAME": f"user{os.getuid()}"}
    assert home.stat().st_mode & 0o777 == 0o700


def test_caches_move_where_the_home_directory_cannot_be_written(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    set_missing_variables()
    cache = temporary / f"eagleray-cache-{os.getuid()}"
    assert given()["EAGLERAY_CACHE_DIR"] == str(cache / ".cache/eagleray")
    assert given()["TRITON_CACHE_DIR"] == str(cache / ".triton/cache")


def test_caches_move_where_the_home_directory_is_another_user_s(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with another user id often leaves HOME=/root, which nobody else may enter."""

    look = Path.stat

    def may_not_look(path: Path, **options: bool) -> os.stat_result:
        if str(path).startswith("/root/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path, **options)

    monkeypatch.setenv("HOME", "/root")
    monkeypatch.setattr(Path, "stat", may_not_look)
    set_missing_variables()
    cache = temporary / f"eagleray-cache-{os.getuid()}"
    assert given()["EAGLERAY_CACHE_DIR"] == str(cache / ".cache/eagleray")


@pytest.mark.parametrize("name", ["EAGLERAY_CACHE_DIR", "NUMBA_CACHE_DIR"])
def test_a_chosen_cache_stays(name: str, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setenv(name, "/chosen")
    set_missing_variables()
    assert given()[name] == "/chosen"
    assert name == "EAGLERAY_CACHE_DIR" or "EAGLERAY_CACHE_DIR" not in given()


@pytest.mark.parametrize("kind", ["writable by all", "a link"])
def test_a_folder_that_others_may_have_made_is_not_used(
    kind: str, nobody: None, temporary: Path, tmp_path: Path
) -> None:
    path = temporary / f"eagleray-home-{os.getuid()}"
    if kind == "a link":
        path.symlink_to(tmp_path)
    else:
        path.mkdir()
        path.chmod(0o777)
    set_missing_variables()
    assert given()["HOME"] == "/"
