"""Reader of traces in the Mooncake format: one JSON object per line, prompts as block ids.

Public origin: kvcache-ai/Mooncake, FAST25-release/traces. ``{"timestamp": ms, "input_length":
tokens, "output_length": tokens, "hash_ids": [one id per block]}``; equal ids at equal positions are
the same prefix block. Optional: ``session_id``, whose requests run one after another, and
``delay``, the milliseconds between the session's last answer and this request.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from dynamo.errors import ConfigError

__all__ = ["TraceRequest", "parents", "read_trace"]


class TraceRequest(msgspec.Struct, frozen=True):
    """One line of a trace; ``timestamp`` is milliseconds from the start."""

    hash_ids: list[int]
    output_length: int
    input_length: int | None = None
    timestamp: float = 0.0
    session_id: str | None = None
    delay: float = 0.0


def read_trace(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """Read the first ``limit`` requests. Raises ConfigError that names file, line and field."""
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
                    if found and not line.endswith(b"\n"):
                        break  # torn: a recording that was cut off in mid-write
                    raise ConfigError(f"{path}:{number}: not a trace line: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from None
    if not found:
        raise ConfigError(f"the trace {path} holds no request")
    return found


def parents(requests: Sequence[TraceRequest]) -> list[int | None]:
    """Return, for each request, the index of the one it follows up; None for a first turn.

    That is the previous request of its ``session_id``. Without one it is the latest shorter prompt
    that this prompt continues. Their common prefix is all blocks of the shorter prompt except the
    last, which the answer fills up, and at least two, because unrelated prompts share the system
    prompt. O(blocks).
    """
    by_session: dict[str, int] = {}
    by_prefix: dict[int, int] = {}
    found: list[int | None] = []
    for number, request in enumerate(requests):
        if request.session_id is not None:
            found.append(by_session.get(request.session_id))
            by_session[request.session_id] = number
            continue
        prefixes = _prefix_hashes(request.hash_ids)
        parent = None
        for prefix in reversed(prefixes[1:]):
            candidate = by_prefix.get(prefix)
            if candidate is not None:
                if len(requests[candidate].hash_ids) < len(prefixes):
                    parent = candidate
                break
        found.append(parent)
        by_prefix.update(dict.fromkeys(prefixes[1:][-2:], number))
    return found


def _prefix_hashes(block_ids: Sequence[int]) -> list[int]:
    return list(accumulate(block_ids, lambda prefix, block: hash((prefix, block)), initial=0))[1:]
