"""Who may use a server: web pages of other sites may not, without a key."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest

from cluster.api.access import Access, check_content_type
from cluster.api.errors import HttpError
from tests.cluster.api.scripted import serve

LOCAL = Access(bound_host="127.0.0.1")


def is_allowed(access: Access, **headers: str) -> bool:
    try:
        access.check(headers, is_public=True)
    except HttpError as error:
        assert error.status == 403
        return False
    return True


@pytest.mark.parametrize(
    "host",
    ["localhost:8000", "LOCALHOST", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "a.localhost", ""],
)
def test_a_local_server_is_reached_as_localhost(host: str) -> None:
    assert is_allowed(LOCAL, host=host)


@pytest.mark.parametrize(
    "host", ["localhost.:8000", "127.1:8000", "[::ffff:127.0.0.1]:8000", "a.localhost."]
)
def test_other_spellings_of_localhost_are_allowed(host: str) -> None:
    assert is_allowed(LOCAL, host=host)


@pytest.mark.parametrize("bound", ["127.1", "localhost.", "::ffff:127.0.0.1", "LocalHost", "::1"])
def test_a_server_that_is_bound_to_another_spelling_of_localhost_is_local(bound: str) -> None:
    access = Access(bound_host=bound)
    assert is_allowed(access, host="localhost:8000")
    assert not is_allowed(access, host="evil.example")


def test_the_name_that_a_server_is_bound_to_is_looked_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def look_up(host: object, port: object) -> list[tuple[object, ...]]:
        asked.append((host, port))
        return [(socket.AF_INET6, 1, 6, "", ("::1", 0, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    access = Access(bound_host="ip6-localhost")
    assert not is_allowed(access, host="evil.example")
    assert is_allowed(access, host="ip6-localhost:8000") and is_allowed(access, host="localhost")
    assert asked == [("ip6-localhost", None)]


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", "", "10.0.0.1", "nowhere.invalid"])
def test_a_server_that_is_bound_to_no_loopback_address_may_have_any_name(bound: str) -> None:
    assert is_allowed(Access(bound_host=bound), host="gpu-box:8000")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "[::1", "x"]
)
def test_after_dns_rebinding_a_local_server_refuses(host: str) -> None:
    assert not is_allowed(LOCAL, host=host)
    assert not is_allowed(Access(bound_host="localhost"), host=host)


def test_listed_names_are_allowed_and_others_not() -> None:
    access = Access(bound_host="::1", allowed_hosts=("Chat.Example", "b.example:80"))
    assert is_allowed(access, host="chat.example:8000") and is_allowed(access, host="b.example:80")
    assert not is_allowed(access, host="b.example:81")
    assert is_allowed(Access(bound_host="::1", allowed_hosts=("*",)), host="any.example")


def test_a_server_for_others_or_with_a_key_may_have_any_name() -> None:
    assert is_allowed(Access(bound_host="0.0.0.0"), host="gpu-box:8000")
    assert is_allowed(Access(), host="gpu-box:8000")
    assert is_allowed(
        Access(bound_host="127.0.0.1", api_key="k"), host="a.example", origin="https://b.example"
    )


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:8000", True),
        ("https://localhost:8000", True),
        ("http://localhost:3000", False),
        ("https://evil.example", False),
        ("null", False),
        ("https://listed.example", True),
        ("http://listed.example", False),
    ],
)
def test_pages_of_other_sites_are_refused(origin: str, allowed: bool) -> None:
    for bound in ("127.0.0.1", None):
        access = Access(bound_host=bound, allowed_origins=("https://Listed.example",))
        assert is_allowed(access, host="localhost:8000", origin=origin) == allowed


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        ("https://chat.example:8443", "chat.example", True),  # nginx: proxy_set_header Host $host
        ("https://chat.example", "chat.example", True),
        ("http://[2001:db8::1]:8443", "[2001:db8::1]", True),
        ("https://other.example:8443", "chat.example", False),
        ("https://chat.example.evil.example", "chat.example", False),
        ("https://chat.example:8443", "chat.example:8000", False),
        ("https://chat.example", "chat.example:8000", False),
        ("http://localhost:3000", "localhost", False),
        ("http://127.0.0.1:3000", "127.0.0.1", False),
        ("null", "chat.example", False),
        ("https://:8443", "", False),
    ],
)
def test_a_proxy_may_leave_the_port_out_of_the_host(origin: str, host: str, allowed: bool) -> None:
    assert is_allowed(Access(), host=host, origin=origin) == allowed


@pytest.mark.parametrize(
    ("kind", "allowed"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/vnd.api+json", True),
        ("", True),
        ("text/plain", False),
        ("text/plain; x=application/json", False),
        ("application/x-www-form-urlencoded", False),
        ("multipart/form-data; boundary=x", False),
    ],
)
def test_bodies_must_be_json_by_their_type(kind: str, allowed: bool) -> None:
    headers = {"content-type": kind} if kind else {}
    if allowed:
        check_content_type(headers)
        return
    with pytest.raises(HttpError, match="application/json") as refused:
        check_content_type(headers)
    assert refused.value.status == 415


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(access=LOCAL) as server:
        yield server.url


def test_a_web_page_cannot_use_a_local_server(url: str) -> None:
    path, body = f"{url}/v1/completions", b'{"prompt": "Hi"}'
    json = {"content-type": "application/json"}
    assert httpx.post(path, content=body, headers=json).status_code == 200
    assert httpx.post(path, content=body, headers=json | {"origin": url}).status_code == 200
    refused = httpx.post(path, content=body, headers=json | {"origin": "https://evil.example"})
    assert refused.status_code == 403 and "evil.example" in refused.text
    rebound = httpx.get(f"{url}/v1/models", headers={"host": "evil.example"})
    assert rebound.status_code == 403 and "--allowed-hosts" in rebound.text
    plain = httpx.post(path, content=body, headers={"content-type": "text/plain"})
    assert plain.status_code == 415


def test_nothing_is_said_about_models_and_paths_without_the_key() -> None:
    with serve(api_key="secret") as server:
        for path in ("/v1/models/other", "/v1/models/tiny", "/v1/nothing", "/debug/trace"):
            answer = httpx.get(server.url + path)
            assert answer.status_code == 401 and "tiny" not in answer.text
        headers = {"authorization": "Bearer secret"}
        assert httpx.get(f"{server.url}/v1/models/other", headers=headers).status_code == 404
        assert httpx.get(f"{server.url}/v1/nothing", headers=headers).status_code == 404
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/").status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "cross-site", "origin": "https://listed.example"}, 200),
        ({"sec-fetch-site": "cross-site", "origin": "https://evil.example"}, 403),
    ],
)
def test_pages_of_other_sites_cannot_have_traces_made(headers: dict[str, str], status: int) -> None:
    access = Access(bound_host="127.0.0.1", allowed_origins=("https://listed.example",))
    with serve(access=access) as server:
        assert httpx.get(f"{server.url}/debug/trace", headers=headers).status_code == status


def test_with_a_key_the_site_of_a_page_does_not_count() -> None:
    headers = {"sec-fetch-site": "cross-site", "authorization": "Bearer k"}
    with serve(access=Access(api_key="k")) as server:
        assert httpx.get(f"{server.url}/debug/trace", headers=headers).status_code == 200
