"""Routes with a method, and with parameters in their paths: ``DELETE /v1/responses/{id}``.

The notation is that of an OpenAPI document. A parameter is one segment of the path and has only
characters that mean the same encoded and decoded, so that the path can be sent on as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["RouteMatch", "RoutePatterns"]

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.~-]*"
_ROUTE = re.compile(rf"(GET|POST|DELETE) /v1(?:/(?:{_NAME}|\{{\w+\}}))+", re.ASCII)
_PARAMETER = re.compile(r"\\\{\w+\\\}")
_VALUE = r"((?!\.{1,2}(?:/|$))[A-Za-z0-9_.~:@-]{1,256})"


class RouteMatch(NamedTuple):
    """A route and where its parameters are in the path: (begin, end) of each."""

    route: str
    spans: tuple[tuple[int, int], ...]


class RoutePatterns:
    """The well-formed routes under /v1/ among ``routes``; others are ignored."""

    def __init__(self, routes: Iterable[str] = ()) -> None:
        self.routes = frozenset(one for one in routes if _ROUTE.fullmatch(one))
        self._by_shape: dict[tuple[str, int], list[tuple[str, re.Pattern[str]]]] = {}
        for route in sorted(self.routes, key=lambda one: (one.count("{"), one)):
            method, _, path = route.partition(" ")
            pattern = re.compile(_PARAMETER.sub(lambda _: _VALUE, re.escape(path)))
            self._by_shape.setdefault((method, path.count("/")), []).append((route, pattern))

    def find(self, method: str, path: str) -> RouteMatch | None:
        """Return the route of ``path`` with the fewest parameters. O(routes of that depth)."""
        for route, pattern in self._by_shape.get((method, path.count("/")), ()):
            found = pattern.fullmatch(path)
            if found is not None:
                spans = (found.span(number + 1) for number in range(pattern.groups))
                return RouteMatch(route, tuple(spans))
        return None
