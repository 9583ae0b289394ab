"""The lines of ``GET /v1/record``: requests that have ended, without their content, and a count.

Each line is one JSON object; ``type`` distinguishes them.
"""

from __future__ import annotations

import msgspec

__all__ = ["TRACE_BLOCK_TOKENS", "RecordedRequest", "RecordingCount", "RecordingLine"]

TRACE_BLOCK_TOKENS = 512
"""Tokens per block id, as in Mooncake's traces."""


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True, tag="request", omit_defaults=True):
    """One prompt that was sent to a worker, or waited for one.

    Times are milliseconds since the recording began. ``blocks`` has one id for each
    ``TRACE_BLOCK_TOKENS`` of the prompt, the last, partial one included; an id stands for the whole
    prompt up to there. Ids of blocks and sessions depend on a key that only this recording has.
    ``session`` is None if the client named none.
    """

    model: str
    arrived_ms: float
    ended_ms: float
    input_length: int
    output_length: int
    blocks: list[int]
    session: int | None = None


class RecordingCount(msgspec.Struct, frozen=True, kw_only=True, tag="count"):
    """Sent every second: records so far, those lost because the client reads too slowly, and the
    requests that are running now."""

    recorded: int
    lost: int
    running: int


RecordingLine = RecordedRequest | RecordingCount
