"""Who may send requests: the key, and without one, protection from web pages.

A web page that a user visits can send requests to a server on the user's own machine. It cannot
choose all headers: `Origin` names the page's site, and after DNS rebinding, by which the page's
name comes to mean this machine, `Host` is still that name. A page can also not send what says
that it is JSON to another site without asking first; a body that says that it is anything else, as
that of a form does, is refused.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from cluster.api.errors import HttpError

Headers = Mapping[str, str]  # by names in small letters


@dataclass(slots=True, kw_only=True)
class Access:
    """What is checked before a request is served.

    bound_host: the name or address that is listened on, None if unknown. Without a key,
    allowed_hosts are further names under which a server on a loopback address may be reached, and
    allowed_origins sites whose pages may use it, such as `https://chat.example.com`; "*" allows
    all. is_local: whether that address is a loopback address; a name is looked up once.
    """

    api_key: str | None = None
    bound_host: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    is_local: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_local = _is_bound_to_loopback(self.bound_host)

    def check(self, headers: Headers, *, is_public: bool = False) -> None:
        """Raise `HttpError` 401 for a request without the key, and on a server without one, 403 for
        a request that may come from a web page of another site: with a key, a page would have to
        know that. `is_public`: the path needs no key, and its answers cost little.
        """
        if self.api_key is None:
            self._check_site(headers, is_public)
            return
        scheme, _, given_key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given_key = headers.get("x-api-key", "")  # where Anthropic's clients send it
        is_key_right = hmac.compare_digest(
            given_key.strip().encode("latin-1"), self.api_key.encode()
        )
        if not (is_key_right or is_public):
            raise HttpError(
                401,
                "wrong or missing API key; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _check_site(self, headers: Headers, is_public: bool) -> None:
        """Raise `HttpError` 403 for a request of another site's page, by `Host`, `Origin` and
        `Sec-Fetch-Site`. What a page has a browser fetch from another site, such as an image, has
        no `Origin`. The page cannot read the answer, but making it may take long.
        """
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        if not self._is_host_allowed(host):
            raise HttpError(
                403,
                f"this server has no API key and listens on {self.bound_host}, so it is reached as"
                f" localhost and not as {host[:200]!r}. Serve with --allowed-hosts for other names,"
                " or with --api-key",
                code="host_not_allowed",
            )
        if origin:
            is_allowed = self._is_origin_allowed(origin, host)
            site, remedy = origin[:200], "Serve with --allowed-origins for it"
        else:
            is_allowed = is_public or headers.get("sec-fetch-site", "").lower() != "cross-site"
            site, remedy = "another site", "Open the address by itself"
        if not is_allowed:
            raise HttpError(
                403,
                f"a web page of {site} may not use this server, which has no API key. {remedy},"
                " or serve with --api-key",
                code="origin_not_allowed",
            )

    def _is_host_allowed(self, host: str) -> bool:
        """Browsers always send a host; other clients may leave it out."""
        if not host or self.bound_host is None or not self.is_local:
            return True
        name = _hostname_of(f"//{host}")
        if _is_loopback(name) or name == self.bound_host.lower():
            return True
        return _is_listed(name, self.allowed_hosts) or _is_listed(host, self.allowed_hosts)

    def _is_origin_allowed(self, origin: str, host: str) -> bool:
        """A proxy may have taken the encryption off, so the scheme does not count; and it may have
        left the port out of the host. But on this machine, another port may be another's page.
        """
        _, _, origin_host = origin.partition("://")
        name = _hostname_of(f"//{host}")
        has_port = host not in (name, f"[{name}]")
        if name and not has_port and not _is_loopback(name) and _hostname_of(origin) == name:
            return True
        return origin_host == host != "" or _is_listed(origin, self.allowed_origins)


def check_content_type(headers: Headers) -> None:
    """Raise `HttpError` 415 for a body that says that it is something else than JSON."""
    content_type = headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if not re.fullmatch(r"(application/(.*\+)?json)?", media_type):
        raise HttpError(
            415,
            f"the body must be JSON, not {content_type[:100]!r}; send it with"
            " 'Content-Type: application/json'",
        )


def _is_listed(value: str, allowed: tuple[str, ...]) -> bool:
    return "*" in allowed or value in {name.lower() for name in allowed}


def _hostname_of(url: str) -> str:
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
        if re.fullmatch("[0-9.]+", name):  # IPv4, also short as 127.1
            return socket.inet_aton(name)[0] == 127
        address = ipaddress.IPv6Address(name)
    except (OSError, ValueError):
        return False
    return (address.ipv4_mapped or address).is_loopback
