"""The formats of traces, a line at a time: Mooncake's JSONL and Azure's CSV.

A reader turns the lines of one file into requests. What a format does not have stays out: without
block ids ``hash_ids`` is empty, and the prompt shares nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol, TypeVar

import msgspec

DEFAULT_OUTPUT_TOKENS = 128
"""Of a request whose trace does not say how long its answer is."""

_BLOCK_TOKENS = 512
_CHARS_PER_TOKEN = 4
_BLOCK_CHARS = _BLOCK_TOKENS * _CHARS_PER_TOKEN
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING = re.compile(r"required field `([^`]*)`")
_T = TypeVar("_T")


class TraceLineError(Exception):
    """A line is not of its format; ``field`` is "" if no single field is wrong."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.field = field


class TraceRequest(msgspec.Struct, frozen=True):
    """One request; ``timestamp`` is milliseconds from the start, ``delay`` from the session's last
    answer."""

    hash_ids: list[int]
    output_length: int
    input_length: int | None = None
    timestamp: float = 0.0
    session_id: str | None = None
    delay: float = 0.0


class TraceReader(Protocol):
    """Reads the lines of one file in their order."""

    def read(self, line: bytes) -> Sequence[TraceRequest]:
        """Return the requests of one line, none for a title. Raises TraceLineError."""


class SessionClock:
    """Gives a request without a time that of the one before it in its session: its delay counts."""

    def __init__(self) -> None:
        self._last_ms: dict[str, float] = {}

    def at_ms(self, given_ms: float | None, session: str | None) -> float:
        """Return the time of the next request of ``session``."""
        if session is None:
            return given_ms or 0.0
        time_ms = self._last_ms.get(session, 0.0) if given_ms is None else given_ms
        self._last_ms[session] = time_ms
        return time_ms


class TextBlocks:
    """A prompt that is known as text, as block ids: 4 characters count as a token.

    Texts that begin alike have the same ids, if they share ``known_ids``.
    """

    def __init__(self, known_ids: dict[tuple[int, str], int]) -> None:
        self._known = known_ids
        self._ids: list[int] = []
        self._tail = ""

    def add(self, text: str) -> None:
        """Append ``text`` to the prompt. O(characters)."""
        whole = self._tail + text
        full = len(whole) - len(whole) % _BLOCK_CHARS
        for start in range(0, full, _BLOCK_CHARS):
            self._ids.append(self._id(whole[start : start + _BLOCK_CHARS]))
        self._tail = whole[full:]

    def add_unknown(self, tokens: int) -> None:
        """Append ``tokens`` tokens that no other prompt has: an answer."""
        # No other prompt has this text: the number of known blocks grows with each new one.
        self.add(f"\0{len(self._known)}\0".ljust(tokens * _CHARS_PER_TOKEN, "."))

    def prompt(self) -> tuple[list[int], int]:
        """Return block ids, that of the partial block included, and the length in tokens."""
        tail = [self._id(self._tail)] if self._tail else []
        chars = len(self._ids) * _BLOCK_CHARS + len(self._tail)
        return self._ids + tail, max(1, chars // _CHARS_PER_TOKEN)

    def _id(self, text: str) -> int:
        before = self._ids[-1] if self._ids else -1
        # With the block before it: an id stands for the whole prefix.
        return self._known.setdefault((before, text), len(self._known))


class _MooncakeLine(msgspec.Struct):
    """Mooncake's fields; those from ``text_input`` on are aiperf's."""

    hash_ids: list[int] | None = None
    input_length: int | None = None
    output_length: int | None = None
    timestamp: float | None = None
    session_id: str | int | None = None
    delay: float | None = None
    text_input: str | None = None
    messages: msgspec.Raw = msgspec.Raw()
    message_mode: str = "history"
    payload: msgspec.Raw = msgspec.Raw()


_decode_mooncake = msgspec.json.Decoder(_MooncakeLine)


class MooncakeReader:
    """Mooncake's JSONL, with aiperf's additions: sessions, delays, prompts as text or messages."""

    def __init__(self) -> None:
        self._clock = SessionClock()
        self._known: dict[tuple[int, str], int] = {}
        self._prompts: dict[str | None, TextBlocks] = {}

    def read(self, line: bytes) -> Sequence[TraceRequest]:
        """See :class:`TraceReader`."""
        row = decode_line(line, _decode_mooncake)
        session = None if row.session_id is None else str(row.session_id)
        output = DEFAULT_OUTPUT_TOKENS if row.output_length is None else row.output_length
        ids, length = self._prompt(row, session, output)
        at_ms = self._clock.at_ms(row.timestamp, session)
        return [TraceRequest(ids, output, length, at_ms, session, row.delay or 0.0)]

    def _prompt(
        self, row: _MooncakeLine, session: str | None, output: int
    ) -> tuple[list[int], int | None]:
        if row.hash_ids is not None:
            return row.hash_ids, row.input_length
        if row.input_length is not None:
            return [], row.input_length
        text = row.text_input
        if text is None:
            raw = bytes(row.messages) or bytes(row.payload)
            if not raw:
                raise TraceLineError("hash_ids", "missing, and so are input_length and text_input")
            text = raw.decode()[:-1]  # without the bracket: the next turn goes on there
        if row.message_mode != "delta":
            prompt = TextBlocks(self._known)
            prompt.add(text)
            return prompt.prompt()
        prompt = self._prompts.setdefault(session, TextBlocks(self._known))
        prompt.add(text)
        blocks = prompt.prompt()
        prompt.add_unknown(output)
        return blocks


class AzureReader:
    """Azure's CSV of 2023 and 2024: ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``.

    Public origin: Azure/AzurePublicDataset. The columns may be in another order, and among others.
    """

    def __init__(self, title: bytes) -> None:
        names = _cells(title)
        try:
            self._places = [
                names.index(name) for name in ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
            ]
        except ValueError as error:
            raise TraceLineError("", f"the first line must name the columns: {error}") from None
        self._title: bytes | None = title
        self._width = len(names)
        self._begun_ms: float | None = None

    def read(self, line: bytes) -> Sequence[TraceRequest]:
        """See :class:`TraceReader`."""
        if line == self._title:
            self._title = None
            return ()
        cells = _cells(line)
        if len(cells) != self._width:
            raise TraceLineError("", f"{len(cells)} columns, the first line has {self._width}")
        time, context, generated = (cells[column] for column in self._places)
        at_ms = parse_time(time, "TIMESTAMP")
        if self._begun_ms is None:
            self._begun_ms = at_ms
        return [
            TraceRequest(
                [],
                _tokens(generated, "GeneratedTokens"),
                _tokens(context, "ContextTokens"),
                round(at_ms - self._begun_ms, 3),
            )
        ]


def decode_line(line: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    """Decode a line of JSON. Raises TraceLineError."""
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)
        path, missing = _PLACE.search(text), _MISSING.search(text)
        parts = [path[1] if path else "", missing[1] if missing else ""]
        reason = _PLACE.sub("", text)
        raise TraceLineError(".".join(filter(None, parts)), f"not a trace line: {reason}") from None


def parse_time(text: str, field: str) -> float:
    """Return an ISO 8601 time in ms; one without a zone is UTC. Raises TraceLineError."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise TraceLineError(field, f"not a time: {text[:64]!r}") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1e3


def _cells(line: bytes) -> list[str]:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceLineError("", f"not text: {error}") from None
    return [cell.strip().strip('"') for cell in text.split(",")]


def _tokens(text: str, field: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise TraceLineError(field, f"not a number of tokens: {text[:64]!r}")
    return int(text)
