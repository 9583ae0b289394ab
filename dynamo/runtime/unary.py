"""Requests with one response: a function as an endpoint, and a client that returns its value."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

__all__ = ["UnaryClient", "serve_unary_endpoint"]


async def serve_unary_endpoint(endpoint: Any, handler: Callable[..., Awaitable[Any]]) -> None:
    """Serve ``async def handler(request, *, context)``, whose value is the only item."""

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        yield await handler(request, context=context)

    await endpoint.serve_endpoint(generate)


class UnaryClient:
    """Calls the instances of a client in turn, for responses of one item."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def complete(self, request: Any, context: Any = None) -> Any:
        """Return the item. RuntimeError for a response of none or several."""
        stream = await self._client.round_robin(request, annotated=False, context=context)
        try:
            items = [item async for item in _first_two(stream)]
        finally:
            await stream.aclose()
        if len(items) != 1:
            count = "no item" if not items else "several items"
            raise RuntimeError(f"a unary response has {count} instead of one")
        return items[0]


async def _first_two(stream: Any) -> AsyncIterator[Any]:
    """Yield at most two items: enough to detect a response that is too long."""
    count = 0
    async for item in stream:
        yield item
        count += 1
        if count == 2:
            return
