"""Cross-origin requests: which pages of other origins may read responses. Fetch standard, 3.3."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from dynamo.http.exchange import Exchange, encode_headers
from dynamo.http.head import Head

_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1024}")
_METHODS = "GET, HEAD, POST, DELETE"
_EXPOSED = "x-request-id, request-id, retry-after, x-dynamo-route"
_MAX_AGE_S = "600"
CORS_HEADERS = frozenset(
    (
        "access-control-allow-origin",
        "access-control-allow-credentials",
        "access-control-expose-headers",
        "access-control-allow-methods",
        "access-control-allow-headers",
        "access-control-max-age",
    )
)
"""Headers of responses that only this server sets."""
_ASKED_METHOD = "access-control-request-method"
_ASKED_HEADERS = "access-control-request-headers"


class Cors:
    """Lets pages of ``origins``, or of any with ``*``, use all paths that are not ``closed``.

    A preflight has no credentials, so it is answered before keys are checked. Pages may send those
    of their browser (client certificates) only from origins that are named.
    """

    def __init__(self, origins: Iterable[str], closed: Callable[[str], bool]) -> None:
        self._origins = frozenset(origins)
        self._any = "*" in self._origins
        self._closed = closed

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
        return origin is not None and (self._any or origin in self._origins)

    def _headers(self, path: str, headers: Mapping[str, str]) -> bytes:
        if self._closed(path):
            return b""
        # Without the header, too: a cache must not give one origin the response to another.
        found = [] if self._any else [("vary", "Origin")]
        if self._allows(headers):
            allowed = "*" if self._any else headers["origin"]
            found.append(("access-control-allow-origin", allowed))
            found.append(("access-control-expose-headers", _EXPOSED))
            if not self._any:
                found.append(("access-control-allow-credentials", "true"))
        return encode_headers(found)


def _preflight_headers(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    found = [("access-control-allow-methods", _METHODS), ("access-control-max-age", _MAX_AGE_S)]
    names = headers.get(_ASKED_HEADERS, "")
    if _HEADER_NAMES.fullmatch(names):  # named, because * does not cover Authorization
        found.append(("access-control-allow-headers", names))
    return found
