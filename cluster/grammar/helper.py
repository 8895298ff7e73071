"""The parent's side of the helper process (`process.py`) and of its children: calls with a time
limit, after which a child is killed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster.grammar.pipes import Pipe, PipeError
from configs.paths import SOURCE_ROOT, module_command

START_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 256  # of the helper to a command
CPU_TIME_CHECK_PERIOD_S = 0.05
SLOW_NICENESS = 15
# A process that gets no share of the processors: how much longer than its limit it may take.
MAX_WALL_TIME_FACTOR = 6.0


class HelperError(Exception):
    """A call of a child failed, or the helper has no child to give; the message says why."""


class HelperLostError(Exception):
    """A child has died, or what it answered is not an answer."""


class HelperStarvedError(HelperLostError):
    """A child did not answer, but did not get the time of a processor that it may take."""


class HelperTimeoutError(Exception):
    """A child did not answer in the time of a processor that it may take."""


class Child:
    """A child of the helper. One thread; any may `close`."""

    def __init__(self, helper: Helper, pipe: Pipe, pid: int) -> None:
        self._helper = helper
        self._pipe = pipe
        self.pid = pid

    def call(self, limit_s: float, name: str, *arguments: Any) -> Any:
        """The one answer to a call. Raises as `answers`."""
        [answer] = self.answers(limit_s, 1, name, *arguments)
        return answer

    def answers(
        self, limit_s: float, count: int, name: str, *arguments: Any, yields_cores: bool = False
    ) -> Iterator[Any]:
        """The `count` answers to a call, each of which may take the child `limit_s` of a
        processor's time. With `yields_cores`, a child that is slow leaves the processors to others
        from then on. Raises `HelperError`, and `HelperLostError` and `HelperTimeoutError`, after
        which the child must be closed.
        """
        try:
            self._pipe.send((name, arguments), limit_s * MAX_WALL_TIME_FACTOR)
            for _ in range(count):
                is_success, answer = self._receive(limit_s, yields_cores=yields_cores)
                if not is_success:
                    raise HelperError(answer)
                yield answer
        except PipeError as error:
            raise HelperLostError(f"its process has ended: {error}") from None
        except TimeoutError:
            wall_limit_s = limit_s * MAX_WALL_TIME_FACTOR
            raise HelperStarvedError(
                f"its process got less than {limit_s:g} s of a processor in {wall_limit_s:g} s; the"
                " machine is too busy"
            ) from None

    def close(self) -> None:
        """Kill the child."""
        self._pipe.close()
        self._helper.end(self.pid)

    def _receive(self, limit_s: float, *, yields_cores: bool) -> Any:
        """The next message. A busy machine is not the child's fault, so its own time counts; raises
        `TimeoutError` if it gets too little of that.
        """
        began_s, began_cpu_s = time.monotonic(), self._cpu_s()
        check_period_s = min(CPU_TIME_CHECK_PERIOD_S, limit_s)
        while True:
            try:
                return self._pipe.receive(check_period_s)
            except TimeoutError:
                cpu_s, wall_s = self._cpu_s() - began_cpu_s, time.monotonic() - began_s
                if cpu_s >= limit_s:
                    raise HelperTimeoutError from None
                if wall_s >= MAX_WALL_TIME_FACTOR * limit_s:
                    raise
                if yields_cores and cpu_s > CPU_TIME_CHECK_PERIOD_S / 2:
                    self._yield_processors()

    def _yield_processors(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, self.pid, SLOW_NICENESS)
        except OSError as error:
            raise PipeError(str(error)) from None  # it has ended

    def _cpu_s(self) -> float:
        """The time that the child has spent on processors. Raises `PipeError` if it has ended."""
        try:
            return time.clock_gettime(~self.pid << 3 | 2)  # clock_getcpuclockid(3)
        except OSError as error:
            raise PipeError(str(error)) from None


class Helper:
    """The helper process. It is started by the first call, and again by the first call after it was
    lost. Any thread may call; the calls wait for each other.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer_file`: path of the `tokenizer.json`."""
        self._tokenizer_file = tokenizer_file
        self._argv = [
            *module_command(f"{__package__}.process"),
            *(str(tokenizer_file), str(vocab_size), *map(str, eos_token_ids)),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._command_socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def fork(self, memory_bytes: int) -> Child:
        """A new child, which may take so much memory beyond the helper's. Raises `HelperError`."""
        with self._lock:
            for is_last_attempt in (False, True):
                self._start()
                try:
                    our_end, their_end = socket.socketpair()
                except OSError as error:
                    raise HelperError(f"no process can be started: {error}") from None
                try:
                    answer = self._send_command(f"fork {memory_bytes}", their_end)
                except OSError as error:  # the helper was lost since; another one is tried
                    our_end.close()
                    self._stop()
                    if is_last_attempt:
                        raise HelperError(f"the process for grammars was lost: {error}") from None
                    continue
                finally:
                    their_end.close()
                if answer.isdigit():
                    return Child(self, Pipe(our_end), int(answer))
                our_end.close()
                raise HelperError(answer)
        raise AssertionError("the last attempt returns or raises")

    def end(self, pid: int) -> None:
        """Kill a child, if it is one of the helper process that runs now."""
        with self._lock:
            if self._process is not None:
                try:
                    self._send_command(f"end {pid}")
                except OSError:
                    self._stop()  # all children end with it

    def close(self) -> None:
        """End the process, if there is one, with all children. No call starts it again."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()  # whatever another thread waits for
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        command_socket, self._command_socket = self._command_socket, None
        if command_socket is not None:
            command_socket.close()
        if process is not None:
            process.kill()
            process.wait()

    def _start(self) -> None:
        if self._is_closed:
            raise HelperError("the engine has been stopped")
        if self._process is not None:
            return
        if not self._tokenizer_file.exists():
            raise HelperError(
                f"the machine {socket.gethostname()} has no {self._tokenizer_file}, which grammars"
                " need: copy the checkpoint to the same path, or share the folder"
            )
        try:
            self._command_socket, their_end = socket.socketpair(
                socket.AF_UNIX, socket.SOCK_SEQPACKET
            )
            with their_end:
                stdin = their_end.fileno()
                self._process = subprocess.Popen(self._argv, cwd=SOURCE_ROOT, stdin=stdin)
            self._receive_answer(START_TIMEOUT_S)
        except OSError as error:
            self._stop()
            raise HelperError(f"the process for grammars cannot be started: {error}") from None

    def _send_command(self, command: str, *sent_sockets: socket.socket) -> str:
        assert self._command_socket is not None
        self._command_socket.settimeout(COMMAND_TIMEOUT_S)
        fds = [sent_socket.fileno() for sent_socket in sent_sockets]
        socket.send_fds(self._command_socket, [command.encode()], fds)
        return self._receive_answer(COMMAND_TIMEOUT_S)

    def _receive_answer(self, limit_s: float) -> str:
        """Raises `OSError`."""
        assert self._command_socket is not None
        self._command_socket.settimeout(limit_s)
        answer = self._command_socket.recv(MAX_ANSWER_BYTES)
        if not answer:
            raise OSError(
                f"it has ended; the standard error of process {os.getpid()} on"
                f" {socket.gethostname()} says why"
            )
        return answer.decode()
