"""The routes that report state: /live, /health, /metrics, /openapi.json, /v1/models."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import orjson

from dynamo.errors import InvalidArgument
from dynamo.frontend.apis.messages.answer import error_message
from dynamo.frontend.apis.messages.route import model_info, model_page
from dynamo.frontend.apis.responses.prompt import ResponsesRequest
from dynamo.frontend.models.registry import Models
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http import Exchange
from dynamo.http.routes import Routes, in_task
from dynamo.observability.metrics import Registry
from dynamo.protocols.control import EndpointRecord
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest
from dynamo.runtime.endpoints.instances import Outage
from dynamo.runtime.process.tasks import Tasks

_MODELS = "/v1/models/"
_SLICE_S = 0.005
"""How long a scrape may hold the event loop at a time, and the last part of about 1 ms."""
_VERSION = "anthropic-version"
"""A header of Anthropic's clients, whose lists of models have another form than OpenAI's."""

_PARAMETERS = {_MODELS: "model", "/v1/requests/": "request_id"}
"""The name of the rest of a path, in ``/openapi.json``."""
_STORED = (
    ("/v1/responses/{response_id}", ("GET", "DELETE")),
    ("/v1/responses/{response_id}/input_items", ("GET",)),
    ("/v1/responses/{response_id}/cancel", ("POST",)),
)
"""The paths of stored responses, which have one entry in the table of routes."""
_LIVE = orjson.dumps({"status": "live", "message": "Service is live"})


class InfoRoutes:
    """Responds from memory, at once except for a page of metrics."""

    def __init__(
        self,
        models: Models,
        requests: RequestRegistry,
        registry: Registry,
        tasks: Tasks,
    ) -> None:
        self._tasks = tasks
        self._models = models
        self._requests = requests
        self._registry = registry
        self._openapi: dict[str, Any] = {}

    def install(self, routes: Routes) -> None:
        """Add the routes to the table."""
        routes.get("/live", self._live)
        routes.get("/health", self._health)
        routes.get("/metrics", in_task(self._tasks, self._metrics))
        routes.get("/v1/models", self._list)
        routes.get(_MODELS, self._one)
        routes.get("/openapi.json", self._describe)
        self._openapi = _openapi(routes)

    def _live(self, exchange: Exchange) -> None:
        exchange.respond(200, _LIVE)

    def _health(self, exchange: Exchange) -> None:
        """Respond 200 when a worker can be reached, or is started when a request needs it; 503
        without one and while draining."""
        instances, outages = self._models.instances(), self._models.outages()
        rows = [_instance_row(one, outages.get(one.instance_id)) for one in instances]
        body: dict[str, Any]
        if self._requests.draining:
            body = {"status": "draining", "message": "Service is shutting down"}
        elif not instances and not self._models.on_demand.listed():
            body = {"status": "unhealthy", "message": "No endpoints available"}
        elif instances and all(one.instance_id in outages for one in instances):
            body = {"status": "unhealthy", "message": "No instance answers"}
        else:
            paths = {f"dyn://{one.namespace}.{one.component}.{one.endpoint}" for one in instances}
            body = {"status": "healthy", "endpoints": sorted(paths)}
        body["instances"] = rows
        # For `dynamo serve`, which has no API key and so may not read /v1/models.
        body["models"] = [name for name, *_ in self._models.listed()]
        exchange.respond(200 if body["status"] == "healthy" else 503, orjson.dumps(body))

    async def _metrics(self, exchange: Exchange) -> None:
        """Render the page in parts, between which the loop serves other requests."""
        self._models.count()
        slices, content_type = self._registry.slices(exchange.headers.get("accept", ""))
        parts, begun_s = [], time.perf_counter()
        for part in slices:
            parts.append(part)
            if time.perf_counter() - begun_s > _SLICE_S:
                await asyncio.sleep(0)
                begun_s = time.perf_counter()
        exchange.respond(200, b"".join(parts), content_type)

    def _describe(self, exchange: Exchange) -> None:
        """Describe the routes, those that only relayed models have included."""
        paths = dict(self._openapi["paths"])
        for entry in self._models.entries():
            for path in sorted(entry.paths) if entry.served else ():
                paths.setdefault(path, {"post": _operation()})
            for route in sorted(entry.patterns.routes) if entry.served else ():
                method, _, path = route.partition(" ")
                paths[path] = {method.lower(): _operation(), **paths.get(path, {})}
        exchange.respond(200, orjson.dumps({**self._openapi, "paths": paths}))

    def _list(self, exchange: Exchange) -> None:
        if _VERSION in exchange.headers:
            self._list_as_anthropic(exchange)
            return
        rows = [_row(*one) for one in self._models.listed()]
        exchange.respond(200, orjson.dumps({"object": "list", "data": rows}))

    def _list_as_anthropic(self, exchange: Exchange) -> None:
        try:
            page = model_page(self._models.listed(), exchange.query)
        except (InvalidArgument, ValueError) as error:
            exchange.respond(400, error_message(400, str(error)))
            return
        exchange.respond(200, orjson.dumps(page))

    def _one(self, exchange: Exchange) -> None:
        name = exchange.path[len(_MODELS) :]
        anthropic = _VERSION in exchange.headers
        for one in self._models.listed():
            if one[0] == name:
                row = model_info(*one) if anthropic else _row(*one)
                exchange.respond(200, orjson.dumps(row))
                return
        text = f"Model not found: {name}"
        if anthropic:
            exchange.respond(404, error_message(404, text))
        else:
            exchange.refuse(404, text)


def _instance_row(record: EndpointRecord, outage: Outage | None) -> dict[str, Any]:
    row = {
        "namespace": record.namespace,
        "component": record.component,
        "endpoint": record.endpoint,
        "instance_id": record.instance_id,
        "transport": record.transport,
        "device_type": record.device_type,
        "request_plane_codec": record.request_plane_codec,
    }
    if outage is not None:
        row["unavailable"] = {"reason": outage.reason, "message": outage.text}
    return row


def _row(name: str, created: int, context_length: int | None) -> dict[str, Any]:
    row = {"id": name, "object": "model", "created": created, "owned_by": "dynamo"}
    if context_length is not None:
        row["context_window"] = context_length
    return row


def _operation() -> dict[str, Any]:
    return {"responses": {"200": {"description": "OK"}}}


def _openapi(routes: Routes) -> dict[str, Any]:
    bodies = {
        "/v1/chat/completions": ChatCompletionRequest,
        "/v1/completions": CompletionRequest,
        "/v1/responses": ResponsesRequest,
    }
    _, schemas = msgspec.json.schema_components(
        bodies.values(), ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {}
    rows = [row for row in routes.paths() if row[0] not in ("/", "/v1/responses/")]
    for path, methods in (*rows, *_STORED):
        rest = _PARAMETERS.get(path, "path") if path.endswith("/") else ""
        shown = f"{path}{{{rest}}}" if rest else path
        rest = "response_id" if "{response_id}" in path else rest
        for method in methods:
            if method == "HEAD":
                continue
            operation = _operation()
            if path in bodies:
                schema = {"$ref": f"#/components/schemas/{bodies[path].__name__}"}
                content = {"application/json": {"schema": schema}}
                operation["requestBody"] = {"required": True, "content": content}
            if rest:
                parameter = {"name": rest, "in": "path", "required": True}
                operation["parameters"] = [{**parameter, "schema": {"type": "string"}}]
            paths.setdefault(shown, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "NVIDIA Dynamo OpenAI Frontend", "version": "1.0.0"},
        "paths": paths,
        "components": {"schemas": schemas},
    }
