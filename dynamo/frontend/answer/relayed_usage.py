"""Token counts of a response that is relayed unread: its events, and the ``usage`` at its end.

Nothing is parsed while the bytes pass: a search for the beginnings of events in each part, and one
search for ``usage`` in the last parts.
"""

from __future__ import annotations

from collections import deque
from json import JSONDecodeError, JSONDecoder
from typing import Any

from dynamo.frontend.answer.generation import Usage

__all__ = ["EventCounter", "find_usage", "usage_of"]

_EVENT = b"\ndata:"
_KEPT_PARTS = 4
_USAGE = '"usage"'
_LIMIT = 2**48
_BESIDE_INPUT = ("cache_read_input_tokens", "cache_creation_input_tokens")
_DECODE = JSONDecoder().raw_decode


class EventCounter:
    """Counts server-sent events in a stream that is cut anywhere.

    ``last_parts`` are the last few parts, where the usage is. The count includes the event
    ``[DONE]``.
    """

    __slots__ = ("_tail", "last_parts")

    def __init__(self) -> None:
        self._tail = b"\n"
        self.last_parts: deque[bytes] = deque(maxlen=_KEPT_PARTS)

    @property
    def between_events(self) -> bool:
        """Whether the bytes so far end with a complete event: another one may follow."""
        return self._tail.endswith((b"\n\n", b"\r\n\r\n")) or self._tail == b"\n"

    def count(self, part: bytes) -> int:
        """Return how many events begin in ``part``, or with it. O(bytes)."""
        # The tail is one byte shorter than what is searched for, so nothing is counted twice.
        text = self._tail + part
        self._tail = text[1 - len(_EVENT) :]
        self.last_parts.append(part)
        return text.count(_EVENT)


def find_usage(text: bytes) -> Usage | None:
    """Return the last ``usage`` object in ``text``, part of a response; None without one.

    Understands the names of chat and text completions, of /v1/responses and of /v1/messages.
    """
    whole = text.decode(errors="replace")
    place = whole.rfind(_USAGE)
    while place >= 0:
        found = _object_after(whole, place + len(_USAGE))
        if found is not None:
            return usage_of(found)
        place = whole.rfind(_USAGE, 0, place)
    return None


def _object_after(text: str, place: int) -> dict[str, Any] | None:
    """The object that follows the colon at ``place``, if there is one, whole."""
    rest = text[place : place + 4096].lstrip()
    if not rest.startswith(":"):
        return None
    try:
        found, _ = _DECODE(rest[1:].lstrip())
    except (JSONDecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def usage_of(found: dict[str, Any]) -> Usage:
    """Return the counts of a ``usage`` object; what it lacks or states wrongly is 0 or None."""
    details = found.get("prompt_tokens_details") or found.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    if cached is None:
        cached = found.get("cache_read_input_tokens")
    prompt_tokens = _count(found, "prompt_tokens", "input_tokens")
    # Of /v1/messages: there the input is what was neither found in a cache nor added to it.
    prompt_tokens += sum(_count(found, name) for name in _BESIDE_INPUT)
    return Usage(
        prompt_tokens,
        _count(found, "completion_tokens", "output_tokens"),
        cached if _is_count(cached) else None,
    )


def _count(found: dict[str, Any], *names: str) -> int:
    return next((found[name] for name in names if _is_count(found.get(name))), 0)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LIMIT
