"""Addresses: which Ray cluster runs here, which addresses are the same, whether anything listens at
one or can. An IPv6 address stands in brackets where a port follows it.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from pathlib import Path
from typing import Any

import ray

from scheduler.errors import ConfigError

# Of the addresses of a name, those of a protocol that this machine does not have do not count.
_NO_SUCH_PROTOCOL_ERRNOS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
PROBE_TIMEOUT_S = 3.0
MAX_PORT = 65_535


def ray_temp_root() -> Path:
    """The folder in which Ray makes its own, `ray`, for sessions, logs and sockets."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")


def local_cluster_address() -> str | None:
    """The address that `ray start` recorded here, if something still listens there: a killed
    cluster leaves its record behind.
    """
    record = ray_temp_root() / "ray" / "ray_current_cluster"
    try:
        address = record.read_text().strip()
    except OSError:
        return None
    return address if is_host_and_port(address) and is_listening(address) else None


def host_and_port(host: str, port: int) -> str:
    """As in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_port(host: str, port: int) -> None:
    """Raise `ConfigError` unless a server can listen on this port of `host`, name or address."""
    for bound_socket in bound_sockets(host, port):
        bound_socket.close()


def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of `host`, a name or an address, that does not listen yet. With
    "::" it takes connections of both protocols. Raises `ConfigError`.
    """
    sockets: list[socket.socket] = []
    failures: list[OSError] = []
    try:
        address_infos = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, address in dict.fromkeys(address_infos):
            try:
                sockets.append(_bind(family, address))
            except OSError as error:
                failures.append(error)
        serious = [error for error in failures if error.errno not in _NO_SUCH_PROTOCOL_ERRNOS]
        if serious or not sockets:
            raise (serious or failures)[0]
    except (OSError, OverflowError, UnicodeError) as error:  # the last two: no valid port, name
        for bound_socket in sockets:
            bound_socket.close()
        raise ConfigError(
            f"cannot listen on {host_and_port(host, port)}: {error}. Choose another --port or"
            " --host"
        ) from None
    return sockets


def _bind(family: int, address: Any) -> socket.socket:
    bound_socket = socket.socket(family)
    try:
        bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            is_dual_stack = address[0] == "::" and socket.has_dualstack_ipv6()
            bound_socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_dual_stack)
        bound_socket.bind(address)
    except BaseException:
        bound_socket.close()
        raise
    return bound_socket


def is_same_address(one: str, other: str) -> bool:
    """Whether two addresses name the same port on the same machine."""
    return is_host_and_port(one) and _ip_and_port(one) == _ip_and_port(other)


def is_host_and_port(address: str) -> bool:
    """Whether an address has the form host:port."""
    host, _, port = address.rpartition(":")
    return bool(host) and "/" not in address and port.isdecimal()


def is_listening(address: str) -> bool:
    """Whether something accepts connections there."""
    host, _, port = address.rpartition(":")
    if int(port) > MAX_PORT:  # the system would try another one, without the higher bits
        return False
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S).close()
    except (OSError, UnicodeError):  # the last: no valid host name
        return False
    return True


def _ip_and_port(address: str) -> tuple[str, str]:
    """(IP address, or that of this node for a loopback address; port)"""
    host, _, port = address.rpartition(":")
    try:
        [*_, (ip, *_)] = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0]
        is_loopback = ipaddress.ip_address(ip).is_loopback
    except (OSError, UnicodeError, ValueError):  # not a name at all, or an address with a zone
        return host.strip("[]"), port
    return ray.util.get_node_ip_address() if is_loopback else str(ip), port
