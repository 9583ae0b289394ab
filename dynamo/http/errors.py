"""How a request is turned away: a status, and the error body that says why. Spec 5.4."""

from __future__ import annotations

from http import HTTPStatus

import orjson

from dynamo.errors import MESSAGE_LIMIT, shorten

__all__ = ["HttpStatusError", "error_body", "reason_phrase"]

_REASONS = {status.value: status.phrase for status in HTTPStatus}
_REASONS.update({413: "Payload Too Large", 414: "URI Too Long", 499: "Client Closed Request"})
_REASONS[529] = "Overloaded"


class HttpStatusError(Exception):
    """The request breaks a rule or a bound; ``status`` and ``message`` go to the client.

    ``retry_after_s``, unless 0, is the value of the Retry-After header.
    """

    def __init__(self, status: int, message: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s


def reason_phrase(status: int) -> str:
    """The reason phrase of the status line; never empty."""
    return _REASONS.get(status, "Unknown")


def error_body(status: int, message: str, kind: str | None = None) -> bytes:
    """``{"message", "type", "code"}``; ``kind`` defaults to the reason phrase.

    Messages may quote input, so a long one is cut to 8192 characters that end in three dots.
    """
    message = shorten(message, MESSAGE_LIMIT)
    return orjson.dumps({"message": message, "type": kind or reason_phrase(status), "code": status})
