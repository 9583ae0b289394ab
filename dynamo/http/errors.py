"""Errors of HTTP requests: a status, and an error body with the reason."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

import orjson

from dynamo.errors import MESSAGE_LIMIT, shorten

_REASONS = {status.value: status.phrase for status in HTTPStatus}
_REASONS.update({413: "Payload Too Large", 414: "URI Too Long", 499: "Client Closed Request"})
_REASONS[529] = "Overloaded"

ErrorBodies = Callable[[str, int, str], bytes | None]
"""From path, status and message to the error body of an API with its own; None for other paths."""


class HttpStatusError(Exception):
    """The request breaks a rule or a bound; ``status``, ``body`` and ``headers`` go to the client.

    ``retry_after_s``, unless 0, is the value of the Retry-After header. ``path`` is that of the
    request, where it is known; ``bodiless``: it is a HEAD.
    """

    path: str = ""
    bodiless: bool = False

    def __init__(self, status: int, message: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers: tuple[tuple[str, str], ...] = (
            (("retry-after", str(retry_after_s)),) if retry_after_s else ()
        )

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


def error_body(status: int, message: str, kind: str | None = None) -> bytes:
    """``{"message", "type", "code"}``; ``kind`` defaults to the reason phrase.

    Messages may quote input, so a long one is cut to 8192 characters that end in three dots.
    """
    message = shorten(message, MESSAGE_LIMIT)
    return orjson.dumps({"message": message, "type": kind or reason_phrase(status), "code": status})
