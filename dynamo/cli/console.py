"""The terminal output of ``dynamo serve``: its messages, and the output of services by name.

A terminal can be slow or stopped (Ctrl-S), and the arbiter must not wait for it. So a thread writes
from a bounded queue. Lines that do not fit are counted and reported; the log files have them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import select
import sys
import textwrap
import threading
import time
import zlib
from io import BytesIO, FileIO, RawIOBase
from typing import IO, Any

from dynamo.config import environ
from dynamo.observability.logs import counted, one_line

_QUEUE_LINES = 10_000
_LINES_AT_ONCE = 256
_CLOSE_TIMEOUT_S = 2.0
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_LEVEL_COLOURS = {logging.WARNING: 33, logging.ERROR: 31}


def shows_colour(stream: IO[Any] | RawIOBase | BytesIO) -> bool:
    """Whether ``stream`` is a terminal, and colours are wanted there (https://no-color.org)."""
    return stream.isatty() and not environ().get("NO_COLOR")


class WatcherPrefix:
    """The names of watchers before their lines, without ``namespace_``, in columns of one width."""

    def __init__(self, namespace: str, colour: bool) -> None:
        self._namespace = f"{namespace}_"
        self._colour = colour
        self._width = 8

    def of(self, watcher: str) -> bytes:
        """Return the prefix of the lines of ``watcher``."""
        name = watcher.removeprefix(self._namespace)
        self._width = max(self._width, len(name))
        padded = f"{name:<{self._width}} |".encode()
        if self._colour:
            # Not hash(), which differs from one start to the next: a worker keeps its colour.
            colour = _COLOURS[zlib.crc32(name.encode()) % len(_COLOURS)]
            padded = b"\x1b[%dm%s\x1b[0m" % (colour, padded)
        return padded + b" "


class Console:
    """Writes lines to ``stream``, with the watchers' names without their ``namespace_`` prefix.

    ``jsonl``: each line is one JSON object; a service's JSON line gets a member ``watcher``.
    ``quiet``: drop the output of services.
    """

    def __init__(
        self,
        namespace: str,
        *,
        jsonl: bool = False,
        quiet: bool = False,
        stream: RawIOBase | BytesIO | None = None,
    ) -> None:
        # Not sys.stdout: a flush of that at exit would wait for our thread, which may be blocked
        # in a pipe that is full and never read.
        self._stream = FileIO(sys.stdout.fileno(), "w", closefd=False) if stream is None else stream
        self._colour = not jsonl and shows_colour(self._stream)
        self._jsonl = jsonl
        self._quiet = quiet
        self._prefix = WatcherPrefix(namespace, self._colour)
        self._dropped = 0
        self._lines: queue.Queue[bytes | None] = queue.Queue(_QUEUE_LINES)
        # A daemon: a stopped terminal must not keep the process from its exit.
        self._thread = threading.Thread(target=self._write, name="console", daemon=True)
        self._thread.start()

    def announce(self, text: str, level: int = logging.INFO) -> None:
        """Show a message of ``dynamo serve``."""
        if self._jsonl:
            self._put(_json_line(level, "dynamo.serve", text))
        else:
            colour = _LEVEL_COLOURS.get(level, 1)
            mark = f"\x1b[{colour}mdynamo:\x1b[0m" if self._colour else "dynamo:"
            self._put(f"{mark} {text}".encode(errors="backslashreplace"))

    def output(self, watcher: str, line: bytes) -> None:
        """Show a line of a service, given without its line end."""
        if self._quiet:
            return
        if self._jsonl:
            self._put(_with_watcher(watcher, line))
            return
        self._put(self._prefix.of(watcher) + line)

    def close(self) -> None:
        """Write the queued lines, for two seconds at most."""
        try:
            self._lines.put(None, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _put(self, line: bytes) -> None:
        try:
            # Before the line: the note stands where the others are missing.
            if self._dropped:
                lines = counted(self._dropped, "line was", "lines were")
                note = f"dynamo: {lines} dropped here; the log files have all"
                self._lines.put_nowait(note.encode())
                self._dropped = 0
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def _write(self) -> None:
        ended = False
        while not ended:
            lines = [self._lines.get()]
            with contextlib.suppress(queue.Empty):
                while len(lines) < _LINES_AT_ONCE:
                    lines.append(self._lines.get_nowait())
            ended = None in lines
            text = b"".join(line + b"\n" for line in lines if line is not None)
            try:
                self._write_all(memoryview(text))
            except (OSError, ValueError):
                return  # the reader closed its end: stop writing, the deployment continues

    def _write_all(self, data: memoryview) -> None:
        while data:
            written = self._stream.write(data)
            if written is None:  # a non-blocking pipe that is full
                select.select([], [self._stream], [])
            else:
                data = data[written:]


class ConsoleLog(logging.Handler):
    """Sends log records to a console."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Show ``record``."""
        text = one_line(record.getMessage())
        if record.exc_info:
            error = logging.Formatter().formatException(record.exc_info)
            text += "\n" + textwrap.indent(error, "  ")
        self._console.announce(text, record.levelno)


def _json_line(level: int, target: str, text: str) -> bytes:
    now_s = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s))
    row = {
        "time": f"{stamp}.{int(now_s % 1 * 1000):03d}Z",
        "level": logging.getLevelName(level),
        "target": target,
        "message": text,
    }
    return json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace")


def _with_watcher(watcher: str, line: bytes) -> bytes:
    # Inserted, not parsed: the members of the service stay as they are.
    if line.startswith(b'{"') and line.endswith(b"}"):
        return b'{"watcher":%s,%s' % (json.dumps(watcher).encode(), line[1:])
    text = line.decode(errors="replace")
    row = json.loads(_json_line(logging.INFO, "output", text))
    return json.dumps({"watcher": watcher, **row}, ensure_ascii=False).encode()
