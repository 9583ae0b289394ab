"""The items of a handler: encoding, Dynamo's envelopes, and the sender of handlers that push."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.errors import EngineFailure
from dynamo.protocols import codec
from dynamo.runtime.requests.stream import ServerStream

__all__ = ["ENVELOPE", "ResponseSender", "encode_item"]

ENVELOPE = "_dynamo_annotated"
"""Key of an item that wraps the value in ``data``, with ``id``, ``event`` and ``comment``."""

_NOTES = ("id", "event", "comment")
_ENCODE_ERRORS = (TypeError, ValueError, msgspec.MsgspecError, RecursionError)


class ResponseSender:
    """Sends the items of one response from a handler that has a parameter ``response_sender``.

    The handler's generator is run to its end, which ends the response unless :meth:`close` did.
    Call it on the loop of the runtime.
    """

    __slots__ = ("_stream",)

    def __init__(self, stream: ServerStream) -> None:
        self._stream = stream

    def send(self, item: Any) -> None:
        """Send one item; never blocks. Dropped after the end. EngineFailure: it has no encoding."""
        self._stream.send(encode_item(item))

    def close(self) -> None:
        """End the response. Idempotent."""
        self._stream.end()

    def close_with_error(self, message: str) -> None:
        """End the response with an error. Idempotent."""
        self._stream.error(EngineFailure(message))


def encode_item(item: Any) -> bytes:
    """Encode an item of a handler. EngineFailure: it cannot be encoded, or it is an error event.

    An envelope without notes is sent as its plain value, so that every caller can read it.
    """
    if type(item) is dict and ENVELOPE in item:
        item = _unwrapped(item)
    try:
        return codec.encode(item)
    except OverflowError:
        return codec.encode(_with_wide_integers(item))
    except _ENCODE_ERRORS as error:
        raise EngineFailure(
            f"critical error: failed serializing Python response as msgpack: {error}"
        ) from error


def _with_wide_integers(item: Any) -> Any:
    """Return ``item`` with integers beyond 64 bits as 16 bytes, big-endian, as Dynamo sends them.

    EngineFailure for integers beyond 128 bits.
    """
    if isinstance(item, dict):
        return {key: _with_wide_integers(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [_with_wide_integers(value) for value in item]
    if not isinstance(item, int) or -(2**63) <= item < 2**64:
        return item
    try:
        return item.to_bytes(16, "big", signed=item < 0)
    except OverflowError as error:
        raise EngineFailure("an integer in a response has more than 128 bits") from error


def _unwrapped(item: dict[str, Any]) -> Any:
    if item.get("event") == "error":
        comments = item.get("comment") or ["the engine sent an error event"]
        raise EngineFailure(" ".join(map(str, comments)))
    return item.get("data") if all(item.get(name) is None for name in _NOTES) else item
