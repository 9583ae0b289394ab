"""GET /v1/models for clients that send ``anthropic-version``: Anthropic's pages of models."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

from dynamo.errors import InvalidArgument, shorten

__all__ = ["model_info", "model_page"]

Listed = tuple[str, int, int | None]
"""Name, time of creation in seconds since the epoch, context length in tokens."""

_DEFAULT_LIMIT = 20
_MAX_LIMIT = 1000


def model_info(name: str, created: int, context_length: int | None) -> dict[str, Any]:
    """One model."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": context_length,
        "max_tokens": context_length,
    }


def model_page(listed: Sequence[Listed], query: str) -> dict[str, Any]:
    """A page of ``listed``. ``query`` may have limit, after_id and before_id.

    Raises InvalidArgument.
    """
    given = {name: values[-1] for name, values in parse_qs(query, max_num_fields=8).items()}
    limit = _limit(given.get("limit"))
    names = [one[0] for one in listed]
    begin, end = 0, len(names)
    if "after_id" in given:
        begin = _place(names, "after_id", given["after_id"]) + 1
    if "before_id" in given:
        end = _place(names, "before_id", given["before_id"])
    if "before_id" in given and "after_id" not in given:
        shown, more = listed[max(end - limit, 0) : end], end > limit
    else:
        shown, more = listed[begin : min(begin + limit, end)], begin + limit < end
    return {
        "data": [model_info(*one) for one in shown],
        "has_more": more,
        "first_id": shown[0][0] if shown else None,
        "last_id": shown[-1][0] if shown else None,
    }


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    if not text.isdecimal() or len(text) > 4 or not 1 <= int(text) <= _MAX_LIMIT:
        raise InvalidArgument(
            f"limit: must be a number from 1 to {_MAX_LIMIT}, got {shorten(repr(text))}"
        )
    return int(text)


def _place(names: list[str], field: str, name: str) -> int:
    if name not in names:
        raise InvalidArgument(f"{field}: no model `{shorten(name)}`")
    return names.index(name)
