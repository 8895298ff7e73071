"""Who may send requests: the key, and without one, protection from web pages.

A web page that a user visits can send requests to a server on the user's own machine. It cannot
choose all headers: `Origin` names the page's site, and after DNS rebinding, by which the page's
name comes to mean this machine, `Host` is still that name. A page can also not send JSON to another
site without asking first, which is why a body must say that it is JSON.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from cluster.api.errors import HttpError

Headers = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What is checked before a request is served.

    bound_host: the address that is listened on, None if unknown. allowed_hosts: further names under
    which a server on a loopback address may be reached, allowed_origins: sites whose pages may use
    a server without a key, such as `https://chat.example.com`; "*" allows all. is_local: whether
    the address that is listened on is a loopback address; a name is looked up once.
    """

    api_key: str | None = None
    bound_host: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    is_local: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_local", _is_bound_to_loopback(self.bound_host))

    def check_site(self, headers: Headers) -> None:
        """Raise `HttpError` 403 for a request to a server without a key that may come from a web
        page of another site. With a key, a page would have to know that.
        """
        if self.api_key is not None:
            return
        host = headers.get(b"host", b"").decode("latin-1").strip().lower()
        if not self._is_host_allowed(host):
            raise HttpError(
                403,
                f"this server has no API key and listens on {self.bound_host}, so it is reached as"
                f" localhost and not as {host[:200]!r}. Serve with --allowed-hosts for other names,"
                " or with --api-key",
                code="host_not_allowed",
            )
        origin = headers.get(b"origin", b"").decode("latin-1").strip().lower()
        if origin and not self._is_origin_allowed(origin, host):
            raise HttpError(
                403,
                f"a web page of {origin[:200]} may not use this server, which has no API key. Serve"
                " with --allowed-origins for it, or with --api-key",
                code="origin_not_allowed",
            )

    def check_fetch(self, headers: Headers) -> None:
        """Raise `HttpError` 403 for what a web page of another site has a browser fetch, such as an
        image, from a server without a key. That has no `Origin`, and the page cannot read the
        answer, but making it may take long. `check_site` must have been called.
        """
        is_foreign = headers.get(b"sec-fetch-site", b"").strip().lower() == b"cross-site"
        if self.api_key is None and is_foreign and not headers.get(b"origin"):
            raise HttpError(
                403,
                "a web page of another site may not use this server, which has no API key. Open the"
                " address by itself, or serve with --api-key",
                code="origin_not_allowed",
            )

    def check_key(self, headers: Headers) -> None:
        """Raise `HttpError` 401 without the key."""
        if self.api_key is None:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = headers.get(b"x-api-key", b"")  # where Anthropic's clients send it
        if not hmac.compare_digest(given.strip(), self.api_key.encode()):
            raise HttpError(
                401,
                "wrong or missing API key; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _is_host_allowed(self, host: str) -> bool:
        """Browsers always send a host; other clients may leave it out."""
        if not host or self.bound_host is None or not self.is_local:
            return True
        name = _name_of(f"//{host}")
        return (
            _is_loopback(name)
            or name == self.bound_host.lower()
            or _is_listed(name, self.allowed_hosts)
            or _is_listed(host, self.allowed_hosts)
        )

    def _is_origin_allowed(self, origin: str, host: str) -> bool:
        """A proxy may have taken the encryption off, so the scheme does not count; and it may have
        left the port out of the host. But on this machine, another port may be another's page.
        """
        _, _, site = origin.partition("://")
        name = _name_of(f"//{host}")
        has_port = host not in (name, f"[{name}]")
        if name and not has_port and not _is_loopback(name) and _name_of(origin) == name:
            return True
        return site == host != "" or _is_listed(origin, self.allowed_origins)


def check_content_type(headers: Headers) -> None:
    """Raise `HttpError` 415 for a body that says that it is something else than JSON."""
    given = headers.get(b"content-type", b"").decode("latin-1")
    kind = given.partition(";")[0].strip().lower()
    if kind in ("", "application/json") or (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        return
    raise HttpError(
        415,
        f"the body must be JSON, not {given[:100]!r}; send it with"
        " 'Content-Type: application/json'",
    )


def _is_listed(value: str, allowed: tuple[str, ...]) -> bool:
    return "*" in allowed or value in {name.lower() for name in allowed}


def _name_of(url: str) -> str:
    """The host of an address without its port; empty if there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_bound_to_loopback(host: str | None) -> bool:
    """Whether a server that listens on `host` can be reached from this machine only."""
    if not host:
        return False
    host = host.strip("[]")  # as an IPv6 address is written before a port
    if _is_loopback(host.lower()):
        return True
    try:
        addresses = {address[0] for *_, address in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(_is_loopback(str(address)) for address in addresses)


def _is_loopback(name: str) -> bool:
    """Whether a name means this machine wherever it is used. It is not looked up: with DNS
    rebinding, any name may mean this machine.
    """
    name = name.removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return _is_short_loopback(name)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _is_short_loopback(name: str) -> bool:
    """Whether this is an IPv4 address such as 127.1."""
    if not name.replace(".", "").isdecimal() or not name.isascii():
        return False
    try:
        return socket.inet_aton(name)[0] == 127
    except OSError:
        return False
