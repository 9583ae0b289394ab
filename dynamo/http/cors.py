"""Cross-origin requests: which pages of other origins may read responses. Fetch standard, 3.3."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import unquote

from dynamo.http.exchange import Exchange, encode_headers
from dynamo.http.head import Head

_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1024}")
_METHODS = "GET, HEAD, POST, DELETE"
_EXPOSED = ", ".join(
    (
        *("x-request-id", "request-id", "retry-after", "retry-after-ms", "x-should-retry"),
        *("warning", "www-authenticate", "x-dynamo-route", "openai-processing-ms"),
        *(
            f"x-ratelimit-{what}-{of}"
            for what in ("limit", "remaining", "reset")
            for of in ("requests", "tokens")
        ),
    )
)
"""What clients read, of attached servers too."""
_VARY = ("vary", "Origin")
_ANY_ORIGIN = (
    ("access-control-allow-origin", "*"),
    ("access-control-expose-headers", f"{_EXPOSED}, *"),
)
_ORIGIN = re.compile(rb"\r\norigin:([^\r\n]*)", re.IGNORECASE)
_MAX_AGE_S = "600"
CORS_HEADERS = frozenset(
    (
        "access-control-allow-origin",
        "access-control-allow-credentials",
        "access-control-expose-headers",
        "access-control-allow-methods",
        "access-control-allow-headers",
        "access-control-allow-private-network",
        "access-control-max-age",
    )
)
"""Headers of responses that only this server sets."""
_ASKED_METHOD = "access-control-request-method"
_ASKED_HEADERS = "access-control-request-headers"
_ASKED_NETWORK = "access-control-request-private-network"


class Cors:
    """Lets pages of ``origins``, or of any with ``*``, use all paths that are not ``closed``.

    A preflight has no credentials, so it is answered before keys are checked. Pages may send those
    of their browser (client certificates) only from origins that are named.
    """

    def __init__(self, origins: Iterable[str], closed: Callable[[str], bool]) -> None:
        allowed = frozenset(origins)
        self._any = "*" in allowed
        self._closed = closed
        # Without an allowed origin, too: with * the response is the same for every page, and else a
        # cache must not give one origin the response to another.
        self._other_lines = encode_headers(_ANY_ORIGIN if self._any else (_VARY,))
        self._lines = {
            origin: encode_headers((_VARY, *_named_origin(origin)))
            for origin in (() if self._any else allowed)
        }

    def unless_preflight(self, check: Callable[[Head], None] | None) -> Callable[[Head], None]:
        """Return ``check``, skipped for preflights; adds the headers of the responses to heads."""

        def checked(head: Head) -> None:
            head.cors = self._headers(head.path, head.headers)
            if check is not None and not self._is_preflight(head):
                check(head)

        return checked

    def before(self, handler: Callable[[Exchange], None]) -> Callable[[Exchange], None]:
        """Return ``handler`` behind the answer to preflights."""

        def answered(exchange: Exchange) -> None:
            if self._is_preflight(exchange):
                exchange.respond(200, b"", "", _preflight_headers(exchange.headers))
            else:
                handler(exchange)

        return answered

    def of_unparsed(self, data: bytes) -> bytes:
        """Return the headers for the refusal of ``data``, which is not a whole head.

        A page must be able to read that its headers are too large. O(bytes).
        """
        target = data.partition(b"\r\n")[0].split(b" ", 2)[1:2]
        path = b"".join(target).partition(b"?")[0].decode("latin-1")
        origins = [value.decode("latin-1").strip(" \t") for value in _ORIGIN.findall(data)]
        return self._headers(unquote(path), {"origin": origins[0]} if len(origins) == 1 else {})

    def _is_preflight(self, request: Head | Exchange) -> bool:
        headers = request.headers
        return (
            request.method == "OPTIONS"
            and _ASKED_METHOD in headers
            and self._allows(headers)
            and not self._closed(request.path)
        )

    def _allows(self, headers: Mapping[str, str]) -> bool:
        origin = headers.get("origin")
        return origin is not None and (self._any or origin in self._lines)

    def _headers(self, path: str, headers: Mapping[str, str]) -> bytes:
        if self._closed(path):
            return b""
        return self._lines.get(headers.get("origin", ""), self._other_lines)


def _named_origin(origin: str) -> tuple[tuple[str, str], ...]:
    return (
        ("access-control-allow-origin", origin),
        ("access-control-expose-headers", _EXPOSED),
        ("access-control-allow-credentials", "true"),
    )


def _preflight_headers(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    fields = [("access-control-allow-methods", _METHODS), ("access-control-max-age", _MAX_AGE_S)]
    names = headers.get(_ASKED_HEADERS, "")
    if _HEADER_NAMES.fullmatch(names):  # named, because * does not cover Authorization
        fields.append(("access-control-allow-headers", names))
    if headers.get(_ASKED_NETWORK) == "true":  # Private Network Access, of pages on the internet
        fields.append(("access-control-allow-private-network", "true"))
    return fields
