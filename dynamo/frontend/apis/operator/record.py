"""GET /v1/record: a stream of records of the requests that end from now on, for operators.

One JSON object a line; :mod:`dynamo.protocols.record` describes them. ``?model=`` records one model
alone. ``dynamo record`` makes a trace of it.
"""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qs

from dynamo.errors import DynamoError, InvalidArgument, ModelNotFound, Unavailable, shorten
from dynamo.frontend.models.registry import Models
from dynamo.frontend.requests.errors import error_response
from dynamo.frontend.requests.recording import Recording
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http import NEVER, Exchange
from dynamo.http.routes import Routes, in_task
from dynamo.runtime.process.tasks import Tasks

__all__ = ["RecordRoutes"]

_PATH = "/v1/record"
_CONTENT_TYPE = "application/x-ndjson"
_RECORDINGS = 4
_COUNT_S = 1.0


class RecordRoutes:
    """Nothing is recorded, and nothing costs anything, while no client is connected here."""

    def __init__(self, registry: RequestRegistry, models: Models, tasks: Tasks) -> None:
        self._registry = registry
        self._models = models
        self._tasks = tasks

    def install(self, routes: Routes) -> None:
        """Add the route to the table."""
        routes.get(_PATH, in_task(self._tasks, self._record))

    async def _record(self, exchange: Exchange) -> None:
        registry = self._registry
        try:
            model = self._asked_model(exchange.query)
            if len(registry.recordings) >= _RECORDINGS:
                raise Unavailable(f"{_RECORDINGS} clients record already; end one of them")
        except DynamoError as error:
            exchange.respond(*error_response(error, registry.overload_status))
            return
        if exchange.method == "HEAD":
            exchange.respond(200, b"", _CONTENT_TYPE)
            return
        exchange.deadline = NEVER
        exchange.start(200, _CONTENT_TYPE, [("cache-control", "no-cache")])
        recording = Recording(exchange, model)
        registry.recordings.append(recording)
        try:
            while True:
                recording.write_count(registry.admitted)
                await asyncio.sleep(_COUNT_S)
        finally:
            registry.recordings.remove(recording)

    def _asked_model(self, query: str) -> str | None:
        """The model to record, None for all. Raises InvalidArgument and ModelNotFound."""
        given = parse_qs(query)
        unknown = ", ".join(f"`{name}`" for name in sorted(given.keys() - {"model"}))
        if unknown:
            raise InvalidArgument(f"The query takes `model`, not {unknown}")
        if "model" not in given:
            return None
        model = given["model"][-1]
        if model not in [name for name, *_ in self._models.listed()]:
            raise ModelNotFound(f"Model not found: {shorten(model)}")
        return model
