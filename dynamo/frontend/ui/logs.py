"""The log of one service as a stream of lines: its end at first, then what is written."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from urllib.parse import parse_qs

import msgspec
from asyncinotify import Mask

from dynamo.errors import ConfigError, InvalidArgument, shorten
from dynamo.frontend.ui.stream import EventStreams, event
from dynamo.http import Exchange
from dynamo.runtime.process.inotify import Inotify
from dynamo.status.logs import LogLine, LogReader, select_watchers

__all__ = ["LogStreams"]

_STREAMS = 16
_LINES = 500  # at first, and at once; a service that writes faster has lines left out
_LINE_CHARACTERS = 4000
_DELAY_S = 0.1
_MASK = Mask.MODIFY | Mask.CREATE | Mask.MOVED_TO | Mask.ONLYDIR
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class LogStreams:
    """Streams of the logs of ``namespace`` in ``directory``."""

    def __init__(self, directory: Path, namespace: str) -> None:
        self.streams = EventStreams(_STREAMS, self._drop_closed)
        self._directory = directory
        self._namespace = namespace
        self._readers: dict[Exchange, tuple[str, LogReader]] = {}
        self._inotify: Inotify | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._changed: set[str] = set()

    def open(self, exchange: Exchange) -> None:
        """Stream the log that the query names: ``name=dynamo_Worker``."""
        name = parse_qs(exchange.query).get("name", [""])[-1]
        try:
            known = select_watchers(self._directory, self._namespace, "")
        except InvalidArgument as error:
            exchange.refuse(404, error.message)
            return
        if name not in known:
            text = f"there is no log of '{shorten(name, 128)}'; there are: {', '.join(known)}"
            exchange.refuse(404, text)
            return
        try:
            self._watch()
        except (ConfigError, OSError) as error:
            exchange.refuse(503, f"the log of {name} can't be followed: {error}")
            return
        if not self.streams.open(exchange):
            self._drop_closed()
            return
        reader = LogReader(self._directory, self._namespace, name)
        self._readers[exchange] = (f"{name}.log", reader)
        self.streams.send_one(exchange, _event("first", reader.last(_LINES)))

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
            lines: deque[LogLine] = deque(maxlen=_LINES)
            left_out = 0
            for line in reader.read():
                left_out += len(lines) == _LINES
                lines.append(line)
            if lines:
                self.streams.send_one(exchange, _event("lines", lines, left_out))

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


def _event(name: str, lines: Iterable[LogLine], left_out: int = 0) -> bytes:
    texts = [_text(line) for _, line in lines]
    if left_out:
        texts.insert(0, f"… {left_out} lines left out …")
    return event(name, msgspec.json.encode(texts))


def _text(line: bytes) -> str:
    text = _ESCAPES.sub("", line.decode(errors="replace")).rstrip("\r").rpartition("\r")[2]
    return text if len(text) <= _LINE_CHARACTERS else text[:_LINE_CHARACTERS] + " …"
