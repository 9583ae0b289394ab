"""Recording requests for an operator: what is kept of each, and the route that sends it.

One JSON object a line; :mod:`dynamo.protocols.status` describes them. ``?model=`` records one model
alone. ``dynamo record`` makes a trace of it. With ``?content=true`` lines have bodies instead
(:mod:`dynamo.frontend.requests.content`), for ``seconds=`` (600) and up to ``mb=`` (64).

Ids are keyed hashes (BLAKE2b) with a random key for each recording, which is never stored: equal
prompts have equal ids within a recording, ids of two recordings cannot be matched, and a prompt
cannot be guessed from its ids without the key.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from array import array
from hashlib import blake2b
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from dynamo.errors import DynamoError, InvalidArgument, ModelNotFound, Unavailable, shorten
from dynamo.frontend.models.registry import Models
from dynamo.frontend.requests.content import MIB, ContentRecording, ending
from dynamo.frontend.requests.engine_request import EngineRequest
from dynamo.frontend.requests.errors import error_response
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.frontend.requests.request import ActiveRequest
from dynamo.http import NEVER, Exchange, query_fields
from dynamo.http.routes import Routes, in_task
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.status import (
    CONTENT_MB,
    CONTENT_SECONDS,
    TRACE_BLOCK_TOKENS,
    RecordedRequest,
    RecordingCount,
)
from dynamo.router.caches.prompt import Hasher
from dynamo.runtime.process.tasks import Tasks

_PATH = "/v1/record"
_CONTENT_TYPE = "application/x-ndjson"
_RECORDINGS = 4
_COUNT_S = 1.0
_NUMBER = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6})?")
log = logging.getLogger(__name__)
_KEY_BYTES = 32
_ID_BYTES = 6  # 48 bits: numbers that every JSON reader takes; 2**20 blocks collide with 0.2 %
_NO_TOKEN = 2**32 - 1
_HASHER = Hasher(TRACE_BLOCK_TOKENS, local=True, chain=True, load=False, clock=time.monotonic)


class Recording:
    """Writes a line to ``exchange`` for each prompt of a request that ends, of ``model`` if given.

    A client that reads too slowly loses records: at most one write more than the buffer of its
    connection is kept.
    """

    def __init__(self, exchange: Exchange, model: str | None = None) -> None:
        self._exchange = exchange
        self._model = model
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._begun_s = time.monotonic()
        self.recorded = self.lost = 0

    def ended(self, request: ActiveRequest) -> None:
        """Record ``request``, unless it arrived before the recording began. O(tokens)."""
        name, arrived_s = request.model.name, request.exchange.received_at
        if arrived_s < self._begun_s or self._model not in (None, name):
            return
        exchange, prompts = self._exchange, request.engine_requests
        if exchange.above_high_water:
            self.lost += len(prompts)
            return
        now_s = time.monotonic()
        try:
            records = [
                self._record(name, engine_request, arrived_s, now_s) for engine_request in prompts
            ]
        except Exception:  # a record must not keep a request from ending
            log.exception("a request cannot be recorded")
            self.lost += len(prompts)
            return
        self.recorded += len(prompts)
        exchange.write(b"".join(msgspec.json.encode(record) + b"\n" for record in records))

    def _record(
        self, model: str, engine_request: EngineRequest, arrived_s: float, now_s: float
    ) -> RecordedRequest:
        prompt, routing = engine_request.original, engine_request.routing
        session = None if routing is None else routing.session_id
        return RecordedRequest(
            model=model,
            arrived_ms=round((arrived_s - self._begun_s) * 1e3, 3),
            ended_ms=round((now_s - self._begun_s) * 1e3, 3),
            input_length=_length(prompt),
            output_length=engine_request.tokens,
            blocks=self._block_ids(model, prompt),
            session=None if session is None else self._keyed(b"s" + session.encode()),
        )

    def _block_ids(self, model: str, prompt: PreprocessedRequest) -> list[int]:
        """The ids of the prompt's blocks. Prompts of two models or adapters share none."""
        tokens, routing = prompt.token_ids, prompt.routing
        if routing is not None and routing.mm_routing_info is not None:
            whole = _padded(routing.mm_routing_info.routing_token_ids)
            info = replace(routing.mm_routing_info, routing_token_ids=whole)
            routing = replace(routing, mm_routing_info=info)
        else:
            tokens = _padded(tokens)
        hashed = _HASHER.hash(tokens, routing, False, 0.0)
        chained, prefix = hashed.chained.tobytes(), b"b" + model.encode()
        return [self._keyed(prefix + chained[at : at + 8]) for at in range(0, len(chained), 8)]

    def _keyed(self, value: bytes) -> int:
        return int.from_bytes(blake2b(value, digest_size=_ID_BYTES, key=self._key).digest())


def write_count(exchange: Exchange, recording: Recording | ContentRecording, running: int) -> None:
    """Write the counts of ``recording``, unless the client is behind."""
    if not exchange.above_high_water:
        recorded, lost = recording.recorded, recording.lost
        count = RecordingCount(recorded=recorded, lost=lost, running=running)
        exchange.write(msgspec.json.encode(count) + b"\n")


def _padded(tokens: Tokens) -> Tokens:
    """Fill the last block up, so that it is hashed like the others."""
    padding = array("I", [_NO_TOKEN]) * (-len(tokens) % TRACE_BLOCK_TOKENS)
    return array("I", tokens) + padding


def _length(prompt: PreprocessedRequest) -> int:
    routing = prompt.routing
    if routing is not None and routing.mm_routing_info is not None:
        return len(routing.mm_routing_info.routing_token_ids)
    return len(prompt.token_ids)


class RecordRoutes:
    """Nothing is recorded, and nothing costs anything, while no client is connected here."""

    def __init__(self, registry: RequestRegistry, models: Models, tasks: Tasks) -> None:
        self._registry = registry
        self._models = models
        self._tasks = tasks

    def install(self, routes: Routes) -> None:
        """Add the route to the table."""
        routes.get(_PATH, in_task(self._tasks.spawn, self._record))

    async def _record(self, exchange: Exchange) -> None:
        registry = self._registry
        try:
            query = _parse(exchange.query)
            query = query._replace(model=self._model_name(query.model))
            if query.content and registry.content is not None:
                raise Unavailable("one client records content already; end that recording")
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
        if query.content:
            await self._record_content(exchange, query)
        else:
            await self._record_figures(exchange, query.model)

    async def _record_figures(self, exchange: Exchange, model: str | None) -> None:
        recordings, recording = self._registry.recordings, Recording(exchange, model)
        recordings.append(recording.ended)
        try:
            await self._count(exchange, recording)
        finally:
            recordings.remove(recording.ended)

    async def _record_content(self, exchange: Exchange, query: _Query) -> None:
        registry, key = self._registry, exchange.api_key
        name = "a client of this machine" if key is None else f"operator {key.name}"
        log.warning("%s records the content of requests, at most %g s", name, query.seconds)
        until_s = time.monotonic() + query.seconds
        recording = ContentRecording(exchange, query.model, query.mb * MIB, until_s)
        registry.content = recording
        registry.recordings.append(recording.ended)
        counts = self._tasks.spawn(self._count(exchange, recording), name="count content")
        try:
            exchange.end(ending(await recording.send()))
        finally:
            counts.cancel()
            registry.content = None
            registry.recordings.remove(recording.ended)
            log.warning("%s: the recording of content has ended", name)

    async def _count(self, exchange: Exchange, recording: Recording | ContentRecording) -> None:
        while True:
            write_count(exchange, recording, self._registry.admitted)
            await asyncio.sleep(_COUNT_S)

    def _model_name(self, name: str | None) -> str | None:
        """Return the model of a name or an alias, None for all. Raises ModelNotFound."""
        if name is None:
            return None
        entry, record = self._models.named(name), self._models.on_demand.record(name)
        if entry is not None:
            return entry.name
        if record is not None:
            return record.model
        raise ModelNotFound(f"Model not found: {shorten(name)}")


class _Query(NamedTuple):
    """What the query asks for."""

    model: str | None
    content: bool
    seconds: float
    mb: int


def _parse(query: str) -> _Query:
    """Read a query. Raises InvalidArgument."""
    fields = query_fields(query)
    unknown = ", ".join(
        f"`{shorten(name)}`"
        for name in sorted(fields.keys() - {"model", "content", "seconds", "mb"})
    )
    if unknown:
        raise InvalidArgument(f"The query takes `model`, `content`, `seconds`, `mb`, not {unknown}")
    content = fields.get("content", "false")
    if content != "true" and fields.keys() & {"seconds", "mb"}:
        raise InvalidArgument("`seconds` and `mb` belong to `content=true`")
    if content not in ("true", "false"):
        raise InvalidArgument(f"`content` must be true or false, got {shorten(content)}")
    return _Query(
        fields.get("model"),
        content == "true",
        _number("seconds", fields.get("seconds", "600"), CONTENT_SECONDS),
        max(1, int(_number("mb", fields.get("mb", "64"), CONTENT_MB))),
    )


def _number(name: str, text: str, most: int) -> float:
    """Return a number above 0. Raises InvalidArgument."""
    if not (_NUMBER.fullmatch(text) and 0 < float(text) <= most):
        raise InvalidArgument(f"`{name}` must be above 0 and at most {most}, got {shorten(text)}")
    return float(text)
