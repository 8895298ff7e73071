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

from cluster.resources.addresses import (
    cluster_on_this_machine,
    is_host_and_port,
    listens,
    same_address,
)
from cluster.resources.local_ray import only_what_engines_use
from configs.paths import CHECKOUT, IS_INSTALLED
from scheduler.errors import ConfigError

# Logical CPUs of a local cluster of our own: they only gate placement, and several small engines
# fit on a laptop.
MIN_LOCAL_CPUS = 16
# Set by Ray for programs that `ray job submit` runs.
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


class RaySession:
    """`connect` and `release` come in pairs.

    `connect` gives a lease, which identifies the Ray that is running: the program may stop that one
    and start another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: list[str] = []
        self._ours: str | None = None  # the Ray we started
        self._address = ""  # the address we started it with

    def connect(self, address: str | None, tensor_parallel_size: int) -> str:
        """Join or start a cluster.

        Raises `ConfigError` when the cluster at `address` cannot be joined, or when this process is
        part of another.
        """
        with self._lock:
            if ray.is_initialized():
                self._check_running_is(address)
            else:
                try:
                    with _deferred_sigint():
                        self._address = _init_ray(address, tensor_parallel_size)
                except BaseException:
                    ray.shutdown()
                    raise
                self._ours = _running()
            lease = _running()
            self._leases.append(lease)
            return lease

    def holds(self, lease: str) -> bool:
        """Whether the Ray of this lease is still running in this process."""
        return ray.is_initialized() and _running() == lease

    def owns(self, lease: str) -> bool:
        """Whether the Ray of this lease is a local one that we started, which ends with its last
        lease.
        """
        return lease == self._ours and self._address == "local"

    def release(self, lease: str) -> None:
        """Leave; the last engine stops the Ray that we started."""
        with self._lock:
            self._leases.remove(lease)
            if lease not in self._leases and lease == self._ours and self.holds(lease):
                ray.shutdown()

    def _check_running_is(self, address: str | None) -> None:
        """A Ray that the program has started is accepted for "local", and any Ray is accepted for
        "auto" and without an address.
        """
        known = self._address if self._ours == _running() else "local"
        if not address or address in ("auto", known):
            return
        running = ray.get_runtime_context().gcs_address
        if not same_address(address, running):
            raise ConfigError(
                f"ray_address is {address!r}, but this process is part of the Ray cluster at"
                f" {running!r} and can be part of only one. Leave ray_address out, or first stop"
                " what uses that cluster (ray.shutdown)"
            )


SESSION = RaySession()


def _running() -> str:
    """Identifies the Ray that is running in this process."""
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


@contextmanager
def _deferred_sigint() -> Iterator[None]:
    """Start Ray without being interrupted by Ctrl-C, which would leave processes behind: it is
    raised afterwards.

    `ray.init` takes over SIGTERM; the program's own handler is put back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted: list[int] = []
    at_int = signal.signal(signal.SIGINT, lambda number, _: interrupted.append(number))
    at_term = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, at_int)
        signal.signal(signal.SIGTERM, at_term)
    if interrupted:
        raise KeyboardInterrupt


def _init_ray(address: str | None, tensor_parallel_size: int) -> str:
    """Start or join a Ray; returns its address, or "local"."""
    check_arguments(sys.argv)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = find_address(address)
    init_context: AbstractContextManager[None] = nullcontext()
    if address == "local":
        num_cpus = max(os.cpu_count() or 1, tensor_parallel_size, MIN_LOCAL_CPUS)
        options: dict[str, Any] = {"num_cpus": num_cpus, "include_dashboard": False}
        init_context = only_what_engines_use()
        failed = "start a local Ray"
        advice = (
            "Its files go to RAY_TMPDIR, TMPDIR or /tmp: use a short path to a writable folder with"
            " enough room"
        )
    else:
        if is_host_and_port(address) and not listens(address):
            raise ConfigError(
                f"nothing listens at the Ray address {address!r}. Check ray_address and RAY_ADDRESS"
            )
        # A program that was submitted as a job has the cluster's working directory already.
        is_job = JOB in os.environ
        ours = {"py_modules": [str(CHECKOUT)]} if IS_INSTALLED else {"working_dir": str(CHECKOUT)}
        options = {} if is_job else {"runtime_env": ours}
        failed = f"join the Ray cluster at {address!r}"
        advice = "Check ray_address, RAY_ADDRESS and RAY_AUTH_MODE, or start one"
    try:
        with init_context:
            ray.init(address=address, **options, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot {failed}: {str(error).rstrip('. ')}. {advice}") from error
    return address


def find_address(address: str | None) -> str:
    """The cluster to join: the one given, or that of RAY_ADDRESS, or one that `ray start` began on
    this machine; otherwise "local", a new one.
    """
    return address or os.environ.get("RAY_ADDRESS") or cluster_on_this_machine() or "local"


def check_arguments(arguments: list[str]) -> None:
    """Raise `ConfigError` unless all are UTF-8: Ray records the command line of the program and
    fails otherwise.
    """
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"the argument {argument!r} of this program is not UTF-8; use UTF-8"
            ) from None
