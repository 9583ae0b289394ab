"""Routes that report state: health, load, version, metrics, models, /openapi.json; thresholds."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from dynamo import __version__
from dynamo.errors import InvalidArgument, ModelNotFound, shorten
from dynamo.frontend.apis.messages.answer import error_message
from dynamo.frontend.apis.messages.route import model_info, model_page
from dynamo.frontend.apis.operator.adapters import (
    LOAD_PATH,
    UNLOAD_PATH,
    LoadBody,
    UnloadBody,
)
from dynamo.frontend.apis.responses.prompt import ResponsesRequest
from dynamo.frontend.models.listing import ListedModel
from dynamo.frontend.models.registry import Models
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http import Exchange
from dynamo.http.routes import Routes, in_task
from dynamo.observability.metrics import Registry
from dynamo.protocols.control import EndpointRecord
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest
from dynamo.router.eligibility.eligibility_filter import EligibilityFilter
from dynamo.runtime.endpoints.instances import Outage
from dynamo.runtime.process.tasks import Tasks

_MODELS = "/v1/models/"
_READY = "/ready"
_SLICE_S = 0.005
"""How long a scrape may hold the event loop at a time, and the last part of about 1 ms."""
_VERSION = "anthropic-version"
"""A header of Anthropic's clients, whose lists of models have another form than OpenAI's."""
_PARAMETERS = {_MODELS: "model", "/v1/requests/": "request_id"}
"""The name of the rest of a path, in ``/openapi.json``."""
_BODIES = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    LOAD_PATH: LoadBody,
    UNLOAD_PATH: UnloadBody,
}
"""The body of a path, whose schema ``/openapi.json`` has."""
_STORED = (
    ("/v1/responses/{response_id}", ("GET", "DELETE")),
    ("/v1/responses/{response_id}/input_items", ("GET",)),
    ("/v1/responses/{response_id}/cancel", ("POST",)),
)
"""The paths of stored responses, which have one entry in the table of routes."""
_VERSION_BODY = orjson.dumps({"version": __version__})
_LIVE = orjson.dumps({"status": "live", "message": "Service is live"})
_PATH = "/busy_threshold"
_IDLE = "kept, not in force: needs --admission-control token-capacity"
_NAME_CHARACTERS = 256
_MOST_TOKENS = 2**63 - 1
log = logging.getLogger(__name__)


class _Change(msgspec.Struct):
    """New values; an absent or null field leaves its value unchanged."""

    model: str
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: Annotated[int, Meta(ge=0)] | None = None
    active_prefill_tokens_threshold_frac: float | None = None


_FIELDS = {
    "active_decode_blocks_threshold": "decode_blocks_share",
    "active_prefill_tokens_threshold": "prefill_tokens",
    "active_prefill_tokens_threshold_frac": "prefill_batch_share",
}
"""Name in a body → field of ``Thresholds``."""
_change = msgspec.json.Decoder(_Change).decode


class BusyThresholdRoutes:
    """GET and POST /busy_threshold: the load above which a worker is busy. For operators.

    Bodies are those of Dynamo's request rejection page. Stateless: each model's router holds its
    thresholds.
    """

    def __init__(self, models: Models, tasks: Tasks) -> None:
        self._models = models
        self._tasks = tasks

    def install(self, routes: Routes) -> None:
        """Add the routes to the table."""
        routes.get(_PATH, self._list)
        routes.post(_PATH, in_task(self._tasks.spawn, self._set))

    def _list(self, exchange: Exchange) -> None:
        """List the models that have a threshold."""
        gates = [(model.name, model.picker.eligibility) for model in self._models.loaded_models()]
        rows = [
            _row_of(name, eligibility) for name, eligibility in gates if eligibility.thresholds.any
        ]
        exchange.respond(200, msgspec.json.encode({"thresholds": rows}))

    async def _set(self, exchange: Exchange) -> None:
        try:
            change = _change(exchange.body)
        except msgspec.ValidationError as error:
            _refuse(exchange, 422, str(error))
            return
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            _refuse(exchange, 400, f"Failed to deserialize the JSON body: {error}")
            return
        wrong = _out_of_range(change)
        entry = self._models.named(change.model)
        if wrong:
            _refuse(exchange, 400, wrong)
        elif entry is None or entry.loaded is None:
            text = f"Model '{shorten(change.model, _NAME_CHARACTERS)}' not found. "
            _refuse(exchange, 404, text + "Thresholds can only be set for discovered models.")
        else:
            changes = {field: getattr(change, name) for name, field in _FIELDS.items()}
            changes = {field: value for field, value in changes.items() if value is not None}
            eligibility = entry.loaded.picker.eligibility
            if changes:
                await entry.limit(dataclasses.replace(eligibility.thresholds, **changes))
            row = _row_of(change.model, eligibility)
            body = msgspec.json.encode(row)
            idle = "warning" in row
            if changes:
                say = log.warning if idle else log.info
                say("busy thresholds %s: %s", "kept" if idle else "set", body.decode())
            headers = [("warning", f'199 - "{_IDLE}"')] if idle else []
            exchange.respond(200, body, headers=headers)


def _row_of(model: str, eligibility: EligibilityFilter) -> dict[str, Any]:
    thresholds = eligibility.thresholds
    row = {"model": model, **{key: getattr(thresholds, field) for key, field in _FIELDS.items()}}
    in_force = eligibility.admission_control or not thresholds.any
    return row if in_force else {**row, "warning": _IDLE}


def _out_of_range(change: _Change) -> str:
    share = change.active_decode_blocks_threshold
    if share is not None and not 0 <= share <= 1:
        return f"active_decode_blocks_threshold must be between 0.0 and 1.0, got {share}"
    tokens = change.active_prefill_tokens_threshold
    if tokens is not None and tokens > _MOST_TOKENS:
        # Python refuses to print an int of more than 4300 digits.
        amount = shorten(tokens) if tokens < 1 << 256 else "a longer number"
        return f"active_prefill_tokens_threshold must be at most {_MOST_TOKENS}, got {amount}"
    fraction = change.active_prefill_tokens_threshold_frac
    if fraction is not None and fraction < 0:
        return f"active_prefill_tokens_threshold_frac must be >= 0.0, got {fraction}"
    return ""


def _refuse(exchange: Exchange, status: int, text: str) -> None:
    exchange.respond(status, msgspec.json.encode({"error": text}))


class InfoRoutes:
    """Responds from memory, at once except for a page of metrics."""

    def __init__(
        self, models: Models, requests: RequestRegistry, registry: Registry, tasks: Tasks
    ) -> None:
        self._tasks = tasks
        self._models = models
        self._requests = requests
        self._registry = registry
        self._openapi: dict[str, Any] = {}

    def install(self, routes: Routes) -> None:
        """Add the routes to the table."""
        routes.get("/live", lambda exchange: exchange.respond(200, _LIVE))
        routes.get("/health", self._health)
        # SageMaker's health check.
        routes.get("/ping", self._health)
        routes.post("/ping", self._health, bodiless=True)
        routes.get("/load", self._load)
        routes.get("/version", lambda exchange: exchange.respond(200, _VERSION_BODY))
        routes.get("/metrics", in_task(self._tasks.spawn, self._metrics))
        routes.get("/v1/models", self._list)
        routes.get(_MODELS, self._one)
        routes.get("/openapi.json", self._describe)
        routes.get("/docs", self._docs)
        self._openapi = _openapi(routes)

    def _health(self, exchange: Exchange) -> None:
        """Respond 200 when a worker can be reached, or is started when a request needs it; 503
        without one and while draining."""
        instances, outages = self._models.instances(), self._models.outages()
        rows = [_instance_row(record, outages.get(record.instance_id)) for record in instances]
        body: dict[str, Any]
        if self._requests.draining:
            body = {"status": "draining", "message": "Service is shutting down"}
        elif not instances and not self._models.on_demand.listed():
            body = {"status": "unhealthy", "message": "No endpoints available"}
        elif instances and all(record.instance_id in outages for record in instances):
            body = {"status": "unhealthy", "message": "No instance answers"}
        else:
            paths = {"dyn://{namespace}.{component}.{endpoint}".format(**row) for row in rows}
            body = {"status": "healthy", "endpoints": sorted(paths)}
        body["instances"] = rows
        # For `dynamo serve`, which has no API key and so may not read /v1/models.
        body["models"] = [model.name for model in self._models.listed()]
        exchange.respond(200 if body["status"] == "healthy" else 503, orjson.dumps(body))

    def _load(self, exchange: Exchange) -> None:
        """Respond with the requests in progress, under the name that vLLM's server has for it."""
        exchange.respond(200, orjson.dumps({"server_load": self._requests.admitted}))

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
        described = {**self._openapi, "paths": paths, "components": {"schemas": _schemas()}}
        exchange.respond(200, orjson.dumps(described))

    def _docs(self, exchange: Exchange) -> None:
        """Redirect to the description: a page that renders it would come from another site."""
        exchange.respond(303, b"", headers=[("location", "/openapi.json")])

    def _list(self, exchange: Exchange) -> None:
        if _VERSION in exchange.headers:
            self._list_as_anthropic(exchange)
            return
        rows = [_row(model, self._models.max_images(model.name)) for model in self._models.public()]
        exchange.respond(200, orjson.dumps({"object": "list", "data": rows}))

    def _list_as_anthropic(self, exchange: Exchange) -> None:
        try:
            page = model_page(self._models.public(), exchange.query)
        except (InvalidArgument, ValueError) as error:
            exchange.respond(400, error_message(400, str(error)))
            return
        exchange.respond(200, orjson.dumps(page))

    def _one(self, exchange: Exchange) -> None:
        name = exchange.path[len(_MODELS) :]
        anthropic = _VERSION in exchange.headers
        # Before /ready: the name of a model may end with it.
        for model in self._models.listed():
            if model.name == name:
                row = model_info(model) if anthropic else _row(model, self._models.max_images(name))
                exchange.respond(200, orjson.dumps(row))
                return
        if name.endswith(_READY):
            self._ready(exchange, name.removesuffix(_READY))
            return
        text = f"Model not found: {name}"
        if anthropic:
            exchange.respond(404, error_message(404, text))
        else:
            exchange.refuse(404, text)

    def _ready(self, exchange: Exchange, name: str) -> None:
        """Respond 200 if a request for model ``name`` would find a worker, 503 if not yet."""
        entry = self._models.named(name)
        if entry is None and self._models.on_demand.record(name) is None:
            error = self._models.unregistered(name)
            if isinstance(error, ModelNotFound):
                exchange.refuse(404, error.message)
                return
        ready = entry is not None and entry.served and not self._requests.draining
        exchange.respond(200 if ready else 503, orjson.dumps({"id": name, "ready": ready}))


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


def _row(model: ListedModel, max_images: int) -> dict[str, Any]:
    row: dict[str, Any] = {"id": model.name, "object": "model"}
    row |= {"created": model.created_s, "owned_by": "dynamo"}
    row |= {"root": model.root or model.name, "parent": model.parent}
    row["max_model_len"] = model.context_length
    if model.context_length is not None:
        row["context_window"] = model.context_length
    if max_images:
        row["max_images"] = max_images
    return row


def _operation() -> dict[str, Any]:
    return {"responses": {"200": {"description": "OK"}}}


def _openapi(routes: Routes) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    rows = [row for row in routes.paths() if row[0] not in ("/", "/v1/responses/")]
    for path, methods in (*rows, *_STORED):
        parameter = "response_id" if "{response_id}" in path else ""
        if path.endswith("/"):
            parameter = _PARAMETERS.get(path, "path")
            path += f"{{{parameter}}}"
        for method in methods:
            if method == "HEAD":
                continue
            operation = _operation()
            if path in _BODIES:
                schema = {"$ref": f"#/components/schemas/{_BODIES[path].__name__}"}
                content = {"application/json": {"schema": schema}}
                operation["requestBody"] = {"required": True, "content": content}
            if parameter:
                described = {"name": parameter, "in": "path", "required": True}
                operation["parameters"] = [{**described, "schema": {"type": "string"}}]
            paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "dynamo-appliance", "version": __version__},
        "paths": paths,
    }


@functools.cache
def _schemas() -> dict[str, Any]:
    """Return the schemas of the bodies: 10 ms of CPU, when they are asked for first."""
    template = "#/components/schemas/{name}"
    return msgspec.json.schema_components(_BODIES.values(), ref_template=template)[1]
