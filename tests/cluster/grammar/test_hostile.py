"""Grammars that are slow, crash or need too much memory, and helpers that are lost: only the
requests concerned notice.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.grammar import compiler as compiler_module
from cluster.grammar import follower as follower_module
from cluster.grammar import helper as helper_module
from cluster.grammar.compiler import MAX_SLOW_COMPILES, GrammarCompiler, NewGrammarError
from cluster.grammar.formats import format_of, structural_tag_of
from cluster.grammar.helper import (
    Child,
    Helper,
    HelperError,
    HelperLostError,
    HelperStarvedError,
    HelperTimeoutError,
)
from cluster.grammar.matching import GrammarMatching
from cluster.grammar.pipes import Pipe, PipeError
from cluster.grammar.process import ForkServer
from configs.model import ModelConfig
from configs.paths import DEFAULT_MODEL_DIR
from scheduler import engine as engine_module
from scheduler.engine import MASK_LATE, Engine, MaskAnswer
from scheduler.errors import EaglerayError, OverloadedError, RequestError, RequestFailedError
from scheduler.messages import Request
from scheduler.params import StructuredOutputs
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence as EngineSequence
from tests.cluster.engine.test_loop import Executor
from tests.scheduler.helpers import make_limits, make_request

MODEL = ModelConfig.from_dir(Path(DEFAULT_MODEL_DIR))
TOKENIZER = Path(DEFAULT_MODEL_DIR) / "tokenizer.json"
HOSTILE = "(" * 12 + "a{1,60}" + "){1,60}" * 12
WAIT_S = 60.0
# What may run on the thread that runs steps, and what a busy machine may add.
MAX_BLOCKED_S = 0.05
NOISE_S = 0.15


def structural_tag_for(**wanted: Any) -> str:
    return structural_tag_of(format_of(StructuredOutputs(**wanted)))


class StubChild:
    """A child whose masks take as long as the grammar says: with `b"0.5"`, half a second."""

    structural_tag = b"0"

    def call(self, limit_s: float, name: str, structural_tag: bytes) -> None:
        assert name == "load"
        self.structural_tag = structural_tag

    def answers(
        self,
        limit_s: float,
        count: int,
        name: str,
        wanted: list[tuple[int, list[int]]],
        ended: list[int],
        *,
        yields_cores: bool,
    ) -> Iterator[tuple[None, float]]:
        assert name == "masks" and len(wanted) == count and yields_cores
        for _ in wanted:
            seconds = float(self.structural_tag)
            time.sleep(min(seconds, limit_s))
            if seconds > limit_s:
                raise HelperTimeoutError
            yield None, seconds

    def close(self) -> None:
        pass


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarMatching]:
    """Matching by stub children."""
    matching = GrammarMatching(TOKENIZER, MODEL.vocab_size, MODEL.eos_token_ids)
    monkeypatch.setattr(matching._helper, "fork", lambda memory_bytes: StubChild())
    yield matching
    matching.close()


def engine_of(matching: GrammarMatching, num_steps_ahead: int) -> Engine:
    limits = make_limits(max_num_seqs=100, num_blocks=1000, max_num_batched_tokens=400)
    executor = Executor(limits, loses=False)
    return Engine(Scheduler(limits), executor, num_steps_ahead=num_steps_ahead, grammars=matching)


def request(name: str, structural_tag: bytes, max_tokens: int = 20) -> Request:
    made = make_request(name, [1, 2, 3], max_tokens=max_tokens)
    return dataclasses.replace(made, structural_tag=structural_tag)


def check_blocked(blocked_s: list[float]) -> None:
    """Steps blocked their thread no longer than they may, apart from what a busy machine adds."""
    assert sorted(blocked_s)[len(blocked_s) * 9 // 10] < MAX_BLOCKED_S, blocked_s
    assert max(blocked_s) < MAX_BLOCKED_S + NOISE_S, blocked_s


def timed_step(engine: Engine) -> float:
    began_s = time.monotonic()
    engine.step()
    engine.check()
    return time.monotonic() - began_s


# -- masks that are slow ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps_ahead", [0, 1, 2])
@pytest.mark.parametrize(
    "slow", [[b"8"], [b"8"] * 3, [b"0.06"] * 64, [b"0.2", b"0.3", b"8"], [b"4.9"]]
)
def test_no_step_waits_for_slow_masks(
    stubbed: GrammarMatching, slow: list[bytes], num_steps_ahead: int
) -> None:
    engine = engine_of(stubbed, num_steps_ahead)
    for number, structural_tag in enumerate(slow):
        engine.add(request(f"slow {number}", structural_tag))
    others = [engine.add(request("free", b"")), engine.add(request("quick", b"0.0001"))]
    blocked_s = []
    while not all(seq.finish_reason for seq in others):
        blocked_s.append(timed_step(engine))
    check_blocked(blocked_s)
    assert [seq.num_output_tokens for seq in others] == [20, 20]
    assert sum(blocked_s) < 1.0


def test_no_step_waits_for_masks_that_are_quick_alone_and_slow_together(
    stubbed: GrammarMatching,
) -> None:
    engine = engine_of(stubbed, 1)
    same = [engine.add(request(f"same {number}", b"0.0045", 60)) for number in range(5)]
    while min(seq.num_output_tokens for seq in same) < 3:
        timed_step(engine)
    free = engine.add(request("free", b"", 50))
    blocked_s = []
    while not free.finish_reason:
        assert not stubbed.is_quick(same[0])
        blocked_s.append(timed_step(engine))
    check_blocked(blocked_s)
    assert sum(blocked_s) < 0.6
    while engine.has_work:
        timed_step(engine)
    assert [seq.num_output_tokens for seq in same] == [60] * 5


def test_a_grammar_that_becomes_slow_holds_up_one_step_for_a_moment(
    stubbed: GrammarMatching, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_in_vain = []
    masks = stubbed.masks

    def watched_masks(sequences: list[EngineSequence], limit_s: float) -> list[MaskAnswer]:
        answers = masks(sequences, limit_s)
        if limit_s > 0 and MASK_LATE in answers:
            waits_in_vain.append(limit_s)
        return answers

    engine = engine_of(stubbed, 1)
    turning = engine.add(request("turning", b"0.0001", 60))
    while turning.num_output_tokens < 20:
        timed_step(engine)
    free = engine.add(request("free", b"", 50))
    child: Any = stubbed._followed_by_request["turning"].follower._child
    child.structural_tag = b"1.0"
    monkeypatch.setattr(stubbed, "masks", watched_masks)
    blocked_s = []
    while not free.finish_reason:
        blocked_s.append(timed_step(engine))
    check_blocked(blocked_s)
    assert len(waits_in_vain) <= 1 and sum(waits_in_vain) < MAX_BLOCKED_S, waits_in_vain
    assert turning.finish_reason is None


def test_an_engine_with_nothing_but_slow_masks_neither_spins_nor_blocks(
    stubbed: GrammarMatching,
) -> None:
    engine = engine_of(stubbed, 1)
    slow = engine.add(request("slow", b"0.4", 2))
    blocked_s, began_s = [], time.monotonic()
    while not slow.finish_reason:
        blocked_s.append(timed_step(engine))
    assert slow.num_output_tokens == 2
    check_blocked(blocked_s)
    assert time.monotonic() - began_s < 2.0
    assert len(blocked_s) < 100


def test_a_slow_grammar_that_is_aborted_is_forgotten(stubbed: GrammarMatching) -> None:
    engine = engine_of(stubbed, 1)
    engine.add(request("slow", b"0.3", 5))
    for _ in range(3):
        timed_step(engine)
    engine.finish("slow", "abort")
    while engine.has_work:
        timed_step(engine)
    assert not stubbed._followed_by_request and not stubbed._followers


def test_an_idle_follower_keeps_no_sequence(stubbed: GrammarMatching) -> None:
    engine = engine_of(stubbed, 1)
    engine.add(request("ends", b"0.0001", 5))
    timed_step(engine)
    followed_seq = weakref.ref(stubbed._followed_by_request["ends"])
    while engine.has_work:
        timed_step(engine)
    assert [*stubbed._idle_followers] == [b"0.0001"]
    deadline_s = time.monotonic() + 10.0
    while followed_seq() is not None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_loaded_child_is_kept_after_masks_that_are_quick_alone_and_slow_together(
    stubbed: GrammarMatching,
) -> None:
    same = [followed(b"0.0005", str(number)) for number in range(50)]
    assert stubbed.masks(same, WAIT_S) == [None] * 50
    assert not stubbed.is_quick(same[0])
    for seq in same:
        stubbed.forget(seq.request_id)
    assert [*stubbed._idle_followers] == [b"0.0005"]


@pytest.mark.parametrize(
    ("limit", "value", "structural_tag"),
    [("MASK_LIMIT_S", 0.1, b"8"), ("ALL_MASKS_LIMIT_S", 0.1, b"0.09")],
)
def test_the_request_of_a_grammar_that_is_too_slow_fails_alone(
    stubbed: GrammarMatching,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    value: float,
    structural_tag: bytes,
) -> None:
    monkeypatch.setattr(follower_module, limit, value)
    engine = engine_of(stubbed, 1)
    slow, quick = (
        engine.add(request("slow", structural_tag, 30)),
        engine.add(request("quick", b"0.0001", 30)),
    )
    while engine.has_work:
        assert timed_step(engine) < MAX_BLOCKED_S + NOISE_S
    [(failed, error)] = engine.take_failures()
    assert failed is slow and isinstance(error, RequestError)
    assert "the grammar is too slow" in str(error) and error.parameter == "structured_outputs"
    assert quick.finish_reason == "length"


def test_outputs_are_the_same_whether_masks_are_slow_or_quick(stubbed: GrammarMatching) -> None:
    outputs = []
    for structural_tag in (b"0.0001", b"0.02"):
        engine = engine_of(stubbed, 1)
        seq = engine.add(request("a", structural_tag, 10))
        while engine.has_work:
            timed_step(engine)
        outputs.append(seq.token_ids)
    assert outputs[0] == outputs[1]


def test_quick_grammars_run_ahead(
    stubbed: GrammarMatching, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine may wake the follower later than a step waits for it.
    monkeypatch.setattr(engine_module, "MASK_WAIT_S", 10.0)
    engine = engine_of(stubbed, 1)
    seq = engine.add(request("a", b"0.0001", 40))
    num_ahead = 0
    while engine.has_work:
        engine.step()
        num_ahead += bool(engine.scheduler.submitted_steps)
    assert seq.num_output_tokens == 40
    assert num_ahead >= 37, "before the result of a step is read, the next one is submitted"
    assert engine.scheduler.stats.num_steps <= 42, "a token in each step, except for the first"


# -- helpers that are lost -------------------------------------------------------------------------


def framed(message: Any) -> bytes:
    data = pickle.dumps(message, protocol=5)
    return struct.pack("<Q", len(data)) + data


class ScriptedChild(Child):
    """No process of its own, so it takes no time of a processor."""

    def _cpu_s(self) -> float:
        return 0.0


class ScriptedHelper:
    """Forks children that answer with given bytes and then close their end."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.ended = 0

    def fork(self, memory_bytes: int) -> Child:
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._serve, args=(theirs, self.answers.pop(0))).start()
        return ScriptedChild(self, Pipe(ours), os.getpid())  # type: ignore[arg-type]

    def _serve(self, end: socket.socket, answer: bytes) -> None:
        with end:
            end.sendall(answer)
            end.shutdown(socket.SHUT_WR)
            while end.recv(1 << 16):
                pass

    def end(self, pid: int) -> None:
        self.ended += 1


class SilentHelper(ScriptedHelper):
    """Forks children that say nothing after given bytes, and take no time of a processor."""

    def _serve(self, end: socket.socket, answer: bytes) -> None:
        with end:
            end.sendall(answer)
            while end.recv(1 << 16):
                pass


LOADED = framed((True, None))
ANSWER = LOADED + framed((True, (b"mask", 0.0)))


def first_mask(helper: Any) -> Any:
    matching = GrammarMatching(TOKENIZER, MODEL.vocab_size, MODEL.eos_token_ids)
    matching._helper = helper
    seq = EngineSequence(request("a", b"grammar"), arrival_index=0, max_total_tokens=100)
    [answer] = matching.masks([seq], WAIT_S)
    with matching._lock:
        for follower in matching._followers.values():
            follower.close()
    return answer


@pytest.mark.parametrize("length", range(len(ANSWER)))
def test_a_child_that_dies_at_any_byte_of_its_answers_is_replaced_once(length: int) -> None:
    assert first_mask(ScriptedHelper(ANSWER[:length], ANSWER)) == b"mask"
    answer = first_mask(ScriptedHelper(ANSWER[:length], ANSWER[:length], ANSWER))
    assert isinstance(answer, RequestFailedError) and "no mask for request a: 2 times" in str(
        answer
    )


def test_a_child_that_gets_no_processor_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "MASK_LIMIT_S", 0.2)
    answer = first_mask(SilentHelper(LOADED, LOADED, LOADED))
    assert isinstance(answer, RequestFailedError)
    assert "2 times, its process got less than 0.2 s of a processor in 1.2 s" in str(answer)


def test_a_grammar_that_gets_no_processor_to_load_is_given_up_for_all_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follower_module, "LOAD_LIMIT_S", 0.2)
    matching: Any = GrammarMatching(TOKENIZER, MODEL.vocab_size, MODEL.eos_token_ids)
    matching._helper = SilentHelper(b"", b"")
    answers = matching.masks([followed(b"grammar", name) for name in "ab"], WAIT_S)
    for name, answer in zip("ab", answers, strict=True):
        assert isinstance(answer, RequestFailedError)
        assert f"no mask for request {name}: it cannot be loaded: its process" in str(answer)
    assert len(matching._helper.answers) == 1, "one child"
    for name in "ab":
        matching.forget(name)


def test_no_child_is_forked_again_for_sequences_that_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follower_module, "MASK_LIMIT_S", 0.2)
    matching: Any = GrammarMatching(TOKENIZER, MODEL.vocab_size, MODEL.eos_token_ids)
    matching._helper = SilentHelper(LOADED, LOADED)
    assert matching.masks([followed(b"grammar", name) for name in "ab"], 0.1) == [MASK_LATE] * 2
    thread = matching._followers[b"grammar"]._thread
    for name in "ab":
        matching.forget(name)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert len(matching._helper.answers) == 1, "one child"


def test_a_grammar_whose_compiler_gets_no_processor_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler_module, "QUICK_COMPILE_S", 0.1)
    monkeypatch.setattr(compiler_module, "COMPILE_TIMEOUT_S", 0.2)
    compiler = GrammarCompiler(TOKENIZER, MODEL.vocab_size, MODEL.eos_token_ids)
    helper = SilentHelper(b"", b"", b"")
    monkeypatch.setattr(compiler._helper, "fork", helper.fork)
    with pytest.raises(OverloadedError, match="cannot be compiled now: its process got less than"):
        compiler.check("starved")
    compiler._num_slow_compiles = MAX_SLOW_COMPILES
    with pytest.raises(OverloadedError, match="too busy to see whether this one would; try again"):
        compiler.check("starved")
    assert helper.ended == 3 and not compiler._refusals and not compiler._slow_digests


@pytest.mark.parametrize(
    ("garbage", "why"),
    [
        (framed((True, None))[:8] + b"\xff" * (len(framed((True, None))) - 8), "2 times"),
        (b"\xff" * 64, "2 times"),
        (struct.pack("<Q", 3) + b"no.", "2 times"),
        (struct.pack("<Q", 0), "2 times"),
        (struct.pack("<Q", 16) + b"cmissing\nname\n..", "2 times"),
        (framed("not a pair"), "too many values"),
        (framed((True, None)) + framed((True, "not a mask and seconds")), "too many values"),
    ],
)
def test_a_child_that_answers_garbage_costs_one_request(garbage: bytes, why: str) -> None:
    answer = first_mask(ScriptedHelper(garbage, garbage, ANSWER))
    assert isinstance(answer, RequestFailedError)
    assert "no mask for request a" in str(answer) and why in str(answer)


FAKE_HELPER = """
import socket, sys, time
commands = socket.socket(fileno=0)
{start}
while True:
    data, descriptors, _, _ = socket.recv_fds(commands, 64, 1)
    if not data:
        break
    {answer}
"""


def fake_helper(start: str, answer: str) -> Helper:
    """A helper whose process runs another program."""
    helper = Helper(TOKENIZER, MODEL.vocab_size, MODEL.eos_token_ids)
    helper._argv = [sys.executable, "-c", FAKE_HELPER.format(start=start, answer=answer)]
    return helper


READY = "commands.sendall(b'ready')"
NO_PROCESS = "commands.sendall(b'no process can be started: Cannot allocate memory')"


@pytest.mark.parametrize(
    ("start", "answer", "message"),
    [
        (READY, NO_PROCESS, "no process can be started: Cannot allocate memory"),
        (READY, "sys.exit(1)", "the process for grammars was lost"),
        (READY, "time.sleep(5)", "the process for grammars was lost: timed out"),
        (
            "sys.exit(1)",
            "pass",
            "the process for grammars cannot be started: it has ended; the standard error of"
            f" process {os.getpid()} on {socket.gethostname()} says why",
        ),
        ("time.sleep(5)", "pass", "the process for grammars cannot be started: timed out"),
        (READY, "commands.close(); time.sleep(5)", "the process for grammars was lost"),
    ],
)
def test_without_a_child_only_the_requests_with_a_grammar_fail(
    monkeypatch: pytest.MonkeyPatch, start: str, answer: str, message: str
) -> None:
    if "timed out" in message:
        limit = "START_TIMEOUT_S" if start != READY else "COMMAND_TIMEOUT_S"
        monkeypatch.setattr(helper_module, limit, 0.3)
    matching = GrammarMatching(TOKENIZER, MODEL.vocab_size, MODEL.eos_token_ids)
    matching._helper = fake_helper(start, answer)
    engine = engine_of(matching, 1)
    free, bad = engine.add(request("free", b"")), engine.add(request("bad", b"grammar"))
    while engine.has_work:
        assert timed_step(engine) < MAX_BLOCKED_S + NOISE_S
    [(failed, error)] = engine.take_failures()
    assert failed is bad and isinstance(error, RequestFailedError) and message in str(error)
    assert free.finish_reason == "length"
    matching.close()


@pytest.mark.parametrize(
    ("start", "message"),
    [(READY, "no process can be started"), ("sys.exit(1)", "cannot be started: it has ended")],
)
def test_a_grammar_that_cannot_be_compiled_here_is_not_the_callers_fault(
    start: str, message: str
) -> None:
    compiler = GrammarCompiler(TOKENIZER, MODEL.vocab_size, MODEL.eos_token_ids)
    compiler._helper = fake_helper(start, NO_PROCESS)
    with pytest.raises(RequestFailedError, match=message):
        compiler.check(structural_tag_for(choice=["a"]))
    compiler.close()
    with pytest.raises(RequestFailedError, match="the engine has been stopped"):
        compiler.check(structural_tag_for(choice=["a"]))
    assert not compiler._refusals


def test_a_program_that_cannot_be_started_is_an_error_of_the_request() -> None:
    helper = Helper(TOKENIZER, MODEL.vocab_size, MODEL.eos_token_ids)
    helper._argv = ["/does/not/exist"]
    with pytest.raises(HelperError, match=r"cannot be started: .*No such file"):
        helper.fork(2**30)


def test_without_room_for_a_socket_the_helper_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    helper = fake_helper(READY, NO_PROCESS)
    with pytest.raises(HelperError, match="Cannot allocate memory"):
        helper.fork(2**30)
    process = helper._process
    monkeypatch.setattr(socket, "socketpair", no_room)
    with pytest.raises(HelperError, match=r"no process can be started: .*Too many open files"):
        helper.fork(2**30)
    assert process is not None and helper._process is process and process.poll() is None
    helper.close()


def test_without_room_for_a_thread_only_the_request_with_a_grammar_fails(
    stubbed: GrammarMatching, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_room)
    engine = engine_of(stubbed, 1)
    free, bad = engine.add(request("free", b"")), engine.add(request("bad", b"0.0001"))
    while engine.has_work:
        engine.step()
    [(failed, error)] = engine.take_failures()
    assert failed is bad and "can't start new thread" in str(error)
    assert free.finish_reason == "length"


def test_a_bug_in_a_follower_costs_the_requests_of_its_grammar(
    stubbed: GrammarMatching, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork(memory_bytes: int) -> StubChild:
        raise ZeroDivisionError("a bug")

    engine = engine_of(stubbed, 1)
    good = engine.add(request("good", b"0.0001", 30))
    while good.num_output_tokens < 3:
        timed_step(engine)
    monkeypatch.setattr(stubbed._helper, "fork", fork)
    bad = engine.add(request("bad", b"0.0002", 30))
    while engine.has_work:
        timed_step(engine)
    [(failed, error)] = engine.take_failures()
    assert failed is bad and "ZeroDivisionError: a bug" in str(error)
    assert good.finish_reason == "length"


def test_a_peer_that_does_not_read_is_late_and_one_that_is_gone_is_lost() -> None:
    ours, theirs = socket.socketpair()
    pipe = Pipe(ours)
    with pytest.raises(TimeoutError):
        pipe.send(b"x" * 2**24, 0.05)
    theirs.close()
    with pytest.raises(PipeError):
        pipe.send(b"x")
    with pytest.raises(PipeError):
        pipe.receive()
    pipe.close()


# -- real children ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENIZER, MODEL.vocab_size, MODEL.eos_token_ids)
    made.check(structural_tag_for(choice=["warm"]))
    yield made
    made.close()


@pytest.fixture(scope="module")
def matching() -> Iterator[GrammarMatching]:
    made = GrammarMatching(TOKENIZER, MODEL.vocab_size, MODEL.eos_token_ids)
    made._helper.fork(2**30).close()
    yield made
    made.close()


def followed(structural_tag: bytes, name: str) -> EngineSequence:
    return EngineSequence(request(name, structural_tag), arrival_index=0, max_total_tokens=100)


def test_a_child_that_is_killed_or_stopped_costs_its_grammar_a_moment(
    compiler: GrammarCompiler, matching: GrammarMatching
) -> None:
    structural_tags = [
        compiler.check(structural_tag_for(choice=[text, "no"])) for text in ("yes", "ja")
    ]
    sequences = [
        followed(structural_tag, f"r{i}") for i, structural_tag in enumerate(structural_tags)
    ]
    before = matching.masks(sequences, WAIT_S)
    child = matching._followed_by_request["r0"].follower._child
    assert child is not None and all(isinstance(mask, bytes) for mask in before)
    os.kill(child.pid, signal.SIGSTOP)
    for seq in sequences:
        matching.forget(seq.request_id)
    again = [
        followed(structural_tag, f"again {i}") for i, structural_tag in enumerate(structural_tags)
    ]
    assert matching.masks(again, 0.5) == [MASK_LATE, before[1]], "only one is late"
    os.kill(child.pid, signal.SIGKILL)
    assert matching.masks(again, WAIT_S) == before
    for seq in again:
        matching.forget(seq.request_id)


def test_the_time_of_real_masks_is_limited(
    compiler: GrammarCompiler, matching: GrammarMatching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "ALL_MASKS_LIMIT_S", -1.0)
    structural_tag = compiler.check(structural_tag_for(regex="[a-z]{1,30}"))
    [answer] = matching.masks([followed(structural_tag, "slow")], WAIT_S)
    matching.forget("slow")
    assert isinstance(answer, RequestError) and "too slow" in str(answer)


def test_real_children_that_compute_on_are_late(compiler: GrammarCompiler) -> None:
    child = compiler._helper.fork(2**30)
    began_s = time.monotonic()
    with pytest.raises((HelperTimeoutError, HelperStarvedError)):
        child.call(0.2, "check", wide(1450))
    child.close()
    assert time.monotonic() - began_s < 2.0
    with pytest.raises(HelperLostError):
        child.call(0.2, "check", "")
    deadline_s = time.monotonic() + 10.0
    while Path(f"/proc/{child.pid}").exists():
        assert time.monotonic() < deadline_s
        compiler._helper.fork(2**30).close()  # the next call but one finds it dead


def test_a_child_that_dies_slowly_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    server: Any = ForkServer(None, theirs)  # type: ignore[arg-type]
    with ours, theirs, subprocess.Popen(["sleep", "60"]) as child:
        server._pids.add(child.pid)
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda pid, number: None)
            assert server._end(child.pid) == "ended" and child.poll() is None
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert server._end(child.pid) == "ended" and not server._dying_pids


def wide(count: int) -> str:
    names = {f"property {i}": {"type": "integer"} for i in range(count)}
    return structural_tag_for(json={"type": "object", "properties": names})


@pytest.mark.parametrize("memory_bytes", [2**20, 2**21, 2**22])
def test_memory_is_limited_and_the_error_says_so(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, memory_bytes: int
) -> None:
    monkeypatch.setattr(compiler_module, "CHILD_MEMORY_BYTES", memory_bytes)
    with pytest.raises(
        RequestError, match=f"needs more than {memory_bytes // 2**20} MiB of memory"
    ):
        compiler.check(wide(1450 + memory_bytes // 2**20))
    monkeypatch.undo()
    compiler.check(structural_tag_for(choice=["alive", str(memory_bytes)]))


def test_masks_that_need_too_much_memory_fail_alone(
    compiler: GrammarCompiler, matching: GrammarMatching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "CHILD_MEMORY_BYTES", 2**20)
    structural_tag = compiler.check(wide(1450))
    [answer] = matching.masks([followed(structural_tag, "large")], WAIT_S)
    matching.forget("large")
    assert isinstance(answer, RequestFailedError) and "needs more than 1 MiB of memory" in str(
        answer
    )


def test_children_are_chosen_first_when_the_machine_has_no_memory(
    compiler: GrammarCompiler,
) -> None:
    child = compiler._helper.fork(2**30)
    child.call(5.0, "check", structural_tag_for(choice=["a"]))
    assert Path(f"/proc/{child.pid}/oom_score_adj").read_text().strip() == "1000"
    child.close()


def count_forks(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, fork: Callable[[int], Any]
) -> list[int]:
    """Let `fork` make the children; returns a list with an entry for each from now on."""
    forks: list[int] = []

    def counted(memory_bytes: int) -> Any:
        forks.append(memory_bytes)
        return fork(memory_bytes)

    monkeypatch.setattr(compiler._helper, "fork", counted)
    return forks


def test_refusals_are_remembered_for_a_while(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = structural_tag_of({"type": "regex", "pattern": "a{3,1}"})
    with pytest.raises(RequestError) as first:
        compiler.check(bad)
    forks = count_forks(compiler, monkeypatch, compiler._helper.fork)
    with pytest.raises(RequestError) as second:
        compiler.check(bad)
    assert str(first.value) == str(second.value) and not forks
    monkeypatch.setattr(compiler_module, "REFUSAL_TTL_S", 0.0)
    with pytest.raises(RequestError):
        compiler.check(bad)
    assert forks


@pytest.mark.parametrize("loses_helper", [False, True])
def test_a_compiler_that_is_killed_once_is_replaced(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, loses_helper: bool
) -> None:
    fork = compiler._helper.fork

    def killed(memory_bytes: int) -> Child:
        child = fork(memory_bytes)
        if len(forks) == 1:
            process = compiler._helper._process
            assert process is not None
            os.kill(process.pid if loses_helper else child.pid, signal.SIGKILL)
            if loses_helper:
                process.wait()
        return child

    forks = count_forks(compiler, monkeypatch, killed)
    structural_tag = structural_tag_for(choice=["killed once", str(loses_helper)])
    assert compiler.check(structural_tag) == structural_tag.encode()
    assert len(forks) == 2 and not _is_refused(compiler, structural_tag)


def test_a_grammar_that_loses_its_compiler_twice_is_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = ScriptedHelper(b"", b"")
    forks = count_forks(compiler, monkeypatch, helper.fork)
    for _ in range(2):
        with pytest.raises(RequestError, match="has ended twice; simplify it"):
            compiler.check(structural_tag_for(choice=["killed twice"]))
    assert len(forks) == helper.ended == 2, "it is remembered"


def test_refusals_take_a_limited_place(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_CACHED_VERDICTS", 2)
    for number in range(4):
        with pytest.raises(RequestError):
            bad = {"type": "regex", "pattern": "a" * number + "b{3,1}"}
            compiler.check(structural_tag_of(bad))
    assert len(compiler._refusals) == 2


def _is_refused(compiler: GrammarCompiler, structural_tag: str) -> bool:
    return compiler_module._digest(structural_tag.encode()) in compiler._refusals


class StubCompiling:
    """A child that compiles a grammar with "slow" in its source in an hour, others at once."""

    def call(self, limit_s: float, name: str, structural_tag: str) -> bytes:
        assert name == "check"
        if "slow" in structural_tag:
            time.sleep(limit_s)
            raise HelperTimeoutError
        return structural_tag.encode()

    def close(self) -> None:
        pass


def in_threads(
    compiler: GrammarCompiler, structural_tags: Sequence[str]
) -> tuple[list[Any], list[Any]]:
    """(threads that compile, where their results will be)"""
    results: list[Any] = []

    def compile_one(structural_tag: str) -> None:
        try:
            results.append(compiler.check(structural_tag))
        except (RequestError, OverloadedError) as error:
            results.append(error)

    threads = [threading.Thread(target=compile_one, args=(each,)) for each in structural_tags]
    for thread in threads:
        thread.start()
    return threads, results


def test_grammars_that_are_slow_to_compile_hold_up_only_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler_module, "QUICK_COMPILE_S", 0.05)
    monkeypatch.setattr(compiler_module, "COMPILE_TIMEOUT_S", 1.5)
    compiler = GrammarCompiler(TOKENIZER, MODEL.vocab_size, MODEL.eos_token_ids)
    monkeypatch.setattr(compiler._helper, "fork", lambda memory_bytes: StubCompiling())
    slow = [f"slow {number}" for number in range(MAX_SLOW_COMPILES + 2)]
    threads, results = in_threads(compiler, slow)
    began_s = time.monotonic()
    for number in range(10):
        assert compiler.check(f"quick {number}") == f"quick {number}".encode()
    assert time.monotonic() - began_s < 1.5, "none waited until a slow one was refused"
    for thread in threads:
        thread.join(60)
    overloaded = [str(each) for each in results if isinstance(each, OverloadedError)]
    too_slow = [str(each) for each in results if isinstance(each, RequestError)]
    assert (len(overloaded), len(too_slow)) == (2, MAX_SLOW_COMPILES)
    assert all("takes longer than 1.5 s; simplify it" in each for each in too_slow)
    assert all("try again later" in each for each in overloaded)
    began_s = time.monotonic()
    with pytest.raises(RequestError, match="simplify it"):
        compiler.check(next(each for each in slow if _is_refused(compiler, each)))
    assert time.monotonic() - began_s < 0.05, "it is known to be slow"


def test_a_grammar_that_was_slow_does_not_hold_up_the_quick_ones_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler_module, "QUICK_COMPILE_S", 0.05)
    monkeypatch.setattr(compiler_module, "COMPILE_TIMEOUT_S", 0.1)
    compiler = GrammarCompiler(TOKENIZER, MODEL.vocab_size, MODEL.eos_token_ids)
    forks = count_forks(compiler, monkeypatch, lambda memory_bytes: StubCompiling())
    compiler._num_slow_compiles = MAX_SLOW_COMPILES
    for _ in range(3):
        with pytest.raises(OverloadedError, match="so would this one; try again later"):
            compiler.check("slow")
    assert len(forks) == 1
    compiler._num_slow_compiles = 0
    with pytest.raises(RequestError, match="simplify it"):
        compiler.check("slow")
    assert len(forks) == 2


def test_without_compiling_only_known_grammars_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = GrammarCompiler(TOKENIZER, MODEL.vocab_size, MODEL.eos_token_ids)
    monkeypatch.setattr(compiler._helper, "fork", lambda memory_bytes: StubCompiling())
    with pytest.raises(NewGrammarError):
        compiler.check("quick", compiles=False)
    assert compiler.check("quick") == compiler.check("quick", compiles=False) == b"quick"


def test_the_same_grammar_sent_many_times_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler_module, "QUICK_COMPILE_S", 0.3)
    monkeypatch.setattr(compiler_module, "COMPILE_TIMEOUT_S", 0.6)
    compiler = GrammarCompiler(TOKENIZER, MODEL.vocab_size, MODEL.eos_token_ids)
    forks = count_forks(compiler, monkeypatch, lambda memory_bytes: StubCompiling())
    remember_refusal = compiler._remember_refusal

    def remember_later(encoded_tag: bytes, reason: str) -> EaglerayError:
        time.sleep(0.1)
        return remember_refusal(encoded_tag, reason)

    monkeypatch.setattr(compiler, "_remember_refusal", remember_later)
    threads, results = in_threads(compiler, ["slow"] * 3 + ["quick"] * 5)
    for thread in threads:
        thread.join(60)
    assert results.count(b"quick") == 5
    assert len(forks) <= 1 + 1 + 1, "one for the quick one, and two for the first of the slow ones"
