"""Recording of a deployment's requests: the client of ``GET /v1/record``, and the file.

The file holds whole lines at any time, so it can be read after a crash; a torn last line, which a
full disk or a power cut may leave, is skipped by :func:`dynamo.bench.trace.read_trace`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import msgspec

from dynamo.bench.client import refusal
from dynamo.errors import CannotConnect, ConfigError, DynamoError
from dynamo.http.client import HttpClient, Target, cause, remedy
from dynamo.protocols.status import (
    RecordedContent,
    RecordedRequest,
    RecordingCount,
    RecordingEnd,
    RecordingLine,
)

_BLOCKS = 1 << 20
_SESSIONS = 1 << 16
_LINE_BYTES = 16 << 20
_ERROR_BODY_BYTES = 1 << 20
_CONNECT_S = 10.0
_COUNT_S = 3.0
_decode = msgspec.json.Decoder(RecordingLine).decode


@dataclass(slots=True)
class RecordTotals:
    """What has been recorded; the last two are the frontend's, at its latest count."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    lost: int = 0
    running: int = 0


class RecordClient(HttpClient):
    """Calls ``add`` with each record, at most ``limit`` times.

    ``stopped`` is set at the limit, by :meth:`stop`, and when the stream has ended; ``failure`` is
    why it broke, ``ending`` why the frontend ended it as planned.
    """

    def __init__(
        self,
        target: Target,
        add: Callable[[Any], None],
        limit: int | None = None,
    ) -> None:
        super().__init__(_ERROR_BODY_BYTES)
        self._target = target
        self._add = add
        self._limit = limit
        self._pending = b""
        self.totals = RecordTotals()
        self.stopped = asyncio.Event()
        self.failure: DynamoError | None = None
        self.ending = ""
        self._counted = asyncio.Event()

    async def open(self, query: Mapping[str, str]) -> None:
        """Connect and begin to record. Raises CannotConnect with a remedy."""
        target = self._target
        try:
            async with asyncio.timeout(_CONNECT_S):
                await self.connect_to(target)
        except (OSError, UnicodeError) as error:  # TimeoutError is one
            start = "start the deployment, or name its frontend with --url"
            raise CannotConnect(
                f"cannot connect to {target.authority} ({cause(error)}); {remedy(error, start)}"
            ) from None
        path = f"/v1/record?{urlencode(query)}" if query else "/v1/record"
        self.start(target.head("GET", path, 0), self._ended)

    def stop(self) -> None:
        """Record nothing more. The second time, end at once."""
        if self.stopped.is_set():
            self._counted.set()
        self.stopped.set()

    async def last_count(self) -> None:
        """Wait for the count of the requests that are running when the recording stops."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_COUNT_S):
                await self._counted.wait()

    def on_body(self, data: bytes) -> None:
        """httptools: a piece of the stream, or of an error."""
        if self.status != 200:
            super().on_body(data)
            return
        *lines, self._pending = (self._pending + data).split(b"\n")
        try:
            for line in lines:
                self._take(_decode(line))
        except msgspec.MsgspecError as error:
            self._fail(DynamoError(f"not a record of {self._target.url}: {error}"))
        except DynamoError as error:
            self._fail(error)
        if len(self._pending) > _LINE_BYTES:
            self._fail(DynamoError("a record is too large"))

    def _take(self, line: RecordingLine) -> None:
        totals = self.totals
        if isinstance(line, RecordingEnd):
            self.ending = line.reason
            self._counted.set()
            self.stopped.set()
            return
        if isinstance(line, RecordingCount):
            totals.lost, totals.running = line.lost, line.running
            if self.stopped.is_set():
                self._counted.set()
            return
        if self.stopped.is_set():
            return
        self._add(line)
        totals.requests += 1
        if isinstance(line, RecordedRequest):
            totals.prompt_tokens += line.input_length
            totals.output_tokens += line.output_length
        if totals.requests == self._limit:
            self.stop()

    def _fail(self, error: DynamoError) -> None:
        self.failure = self.failure or error
        self._counted.set()
        self.stop()

    def _ended(self, reason: str | None) -> None:
        """The stream has ended, which only the frontend's end or an error does."""
        self._counted.set()
        if not self.stopped.is_set():
            if self.status not in (0, 200):
                text = refusal(self.status, bytes(self.body))
                reason = f"{self._target.url} answered {text}"
            else:
                reason = f"the frontend ended the recording: {reason or 'it stops'}"
            self._fail(DynamoError(reason))


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a trace, in the order of its fields; see :class:`TraceRequest`."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: str | None = None
    delay: float = 0.0


class Numbers:
    """Gives each key the next number, from 0; a key that is not used for long gets a new one.

    It remembers the ``limit`` keys that were used last.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: dict[tuple[str, int], int] = {}
        self._next = 0

    def __getitem__(self, key: tuple[str, int]) -> int:
        numbers = self._known
        number = numbers.pop(key, -1)
        if number < 0:
            number, self._next = self._next, self._next + 1
            if len(numbers) >= self._limit:
                del numbers[next(iter(numbers))]
        numbers[key] = number  # the last one in the order of the dict
        return number


class RecordFile:
    """A new file at ``path``, of whole lines. Raises ConfigError if it exists or cannot be made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags, 0o600)
        except FileExistsError:
            raise ConfigError(f"{path} exists: name another file, or remove it") from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(f"cannot write {path}: {reason}") from None
        self.size_bytes = 0
        self.lines = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def finish(self) -> None:
        """Remove an empty file. Raises DynamoError."""
        if not self.lines:
            self._path.unlink()

    def append(self, record: msgspec.Struct) -> None:
        """Append one record. Raises DynamoError if the disk is full; the file stays whole."""
        line = msgspec.json.encode(record) + b"\n"
        written = -1
        try:
            written = os.write(self._file, line)
        except OSError as error:
            raise self._cannot_write(error) from None
        finally:
            if written != len(line):  # a part of a line would spoil the next one
                os.ftruncate(self._file, self.size_bytes)
        if written != len(line):
            raise DynamoError(f"cannot write {self._path}: the disk is full")
        self.size_bytes += len(line)
        self.lines += 1

    def _cannot_write(self, error: OSError) -> DynamoError:
        return DynamoError(f"cannot write {self._path}: {error.strerror}")


class TraceFile(RecordFile):
    """A trace. What it remembers is bounded, apart from 16 bytes for each line."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._starts, self._times = array("Q"), array("d")
        self._blocks, self._sessions = Numbers(_BLOCKS), Numbers(_SESSIONS)
        self._ended_ms: dict[int, float] = {}

    def add(self, record: RecordedRequest) -> None:
        """Append one request; see :meth:`append`."""
        start = self.size_bytes
        self.append(self._line(record))
        self._starts.append(start)
        self._times.append(record.arrived_ms)

    def finish(self) -> None:
        """Replace the file by one in the order of arrival that begins at 0; remove an empty one.

        Raises DynamoError; the unsorted file stays then, which readers take as well.
        """
        super().finish()
        if not self.lines:
            return
        temporary = self._path.with_name(f"{self._path.name}.sorting")
        times, first_ms = self._times, min(self._times)
        try:
            with temporary.open("wb") as out, self._path.open("rb") as lines:
                os.fchmod(out.fileno(), 0o600)
                # Only their numbers are sorted in memory: the lines stay on disk.
                for number in sorted(range(self.lines), key=times.__getitem__):
                    lines.seek(self._starts[number])
                    line = msgspec.json.decode(lines.readline(), type=TraceLine)
                    moved_ms = round(line.timestamp - first_ms, 3)
                    line = msgspec.structs.replace(line, timestamp=moved_ms)
                    out.write(msgspec.json.encode(line) + b"\n")
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(self._path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise self._cannot_write(error) from None

    def _line(self, record: RecordedRequest) -> TraceLine:
        session_id, delay_ms = None, 0.0
        if record.session is not None:
            session = self._sessions["", record.session]
            session_id = str(session)
            # Put back at the end below: the dict is in the order of use, and the oldest is dropped.
            ended_ms = self._ended_ms.pop(session, None)
            if ended_ms is not None:
                delay_ms = max(0.0, round(record.arrived_ms - ended_ms, 3))
            elif len(self._ended_ms) >= _SESSIONS:
                del self._ended_ms[next(iter(self._ended_ms))]
            self._ended_ms[session] = record.ended_ms
        return TraceLine(
            timestamp=record.arrived_ms,
            input_length=record.input_length,
            output_length=record.output_length,
            hash_ids=[self._blocks[record.model, block] for block in record.blocks],
            session_id=session_id,
            delay=delay_ms,
        )


class ContentReader:
    """Reads the requests of a recording of content. Raises ConfigError with file and line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decode = msgspec.json.Decoder(RecordedContent).decode

    def __iter__(self) -> Iterator[RecordedContent]:
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.endswith(b"\n"):  # a torn last line is skipped
                        yield self._record(number, line)
        except OSError as error:
            raise ConfigError(f"cannot read {self._path}: {error.strerror}") from None

    def _record(self, number: int, line: bytes) -> RecordedContent:
        try:
            return self._decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{self._path}, line {number}: not a request of dynamo record --content: {error}"
            ) from None
