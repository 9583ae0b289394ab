"""Map method and path to a handler; read parameters of paths and fields of forms.

The notation is that of an OpenAPI document. A parameter is one segment of the path and has only
characters that mean the same encoded and decoded, so that the path can be sent on as it is.

A field of a ``multipart/form-data`` body, found without decoding the rest. RFC 7578, 2046.

A body may be large, and its files are not needed: only the heads of its parts are read.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple

from dynamo.http import Exchange

Route = Callable[[Exchange], None]
log = logging.getLogger(__name__)
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.~-]*"
_ROUTE = re.compile(rf"(GET|POST|DELETE) /v1(?:/(?:{_NAME}|\{{\w+\}}))+", re.ASCII)
_PARAMETER = re.compile(r"\\\{\w+\\\}")
# Not "." or "..": a server behind this one would read another path.
_VALUE = r"((?!\.{1,2}(?:/|$))[A-Za-z0-9_.~:@-]{1,256})"
_TYPE = "multipart/form-data"
_BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_FIELD_NAME = re.compile(rb'[;\s]name="([^"\r\n]*)"', re.IGNORECASE)
_MAX_PARTS = 64
_MAX_HEAD_BYTES = 4096


def is_multipart(content_type: str | None) -> bool:
    """Return whether a body of this type is a form with files."""
    return content_type is not None and content_type[: len(_TYPE)].lower() == _TYPE


def field_span(body: bytes, content_type: str, name: str) -> tuple[int, int] | None:
    """Return where the value of the field ``name`` begins and ends in ``body``; None without one.

    At most 64 parts are searched. O(bytes), most of it in :meth:`bytes.find`.
    """
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        return None
    delimiter = b"--" + (boundary[1] or boundary[2]).encode()
    at = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter)
    for _ in range(_MAX_PARTS):
        if at < 0:
            return None
        begins = body.find(b"\r\n\r\n", at, at + _MAX_HEAD_BYTES)
        if begins < 0:
            return None
        ends = body.find(b"\r\n" + delimiter, begins + 2)
        named = _FIELD_NAME.search(body, at, begins)
        if named is not None and named[1] == name.encode() and ends >= 0:
            return min(begins + 4, ends), ends  # an empty value shares a line end with its head
        at = ends
    return None


class RouteMatch(NamedTuple):
    """A route and where its parameters are in the path: (begin, end) of each."""

    route: str
    spans: tuple[tuple[int, int], ...]


class RoutePatterns:
    """The well-formed routes under /v1/ among ``routes``; others are ignored."""

    def __init__(self, routes: Iterable[str] = ()) -> None:
        self.routes = frozenset(route for route in routes if _ROUTE.fullmatch(route))
        self._by_shape: dict[tuple[str, int], list[tuple[str, re.Pattern[str]]]] = {}
        # Fewest parameters first: /v1/a/b before /v1/a/{id}.
        for route in sorted(self.routes, key=lambda text: (text.count("{"), text)):
            method, _, path = route.partition(" ")
            pattern = re.compile(_PARAMETER.sub(lambda _: _VALUE, re.escape(path)))
            self._by_shape.setdefault((method, path.count("/")), []).append((route, pattern))

    def find(self, method: str, path: str) -> RouteMatch | None:
        """Return the route of ``path`` with the fewest parameters. O(routes of that depth)."""
        for route, pattern in self._by_shape.get((method, path.count("/")), ()):
            match = pattern.fullmatch(path)
            if match is not None:
                spans = (match.span(number + 1) for number in range(pattern.groups))
                return RouteMatch(route, tuple(spans))
        return None


class Routes:
    """A table of exact paths, and of prefixes whose routes parse the rest of the path."""

    def __init__(self) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._bodiless: set[str] = set()
        self._prefixes: list[tuple[str, dict[str, Route]]] = []
        self._rest: dict[str, Route] = {}
        self._rest_prefix = ""

    def get(self, path: str, route: Route) -> None:
        """Handle GET and HEAD of ``path``; ``/ui/`` would match all longer ones, ``/`` does not."""
        methods = {"GET": route, "HEAD": route}
        if path.endswith("/") and path != "/":
            self._prefixes.append((path, methods))
        else:
            self._exact.setdefault(path, {}).update(methods)

    def below(self, prefix: str, methods: Sequence[str], route: Route) -> None:
        """Handle ``methods`` of all paths longer than ``prefix``, which ends in ``/``."""
        self._prefixes.append((prefix, dict.fromkeys(methods, route)))

    def post(self, path: str, route: Route, bodiless: bool = False) -> None:
        """Handle POST of a JSON body to ``path``; if ``bodiless``, also without any."""
        self._exact.setdefault(path, {})["POST"] = route
        if bodiless:
            self._bodiless.add(path)

    def rest(self, prefix: str, methods: Sequence[str], route: Route) -> None:
        """Handle ``methods`` of every path under ``prefix`` that has no route of its own.

        The body of a POST is JSON or a form with files.

        ``route`` refuses those that do not exist.
        """
        self._rest_prefix = prefix
        self._rest = dict.fromkeys(methods, route)

    def wrap(self, path: str, methods: Sequence[str], wrap: Callable[[Route], Route]) -> None:
        """Replace the routes of ``path`` for ``methods`` by the results of ``wrap``."""
        routes = self._exact.get(path) or dict(self._prefixes)[path]
        routes.update({method: wrap(routes[method]) for method in methods})

    def serves(self, path: str) -> bool:
        """Return whether ``path`` has a route."""
        return path in self._exact or self._prefixed(path) is not None

    def paths(self) -> list[tuple[str, tuple[str, ...]]]:
        """Every path and its methods."""
        rows = [*self._exact.items(), *self._prefixes]
        return [(path, tuple(methods)) for path, methods in rows]

    def __call__(self, exchange: Exchange) -> None:
        """Handle ``exchange``: the handler of the HTTP server."""
        methods = self._exact.get(exchange.path) or self._prefixed(exchange.path)
        hint = "" if methods is not None else self._hint(exchange.path)
        if methods is None and not hint and exchange.method in self._rest:
            methods = self._rest if exchange.path.startswith(self._rest_prefix) else None
        if not methods:
            if exchange.path == "*":  # RFC 9110 9.3.7: OPTIONS of the server, only a ping
                exchange.respond(200, b"", "", [("allow", "GET, HEAD, POST, DELETE, OPTIONS")])
                return
            exchange.refuse(404, f"Route not found: {exchange.method} {exchange.path}{hint}")
            return
        route = methods.get(exchange.method)
        if route is None:
            if exchange.headers.get("upgrade", "").lower() == "websocket":
                # RFC 9110 15.5.22: the protocol to use. After another status Codex repeats its
                # attempt for 6 s before it sends a POST.
                upgrade = [("connection", "upgrade"), ("upgrade", "HTTP/1.1")]
                exchange.respond(426, b"", "", upgrade)
                return
            allowed = ", ".join(methods)
            text = f"{exchange.path} does not take {exchange.method}; it takes {allowed}"
            exchange.refuse(405, text, headers=[("allow", allowed)])
            return
        if exchange.method == "POST":
            content_type = exchange.headers.get("content-type")
            if not exchange.body and exchange.path in self._bodiless:
                content_type = "application/json"
            if content_type != "application/json" and not (
                _is_json(content_type) or (methods is self._rest and is_multipart(content_type))
            ):
                exchange.refuse(415, _wrong_type(content_type))
                return
            if exchange.headers.get("content-encoding", "identity") != "identity":
                text = "Content-Encoding is not supported; send the body without compression"
                exchange.refuse(415, text)
                return
        route(exchange)

    def _hint(self, path: str) -> str:
        """What is wrong with a base URL that a client has put before a path of this table."""
        if path.startswith("/v1/v1/"):
            return "; the base URL has a /v1 too many, use one without it"
        return f"; the base URL lacks /v1: /v1{path}" if f"/v1{path}" in self._exact else ""

    def _prefixed(self, path: str) -> dict[str, Route] | None:
        for prefix, methods in self._prefixes:
            if len(path) > len(prefix) and path.startswith(prefix):
                return methods
        return None


def in_task(
    spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    answer: Callable[[Exchange], Coroutine[Any, Any, None]],
) -> Route:
    """Return a route that runs ``answer`` in a task of ``spawn(work, name)``.

    The task is cancelled if the client disconnects or the deadline passes. An uncaught exception is
    a 500.
    """

    def route(exchange: Exchange) -> None:
        task = spawn(_run(exchange, answer), exchange.path)
        exchange.on_disconnect = task.cancel

    return route


async def _run(exchange: Exchange, answer: Callable[[Exchange], Coroutine[Any, Any, None]]) -> None:
    try:
        await answer(exchange)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        log.exception("%s %s failed", exchange.method, exchange.path)
        exchange.crashed(error)


def _wrong_type(content_type: str | None) -> str:
    text = "Expected request with Content-Type application/json"
    if content_type is not None and content_type.startswith("multipart/"):
        text += "; this path takes no multipart body"
    return text


def _is_json(content_type: str | None) -> bool:
    if content_type is None:
        return False
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
