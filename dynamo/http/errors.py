"""Errors of HTTP requests: a status, and an error body with the reason."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import orjson

from dynamo.errors import MESSAGE_LIMIT, shorten

if TYPE_CHECKING:
    from dynamo.http.head import Head

_REASONS = {status.value: status.phrase for status in HTTPStatus}
_REASONS.update({413: "Payload Too Large", 414: "URI Too Long", 499: "Client Closed Request"})
_REASONS[529] = "Overloaded"
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}

ErrorBodies = Callable[[str, int, str], bytes | None]
"""From path, status and message to the error body of an API with its own; None for other paths."""


class HttpStatusError(Exception):
    """The request breaks a rule or a bound; ``status``, ``body`` and ``headers`` go to the client.

    ``retry_after_s``, unless 0, is the value of the Retry-After header. ``path`` is that of the
    request, where it is known; ``bodiless``: it is a HEAD. ``cors`` are more header lines, None
    where the head was not parsed.
    """

    path: str = ""
    bodiless: bool = False
    cors: bytes | None = None

    def __init__(self, status: int, message: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers: tuple[tuple[str, str], ...] = (
            (("retry-after", str(retry_after_s)),) if retry_after_s else ()
        )

    def set_request(self, head: Head) -> None:
        """Remember what the response needs of its request, and echo the id of the client."""
        self.path, self.bodiless, self.cors = head.path, head.method == "HEAD", head.cors
        if (request_id := head.headers.get("x-request-id")) is not None:
            self.headers += (("x-request-id", request_id),)

    @property
    def body(self) -> bytes:
        """The error body."""
        return error_body(self.status, self.message)


class KeyRefused(HttpStatusError):
    """The request has no valid API key; ``given``: it has one.

    The body is OpenAI's, so that its clients raise their AuthenticationError. RFC 6750 3.
    """

    def __init__(self, message: str, *, given: bool) -> None:
        super().__init__(401, message)
        challenge = 'Bearer realm="dynamo"' + (', error="invalid_token"' if given else "")
        # Anthropic's clients obey the second; Claude Code tried a wrong key for three minutes.
        self.headers = (("www-authenticate", challenge), ("x-should-retry", "false"))

    @property
    def body(self) -> bytes:
        """OpenAI's error body."""
        error = {"message": self.message, "type": "invalid_request_error", "param": None}
        return orjson.dumps({"error": {**error, "code": "invalid_api_key"}})


def reason_phrase(status: int) -> str:
    """The reason phrase of the status line; never empty."""
    return _REASONS.get(status, "Unknown")


def openai_error(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object; its type is that of the status."""
    kind = _OPENAI_TYPES.get(status)
    if kind is None:
        kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": param, "code": code}


def error_body(
    status: int,
    message: str,
    kind: str | None = None,
    error: dict[str, Any] | None = None,
    **members: Any,
) -> bytes:
    """Dynamo's ``{"message", "type", "code"}`` with ``members``, and OpenAI's ``error`` beside it.

    OpenAI's client for Node shows only the latter. ``kind`` defaults to the reason phrase,
    ``error`` to an :func:`openai_error` without details. Messages may quote input, so a long one
    is cut to 8192 characters that end in three dots.
    """
    message = shorten(message, MESSAGE_LIMIT)
    body = {"message": message, "type": kind or reason_phrase(status), "code": status, **members}
    return orjson.dumps({**body, "error": error or openai_error(status, message)})
