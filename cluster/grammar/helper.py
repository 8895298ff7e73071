"""The parent's side of a helper process (`process.py`): calls with a time limit, after which the
process is killed.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.grammar.pipes import read_message, write_message
from configs.paths import CHECKOUT

START_TIMEOUT_S = 60.0


class HelperError(Exception):
    """The helper refused a call; the message is the helper's."""


class HelperLostError(Exception):
    """The helper died, or did not answer in time and was killed."""


class Helper:
    """One helper process. It is started by the first call, and again by the first call after it was
    lost. Any thread may call; the calls wait for each other.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer`: path of the `tokenizer.json`."""
        self._tokenizer = tokenizer
        self._command = [
            *(sys.executable, "-m", "cluster.grammar.process"),
            *(str(tokenizer), str(vocab_size), *map(str, eos_token_ids)),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The process id, None while there is no process."""
        return None if self._process is None else self._process.pid

    def call(self, limit_s: float, name: str, *arguments: Any) -> Any:
        """Make a call and return its result. Raises `HelperError` and `HelperLostError`."""
        with self._lock:
            self._start()
            return self._ask(limit_s, name, arguments)

    def start(self) -> None:
        """Start the process, which takes seconds, so that the next call does not have to. Raises as
        `call`.
        """
        with self._lock:
            self._start()

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()

    def _start(self) -> None:
        if self._process is None:
            if not self._tokenizer.exists():
                raise HelperError(
                    f"the machine {socket.gethostname()} has no {self._tokenizer}, which grammars"
                    " need: copy the checkpoint to the same path, or share the folder"
                )
            self._process = subprocess.Popen(
                self._command, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._ask(START_TIMEOUT_S, "ready", ())

    def _ask(self, limit_s: float, name: str, arguments: tuple[Any, ...]) -> Any:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        clock = threading.Timer(limit_s, process.kill)
        clock.start()
        try:
            write_message(process.stdin, (name, arguments))
            is_done, answer = read_message(process.stdout)
        except (OSError, EOFError):
            self.close()
            raise HelperLostError(f"{name} did not end within {limit_s:g} s, or crashed") from None
        finally:
            clock.cancel()
        if not is_done:
            raise HelperError(answer)
        return answer
