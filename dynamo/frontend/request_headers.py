"""What a client says in HTTP headers: its request id, and where the request should go. Spec 5.7."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Mapping

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.protocols.engine import Routing

__all__ = ["new_request_id", "request_id", "routed"]

_RANDOM = random.Random()
_INTEGERS = {
    "x-worker-instance-id": "backend_instance_id",
    "x-dynamo-worker-instance-id": "backend_instance_id",
    "x-prefill-instance-id": "prefill_worker_id",
    "x-dynamo-prefill-instance-id": "prefill_worker_id",
    "x-dp-rank": "dp_rank",
    "x-data-parallel-rank": "dp_rank",
    "x-dynamo-dp-rank": "dp_rank",
    "x-prefill-dp-rank": "prefill_dp_rank",
    "x-dynamo-prefill-dp-rank": "prefill_dp_rank",
    "x-dynamo-request-priority": "priority",
    "x-dynamo-request-strict-priority": "strict_priority",
}
_TEXTS = {"x-dynamo-session-id": "session_id"}
_ROUTING = frozenset((*_INTEGERS, *_TEXTS))


def new_request_id() -> str:
    """A random UUID (version 4), four times as fast as ``uuid.uuid4``; not a secret."""
    bits = f"{_RANDOM.getrandbits(128):032x}"
    return f"{bits[:8]}-{bits[8:12]}-4{bits[13:16]}-a{bits[17:20]}-{bits[20:]}"


def request_id(headers: Mapping[str, str]) -> tuple[str, str | None]:
    """The internal id, and what the client gave as its own (to be echoed), if anything.

    The client's becomes the internal one if it is a UUID.
    """
    given = headers.get("x-request-id")
    if given is None:
        return new_request_id(), None
    try:
        return str(uuid.UUID(given)), given
    except ValueError:
        return new_request_id(), given


def routed(routing: Routing | None, headers: Mapping[str, str]) -> Routing | None:
    """``routing`` with what the headers say on top; the same object if they say nothing.

    Raises InvalidArgument naming the header.
    """
    if _ROUTING.isdisjoint(headers):
        return routing
    changes: dict[str, int | str] = {}
    for name, field in _INTEGERS.items():
        if name in headers:
            changes[field] = _integer(name, headers[name])
    for name, field in _TEXTS.items():
        if name in headers:
            changes[field] = headers[name]
    replace: Callable[..., Routing] = msgspec.structs.replace
    return replace(routing or Routing(), **changes)


def _integer(name: str, text: str) -> int:
    if text.isascii() and text.isdecimal():
        value = int(text)
        if value < 2**64:
            return value
    raise InvalidArgument(f"Header '{name}' must be a non-negative integer, got {text!r}")
