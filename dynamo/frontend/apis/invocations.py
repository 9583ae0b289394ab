"""POST /invocations, SageMaker's only route for requests: body and model choose the API.

The request then takes the path of that API through the table of routes, so the checks, limits,
metrics and errors are those of the API.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import msgspec

from dynamo.errors import DynamoError, InvalidArgument
from dynamo.frontend.models.model import api_paths
from dynamo.frontend.models.registry import Models
from dynamo.frontend.prompt.bounds import DESERIALIZE, INLINE_BODY_BYTES
from dynamo.frontend.prompt.validation import check_json
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http import Exchange
from dynamo.http.routes import Route, Routes
from dynamo.protocols.openai import CHAT_PATH, COMPLETIONS_PATH, EMBEDDINGS_PATH
from dynamo.runtime.process.tasks import Tasks

INVOCATIONS_PATH = "/invocations"
_LABEL = "invocations"


class _Members(msgspec.Struct):
    """The members that only some APIs have; the others stay undecoded."""

    model: Any = None
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    queries: msgspec.Raw = msgspec.Raw()
    text_1: msgspec.Raw = msgspec.Raw()
    data_1: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


class Invocation(NamedTuple):
    """The model that a body names, if any, and the paths of the APIs that it may be for."""

    model: Any
    paths: tuple[str, ...]


_VECTORS = (EMBEDDINGS_PATH, "/classify", "/pooling")
_SCORE = ("/v1/score",)
_API_PATHS = {
    "messages": (CHAT_PATH, *_VECTORS),
    "prompt": (COMPLETIONS_PATH,),
    "query": ("/v1/rerank",),
    "queries": _SCORE,
    "text_1": _SCORE,
    "data_1": _SCORE,
    "input": _VECTORS,
}
"""The APIs that a member of a body stands for: of several, the first that the model has."""
_ABSENT = (b"", b"null")
_decode = msgspec.json.Decoder(_Members).decode


def read_invocation(body: bytes) -> Invocation:
    """Read what chooses the API. Raises InvalidArgument. O(bytes)."""
    if len(body) > INLINE_BODY_BYTES:
        check_json(body)
    try:
        members = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{DESERIALIZE}{error}") from None
    for member, paths in _API_PATHS.items():
        if bytes(getattr(members, member)) not in _ABSENT:
            return Invocation(members.model, paths)
    expected = ", ".join(f"`{member}` ({paths[0]})" for member, paths in _API_PATHS.items())
    raise InvalidArgument(
        f"Validation: the body of {INVOCATIONS_PATH} has none of the members that choose an API; "
        f"send one of {expected}"
    )


class InvocationRoutes:
    """Passes each request to the route of its API; reads large bodies in a thread."""

    def __init__(self, registry: RequestRegistry, models: Models, tasks: Tasks) -> None:
        self._registry = registry
        self._models = models
        self._tasks = tasks

    def install(self, routes: Routes) -> None:
        """Add the route to the table, which serves its requests under their own paths."""

        def serve(exchange: Exchange) -> None:
            if len(exchange.body) > INLINE_BODY_BYTES:
                self._tasks.spawn(self._serve_large(routes, exchange), name="large body")
                return
            try:
                exchange.path = self._path(read_invocation(exchange.body))
            except DynamoError as error:
                self._refuse(exchange, error)
                return
            routes(exchange)

        routes.post(INVOCATIONS_PATH, serve)

    async def _serve_large(self, routes: Route, exchange: Exchange) -> None:
        registry = self._registry
        with registry.preparing(exchange, partial(self._refuse, exchange)):
            with registry.off_loop.hold(len(exchange.body)):
                invocation = await registry.off_loop.run(read_invocation, exchange.body)
            if exchange.gone:
                registry.abandoned(exchange, _LABEL, "unknown", False)
                return
            # Behind hold(): the route of the API counts the body itself.
            exchange.path = self._path(invocation)
            routes(exchange)

    def _refuse(self, exchange: Exchange, error: DynamoError) -> None:
        self._registry.hold_or_refuse(exchange, _LABEL, error, "unknown")

    def _path(self, invocation: Invocation) -> str:
        """Return the first path that the model has, else the first, whose API reports the error.

        For a body without a model it is the first path of any model.
        """
        first, *more = invocation.paths
        if not more:
            return first
        entries = self._models.entries()
        if isinstance(invocation.model, str) and invocation.model:
            entry = self._models.named(invocation.model)
            entries = [] if entry is None else [entry]
        own = {path for entry in entries for path in api_paths(entry)}
        return next((path for path in invocation.paths if path in own), first)
