"""What all tests share: quiet libraries, no network, Triton's interpreter where there is no GPU."""

import faulthandler
import gc
import logging
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Ray's own default, 15, leaves its workers almost no time on a core that another program uses.
os.environ.setdefault("RAY_worker_niceness", "0")
# Each node would start a process per CPU in advance, which actors of ours cannot use.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
os.environ.setdefault("RAY_enable_worker_prestart", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

gc.disable()  # importing and collecting tests create many objects and leave nothing to free

# One thread per test process: two of them share two cores, and the first float32 cosine of a
# process may be of low accuracy on several threads, also in a test's own reference.
torch.set_num_threads(1)

# A shell in the background starts its programs with SIGINT ignored, and ours would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """From here on, the garbage collector looks only at what tests create."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` looks for tests that start engines only in tests/cluster, to collect less."""
    for item in items:
        if item.get_closest_marker("engine") and "tests/cluster/" not in item.path.as_posix():
            raise pytest.UsageError(f"{item.nodeid} is marked `engine` outside tests/cluster")
        slow_marks = {mark.name for mark in item.iter_markers()} & {"programs", "nodes"}
        if slow_marks and not item.get_closest_marker("engine"):
            raise pytest.UsageError(f"{item.nodeid} is marked {slow_marks} but not `engine`")


@pytest.fixture
def restored() -> Iterator[None]:
    """Signal handlers and loggers that a command changes in this process are restored."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    logger = logging.getLogger("eagleray")
    before = list(logger.handlers), logger.level
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logger.handlers[:], logger.level = before


# -- a test process that ends in the middle of a test ----------------------------------------------


# A descriptor of the file that pytest captures into, which is in place while this is imported.
_STDERR_COPY = 200
if "PYTEST_XDIST_WORKER" in os.environ:
    os.dup2(2, _STDERR_COPY, inheritable=False)


def _crash_path(run: str, worker: str) -> Path:
    return Path(tempfile.gettempdir()) / f"eagleray-tests-{run}-{worker}"


@pytest.hookimpl(trylast=True)  # after pytest's own, which writes to stderr, far from the failure
def pytest_configure(config: pytest.Config) -> None:
    """Of several test processes, each writes its stacks to a file if it crashes."""
    if workerinput := getattr(config, "workerinput", None):
        path = _crash_path(workerinput["testrunuid"], workerinput["workerid"])
        faulthandler.enable(path.open("w"))
        config.add_cleanup(path.unlink)


_captured_stderr: dict[str, Any] = {}  # of each process, by its name


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready(node: Any) -> None:
    """Keep what pytest captures in this process, which would be gone with it."""
    with suppress(OSError):
        path = Path(f"/proc/{node.gateway._io.popen.pid}/fd/{_STDERR_COPY}")
        if path.is_file():  # with `-s` it is a terminal or a pipe
            _captured_stderr[node.gateway.id] = path.open(errors="replace")


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: Any) -> None:
    """Say how the process ended, which pytest-xdist does not."""
    worker = report.node.gateway.id
    path = _crash_path(report.node.workerinput["testrunuid"], worker)
    with suppress(OSError, subprocess.TimeoutExpired):  # an error here would end the whole run
        exit_code = report.node.gateway._io.popen.wait(10)
        stacks = path.read_text() or "It wrote no stacks: it was killed, or ended itself."
        said = _captured_stderr[worker].read() if worker in _captured_stderr else ""
        report.longrepr = f"{report.longrepr}\nexit code {exit_code}\n{stacks}\nstderr:\n{said}"
        path.unlink()
