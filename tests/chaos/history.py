"""What a chaos run records: every request with what its client received, every fault, every life.

A history is a file of JSON lines, one :class:`Request`, :class:`Fault` or :class:`Life` each. Times
are monotonic seconds since the start of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TextIO

import msgspec

__all__ = ["Answer", "Ending", "Event", "Fault", "History", "Life", "Record", "Request", "read"]

Ending = Literal["complete", "closed", "cancelled", "timeout", "refused"]
"""How the HTTP exchange ended: complete response; connection closed before that; client left; the
client's deadline passed; no connection at all."""


class Answer(msgspec.Struct, frozen=True):
    """The complete answer to a request, the same for each of its choices."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that a client received; ``index`` is the choice.

    ``text`` is the delta, the finish reason or the error's message; ``usage`` are prompt and
    completion tokens.
    """

    at_s: float
    kind: Literal["text", "finish", "usage", "done", "error"]
    text: str = ""
    index: int = 0
    usage: tuple[int, int] | None = None


class Request(msgspec.Struct, tag="request", omit_defaults=True):
    """One request and its history. ``cancel`` is the stage at which the client planned to leave."""

    id: str
    api: str
    stream: bool
    choices: int
    expected: Answer
    started_s: float
    cancel: str = ""
    ended_s: float = 0.0
    status: int = 0
    ending: Ending = "closed"
    events: list[Event] = msgspec.field(default_factory=list)


class Fault(msgspec.Struct, tag="fault"):
    """One fault that happened, and what it hit."""

    kind: str
    target: str
    at_s: float


class Life(msgspec.Struct, tag="life", omit_defaults=True):
    """A span in which a frontend served requests, or a worker was registered and ran.

    ``until_s`` is null if it lasted to the end of the run. From ``closing_s`` on a frontend drains:
    it accepts no new requests.
    """

    role: Literal["frontend", "worker"]
    name: str
    from_s: float
    until_s: float | None = None
    closing_s: float | None = None
    pid: int = 0


Record = Request | Fault | Life
_decode = msgspec.json.Decoder(Record).decode


class History:
    """Appends records to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO = path.open("w", encoding="utf-8")

    def add(self, record: Record) -> None:
        """Append one record."""
        self._file.write(msgspec.json.encode(record).decode() + "\n")

    def close(self) -> None:
        """Write what is buffered."""
        self._file.close()


def read(path: Path) -> Iterator[Record]:
    """Yield the records of a history, one line in memory at a time."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield _decode(line)
