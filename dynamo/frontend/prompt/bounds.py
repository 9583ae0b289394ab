"""Bounds on one request: its JSON, its lists and its choices.

Each bound is checked before the work that it bounds; docs/limits.md has them all.
"""

from __future__ import annotations

from typing import Any

from dynamo.errors import InvalidArgument, shorten

__all__ = [
    "INLINE_BODY_BYTES",
    "MAX_BODY_BYTES",
    "MAX_CHOICES",
    "MAX_COUNTED_TOKENS",
    "MAX_ENGINE_BYTES",
    "MAX_IMAGES",
    "MAX_IMAGES_BYTES",
    "MAX_JSON_DEPTH",
    "MAX_JSON_WEIGHT",
    "MAX_MESSAGES",
    "MAX_TOOLS",
    "body_limit_bytes",
    "check_engine_value",
]

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


def body_limit_bytes(context_lengths: list[int | None], media: bool = False) -> int:
    """The default limit on a body, for models of these context lengths in tokens.

    4 MiB and 32 bytes for each token of the longest context, at most 45 MiB; 45 MiB without models
    or where one does not state its length, and with ``media``.
    """
    if media:
        return MAX_BODY_BYTES
    known = [each for each in context_lengths if each is not None]
    if not known or len(known) < len(context_lengths):
        return MAX_BODY_BYTES
    return min(MAX_BODY_BYTES, _BODY_BASE_BYTES + _BODY_BYTES_PER_TOKEN * max(known))


def check_engine_value(name: str, value: Any, depth: int = MAX_JSON_DEPTH) -> None:
    """Check that free-form JSON can be sent to an engine: integers of 64 bits, bounded nesting.

    ``name`` is its place in the request. Raises InvalidArgument.
    """
    if isinstance(value, int):
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
        for each in items:
            check_engine_value(name, each, depth - 1)
