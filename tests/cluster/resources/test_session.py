"""Which Ray an engine becomes part of, and which it refuses."""

from __future__ import annotations

import signal
import socket

import pytest
import ray
from ray.exceptions import RayError

from cluster.resources import session as session_module
from cluster.resources.addresses import is_listening
from cluster.resources.session import RaySession, _init_ray, _running_ray_id
from scheduler.errors import ConfigError, EngineError

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("address", [None, "", "auto", "local"])
def test_the_ray_of_the_program_is_used_where_no_other_is_named(
    users_ray: None, address: str | None
) -> None:
    session = RaySession()
    lease = session.connect(address, 1)
    assert lease == _running_ray_id()
    session.release(lease)
    assert ray.is_initialized()


@pytest.mark.parametrize("host", [None, "127.0.0.1", "localhost"])
def test_the_ray_of_the_program_may_be_named_by_its_address(
    users_ray: None, host: str | None
) -> None:
    address = ray.get_runtime_context().gcs_address
    session = RaySession()
    session.release(session.connect(f"{host}:{address.rpartition(':')[2]}" if host else address, 1))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "elsewhere", "a..b:1"])
def test_another_cluster_than_the_one_this_process_is_part_of_is_refused(
    users_ray: None, address: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"ray_address is '{address}', but this process is part of .*Leave .* out"
    ):
        RaySession().connect(address, 1)


@pytest.mark.parametrize("number", session_module.DEFERRED_SIGNALS)
def test_a_program_that_is_ended_while_ray_starts_hears_it_when_ray_has_started(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    starts: list[bool] = []

    def init_ray(*_: object) -> str:
        ray._private.utils.set_sigterm_handler(lambda *_: pytest.fail("Ray's handler"))
        signal.raise_signal(number)
        starts.append(True)
        if len(starts) == 1:
            raise EngineError("Ray has not started")
        return "local"

    shutdowns: list[bool] = []
    monkeypatch.setattr(session_module, "_init_ray", init_ray)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: shutdowns.append(True))  # not the other tests' Ray
    monkeypatch.setattr(session_module, "_running_ray_id", lambda: "id")
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            RaySession().connect("local", 1)
        assert signal.getsignal(number) is signal.default_int_handler
        signal.signal(number, signal.SIG_DFL)
        with pytest.raises(SystemExit):
            RaySession().connect("local", 1)
        signal.signal(number, signal.SIG_IGN)
        RaySession().connect("local", 1)
    finally:
        signal.signal(number, before)
    assert starts == [True] * 3 and shutdowns == [True] * 2, "also if it does not start"


def test_a_second_engine_names_the_cluster_of_the_first_as_the_first_did(users_ray: None) -> None:
    session = RaySession()
    session._initialized_ray_id, session._address = _running_ray_id(), "ray://head:10001"
    assert session.connect("ray://head:10001", 1) == _running_ray_id()
    with pytest.raises(
        ConfigError, match="ray_address is 'local'"
    ):  # it has joined a cluster, which is not its own
        session.connect("local", 1)


def test_an_ipv6_address_is_looked_at_without_its_brackets() -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    port = server.getsockname()[1]
    with server:
        assert is_listening(f"[::1]:{port}") and not is_listening(f"[::1]:{port + 2**16}")
    assert not is_listening(f"[::1]:{port}")


@pytest.mark.parametrize("address", ["a..b:1", "127.0.0.1:99999"])
def test_nothing_listens_where_nothing_can(address: str) -> None:
    assert not is_listening(address)


def test_a_ray_that_starts_too_slowly_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(**options: object) -> None:
        raise Exception("The current node timed out during startup. This could happen")

    monkeypatch.setattr(ray, "init", time_out)
    with pytest.raises(EngineError, match=r"cannot start a local Ray: .* timed out .*Try again"):
        _init_ray("local", 1)


@pytest.mark.parametrize(("raised", "seen"), [(RayError, ConfigError), (TypeError, TypeError)])
def test_other_errors_of_a_start_are_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch, raised: type[Exception], seen: type[Exception]
) -> None:
    def fail(**options: object) -> None:
        raise raised("no token")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(seen, match="no token"):
        _init_ray("local", 1)


def test_a_ray_that_has_lost_processes_is_not_used_again(
    users_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "dead_local_processes", lambda: ["dashboard", "raylet"])
    with pytest.raises(EngineError, match=r"has lost its raylet\. Start the program again"):
        RaySession().connect("local", 1)
