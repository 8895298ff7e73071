"""Addresses of both protocols: where a server can listen, and which name the same place."""

from __future__ import annotations

import socket

import pytest
import ray

from cluster.resources.addresses import (
    check_port,
    host_and_port,
    is_host_and_port,
    is_same_address,
)
from scheduler.errors import ConfigError


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("host", "written"), [("::1", "[::1]:80"), ("127.0.0.1", "127.0.0.1:80"), ("a.b", "a.b:80")]
)
def test_an_address_is_written_as_in_a_url(host: str, written: str) -> None:
    assert host_and_port(host, 80) == written
    assert is_host_and_port(written)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", pytest.param("::1", marks=needs_ipv6)])
def test_a_port_in_use_is_refused_and_a_free_one_is_not(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=r"cannot listen on .* in use\. Choose another --por"):
            check_port(host, port)
    check_port(host, port)


@pytest.mark.parametrize("host", ["2001:db8::1", "192.0.2.1", "no such name", "a..b"])
def test_an_address_of_another_machine_or_of_none_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on .*Choose another --port or --host"):
        check_port(host, 0)


def test_loopback_addresses_of_both_protocols_name_this_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    assert is_same_address("[::1]:6379", "10.0.0.7:6379")
    assert is_same_address("127.0.0.1:6379", "[::1]:6379")
    assert is_same_address("[2001:db8::1]:6379", "[2001:db8:0::1]:6379")
    assert not is_same_address("[2001:db8::2]:6379", "10.0.0.7:6379")
    assert not is_same_address("[::1]:6379", "10.0.0.7:6380")
