"""Read a trace of requests in any of the formats that are in use.

Public origin of the first: kvcache-ai/Mooncake, FAST25-release/traces. ``{"timestamp": ms,
"input_length": tokens, "output_length": tokens, "hash_ids": [one id per block]}``; equal ids at
equal positions are the same prefix block. Optional: ``session_id``, whose requests run one after
another, and ``delay``, the milliseconds between the session's last answer and this request.
"""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from dynamo.bench.trace_formats import (
    AzureReader,
    MooncakeReader,
    TraceLineError,
    TraceReader,
    TraceRequest,
)
from dynamo.bench.trace_sessions import AiperfReader, TraceLabReader
from dynamo.config.trace import TRACE_FORMATS
from dynamo.errors import ConfigError

__all__ = ["TraceRequest", "parents", "read_trace"]

_GZIP = b"\x1f\x8b"
_READERS: dict[str, Callable[[bytes], TraceReader]] = {
    "mooncake": lambda line: MooncakeReader(),
    "azure": AzureReader,
    "aiperf": lambda line: AiperfReader(),
    "tracelab": lambda line: TraceLabReader(),
}
assert {"auto", *_READERS} == set(TRACE_FORMATS)


class _LineKind(msgspec.Struct):
    """The fields that distinguish the JSON formats."""

    turns: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    texts: msgspec.Raw = msgspec.Raw()
    timing_events: msgspec.Raw = msgspec.Raw()
    newly_append_tokens: msgspec.Raw = msgspec.Raw()


def read_trace(
    path: str | Path, limit: int | None = None, form: str = "auto"
) -> list[TraceRequest]:
    """Read the first ``limit`` requests, sorted by time. ``form`` is one of ``TRACE_FORMATS``.

    A file may be compressed with gzip. Raises ConfigError that names file, line and field.
    """
    try:
        with _open(path) as lines:
            found = _read(path, lines, limit, form)
    except (OSError, EOFError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"cannot read the trace {path}: {reason}") from None
    if not found:
        raise ConfigError(f"the trace {path} holds no request")
    return sorted(found[:limit], key=lambda request: request.timestamp)


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


@contextlib.contextmanager
def _open(path: str | Path) -> Iterator[Iterable[bytes]]:
    with Path(path).open("rb") as file:
        if file.peek(2)[:2] == _GZIP:
            with gzip.GzipFile(fileobj=file) as lines:
                yield lines
        else:
            yield file


def _read(
    path: str | Path, lines: Iterable[bytes], limit: int | None, form: str
) -> list[TraceRequest]:
    found: list[TraceRequest] = []
    reader: TraceReader | None = None
    for number, line in enumerate(lines, 1):
        if limit is not None and len(found) >= limit:
            break
        if not line.strip():
            continue
        try:
            if reader is None:
                reader = _READERS[_detect(line) if form == "auto" else form](line)
            found += reader.read(line)
        except TraceLineError as error:
            if found and not line.endswith(b"\n"):
                break  # torn: a recording that was cut off in mid-write
            raise ConfigError(f"{path}:{number}: {error}") from None
    return found


def _detect(line: bytes) -> str:
    """Return the format whose first line this is."""
    if b"ContextTokens" in line and not line.lstrip().startswith(b"{"):
        return "azure"
    try:
        kind = msgspec.json.decode(line, type=_LineKind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "mooncake"  # its reader says what is wrong
    if bytes(kind.timing_events) or bytes(kind.newly_append_tokens):
        return "tracelab"
    return "aiperf" if any(map(bytes, (kind.turns, kind.text, kind.texts))) else "mooncake"


def _prefix_hashes(block_ids: Sequence[int]) -> list[int]:
    return list(accumulate(block_ids, lambda prefix, block: hash((prefix, block)), initial=0))[1:]
