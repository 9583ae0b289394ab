"""GET /v1/requests and /v1/requests/{id}: the requests that ended last, for operators.

``?limit=`` (20) and ``model=`` choose from the list; ``/v1/requests/last`` is the newest request.
"""

from __future__ import annotations

from urllib.parse import parse_qs, unquote

import msgspec

from dynamo.errors import DynamoError, InvalidArgument, shorten
from dynamo.frontend.requests.errors import error_response
from dynamo.frontend.requests.recent import RecentRequests
from dynamo.http import Exchange
from dynamo.http.routes import Routes
from dynamo.protocols.status import RecentList

__all__ = ["RecentRoutes"]

_PATH = "/v1/requests"
_LIMIT = 20
_MOST = 1000
_LAST = "last"


class RecentRoutes:
    """Responds at once, from memory."""

    def __init__(self, recent: RecentRequests) -> None:
        self._recent = recent

    def install(self, routes: Routes) -> None:
        """Add the routes to the table."""
        routes.get(_PATH, self._list)
        routes.get(f"{_PATH}/", self._one)

    def _list(self, exchange: Exchange) -> None:
        try:
            limit, model = _parse(exchange.query)
        except DynamoError as error:
            exchange.respond(*error_response(error))
            return
        found = RecentList(requests=tuple(self._recent.newest(limit, model)))
        exchange.respond(200, msgspec.json.encode(found))

    def _one(self, exchange: Exchange) -> None:
        name = unquote(exchange.path.removeprefix(f"{_PATH}/"))
        try:
            ended = self._recent.last() if name == _LAST else self._recent.find(name)
        except DynamoError as error:
            exchange.respond(*error_response(error))
            return
        exchange.respond(200, msgspec.json.encode(ended.explained()))


def _parse(query: str) -> tuple[int, str]:
    """Return limit and model of a query. Raises InvalidArgument."""
    given = {name: values[-1] for name, values in parse_qs(query).items()}
    unknown = ", ".join(f"`{shorten(name)}`" for name in sorted(given.keys() - {"limit", "model"}))
    if unknown:
        raise InvalidArgument(f"The query takes `limit` and `model`, not {unknown}")
    text = given.get("limit", str(_LIMIT))
    if not (text.isascii() and text.isdecimal() and len(text) <= 4 and 1 <= int(text) <= _MOST):
        raise InvalidArgument(f"`limit` must be a number from 1 to {_MOST}, got {shorten(text)}")
    return int(text), given.get("model", "")
