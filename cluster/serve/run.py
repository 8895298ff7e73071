"""`launch.py serve`: start an application, wait for a signal, finish running requests, and leave
nothing behind.

The configuration, checkpoint, port, resources and name are checked before Serve starts. What
SIGTERM, Ctrl-C or the end of the terminal does:

while it starts               everything ends, once Ray has started
the first time it serves      new requests get 503, running ones finish, then it ends
a second time                 everything ends at once

Once everything ends, more signals change nothing for `END_LIMIT_S`: they would interrupt Ray's end,
and leave its processes. After that the next one does interrupt it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from cluster.client.setup import EngineSetup, make_engine_setup
from cluster.resources.addresses import MAX_PORT, check_port, host_and_port
from cluster.resources.local_ray import check_local_ray_alive, kill_local_ray
from cluster.resources.room import check_room, pick_device
from cluster.resources.session import SESSION, find_address
from cluster.serve.port import SharedPortOwner
from configs.serve import ServeConfig
from scheduler.errors import ConfigError, EngineError
from scheduler.params import SamplingParams
from workers.models.local import recheck_checkpoint

DRAIN_GRACE_S = 5.0  # for the answers of replicas, beyond the time of the requests
END_LIMIT_S = 10.0
DRAIN_CHECK_PERIOD_S = 0.2
LISTEN_TIMEOUT_S = 10.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

logger = logging.getLogger("eagleray")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeJob:
    """The arguments of the command."""

    config: ServeConfig
    host: str
    port: int
    name: str = "eagleray"
    route_prefix: str = "/"
    detach: bool = False


def run_serve(job: ServeJob) -> None:
    """Serve until a signal. Raises `ConfigError`, and `EngineError` if that goes wrong."""
    began_s = time.perf_counter()
    job = dataclasses.replace(job, host=job.host.removeprefix("[").removesuffix("]"))
    _check_job(job)
    if find_address(job.config.engine.ray_address) == "local":
        check_port(job.host, job.port)
        if job.detach:
            raise ConfigError(
                "--detach needs a Ray cluster that outlives this command: start one with 'ray start"
                " --head', or name one with --ray-address"
            )
    setup = make_engine_setup(job.config.engine, SamplingParams.from_dict(job.config.sampling))
    with _handled_signals() as signal_handler:
        num_ranks = job.config.engine.tensor_parallel_size
        num_all_ranks = num_ranks * job.config.replicas
        session_lease = SESSION.connect(job.config.engine.ray_address, num_all_ranks)
        try:
            if not job.config.engine.wait_for_nodes_s:
                device = pick_device(job.config.engine.device, num_ranks)
                check_room(num_ranks, device, num_engines=job.config.replicas)
            _serve(job, setup, signal_handler, began_s, SESSION.owns(session_lease))
        finally:
            SESSION.release(session_lease)


class _SignalHandler:
    """The effect of a signal: see the table at the top."""

    def __init__(self) -> None:
        self.is_serving = False
        self.stop_event = threading.Event()
        self.interrupted_at_s: float | None = None  # when a signal last ended everything

    def handle(self, signal_number: int, _: FrameType | None) -> None:
        if self.is_serving and not self.stop_event.is_set():
            self.stop_event.set()
            return
        now_s = time.monotonic()
        if self.interrupted_at_s is None or now_s - self.interrupted_at_s > END_LIMIT_S:
            self.interrupted_at_s = now_s
            raise KeyboardInterrupt


def _serve(
    job: ServeJob,
    setup: EngineSetup,
    signal_handler: _SignalHandler,
    began_s: float,
    owns_ray: bool,
) -> None:
    """Serve until a signal, and finish. `owns_ray`: whether Ray ends with this program."""
    from ray import serve

    from cluster.serve.lifetime import RunningApplication

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    was_serve_unused = not serve.status().applications
    job = _adapt_to_running_serve(job, owns_ray=owns_ray)
    check_ray = check_local_ray_alive if owns_ray else lambda: None
    application = RunningApplication(
        job.name, functools.partial(recheck_checkpoint, setup.expected_config), check_ray
    )
    # On one machine the API listens itself: Serve's proxy would make a Ray object of every event.
    listens_itself = owns_ray and job.route_prefix == "/"
    num_api_replicas = job.config.api_replicas
    port_owner: SharedPortOwner | None = None
    if listens_itself and num_api_replicas > 1:
        port_owner = SharedPortOwner(job.host, job.port, num_api_replicas)
    try:
        with application.logged_waits():
            handle = _start(job, port_owner, listens_itself=listens_itself)
        _wait_until_listening(job)
        signal_handler.is_serving = True
        seconds, path = time.perf_counter() - began_s, job.route_prefix.rstrip("/")
        address = host_and_port(job.host, job.port)
        logger.info("ready on http://%s%s after %.1f s", address, path, seconds)
        if job.detach:
            logger.info("it stays; 'launch.py down %s' ends it", job.name)
            return
        application.watch(signal_handler.stop_event)
        logger.info("finishing the requests that run; a second signal ends at once")
        _drain_watched(handle, job.config.drain_timeout_s, check_ray)
        has_ended = application.end()
    except BaseException as error:
        if not owns_ray:
            application.kill()  # Serve would wait for the running requests
        # Below process 1, Ray would end this program with a code of its own.
        elif isinstance(error, KeyboardInterrupt) and os.getppid() != 1:
            # Before `ray.shutdown`, in which another SIGTERM ends this program, but not them.
            kill_local_ray()
        raise
    finally:
        if port_owner is not None:
            port_owner.close()
    if not has_ended and not owns_ray:
        raise EngineError(f"Ray Serve has not ended the application {job.name!r} in time")
    # HAProxy runs as a process of its own, which only `serve.shutdown` ends.
    must_end_serve = not owns_ray or os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
    if must_end_serve and was_serve_unused and not serve.status().applications:
        serve.shutdown()


def _adapt_to_running_serve(job: ServeJob, *, owns_ray: bool) -> ServeJob:
    """The job, with the address on which Serve listens already, if it does. Raises `ConfigError`
    if the name or the port is taken.
    """
    from ray import serve

    status = serve.status()
    if job.name in status.applications:
        raise ConfigError(
            f"an application named {job.name!r} runs in this Ray cluster already; end it with"
            f" 'launch.py down {job.name}' or give another --name"
        )
    if status.proxies:
        serve_client: Any = serve.context._get_global_client()
        host, port = serve_client.http_config.host, serve_client.http_config.port
        if (job.host, job.port) != (host, port):
            job = dataclasses.replace(job, host=host, port=port)
            logger.info("Serve listens on %s already", host_and_port(host, port))
    elif not owns_ray:
        check_port(job.host, job.port)
    return job


def _start(job: ServeJob, port_owner: SharedPortOwner | None, *, listens_itself: bool) -> Any:
    """Start the application; returns a handle of it. Raises `ConfigError`, `EngineError`."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    from cluster.serve.application import application

    config = dataclasses.replace(
        job.config,
        listen_address=(job.host, job.port) if listens_itself and port_owner is None else None,
        shared_port_path=port_owner.path if port_owner is not None else None,
        bound_host=job.host,
    )
    serve.start(
        proxy_location="Disabled" if listens_itself else "HeadOnly",
        http_options={"host": job.host, "port": job.port, "keep_alive_timeout_s": 75},
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    try:
        return serve.run(
            application(config), name=job.name, route_prefix=job.route_prefix, blocking=False
        )
    except RayServeException as error:  # such as a route prefix that is in use
        # The text of the error itself begins with a remote traceback.
        refusal = str(getattr(error, "cause", error)).rstrip(".")
        raise ConfigError(f"{refusal}. Choose another --route-prefix") from None
    except RuntimeError as error:
        reason = _failure_reason(job.name) or error
        raise EngineError(f"the application did not start: {reason}") from error


def _wait_until_listening(job: ServeJob) -> None:
    deadline_s = time.monotonic() + LISTEN_TIMEOUT_S
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(job.host, job.host)
    while True:
        try:
            socket.create_connection((host, job.port), timeout=1.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise EngineError(
                    f"nothing listens on {host_and_port(job.host, job.port)}"
                    f" {LISTEN_TIMEOUT_S:g} s after the application has started: {error}"
                ) from None
            time.sleep(0.05)


def _drain_watched(handle: Any, limit_s: float, check_ray: Callable[[], None]) -> None:
    """Finish the running requests on a thread, since Ray's calls may hang in a place where no
    signal is handled. Raises as `check_ray`.
    """
    thread = threading.Thread(target=_drain, args=(handle, limit_s), name="drain", daemon=True)
    thread.start()
    deadline_s = time.monotonic() + limit_s + 2 * DRAIN_GRACE_S
    while thread.is_alive():
        check_ray()
        if time.monotonic() > deadline_s:
            logger.warning("not every replica could be drained: Ray does not answer")
            return
        thread.join(DRAIN_CHECK_PERIOD_S)


def _drain(handle: Any, limit_s: float) -> None:
    try:
        calls = handle.broadcast("drain", limit_s)
        answers = calls.results(timeout_s=limit_s + DRAIN_GRACE_S, return_exceptions=True)
    except Exception as error:  # one hangs; the others have been asked
        logger.warning("not every replica could be drained: %s", error)
        return
    for answer in answers:
        if isinstance(answer, BaseException):  # that one is dead
            logger.warning("not every replica could be drained: %s", answer)
    num_unfinished = sum(answer for answer in answers if isinstance(answer, int))
    if num_unfinished:
        logger.warning(
            "%d outputs did not end, or were not taken by their clients, within %g s",
            num_unfinished,
            limit_s,
        )


def _failure_reason(name: str) -> str:
    """Serve's message about the deployment that failed."""
    from ray import serve

    from cluster.serve.lifetime import reported_reason

    application = serve.status().applications.get(name)
    return reported_reason(application) if application is not None else ""


def _check_job(job: ServeJob) -> None:
    # The system would take another port: the number without its higher bits, or any for 0.
    if not 1 <= job.port <= MAX_PORT:
        raise ConfigError(f"--port {job.port} must be from 1 to {MAX_PORT}")
    if not re.fullmatch(r"[\w.-]+", job.name):
        raise ConfigError(
            f"--name {job.name!r} must consist of letters, digits, dots, dashes and underscores"
        )
    if not re.fullmatch(r"/|(/[\w.-]+)+", job.route_prefix):
        raise ConfigError(f"--route-prefix {job.route_prefix!r} must be a path such as /chat")


@contextmanager
def _handled_signals() -> Iterator[_SignalHandler]:
    """Handlers of SIGTERM, SIGINT and, unless it is ignored, SIGHUP for the block."""
    signal_handler = _SignalHandler()
    previous_handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    if previous_handlers[signal.SIGHUP] is signal.SIG_IGN:
        del previous_handlers[signal.SIGHUP]
    for number in previous_handlers:
        signal.signal(number, signal_handler.handle)
    try:
        yield signal_handler
    finally:
        for number, handler in previous_handlers.items():
            # Interrupted, this program exits now; in its last moments Python handles no signals.
            is_interrupted = signal_handler.interrupted_at_s is not None
            signal.signal(number, signal.SIG_IGN if is_interrupted else handler)
