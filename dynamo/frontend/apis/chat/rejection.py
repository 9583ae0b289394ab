"""Reject a request before anything is spent on it, while its model can take none.

Of the body only the model's name is read, about 1 µs a kilobyte: no JSON tree, no chat template,
no tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.errors import DynamoError, Overloaded
from dynamo.frontend.models.registry import Models
from dynamo.frontend.prompt.bounds import INLINE_BODY_BYTES
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http import Exchange


class _Named(msgspec.Struct):
    """The members that count; the others stay undecoded."""

    model: str
    stream: Any = None


_decode = msgspec.json.Decoder(_Named).decode


def reject_early(
    registry: RequestRegistry, models: Models, exchange: Exchange, endpoint: str
) -> bool:
    """Respond with 503 while the frontend drains or the model takes no request; return True then.

    Call it while ``registry.refuses`` or ``models.saturation.count`` is set. Large bodies are left
    to :func:`reject_large`. A body that is no JSON, or names no model that is served, is left to
    the route, which explains what is wrong with it. O(bytes).
    """
    if registry.refuses:
        try:
            registry.check()
        except DynamoError as error:
            registry.refuse(exchange, endpoint, error, "unknown")
            return True
    if len(exchange.body) > INLINE_BODY_BYTES:
        return False
    return _reject(registry, models, exchange, endpoint, _named(exchange.body))


async def reject_large(
    registry: RequestRegistry, models: Models, exchange: Exchange, endpoint: str
) -> bool:
    """As :func:`reject_early` for a large body, which a thread reads."""
    asked = await registry.off_loop.run(_named, exchange.body)
    return _reject(registry, models, exchange, endpoint, asked)


def _named(body: bytes) -> _Named | None:
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _reject(
    registry: RequestRegistry,
    models: Models,
    exchange: Exchange,
    endpoint: str,
    asked: _Named | None,
) -> bool:
    entry = None if asked is None else models.named(asked.model)
    if asked is None or entry is None or not entry.served:
        return False
    try:
        entry.dispatch.check()
    except Overloaded as error:
        kind = "stream" if asked.stream is True else "unary"
        registry.refuse(exchange, endpoint, error, entry.name, kind)
        return True
    return False
