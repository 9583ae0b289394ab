"""Read a trace of requests in any of the formats that are in use.

Mooncake's (kvcache-ai/Mooncake, FAST25-release/traces): ``{"timestamp": ms, "input_length": tokens,
"output_length": tokens, "hash_ids": [one id per block]}``; equal ids at equal positions are the
same prefix block. Optional: ``session_id``, whose requests run one after
another, and ``delay``, the milliseconds between the session's last answer and this request.

All become lengths and times alone: no text of a file is sent.
"""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from dynamo.bench.trace_formats import (
    DEFAULT_OUTPUT_TOKENS,
    AzureReader,
    MooncakeReader,
    SessionClock,
    TextBlocks,
    TraceLineError,
    TraceReader,
    TraceRequest,
    decode_line,
    parse_time,
)
from dynamo.config.client import TRACE_FORMATS
from dynamo.errors import ConfigError

_GZIP = b"\x1f\x8b"
_READERS: dict[str, Callable[[bytes], TraceReader]] = {
    "mooncake": lambda line: MooncakeReader(),
    "azure": AzureReader,
    "aiperf": lambda line: AiperfReader(),
    "tracelab": lambda line: TraceLabReader(),
}
_BLOCK_TOKENS = 512
_INPUT_EVENTS = ("user_message", "tool_result")


class _SessionTurn(msgspec.Struct):
    text: str | None = None
    texts: list[str] | None = None
    role: str | None = None
    timestamp: float | None = None
    delay: float | None = None
    output_length: int | None = None

    @property
    def words(self) -> str | None:
        """Its text; None without one."""
        return self.text if self.texts is None else " ".join(self.texts)

    @property
    def is_system(self) -> bool:
        """Whether it is a system prompt, which is no request."""
        timing = (self.timestamp, self.delay, self.output_length)
        return self.role == "system" and timing == (None, None, None)


class _Session(_SessionTurn):
    """A conversation, or with a text of its own a single turn."""

    session_id: str | int | None = None
    turns: list[_SessionTurn] | None = None


_decode_session = msgspec.json.Decoder(_Session)


class AiperfReader:
    """aiperf's ``multi_turn`` and ``single_turn`` JSONL: a conversation, or one turn, a line.

    A turn's prompt is all turns and answers before it, and its own text: 4 characters a token.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], int] = {}
        self._clock = SessionClock()
        self._lines = 0

    def read(self, line: bytes) -> Sequence[TraceRequest]:
        """See :class:`TraceReader`."""
        row = decode_line(line, _decode_session)
        self._lines += 1
        turns = [row] if row.turns is None else row.turns
        session = None
        if row.turns is not None or row.session_id is not None:
            session = str(row.session_id if row.session_id is not None else f"line {self._lines}")
        prompt = TextBlocks(self._known)
        requests = []
        for number, turn in enumerate(turns):
            words = turn.words
            if words is None:
                field = "text" if row.turns is None else f"turns[{number}].text"
                raise TraceLineError(field, "missing")
            prompt.add(words)
            if number == 0 and turn.is_system and len(turns) > 1:
                continue
            output = DEFAULT_OUTPUT_TOKENS if turn.output_length is None else turn.output_length
            at_ms = self._clock.at_ms(turn.timestamp, session)
            ids, length = prompt.prompt()
            requests.append(TraceRequest(ids, output, length, at_ms, session, turn.delay or 0.0))
            prompt.add_unknown(output)
        return requests


class _TimingEvent(msgspec.Struct):
    event_type: str | None = None
    timestamp: str | None = None


class _SessionRound(msgspec.Struct):
    session_id: str
    output_tokens: int
    input_tokens_total: int | None = None
    prefix_tokens: int | None = None
    newly_append_tokens: int | None = None
    timing_events: list[_TimingEvent] = []


_decode_round = msgspec.json.Decoder(_SessionRound)


class _Rounds:
    """One session so far: the blocks of its context, and when its last answer ended."""

    __slots__ = ("answered_ms", "blocks")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.answered_ms: float | None = None


class TraceLabReader:
    """TraceLab's normalized JSONL: a line for each call of a model, with its token counts.

    Public origin: uw-syfi/TraceLab. It has no block ids: a session keeps the blocks of its
    ``prefix_tokens`` and adds new ones, and sessions share none. A round begins with its latest
    input before the model's first output.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, _Rounds] = {}
        self._blocks = 0
        self._begun_ms: float | None = None
        self._clock = SessionClock()

    def read(self, line: bytes) -> Sequence[TraceRequest]:
        """See :class:`TraceReader`."""
        row = decode_line(line, _decode_round)
        session = self._sessions.setdefault(row.session_id, _Rounds())
        begun_ms, ended_ms = _span(row.timing_events)
        if begun_ms is not None and self._begun_ms is None:
            self._begun_ms = begun_ms
        delay_ms = 0.0
        if begun_ms is not None and session.answered_ms is not None:
            delay_ms = max(0.0, round(begun_ms - session.answered_ms, 3))
        session.answered_ms = ended_ms if ended_ms is not None else session.answered_ms
        at_ms = None if begun_ms is None else round(begun_ms - (self._begun_ms or 0.0), 3)
        length = self._length(row)
        ids = self._context(session, row.prefix_tokens or 0, length)
        at_ms = self._clock.at_ms(at_ms, row.session_id)
        return [TraceRequest(ids, row.output_tokens, length, at_ms, row.session_id, delay_ms)]

    def _length(self, row: _SessionRound) -> int:
        if row.input_tokens_total is not None:
            return row.input_tokens_total
        if row.prefix_tokens is None or row.newly_append_tokens is None:
            raise TraceLineError("input_tokens_total", "missing")
        return row.prefix_tokens + row.newly_append_tokens

    def _context(self, session: _Rounds, prefix: int, length: int) -> list[int]:
        """Return the blocks of the prompt: the full ones of its prefix are those of before."""
        kept = session.blocks[: min(prefix, length) // _BLOCK_TOKENS]
        # Rounded up: the last block is partial.
        new = -(-length // _BLOCK_TOKENS) - len(kept)
        session.blocks = [*kept, *range(self._blocks, self._blocks + new)]
        self._blocks += new
        return session.blocks


def _span(events: Iterable[_TimingEvent]) -> tuple[float | None, float | None]:
    """When the round was sent, and when its last output came, in ms; None if the events miss it."""
    begun_ms = ended_ms = None
    for event in events:
        if event.timestamp is None:
            continue
        at_ms = parse_time(event.timestamp, "timing_events[...].timestamp")
        if event.event_type not in _INPUT_EVENTS:
            ended_ms = at_ms if ended_ms is None else max(ended_ms, at_ms)
        elif ended_ms is None:
            begun_ms = at_ms if begun_ms is None else max(begun_ms, at_ms)
    return (ended_ms if begun_ms is None else begun_ms), ended_ms


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
            requests = _read(path, lines, limit, form)
    except (OSError, EOFError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"cannot read the trace {path}: {reason}") from None
    if not requests:
        raise ConfigError(f"the trace {path} holds no request")
    return sorted(requests[:limit], key=lambda request: request.timestamp)


def parents(requests: Sequence[TraceRequest]) -> list[int | None]:
    """Return, for each request, the index of the one it follows up; None for a first turn.

    That is the previous request of its ``session_id``. Without one it is the latest shorter prompt
    that this prompt continues. Their common prefix is all blocks of the shorter prompt except the
    last, which the answer fills up, and at least two, because unrelated prompts share the system
    prompt. O(blocks).
    """
    by_session: dict[str, int] = {}
    by_prefix: dict[int, int] = {}
    indices: list[int | None] = []
    for number, request in enumerate(requests):
        if request.session_id is not None:
            indices.append(by_session.get(request.session_id))
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
        indices.append(parent)
        # Of these two at least one is a prefix of the next turn: the answer changes the last block.
        by_prefix.update(dict.fromkeys(prefixes[1:][-2:], number))
    return indices


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
    requests: list[TraceRequest] = []
    reader: TraceReader | None = None
    for number, line in enumerate(lines, 1):
        if limit is not None and len(requests) >= limit:
            break
        if not line.strip():
            continue
        try:
            if reader is None:
                reader = _READERS[_detect(line) if form == "auto" else form](line)
            requests += reader.read(line)
        except TraceLineError as error:
            if requests and not line.endswith(b"\n"):
                break  # torn: a recording that was cut off in mid-write
            raise ConfigError(f"{path}:{number}: {error}") from None
    return requests


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
