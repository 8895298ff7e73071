"""Where an engine runs: a Ray cluster to be part of, and a placement group with one bundle a rank.

A Ray that the program has already started is used and left running. Otherwise a cluster started by `ray start` on this
machine (or the one at `ray_address`) is joined; otherwise a local one of our own is started, and stopped with the last
engine of this process. A cluster that cannot hold the ranks is refused with what is needed and what each node has.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from scheduler.errors import ConfigError

CHECKOUT = Path(__file__).resolve().parent.parent
# Logical CPUs of a local cluster of our own: they only gate placement, and several small engines fit a laptop.
MIN_LOCAL_CPUS = 16
PLACEMENT_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 3.0

logger = logging.getLogger("eagleray")


class RaySession:
    """This process's part in a Ray cluster, shared by its engines. `connect` and `release` come in pairs.

    `connect` gives a lease, which names the Ray that runs then: the program may stop that one and start another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: list[str] = []
        self._ours: str | None = None  # the Ray we started
        self._address = ""  # and the address we started it with

    def connect(self, address: str | None, tensor_parallel_size: int) -> str:
        """Be part of a cluster. Raises `ConfigError` when the one at `address` cannot be joined, or when this process
        is part of another one."""
        with self._lock:
            if ray.is_initialized():
                self._check_running_is(address)
            else:
                try:
                    with _undisturbed():
                        self._address = _init_ray(address, tensor_parallel_size)
                except BaseException:
                    ray.shutdown()
                    raise
                self._ours = _running()
            lease = _running()
            self._leases.append(lease)
            return lease

    def holds(self, lease: str) -> bool:
        """Whether the Ray of this lease still runs in this process."""
        return ray.is_initialized() and _running() == lease

    def release(self, lease: str) -> None:
        """Leave; the last engine stops the Ray that we started."""
        with self._lock:
            self._leases.remove(lease)
            if lease not in self._leases and lease == self._ours and self.holds(lease):
                ray.shutdown()

    def _check_running_is(self, address: str | None) -> None:
        """What the program has started serves for "local", and whatever runs for "auto" and no address at all."""
        known = self._address if self._ours == _running() else "local"
        if not address or address in ("auto", known):
            return
        running = ray.get_runtime_context().gcs_address
        if not _same_address(address, running):
            raise ConfigError(
                f"ray_address is {address!r}, but this process is part of the Ray cluster at {running!r} and can be "
                "part of one only. Leave ray_address out, or end what uses that cluster (ray.shutdown) first"
            )


SESSION = RaySession()


def _running() -> str:
    """Names the Ray that runs in this process; another one has another name."""
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Start Ray without a Ctrl-C in the middle, which would leave processes behind: it is raised afterwards.

    `ray.init` takes over SIGTERM; what the program does at it stays the program's business.
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
    """Start or join a Ray; its address, or "local"."""
    _check_arguments(sys.argv)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = address or os.environ.get("RAY_ADDRESS") or _cluster_on_this_machine() or "local"
    if address == "local":
        num_cpus = max(os.cpu_count() or 1, tensor_parallel_size, MIN_LOCAL_CPUS)
        options: dict[str, Any] = {"num_cpus": num_cpus, "include_dashboard": False}
        failed = "start a local Ray"
        advice = "Its files go to RAY_TMPDIR, else /tmp: a short path to a folder that can be written and has room"
    else:
        if _is_host_and_port(address) and not _listens(address):
            raise ConfigError(f"nothing listens at the Ray address {address!r}. Check ray_address and RAY_ADDRESS")
        options = {"runtime_env": {"working_dir": str(CHECKOUT)}}
        failed = f"join the Ray cluster at {address!r}"
        advice = "Check ray_address, RAY_ADDRESS and RAY_AUTH_MODE, or start one"
    try:
        ray.init(address=address, **options, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot {failed}: {str(error).rstrip('. ')}. {advice}") from error
    return address


def _check_arguments(arguments: list[str]) -> None:
    """Ray records the command line of the program, and can start nothing if that is not UTF-8."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the argument {argument!r} of this program is not UTF-8; give it in UTF-8") from None


def _cluster_on_this_machine() -> str | None:
    """The address `ray start` recorded here, if something still listens there: a killed cluster leaves its record."""
    record = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        address = record.read_text().strip()
    except OSError:
        return None
    return address if _is_host_and_port(address) and _listens(address) else None


def _same_address(one: str, other: str) -> bool:
    """Whether two addresses have one port on one machine."""
    return _is_host_and_port(one) and _on_machine(one) == _on_machine(other)


def _on_machine(address: str) -> tuple[str, str]:
    """(IP address, that of this node for a loopback one; port)"""
    host, _, port = address.rpartition(":")
    try:
        ip = socket.gethostbyname(host)
    except (OSError, UnicodeError):  # no name at all
        return host, port
    return ray.util.get_node_ip_address() if ip.startswith("127.") else ip, port


def _is_host_and_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and "/" not in address and port.isdecimal()


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S).close()
    except (OSError, OverflowError, UnicodeError):  # the last two: no port, no name
        return False
    return True


def actor_environment() -> dict[str, Any]:
    """Runtime environment of our actors: the checkout on the path.

    An actor passes its environment on to those it starts, so nothing about GPUs may stand here: the driver has none,
    and the ranks it starts have.
    """
    inherited = os.environ.get("PYTHONPATH")
    return {"env_vars": {"PYTHONPATH": f"{CHECKOUT}:{inherited}" if inherited else str(CHECKOUT)}}


def pick_device(device: str, tensor_parallel_size: int) -> str:
    """ "auto" is "cuda" where the cluster has a GPU for every rank, else "cpu".

    Ray counts GPUs by itself: on a cluster of this machine alone torch must be able to use them, too.
    """
    if device != "auto":
        return device
    if ray.cluster_resources().get("GPU", 0) < tensor_parallel_size:
        return "cpu"
    if len([node for node in ray.nodes() if node["Alive"]]) > 1 or torch.cuda.is_available():
        return "cuda"
    logger.warning("there are GPUs here, but torch %s cannot use them: the ranks run on the CPU", torch.__version__)
    return "cpu"


def place(tensor_parallel_size: int, device: str) -> PlacementGroup:
    """Reserve one bundle a rank: on one node if a node can hold them all, else packed on few.

    Raises `ConfigError` when the cluster has not the resources, at once, or when they do not come free in time.
    """
    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if device == "cuda" else {})
    needed = {name: amount * tensor_parallel_size for name, amount in bundle.items()}
    nodes = [node for node in ray.nodes() if node["Alive"]]
    fits_one = any(all(n["Resources"].get(k, 0) >= v for k, v in needed.items()) for n in nodes)
    if not fits_one:
        held = sum(int(min(n["Resources"].get(k, 0) // v for k, v in bundle.items())) for n in nodes)
        if held < tensor_parallel_size:
            raise ConfigError(_shortage(tensor_parallel_size, needed, "the Ray cluster has not the resources for"))
    strategy = "STRICT_PACK" if fits_one else "PACK"
    group: PlacementGroup = placement_group([dict(bundle) for _ in range(tensor_parallel_size)], strategy=strategy)
    if not group.wait(PLACEMENT_TIMEOUT_S):
        remove_placement_group(group)
        what = f"after {PLACEMENT_TIMEOUT_S:.0f} s other work still holds the resources for"
        raise ConfigError(_shortage(tensor_parallel_size, needed, what))
    return group


def _shortage(size: int, needed: dict[str, float], what: str) -> str:
    rows = []
    for node in ray.nodes():
        if node["Alive"]:
            total = node["Resources"]
            rows.append(f"{node['NodeManagerAddress']}: " + ", ".join(f"{total.get(k, 0):g} {k}" for k in needed))
    want = ", ".join(f"{amount:g} {name}" for name, amount in needed.items())
    return (
        f"{what} tensor_parallel_size {size}: needed {want}; nodes have [{'; '.join(rows)}]. "
        "Lower tensor_parallel_size, add nodes, or wait for other work to end"
    )
