"""The items and errors of a response as Dynamo's callers read them."""

from __future__ import annotations

from typing import Any

from dynamo.errors import InvalidArgument
from dynamo.runtime.requests import ResponseStream

__all__ = ["Annotated", "InvalidRequest", "Responses"]


class InvalidRequest(InvalidArgument, ValueError):
    """The worker's handler raised ValueError; the message quotes it. Spec 7.10."""


class Annotated:
    """One response item."""

    __slots__ = ("_data",)

    def __init__(self, data: Any) -> None:
        self._data = data

    def data(self) -> Any:
        """Return the value that the handler yielded."""
        return self._data

    def id(self) -> str | None:
        """Return None: items have no ids here."""
        return None

    def event(self) -> str | None:
        """Return None: a stream carries data only, errors are raised."""
        return None

    def comments(self) -> list[str]:
        """Return an empty list."""
        return []

    def is_error(self) -> bool:
        """Return False: the iteration raises errors."""
        return False

    def __repr__(self) -> str:
        return f"Annotated({self._data!r})"


class Responses:
    """``async for`` over one response. Dropping it before the end kills the request."""

    def __init__(self, stream: ResponseStream, annotated: bool) -> None:
        self._stream = stream
        self._annotated = annotated

    def __aiter__(self) -> Responses:
        return self

    async def __anext__(self) -> Any:
        """The next item. Raises InvalidRequest (a ValueError) or another DynamoError."""
        try:
            item = await self._stream.__anext__()
        except InvalidArgument as error:
            raise InvalidRequest(f"InvalidRequest: ValueError: {error.message}") from None
        return Annotated(item) if self._annotated else item

    async def aclose(self) -> None:
        """Kill the request unless it has ended. Idempotent."""
        await self._stream.aclose()
