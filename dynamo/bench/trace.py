"""Reads traces in the Mooncake format: one JSON object a line, prompts as block ids.

Public origin: kvcache-ai/Mooncake, FAST25-release/traces. ``{"timestamp": ms, "input_length":
tokens, "output_length": tokens, "hash_ids": [one id per block]}``; equal ids at equal positions are
the same prefix block.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from dynamo.errors import ConfigError

__all__ = ["TraceRequest", "read_trace"]


class TraceRequest(msgspec.Struct, frozen=True):
    """One line of a trace; ``timestamp`` is milliseconds from the start."""

    hash_ids: list[int]
    output_length: int
    input_length: int | None = None
    timestamp: float = 0.0


def read_trace(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """The first ``limit`` requests of the file. Raises ConfigError naming file, line and field."""
    decode = msgspec.json.Decoder(TraceRequest).decode
    found: list[TraceRequest] = []
    try:
        with Path(path).open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(found) >= limit:
                    break
                if not line.strip():
                    continue
                try:
                    found.append(decode(line))
                except msgspec.MsgspecError as error:
                    raise ConfigError(f"{path}:{number}: not a trace line: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from None
    if not found:
        raise ConfigError(f"the trace {path} holds no request")
    return found
