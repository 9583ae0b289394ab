"""W3C trace context, and the spans that carry it; those of :mod:`otel` are exported.

Without a tracer no span exists, and the context of a client passes to its worker unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}.*")
_STATE_CHARACTERS = 512  # the W3C lets vendors drop more


class OpenSpan:
    """A span that has begun; this one is not exported, and passes the context of a client on.

    ``headers`` make it the parent of a span elsewhere. ``recording``: it is exported, so steps and
    attributes count. Times are monotonic seconds.
    """

    recording = False

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = trace_context(headers)

    def child(self, name: str, begun_s: float, ended_s: float) -> None:
        """Add a step that has ended."""

    def end(
        self, ended_s: float, attributes: Mapping[str, str | int | float], error: str = ""
    ) -> None:
        """End the span; ``error`` is its description if it failed."""


def trace_context(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the W3C headers ``traceparent`` and ``tracestate`` among ``headers``, if valid."""
    parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
    if not _PARENT.fullmatch(parent) or len(parent) > _STATE_CHARACTERS:
        return {}
    context = {"traceparent": parent}
    if state and len(state) <= _STATE_CHARACTERS:
        context["tracestate"] = state
    return context
