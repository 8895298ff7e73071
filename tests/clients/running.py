"""Runs the driver of one program against a server and reads what it prints."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from configs.paths import DEFAULT_MODEL_DIR
from tests.clients.environments import Environment
from tests.clients.server import API_KEY, MODEL_NAME

DRIVERS = Path(__file__).parent / "drivers"
# Programs must not find the settings of who runs them, nor call home.
_INHERITED = ("PATH", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "TZ")
_QUIET = {
    "CI": "1",
    "DO_NOT_TRACK": "1",
    "DISABLE_TELEMETRY": "1",
    "NO_COLOR": "1",
    "NO_UPDATE_NOTIFIER": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LANGSMITH_TRACING": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "PYTHONWARNINGS": "ignore",
    "no_proxy": "127.0.0.1,localhost",
}
_LINE = re.compile(r"^(ok|failed|left) (\w+) ?(.*)$", re.MULTILINE)


@dataclass
class Outcome:
    """What the checks of one program found: "ok", or why not. `log`: all that was printed."""

    checks: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)  # what could not be checked, and why
    log: str = ""

    @property
    def has_failed(self) -> bool:
        return not self.checks or any(result != "ok" for result in self.checks.values())


def run(environment: Environment, url: str, driver: Path | None = None) -> Outcome:
    """Run a driver, by default the program's, in a folder and a home of its own. A driver that ends
    early or too late is a failed check.
    """
    program = environment.program
    driver = driver or DRIVERS / program.driver
    with tempfile.TemporaryDirectory(prefix="client-", ignore_cleanup_errors=True) as scratch:
        home, work = Path(scratch, "home"), Path(scratch, "work")
        home.mkdir()
        work.mkdir()
        # Beside the packages, where node looks for them, and not by the name of a package.
        copied = environment.path / f"driver{driver.suffix}"
        shutil.copy(driver, copied)
        shutil.copy(DRIVERS / f"checks{driver.suffix}", environment.path)
        variables = {name: os.environ[name] for name in _INHERITED if name in os.environ} | _QUIET
        variables["PATH"] = ":".join([*map(str, environment.commands), variables["PATH"]])
        variables |= {"HOME": str(home), "SERVER_URL": url, "SERVER_KEY": API_KEY}
        variables |= {"SERVER_MODEL": MODEL_NAME, "SERVER_TOKENIZER": str(DEFAULT_MODEL_DIR)}
        command = [str(environment.interpreter), str(copied)]
        try:
            return outcome_of(*_run(command, work, variables, program.limit_s))
        finally:
            _end_what_is_left(home)


def _run(
    command: list[str], folder: Path, variables: dict[str, str], limit_s: float
) -> tuple[str, str | None]:
    """What a command printed, and what was wrong with its end. It prints into a file: what it
    leaves running would keep a pipe open.
    """
    fault = None
    with tempfile.TemporaryFile() as printed:
        with subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            try:
                if code := process.wait(limit_s):
                    fault = f"ended with {code}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                fault = f"took more than {limit_s:.0f} s"
        printed.seek(0)
        return printed.read().decode(errors="replace"), fault


def _end_what_is_left(home: Path) -> None:
    """Kill the processes that a program has left behind, and those that they start meanwhile."""
    while left := _processes_of(home):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def _processes_of(home: Path) -> list[int]:
    """The processes with this home; one that has ended has none."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"HOME={home}".encode() in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
    return pids


def outcome_of(log: str, fault: str | None) -> Outcome:
    """What a driver printed, and what was wrong with its end, as an outcome."""
    outcome = Outcome(log=log)
    for result, name, reason in _LINE.findall(log):
        if result == "left":
            outcome.left[name] = reason
        else:
            outcome.checks[name] = "ok" if result == "ok" else reason
    if fault or not outcome.checks:
        outcome.checks["end"] = fault or "no check was made"
    return outcome
