"""This process's part in a Ray cluster, shared by its engines.

A Ray that the program has already started is used and left running. Otherwise the cluster at
`ray_address`, or one started by `ray start` on this machine, is joined; otherwise a local one of
our own is started, and stopped with the last engine of this process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.resources.addresses import (
    is_host_and_port,
    is_listening,
    is_same_address,
    local_cluster_address,
)
from cluster.resources.local_ray import (
    dead_local_processes,
    end_local_ray,
    kept_sigterm_handler,
    minimal_local_ray,
)
from configs.paths import IS_INSTALLED, SOURCE_ROOT
from scheduler.errors import ConfigError, EngineError

# Logical CPUs of a local cluster of our own: they only gate placement, and several small engines
# fit on a laptop.
MIN_LOCAL_CPUS = 16
DEFERRED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FORKED_MESSAGE = (
    "this process was forked from one that has an engine, which it cannot use, and Ray cannot be"
    " started a second time: start processes with multiprocessing's 'spawn'"
)
# Set by Ray for programs that `ray job submit` runs.
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"


class RaySession:
    """`connect` and `release` come in pairs.

    `connect` gives a lease, which identifies the Ray that is running: the program may stop that one
    and start another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: list[str] = []
        self._initialized_ray_id: str | None = None  # the Ray that we have started or joined
        self._address = ""  # with which we did so, such as "local" or "auto"
        self._process_id = 0  # of the process that has the leases

    def connect(self, address: str | None, num_ranks: int) -> str:
        """Join or start a cluster. `num_ranks`: how many a cluster of our own must have room for.

        Raises `ConfigError` when a cluster cannot be joined or started, or when this process is
        part of another, and `EngineError` when Ray takes too long to start or has died, or in a
        fork of the process that has the leases.
        """
        if self._leases and self._process_id != os.getpid():
            raise EngineError(FORKED_MESSAGE)
        with self._lock:
            self._process_id = os.getpid()
            if ray.is_initialized():
                for name in {"raylet", "gcs_server"}.intersection(dead_local_processes()):
                    raise EngineError(
                        f"this program's Ray has lost its {name}. Start the program again"
                    )
                self._check_running_address(address)
            else:
                try:
                    with _deferred_signals():
                        self._address = _init_ray(address, num_ranks)
                except BaseException:
                    ray.shutdown()
                    raise
                self._initialized_ray_id = _running_ray_id()
            lease = _running_ray_id()
            self._leases.append(lease)
            return lease

    def holds(self, lease: str) -> bool:
        """Whether the Ray of this lease is still running in this process."""
        return ray.is_initialized() and _running_ray_id() == lease

    def owns(self, lease: str) -> bool:
        """Whether the Ray of this lease is a local one of ours, which ends with its last lease."""
        return lease == self._initialized_ray_id and self._address == "local"

    def release(self, lease: str) -> None:
        """Leave; the last engine stops the Ray that we started, or leaves one that we joined."""
        with self._lock:
            self._leases.remove(lease)
            if (
                lease not in self._leases
                and lease == self._initialized_ray_id
                and self.holds(lease)
            ):
                end_local_ray()

    def _check_running_address(self, address: str | None) -> None:
        """A Ray that the program has started is accepted for "local", and any Ray is accepted for
        "auto" and without an address.
        """
        accepted_address = (
            self._address if self._initialized_ray_id == _running_ray_id() else "local"
        )
        if not address or address in ("auto", accepted_address):
            return
        running_address = ray.get_runtime_context().gcs_address
        if not is_same_address(address, running_address):
            raise ConfigError(
                f"ray_address is {address!r}, but this process is part of the Ray cluster at"
                f" {running_address!r} and can be part of only one. Leave ray_address out, or first"
                " stop what uses that cluster (ray.shutdown)"
            )


SESSION = RaySession()


def _running_ray_id() -> str:
    """Identifies the Ray that is running in this process."""
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


@contextmanager
def _deferred_signals() -> Iterator[None]:
    """Start Ray without being interrupted, which would leave processes behind: what the program
    does about Ctrl-C, SIGTERM and SIGHUP follows afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught_signals: list[int] = []
    present_handlers = {number: signal.getsignal(number) for number in DEFERRED_SIGNALS}
    handlers = {  # None: of a handler that is not Python's
        number: handler
        for number, handler in present_handlers.items()
        if handler not in (signal.SIG_IGN, None)
    }
    for number in handlers:
        signal.signal(number, lambda number, _: caught_signals.append(number))
    try:
        with kept_sigterm_handler():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
        for caught_signal in caught_signals:  # also if Ray has not started
            handler = handlers[signal.Signals(caught_signal)]
            if not callable(handler):  # the system would end this program, and nothing else
                sys.exit(caught_signal)
            handler(caught_signal, None)


def _init_ray(address: str | None, num_ranks: int) -> str:
    """Start or join a Ray; returns the address used, as `find_address` does."""
    check_arguments_are_utf8(sys.argv)
    quiet_options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = find_address(address)
    init_context: AbstractContextManager[None] = nullcontext()
    if address == "local":
        num_cpus = max(os.cpu_count() or 1, num_ranks, MIN_LOCAL_CPUS)
        options: dict[str, Any] = {"num_cpus": num_cpus, "include_dashboard": False}
        init_context = minimal_local_ray()
        action = "start a local Ray"
        advice = (
            "Its files go to RAY_TMPDIR, TMPDIR or /tmp: use a short path to a writable folder with"
            " enough room"
        )
    else:
        if is_host_and_port(address) and not is_listening(address):
            raise ConfigError(
                f"nothing listens at the Ray address {address!r}. Check ray_address and RAY_ADDRESS"
            )
        # A program that was submitted as a job has the cluster's working directory already.
        is_job = JOB_VARIABLE in os.environ
        source = str(SOURCE_ROOT)
        environment = {"py_modules": [source]} if IS_INSTALLED else {"working_dir": source}
        options = {} if is_job else {"runtime_env": environment}
        action = f"join the Ray cluster at {address!r}"
        advice = "Check ray_address, RAY_ADDRESS and RAY_AUTH_MODE, or start one"
    try:
        with init_context:
            ray.init(address=address, **options, **quiet_options)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise ConfigError(f"cannot {action}: {str(error).rstrip('. ')}. {advice}") from error
    except Exception as error:
        if type(error) is not Exception:  # Ray's, if a busy machine is too slow to start it
            raise
        problem = str(error).rstrip(". ")
        raise EngineError(f"cannot {action}: {problem}. Is the machine busy? Try again") from error
    return address


def find_address(address: str | None) -> str:
    """The cluster to join: the one given, or that of RAY_ADDRESS, or one that `ray start` began on
    this machine; otherwise "local", a new one.
    """
    return address or os.environ.get("RAY_ADDRESS") or local_cluster_address() or "local"


def check_arguments_are_utf8(arguments: list[str]) -> None:
    """Raise `ConfigError` for arguments that are not UTF-8: Ray records them, and would fail."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"the argument {argument!r} of this program is not UTF-8; use UTF-8"
            ) from None
