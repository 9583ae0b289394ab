"""What stands in the router's line, and how a task waits with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from dynamo.errors import Cancelled, DynamoError
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing
from dynamo.router.picker import Decision
from dynamo.runtime import Context

if TYPE_CHECKING:
    from dynamo.router.queue.request_queue import RequestQueue

__all__ = ["Handle", "Later", "OnDecision", "OnError", "QueuedRequest", "place"]

OnDecision = Callable[[Decision], None]
OnError = Callable[[DynamoError], None]


class Handle(Protocol):
    """A call to come."""

    def cancel(self) -> None:
        """It shall not come."""
        ...


Later = Callable[[float, Callable[[], None]], Handle]
"""(delay in seconds, what to call) to a handle."""


class QueuedRequest:
    """A request in line. ``cancel`` it when nobody wants its decision any more."""

    __slots__ = (
        "_leave",
        "on_decision",
        "on_error",
        "override",
        "request_id",
        "routing",
        "seen_s",
        "tokens",
    )

    def __init__(
        self,
        leave: Callable[[QueuedRequest], None],
        request_id: str,
        tokens: Tokens,
        routing: Routing | None,
        override: Mapping[str, Any] | None,
        on_decision: OnDecision,
        on_error: OnError,
    ) -> None:
        self._leave = leave
        self.request_id = request_id
        self.tokens = tokens
        self.routing = routing
        self.override = override
        self.on_decision = on_decision
        self.on_error = on_error
        self.seen_s = 0.0

    def cancel(self) -> None:
        """Leave the line: nothing is booked, nobody is called. Idempotent, also after the end."""
        self._leave(self)


async def place(
    queue: RequestQueue,
    request_id: str,
    tokens: Tokens,
    *,
    routing: Routing | None = None,
    override: Mapping[str, Any] | None = None,
    context: Context | None = None,
) -> Decision:
    """Wait in a task for the decision of :meth:`RequestQueue.submit`.

    Raises the same errors, and Cancelled when ``context`` ends first. A cancelled task leaves no
    reservation."""
    future: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
    free = partial(queue.picker.free, request_id)
    found = queue.submit(
        request_id,
        tokens,
        routing=routing,
        override=override,
        on_decision=partial(_settle, future, free),
        on_error=partial(_fail, future),
    )
    if not isinstance(found, QueuedRequest):
        return found

    def left(kind: str) -> None:
        found.cancel()
        _fail(future, Cancelled("the request left the router's queue"))

    if context is not None:
        context.on_cancel(left)
    try:
        return await future
    except asyncio.CancelledError:
        found.cancel()
        if future.done() and not future.cancelled() and future.exception() is None:
            free()
        raise
    finally:
        if context is not None:
            context.off_cancel(left)


def _settle(future: asyncio.Future[Decision], free: Callable[[], None], decision: Decision) -> None:
    if future.done():
        free()
    else:
        future.set_result(decision)


def _fail(future: asyncio.Future[Decision], error: DynamoError) -> None:
    if not future.done():
        future.set_exception(error)
