"""Runs the checks of a driver and prints a line for each; where the server is."""

from __future__ import annotations

import os
import subprocess
import traceback
from collections.abc import Callable

URL = os.environ["SERVER_URL"]
V1 = f"{URL}/v1"
KEY = os.environ["SERVER_KEY"]
MODEL = os.environ["SERVER_MODEL"]
SUM = '[[call add {"a": 47, "b": 38}]] [[say It is 85.]]'
COMMAND_LIMIT_S = 100
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def run(*checks: Callable[[], None]) -> None:
    """Run each check and print `ok NAME` or `failed NAME REASON`."""
    for check in checks:
        name = check.__name__
        try:
            check()
        except Exception as error:
            traceback.print_exc()
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"\nfailed {name} {reason[:500]}", flush=True)
        else:
            print(f"\nok {name}", flush=True)


def left(name: str, reason: str) -> None:
    """Say why something could not be checked."""
    print(f"\nleft {name} {reason}", flush=True)


def equal(value: object, wanted: object) -> None:
    """Raise `AssertionError` with both values unless they are equal."""
    assert value == wanted, f"{value!r}, not {wanted!r}"


def output_of(*command: str, **options: str) -> str:
    """What a command prints. `options` are added to the environment variables. Raises
    `AssertionError` with the end of its output if it fails or takes too long.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            stdin=subprocess.DEVNULL,
            env=os.environ | options,
        )
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{command[0]} took too long: {error.stdout!r:.300}") from None
    print(done.stdout, done.stderr, flush=True)
    end = f"{done.stdout[-300:]} {done.stderr[-300:]}"
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}: {end}"
    return done.stdout
