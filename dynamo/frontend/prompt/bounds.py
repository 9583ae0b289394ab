"""Bounds of request bodies, and errors of their decoding in the words of the API.

Each bound is checked before the work that it bounds; docs/limits.md has them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dynamo.errors import InvalidArgument, shorten
from dynamo.protocols.openai import MAX_TOKENS_LIMIT, RANGES

INLINE_BODY_BYTES = 128 << 10
"""Larger bodies are decoded, rendered and tokenized in a thread."""
MAX_JSON_DEPTH = 128
MAX_JSON_WEIGHT = 1_250_000
"""In the units of :func:`dynamo._fast.json_shape.measure`: some 50 ms of decoding."""
MAX_MESSAGES = 16_384
MAX_TOOLS = 4_096
MAX_CHOICES = 1_024
"""Prompts times ``n``."""
MAX_COUNTED_TOKENS = 1 << 20
"""Of a prompt that is tokenized but not generated from, which may exceed the model's context."""
MAX_ENGINE_BYTES = 80 << 20
"""Sent to engines for all choices together: 128 choices of a prompt of 128 Ki tokens fit."""
MAX_IMAGES = 64
"""In a request; a model may take fewer."""
MAX_IMAGES_BYTES = 24 << 20
"""Of all images of a request as data: URLs. A message to a worker has at most 32 MiB by default."""
MAX_BODY_BYTES = 45 << 20
_BODY_BASE_BYTES = 4 << 20
_BODY_BYTES_PER_TOKEN = 32
DESERIALIZE = "Failed to deserialize the JSON body into the target type: "
_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_NAMED = 8
"""At most so many unknown fields are named."""


def unsupported(names: Iterable[str]) -> InvalidArgument:
    """The error for fields that no API here has."""
    unknown = sorted(names)
    listed = ", ".join(f"`{shorten(name)}`" for name in unknown[:_NAMED])
    more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
    return InvalidArgument(f"Unsupported parameter(s): {listed}{more}")


def invalid_value(raw: dict[str, Any], error: Exception) -> InvalidArgument:
    """The error for a body whose members ``raw`` are of a wrong type or out of range."""
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
        values = raw.get(name)
        for value in _numbers(values.values() if isinstance(values, dict) else (values,)):
            if not low <= value <= high or (name == "repetition_penalty" and value == 0):
                title = name.replace("_penalty", " penalty").replace("_bias", " bias").capitalize()
                return f"Validation: {title} must be between {low} and {high}, got {shorten(value)}"
    return None


def _numbers(values: Iterable[Any]) -> list[int | float]:
    return [value for value in values if type(value) in (int, float)]


def decoder_text(error: Exception) -> str:
    """``Expected `int`, got `str` - at `$.seed` `` becomes ``seed: expected `int`, got `str` ``."""
    text = str(error)
    problem, separator, path = text.rpartition(" - at `$")
    if not separator:
        problem, path = text, ""
    problem = problem.removeprefix("Object ").replace("missing required field", "missing field")
    problem = problem[:1].lower() + problem[1:]
    path = path.rstrip("`").lstrip(".")
    return f"{path}: {problem}" if path else problem


def body_limit_bytes(context_lengths: list[int | None], media: bool = False) -> int:
    """The default limit on a body, for models of these context lengths in tokens.

    4 MiB and 32 bytes for each token of the longest context, at most 45 MiB; 45 MiB without models
    or where one does not state its length, and with ``media``.
    """
    if media:
        return MAX_BODY_BYTES
    lengths = [length for length in context_lengths if length is not None]
    if not lengths or len(lengths) < len(context_lengths):
        return MAX_BODY_BYTES
    return min(MAX_BODY_BYTES, _BODY_BASE_BYTES + _BODY_BYTES_PER_TOKEN * max(lengths))


def check_engine_value(name: str, value: Any, depth: int = MAX_JSON_DEPTH) -> None:
    """Check that free-form JSON can be sent to an engine: integers of 64 bits, bounded nesting.

    ``name`` is its place in the request. Raises InvalidArgument.
    """
    if isinstance(value, int):
        # MessagePack has 64 bits for an integer, with a sign for negative ones alone.
        if not -(2**63) <= value < 2**64:
            raise InvalidArgument(
                f"Validation: {name}: integers must be between -2**63 and 2**64-1, "
                f"got {shorten(value)}"
            )
    elif isinstance(value, dict | list):
        if not depth:
            raise InvalidArgument(
                f"Validation: {name} is nested too deeply: at most {MAX_JSON_DEPTH} levels of "
                "objects and arrays"
            )
        items = value.values() if isinstance(value, dict) else value
        for item in items:
            check_engine_value(name, item, depth - 1)
