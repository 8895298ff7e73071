"""`launch.py chat` as a user runs it: in a pseudo-terminal, and from a pipe."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from cluster.commands.chat import show
from configs.paths import SOURCE_ROOT
from tests.cluster.processes import family, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.programs]

LIMIT_S = 90.0
QUESTION = "What is 47 + 38?"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A program in a pseudo-terminal of its own, typed at and read like a user does."""

    def __init__(self, *args: str) -> None:
        self._fd, theirs = pty.openpty()
        command = ["setsid", "--ctty", sys.executable, "launch.py", *args]
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            command, cwd=SOURCE_ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)
        self.text = ""  # what has been shown since `wait_for` last returned

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, pattern: str) -> str:
        """What is shown up to the end of the first match."""
        until_s = time.monotonic() + LIMIT_S
        while not (match := re.search(pattern, self.text)):
            left_s = until_s - time.monotonic()
            assert left_s > 0, f"no {pattern!r} in {self.text!r}"
            if select.select([self._fd], [], [], left_s)[0]:
                shown = os.read(self._fd, 65536).decode(errors="replace")
                self.text += _ESCAPES.sub("", shown).replace("\r", "")
        shown, self.text = self.text[: match.end()], self.text[match.end() :]
        return shown

    def ask(self, line: str) -> str:
        """Type a line; what is shown between it and the next prompt."""
        self.type(f"{line}\n")
        self.wait_for(re.escape(line) + "\n")
        return self.wait_for(r"> $").removesuffix("> ").strip()

    def press_ctrl_c_until_it_ends(self) -> int:
        """The exit code. Python's readline does not notice a signal that comes after it has shown
        the prompt and before it waits for a key; a user presses again then.
        """
        for _ in range(int(LIMIT_S / 5)):
            self.type("\x03")
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(5.0)
        raise AssertionError(f"still there after {LIMIT_S} s of Ctrl-C")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@pytest.fixture
def terminal(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    terminal = Terminal(*request.param)
    yield terminal
    terminal.close()


@pytest.mark.parametrize("terminal", [["--tp", "2"]], indirect=True)
def test_a_conversation_remembers_forgets_and_tells_what_it_took(terminal: Terminal) -> None:
    terminal.wait_for(r"> $")
    assert terminal.ask(QUESTION) == "85"
    first = terminal.ask("/stats")
    terminal.type("What is \\\n")
    terminal.wait_for(r"\n\.\.\. $")
    assert terminal.ask("82 - 35?")
    second = terminal.ask("/stats")
    assert num_before(second) > num_before(first) + 10
    assert terminal.ask("/new") == ""
    assert terminal.ask(QUESTION) == "85"
    assert num_before(terminal.ask("/stats")) == num_before(first)
    assert terminal.ask("/system Be brief.") == ""
    assert terminal.ask(QUESTION) == "85"
    assert num_before(terminal.ask("/stats")) > num_before(first)
    assert "/help" in terminal.ask("/nonsense")
    terminal.type("\x04")
    assert terminal.process.wait(LIMIT_S) == 0


@pytest.mark.parametrize(
    "terminal", [["chat", "--ignore-eos", "--max-tokens", "900"]], indirect=True
)
def test_ctrl_c_ends_an_answer_and_then_the_program(terminal: Terminal) -> None:
    terminal.wait_for(r"> $")
    terminal.type(f"{QUESTION}\n")
    terminal.wait_for(r"\?\n.")
    terminal.type("\x03")
    terminal.wait_for(r"\[ended: interrupted\]\n> $")
    assert num_before(terminal.ask("/stats")) > 0, "the engine lives on"
    assert terminal.press_ctrl_c_until_it_ends() == 130
    wait_until(lambda: not family(terminal.process.pid), "the end of all processes", 10.0)


def test_every_line_of_a_pipe_is_answered_and_a_refused_one_counts() -> None:
    done = subprocess.run(
        [sys.executable, "launch.py", "chat"],
        cwd=SOURCE_ROOT,
        input=QUESTION.encode() + b"\n\n/nons\xe9nse\nWhat is 82 - 35?",
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert done.stdout == b"85\n47\n"
    assert done.returncode == 2 and "no command '/nons�nse'" in done.stderr.decode()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_answer_is_shown_as_it_is_without_what_could_change_the_terminal(
    is_terminal: bool,
) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=20)
    for text in ("all:\n\tcc  x.c \r", "\n", "[red] :smile: " + 30 * "long ", "\x1b[31m\x07\n"):
        show(console, text)
    shown = "all:\n\tcc  x.c \n[red] :smile: " + 30 * "long " + "�[31m�\n"
    assert output.getvalue() == shown


def num_before(stats: str) -> int:
    """The number of prompt tokens that `/stats` tells."""
    match = re.search(r"(\d+) tokens before", stats)
    assert match is not None, stats
    return int(match[1])
