"""POST /invocations, SageMaker's only route for requests: the members of the body choose the API.

The request then takes the path of that API through the table of routes, so the checks, limits,
metrics and errors are those of the API.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

import msgspec

from dynamo.errors import DynamoError, InvalidArgument
from dynamo.frontend.prompt.bounds import DESERIALIZE, INLINE_BODY_BYTES
from dynamo.frontend.prompt.validation import check_json
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http import Exchange
from dynamo.http.routes import Route, Routes
from dynamo.protocols.openai import CHAT_PATH, COMPLETIONS_PATH, EMBEDDINGS_PATH
from dynamo.runtime.process.tasks import Tasks

INVOCATIONS_PATH = "/invocations"
_LABEL = "invocations"
log = logging.getLogger(__name__)


class _Members(msgspec.Struct):
    """The members that only one API has; the others stay undecoded."""

    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    queries: msgspec.Raw = msgspec.Raw()
    text_1: msgspec.Raw = msgspec.Raw()
    data_1: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


class _ApiMember(NamedTuple):
    """A member of bodies and the path of the API that has it."""

    member: str
    path: str


_API_MEMBERS = (
    _ApiMember("messages", CHAT_PATH),
    _ApiMember("prompt", COMPLETIONS_PATH),
    _ApiMember("query", "/v1/rerank"),
    _ApiMember("queries", "/v1/score"),
    _ApiMember("text_1", "/v1/score"),
    _ApiMember("data_1", "/v1/score"),
    _ApiMember("input", EMBEDDINGS_PATH),
)
"""The first that a body has counts."""
_ABSENT = (b"", b"null")
_decode = msgspec.json.Decoder(_Members).decode


def api_path(body: bytes) -> str:
    """Return the path of the API that ``body`` is for. Raises InvalidArgument. O(bytes)."""
    if len(body) > INLINE_BODY_BYTES:
        check_json(body)
    try:
        members = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{DESERIALIZE}{error}") from None
    for member, path in _API_MEMBERS:
        if bytes(getattr(members, member)) not in _ABSENT:
            return path
    expected = ", ".join(f"`{choice.member}` ({choice.path})" for choice in _API_MEMBERS)
    raise InvalidArgument(
        f"Validation: the body of {INVOCATIONS_PATH} has none of the members that choose an API; "
        f"send one of {expected}"
    )


class InvocationRoutes:
    """Passes each request to the route of its API; reads large bodies in a thread."""

    def __init__(self, registry: RequestRegistry, tasks: Tasks) -> None:
        self._registry = registry
        self._tasks = tasks

    def install(self, routes: Routes) -> None:
        """Add the route to the table, which serves its requests under their own paths."""

        def serve(exchange: Exchange) -> None:
            if len(exchange.body) > INLINE_BODY_BYTES:
                self._tasks.spawn(self._serve_large(routes, exchange), name="large body")
                return
            try:
                exchange.path = api_path(exchange.body)
            except DynamoError as error:
                self._registry.hold_or_refuse(exchange, _LABEL, error, "unknown")
                return
            routes(exchange)

        routes.post(INVOCATIONS_PATH, serve)

    async def _serve_large(self, routes: Route, exchange: Exchange) -> None:
        registry = self._registry
        registry.enter()
        try:
            with registry.off_loop.hold(len(exchange.body)):
                path = await registry.off_loop.run(api_path, exchange.body)
            if exchange.gone:
                registry.abandoned(exchange, _LABEL, "unknown", False)
                return
            # Behind hold(): the route of the API counts the body itself.
            exchange.path = path
            routes(exchange)
        except DynamoError as error:
            registry.hold_or_refuse(exchange, _LABEL, error, "unknown")
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # also panics in Rust
            log.exception("a request to %s failed", INVOCATIONS_PATH)
            exchange.crashed(error)
        finally:
            registry.leave()
