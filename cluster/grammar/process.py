"""The program of the helper process: it loads xgrammar once, then forks a child for each task.

`python -m cluster.grammar.process TOKENIZER VOCAB_SIZE EOS_ID...` takes commands from the socket
that is its standard input: `fork` with another socket, on which the child answers calls, and `end`
with the id of a child. xgrammar, which loads torch and transformers, is imported here alone; what
hangs, crashes or needs too much memory in it ends only one child, and the next one is there within
tens of milliseconds. The helper ends when its input is closed, and its children end with it.

A call is (name, arguments); each answer is (True, result) or (False, message). Most calls have one
answer, `masks` has one for each sequence.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch
import xgrammar
from tokenizers import Tokenizer

from cluster.grammar.pipes import Pipe, PipeError

NICENESS = 5
MAX_COMPILED_BYTES = 32 * 2**20  # 24 tools of an agent take 9 MB with Qwen3's tokens
MAX_COMMAND_BYTES = 64
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_MAX_OOM_SCORE_ADJ = "1000"  # killed first when the machine is out of memory
# What xgrammar's messages begin with: a time, a line of its source, and a check there.
_PLACE_IN_SOURCE = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: \(.*?\) is false: )?")

TimedMaskAnswer = tuple[bytes | int | str | None, float]


class ChildCalls:
    """The calls that a child answers."""

    def __init__(self, tokenizer_file: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._tokenizer_info = xgrammar.TokenizerInfo(
            encoded_vocabulary(tokenizer_file, vocab_size),
            xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=vocab_size,
            stop_token_ids=eos_token_ids,
        )
        # However many cores there are, they belong to the ranks.
        self._compiler = xgrammar.GrammarCompiler(
            self._tokenizer_info, max_threads=1, cache_enabled=False
        )
        self._compiled_grammar: xgrammar.CompiledGrammar | None = None
        self._matchers: dict[int, xgrammar.GrammarMatcher] = {}
        self.memory_bytes = 0  # that this process may take beyond the helper's, once it is a child
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def check(self, structural_tag: str) -> Iterator[None]:
        """Compile a structural tag. Raises `ValueError` if it is too large, or as xgrammar does."""
        num_bytes = self._compiler.compile_structural_tag(structural_tag).memory_size_bytes
        if num_bytes > MAX_COMPILED_BYTES:
            raise ValueError(
                f"it takes {num_bytes} bytes when compiled; at most {MAX_COMPILED_BYTES} are"
                " possible"
            )
        yield None

    def load(self, structural_tag: bytes) -> Iterator[None]:
        """Compile the grammar of all sequences that `masks` will be called for. The text is sent,
        and not what it is compiled to: that can take a hundred times the bytes, and longer to read
        than to compile.
        """
        self._compiled_grammar = self._compiler.compile_structural_tag(structural_tag.decode())
        yield None

    def masks(
        self, new_tokens: list[tuple[int, list[int]]], ended_numbers: list[int]
    ) -> Iterator[TimedMaskAnswer]:
        """For each (number of the sequence, output tokens since the last call): which tokens may
        come next, and the seconds of the processor that this took. A mask, empty for no token; None
        for any token; the place of an earlier sequence of this call with the same mask; or an error
        message.
        """
        for number in ended_numbers:
            self._matchers.pop(number, None)
        index_of_mask: dict[bytes, int] = {}
        for index, (number, token_ids) in enumerate(new_tokens):
            began_s = time.process_time()
            answer: bytes | int | str | None = self._mask_or_reason(number, token_ids)
            if isinstance(answer, bytes) and index_of_mask.setdefault(answer, index) < index:
                answer = index_of_mask[answer]
            yield answer, time.process_time() - began_s

    def reason(self, error: Exception) -> str:
        """Why a call failed."""
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            return (
                f"it needs more than {self.memory_bytes // 2**20} MiB of memory, the most that a"
                " grammar may use; simplify it"
            )
        return _PLACE_IN_SOURCE.sub("", str(error)).strip() or type(error).__name__

    def _mask_or_reason(self, number: int, token_ids: list[int]) -> bytes | str | None:
        try:
            return self._mask(number, token_ids)
        except Exception as error:  # it concerns one sequence; the others continue
            return f"its grammar failed: {self.reason(error)}"

    def _mask(self, number: int, token_ids: list[int]) -> bytes | str | None:
        matcher = self._matchers.get(number)
        if matcher is None:
            assert self._compiled_grammar is not None, "`load` comes first"
            matcher = self._matchers[number] = xgrammar.GrammarMatcher(self._compiled_grammar)
        for token_id in token_ids:
            if not matcher.accept_token(token_id):
                return f"its grammar does not allow token {token_id}, which it has already"
        if not matcher.fill_next_token_bitmask(self._bitmask):
            return None
        return self._bitmask.numpy().tobytes() if self._bitmask.any() else b""


def encoded_vocabulary(tokenizer_file: str, vocab_size: int) -> list[str]:
    """The tokens as the tokenizer's file spells them; special tokens, which no output may contain,
    and unused ids are empty.
    """
    tokenizer = Tokenizer.from_file(tokenizer_file)
    tokens = [""] * vocab_size
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size:
            tokens[token_id] = token
    for token_id, added_token in tokenizer.get_added_tokens_decoder().items():
        if added_token.special and token_id < vocab_size:
            tokens[token_id] = ""
    return tokens


class ForkServer:
    """The children of this process. One thread, and no other thread in the process: the child of a
    fork has only the thread that forked.
    """

    def __init__(self, child_calls: ChildCalls, command_socket: socket.socket) -> None:
        self._child_calls = child_calls
        self._command_socket = command_socket
        self._pids: set[int] = set()
        self._dying_pids: set[int] = set()

    def serve(self) -> None:
        """Carry out commands until there are no more."""
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._command_socket, MAX_COMMAND_BYTES, 1)
            if not data:
                return
            name, argument = data.decode().split()
            if name == "fork":
                [descriptor] = descriptors
                answer = self._fork(descriptor, int(argument))
                os.close(descriptor)
            else:
                answer = self._end(int(argument))
            self._command_socket.sendall(answer.encode())

    def _fork(self, descriptor: int, memory_bytes: int) -> str:
        """The id of a new child, or why there is none."""
        helper_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            return f"no process can be started: {error}"
        if pid == 0:
            self._command_socket.close()
            _run_child(
                self._child_calls, socket.socket(fileno=descriptor), helper_pid, memory_bytes
            )
        self._pids.add(pid)
        return str(pid)

    def _end(self, pid: int) -> str:
        """Kill a child. Its id is its own until a later call has found it dead."""
        if pid in self._pids:
            self._pids.remove(pid)
            os.kill(pid, signal.SIGKILL)
            self._dying_pids.add(pid)
        self._dying_pids -= {pid for pid in self._dying_pids if os.waitpid(pid, os.WNOHANG)[0]}
        return "ended"


def _run_child(
    child_calls: ChildCalls, call_socket: socket.socket, helper_pid: int, memory_bytes: int
) -> NoReturn:
    """Answer calls until there are no more. Never returns: nothing of the helper's runs twice."""
    try:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() == helper_pid:
            Path("/proc/self/oom_score_adj").write_text(_MAX_OOM_SCORE_ADJ)
            os.nice(NICENESS)
            child_calls.memory_bytes = memory_bytes
            _limit_memory(memory_bytes)
            _answer_calls(child_calls, Pipe(call_socket))
    finally:
        os._exit(0)


def _limit_memory(more_bytes: int) -> None:
    """Allow this process so many bytes of address space in addition to what it has."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit_bytes = num_pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


def _answer_calls(child_calls: ChildCalls, pipe: Pipe) -> None:
    """Answer until the other end is closed."""
    while True:
        try:
            name, arguments = pipe.receive()
            for result in getattr(child_calls, name)(*arguments):
                pipe.send((True, result))
        except PipeError:
            return
        except Exception as error:
            pipe.send((False, child_calls.reason(error)))


def main() -> None:
    """Answer until the input is closed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer_file")
    parser.add_argument("vocab_size", type=int)
    parser.add_argument("eos_token_ids", type=int, nargs="*")
    args = parser.parse_args()
    torch.set_num_threads(1)
    command_socket = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open("rb") as null_file:
        os.dup2(null_file.fileno(), 0)  # so that no child has the socket of the commands
    os.dup2(2, 1)  # what libraries print does not get into the output of the program
    fork_server = ForkServer(
        ChildCalls(args.tokenizer_file, args.vocab_size, args.eos_token_ids), command_socket
    )
    gc.freeze()  # so that collections in the children do not copy every page
    command_socket.sendall(b"ready")
    fork_server.serve()


if __name__ == "__main__":
    main()
