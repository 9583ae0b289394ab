"""The log of one service as a stream of lines: its end at first, then what is written."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qs

import msgspec
from asyncinotify import Mask

from dynamo.errors import ConfigError, shorten
from dynamo.frontend.ui.stream import EventStreams, event
from dynamo.http import Exchange
from dynamo.runtime.discovery.inotify import Inotify

__all__ = ["LogReader", "LogStreams"]

_STREAMS = 16
_FIRST_BYTES = 128 << 10
_MOST_BYTES = 256 << 10  # at once; a service that writes faster has lines left out
_LINE_CHARACTERS = 4000
_DELAY_S = 0.1
_MASK = Mask.MODIFY | Mask.CREATE | Mask.MOVED_TO | Mask.ONLYDIR
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class LogReader:
    """Reads the lines of a file that grows, also across its rotation. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = b""
        self._file: BinaryIO = path.open("rb")

    def first(self) -> list[str]:
        """Return the last lines, at most 128 KiB."""
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - _FIRST_BYTES))
        lines = self._read()
        return lines[1:] if size > _FIRST_BYTES else lines

    def more(self) -> list[str]:
        """Return the lines since the last call; more than 256 KiB are left out, and said to be."""
        lines = self._read()
        if self._rotated():
            self._file.close()
            self._partial = b""
            self._file = self._path.open("rb")
            lines += self._read()
        return lines

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self) -> list[str]:
        left_out = os.fstat(self._file.fileno()).st_size - self._file.tell() - _MOST_BYTES
        notes = []
        if left_out > 0:
            self._file.seek(left_out, os.SEEK_CUR)
            self._partial = b""
            notes = [f"… {left_out >> 10} KiB left out …"]
        *lines, self._partial = (self._partial + self._file.read(_MOST_BYTES)).split(b"\n")
        return [*notes, *map(_text, lines)]

    def _rotated(self) -> bool:
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False  # the next line creates it


class LogStreams:
    """Streams of the logs in ``directory``, which is missing without ``dynamo serve``."""

    def __init__(self, directory: Path) -> None:
        self.streams = EventStreams(_STREAMS, self._drop_closed)
        self._directory = directory
        self._readers: dict[Exchange, tuple[str, LogReader]] = {}
        self._inotify: Inotify | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._changed: set[str] = set()

    def open(self, exchange: Exchange) -> None:
        """Stream the log that the query names: ``name=dynamo_Worker``."""
        name = parse_qs(exchange.query).get("name", [""])[-1]
        known = {path.name.removesuffix(".log") for path in self._directory.glob("*.log")}
        if name not in known:
            exchange.refuse(404, _unknown(name, known))
            return
        try:
            self._watch()
            reader = LogReader(self._directory / f"{name}.log")
        except (ConfigError, OSError) as error:
            exchange.refuse(503, f"the log of {name} can't be read: {error}")
            return
        if not self.streams.open(exchange):
            reader.close()
            self._drop_closed()
            return
        self._readers[exchange] = (f"{name}.log", reader)
        self.streams.send_one(exchange, _event("first", reader.first()))

    def end(self, message: str) -> None:
        """End all streams and refuse others."""
        self.streams.end(message)

    def _watch(self) -> None:
        if self._inotify is None:
            inotify = Inotify(partial(self._on_file, "", 0))
            inotify.add(self._directory, _MASK, self._on_file)
            self._inotify = inotify

    def _on_file(self, name: str, mask: int) -> None:
        """Read a moment later: a burst of lines becomes one event. "" stands for any file."""
        self._changed.add(name)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self._send)

    def _send(self) -> None:
        self._timer = None
        changed, self._changed = self._changed, set()
        for exchange, (name, reader) in list(self._readers.items()):
            if "" not in changed and name not in changed:
                continue
            try:
                lines = reader.more()
            except OSError as error:
                self.streams.close_one(exchange, f"the log can't be read: {error}")
                continue
            if lines:
                self.streams.send_one(exchange, _event("lines", lines))

    def _drop_closed(self) -> None:
        """Close the readers of streams that ended; stop watching without any."""
        for exchange in [one for one in self._readers if one not in self.streams]:
            self._readers.pop(exchange)[1].close()
        if not self.streams and self._inotify is not None:
            self._inotify.close()
            self._inotify = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None


def _unknown(name: str, known: Iterable[str]) -> str:
    names = ", ".join(sorted(known))
    if not names:
        return "there are no logs: this frontend was not started by dynamo serve"
    return f"there is no log of '{shorten(name, 128)}'; there are: {names}"


def _event(name: str, lines: list[str]) -> bytes:
    return event(name, msgspec.json.encode(lines))


def _text(line: bytes) -> str:
    text = _ESCAPES.sub("", line.decode(errors="replace")).rstrip("\r").rpartition("\r")[2]
    return text if len(text) <= _LINE_CHARACTERS else text[:_LINE_CHARACTERS] + " …"
