"""Error texts for bodies that the decoder refuses: they name the field and the value.

The body is decoded a second time, without types, because the decoder's own message gives neither
the value nor all unknown fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from dynamo.errors import InvalidArgument, shorten
from dynamo.protocols.openai import MAX_TOKENS_LIMIT, RANGES

__all__ = ["DESERIALIZE", "decoder_text", "explain_decode_error"]

DESERIALIZE = "Failed to deserialize the JSON body into the target type: "
_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_NAMED = 8
"""At most so many unknown fields are named."""


def explain_decode_error(
    body: bytes, error: Exception, kind: type[msgspec.Struct], ignore_unsupported: bool
) -> InvalidArgument:
    """The error for the client: what is wrong with ``body``, which is no ``kind``. O(bytes)."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as syntax:
        return InvalidArgument(f"{DESERIALIZE}{syntax}")
    if not isinstance(raw, dict):
        return InvalidArgument(f"{DESERIALIZE}expected `object`, got `{type(raw).__name__}`")
    unknown = sorted(raw.keys() - set(kind.__struct_fields__))
    if unknown and not ignore_unsupported:
        names = ", ".join(f"`{shorten(name)}`" for name in unknown[:_NAMED])
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        return InvalidArgument(f"Unsupported parameter(s): {names}{more}")
    return InvalidArgument(_out_of_range(raw) or DESERIALIZE + decoder_text(error))


def _out_of_range(raw: dict[str, Any]) -> str | None:
    for value in _numbers(map(raw.get, _TOKEN_LIMITS)):
        if value <= 0:
            return f"Validation: Max tokens must be greater than 0, got {shorten(value)}"
        if value > MAX_TOKENS_LIMIT:
            return (
                f"Validation: Max tokens must not exceed {MAX_TOKENS_LIMIT}, got {shorten(value)}"
            )
    for name, (low, high) in RANGES.items():
        given = raw.get(name)
        for value in _numbers(given.values() if isinstance(given, dict) else (given,)):
            if not low <= value <= high or (name == "repetition_penalty" and value == 0):
                title = name.replace("_penalty", " penalty").replace("_bias", " bias").capitalize()
                return f"Validation: {title} must be between {low} and {high}, got {shorten(value)}"
    return None


def _numbers(values: Iterable[Any]) -> list[int | float]:
    return [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]


def decoder_text(error: Exception) -> str:
    """``Expected `int`, got `str` - at `$.seed` `` becomes ``seed: expected `int`, got `str` ``."""
    text = str(error)
    what, found, path = text.rpartition(" - at `$")
    if not found:
        what, path = text, ""
    what = what.removeprefix("Object ").replace("missing required field", "missing field")
    what = what[:1].lower() + what[1:]
    path = path.rstrip("`").lstrip(".")
    return f"{path}: {what}" if path else what
