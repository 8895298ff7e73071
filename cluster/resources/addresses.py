"""Addresses of Ray clusters: which cluster runs here, which addresses are the same, whether
anything listens at one.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import ray

PROBE_TIMEOUT_S = 3.0


def cluster_on_this_machine() -> str | None:
    """The address that `ray start` recorded here, if something still listens there: a killed
    cluster leaves its record behind.
    """
    record = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        address = record.read_text().strip()
    except OSError:
        return None
    return address if is_host_and_port(address) and listens(address) else None


def same_address(one: str, other: str) -> bool:
    """Whether two addresses name the same port on the same machine."""
    return is_host_and_port(one) and _on_machine(one) == _on_machine(other)


def is_host_and_port(address: str) -> bool:
    """Whether an address has the form host:port."""
    host, _, port = address.rpartition(":")
    return bool(host) and "/" not in address and port.isdecimal()


def listens(address: str) -> bool:
    """Whether something accepts connections there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S).close()
    except (OSError, OverflowError, UnicodeError):  # the last two: no valid port, host name
        return False
    return True


def _on_machine(address: str) -> tuple[str, str]:
    """(IP address, or that of this node for a loopback address; port)"""
    host, _, port = address.rpartition(":")
    try:
        ip = socket.gethostbyname(host)
    except (OSError, UnicodeError):  # not a name at all
        return host, port
    return ray.util.get_node_ip_address() if ip.startswith("127.") else ip, port
