"""Access rules: API keys, client certificates, and routes for operators only.

Keys and certificates are checked when the head of a request is parsed, before its body is read.
Routes for operators are checked by an :class:`OperatorGuard` in front of them.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dynamo.errors import shorten
from dynamo.http.api_keys import ApiKeys
from dynamo.http.errors import HttpStatusError, KeyRefused
from dynamo.http.exchange import Exchange
from dynamo.http.head import Head, host_name, plain_name
from dynamo.http.tls import FileWatch, ServerTls

log = logging.getLogger(__name__)
_FORWARDED = frozenset(("forwarded", "x-forwarded-for", "x-real-ip", "via"))
_FOREIGN_PAGES = frozenset(("cross-site", "same-site"))
_REMEDY = "send an operator's API key (--api-key-file), or call from this machine"


@dataclass(frozen=True, kw_only=True)
class Access:
    """The access rules of a server: TLS, and ``keys`` for each path that is not ``is_open``.

    With a client CA, the same paths need a client certificate.
    """

    keys: ApiKeys | None = None
    tls: ServerTls | None = None
    is_open: Callable[[str], bool]

    def watches(self) -> list[FileWatch]:
        """The files to check for changes."""
        return [source.watch for source in (self.keys, self.tls) if source is not None]

    def check_key(self, head: Head) -> None:
        """Move the credentials of ``head`` to its ``api_key``. Raises KeyRefused.

        Wrong credentials are ignored on open paths: monitors send the keys of other services.
        """
        if self.keys is None:
            return
        try:
            head.api_key = self.keys.take(head.headers)
        except KeyRefused:
            if not self.is_open(head.path):
                raise
        else:
            if head.api_key is None and not self.is_open(head.path):
                text = "API key is missing; send it as 'Authorization: Bearer KEY'"
                raise KeyRefused(text, given=False)

    def check_uncertified(self, head: Head) -> None:
        """As :meth:`check_key`, for a client without the certificate that it needs."""
        if not self.is_open(head.path):
            raise HttpStatusError(403, "A client certificate is needed (--tls-client-ca-cert-path)")
        self.check_key(head)


def operator_name(exchange: Exchange, program: str) -> str:
    """Return who asks: the name of the key, else the ``program`` and the address of the client."""
    key = exchange.api_key
    return f"{program}, " + (f"from {exchange.peer}" if key is None else f"key {key.name}")


class OperatorGuard:
    """Admits operators: by their key, or without keys by calling from this machine.

    A web page may reach a loopback port as well. Its requests have an Origin or Sec-Fetch-Site
    header, or with DNS rebinding a Host that is not of this machine. ``names`` are further hosts.
    With ``own_pages`` the pages of this server are admitted: their Origin is the Host.
    """

    def __init__(self, has_keys: bool, names: Iterable[str] = (), own_pages: bool = False) -> None:
        self._has_keys = has_keys
        self._own_pages = own_pages
        self._names = frozenset(("localhost", *map(plain_name, names))) - {"", "*"}

    def check(self, exchange: Exchange) -> str:
        """As :meth:`problem`; logs the name of the operator who changes something."""
        problem, key = self.problem(exchange), exchange.api_key
        if not problem and self._has_keys and key is not None and exchange.method == "POST":
            log.info("POST %s by operator %s", exchange.path, key.name)
        return problem

    def problem(self, exchange: Exchange) -> str:
        """Return why the request is refused, with the remedy; "" if it is admitted."""
        if self._has_keys:
            key = exchange.api_key
            if key is not None and key.operator:
                return ""
            cause = "without a key" if key is None else f"the key '{key.name}' has the role user"
            return f"{exchange.path} is for operators; {cause}: send an operator's key"
        headers = exchange.headers
        if not _is_loopback(exchange.peer):
            return f"{exchange.path} is for operators: {_REMEDY}"
        if self._is_foreign_page(headers):
            return f"{exchange.path} is not for web pages"
        # A proxy on this machine calls from a loopback address for clients anywhere.
        if not _FORWARDED.isdisjoint(headers):
            return f"{exchange.path} is not served through a proxy: {_REMEDY}"
        host = host_name(headers.get("host", ""))
        if host not in self._names and not _is_loopback(host.strip("[]")):
            return f"{exchange.path} is not served as host '{shorten(host, 128)}'; use localhost"
        return ""

    def _is_foreign_page(self, headers: Mapping[str, str]) -> bool:
        # Browsers set this header; a page cannot.
        if headers.get("sec-fetch-site") in _FOREIGN_PAGES:
            return True
        origin = headers.get("origin")
        if origin is None:
            return False
        scheme, _, host = origin.lower().partition("://")
        own = self._own_pages and scheme in ("http", "https")
        return not own or host != headers.get("host", "").lower()

    def before(self, route: Callable[[Exchange], None]) -> Callable[[Exchange], None]:
        """Return ``route`` behind this guard: a refusal is a 403."""

        def guarded(exchange: Exchange) -> None:
            problem, key = self.check(exchange), exchange.api_key
            if problem:
                if key is not None:
                    key.requests -= 1  # no request that its role may make; no scrape has seen it
                exchange.refuse(403, problem)
            else:
                route(exchange)

        return guarded


def _is_loopback(host: str | None) -> bool:
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    # A socket of both families shows IPv4 clients as ::ffff:a.b.c.d.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
