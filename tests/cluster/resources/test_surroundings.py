"""What a container leaves out is filled in, without touching what is there, and never with a folder
that somebody else could have prepared.
"""

from __future__ import annotations

import errno
import os
import pwd
import sys
import tempfile
from pathlib import Path

import pytest

from cluster.resources.authentication import use_auth_token_if_there_is_one
from cluster.resources.surroundings import set_missing_variables

SET = ("HOME", "LOGNAME", "HF_HOME", "EAGLERAY_CACHE_DIR", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR")


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


@pytest.fixture
def foreign_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with another user id often leaves HOME=/root, which nobody else may enter."""

    look = os.stat

    def may_not_look(path: str | Path, **options: bool) -> os.stat_result:
        if str(path).startswith("/root/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path, **options)

    monkeypatch.setenv("HOME", "/root")
    monkeypatch.setattr(os, "stat", may_not_look)
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith("/root"))


def test_a_home_directory_of_another_user_is_replaced(
    temporary: Path, foreign_home: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_missing_variables()
    cache = temporary / f"eagleray-cache-{os.getuid()}"
    assert given()["EAGLERAY_CACHE_DIR"] == str(cache / ".cache/eagleray")
    assert given()["HOME"] == str(temporary / f"eagleray-home-{os.getuid()}")


def test_a_token_that_may_not_be_looked_for_is_none(
    temporary: Path, foreign_home: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    use_auth_token_if_there_is_one()
    assert "RAY_AUTH_MODE" not in os.environ


@pytest.mark.parametrize("home", ["/", "/nonexistent", "folder"])
def test_a_home_directory_in_which_ray_cannot_write_is_replaced(
    home: str, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can be used in it stays in use."""
    chosen = tmp_path if home == "folder" else Path(home)
    volumes = [tmp_path / ".cache" / name for name in ("huggingface", "eagleray")]
    for volume in volumes:
        volume.mkdir(parents=True)
    usable = {*map(str, volumes), str(temporary)}
    monkeypatch.setenv("HOME", str(chosen))
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) in usable)
    set_missing_variables()
    cache = temporary / f"eagleray-cache-{os.getuid()}"
    expected = {
        "HOME": str(temporary / f"eagleray-home-{os.getuid()}"),
        "EAGLERAY_CACHE_DIR": str((tmp_path if home == "folder" else cache) / ".cache/eagleray"),
        "TRITON_CACHE_DIR": str(cache / ".triton/cache"),
    }
    assert given() == expected | ({"HF_HOME": str(volumes[0])} if home == "folder" else {})


def test_a_home_directory_with_a_token_that_can_be_read_stays(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / ".ray" / "auth_token"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) == token)
    set_missing_variables()
    assert given()["HOME"] == str(tmp_path)


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
