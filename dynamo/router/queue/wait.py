"""Waits in a task for the decision on a request that may be queued."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dynamo.errors import Cancelled, DynamoError
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing
from dynamo.router.picker import Decision
from dynamo.router.queue.request_queue import RequestQueue
from dynamo.runtime import Context

__all__ = ["wait_for_decision"]


async def wait_for_decision(  # noqa: PLR0913 - the arguments of Picker.pick, by keyword
    queue: RequestQueue,
    request_id: str,
    tokens: Tokens,
    *,
    routing: Routing | None = None,
    override: Mapping[str, Any] | None = None,
    context: Context | None = None,
) -> Decision:
    """Return the decision of :meth:`RequestQueue.submit`, booked.

    Raises the same errors, and Cancelled when ``context`` ends first. A cancelled task leaves no
    reservation.
    """
    future: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
    free = partial(queue.picker.free, request_id)
    found = queue.submit(
        request_id,
        tokens,
        routing=routing,
        override=override,
        on_decision=partial(_resolve, future, free),
        on_error=partial(_fail, future),
    )
    if isinstance(found, Decision):
        return found

    def abort(kind: str) -> None:
        found.cancel()
        _fail(future, Cancelled("the request left the router's queue"))

    if context is not None:
        context.on_cancel(abort)
    try:
        return await future
    except asyncio.CancelledError:
        found.cancel()
        # The decision may have arrived in the loop iteration that cancelled this task.
        if future.done() and not future.cancelled() and future.exception() is None:
            free()
        raise
    finally:
        if context is not None:
            context.off_cancel(abort)


def _resolve(
    future: asyncio.Future[Decision], free: Callable[[], None], decision: Decision
) -> None:
    if future.done():
        free()
    else:
        future.set_result(decision)


def _fail(future: asyncio.Future[Decision], error: DynamoError) -> None:
    if not future.done():
        future.set_exception(error)
