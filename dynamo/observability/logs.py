"""Logs of every process: one line per event, UTC with milliseconds, or JSON lines.

A process never waits for the reader of its output: see :class:`NonBlockingPipe`.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import io
import json
import logging
import os
import re
import select
import stat
import sys
import termios
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

import orjson

from dynamo.config import environ
from dynamo.config.system import LOG_LEVELS

_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
_LOGGERS_PER_REQUEST = ("dynamo.router.explanations.decision_log",)
"""Loggers with a line per request at INFO: silent unless named in ``level``, or at DEBUG."""

_DROPPED = b"dynamo: %d lines were dropped here: the output was not read\n"
_LAST_LINES = 40
_LAST_LINE_BYTES = 4096
_FINISH_S = 1.0
_REPEAT_BURST = 20.0
_REPEATS_PER_S = 1.0
_REPEAT_KINDS = 1000
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_CONTROL_IN_LINES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_pipes: dict[tuple[int, int], NonBlockingPipe] = {}
_COLOURS = {"DEBUG": "36", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "35"}


def setup_logging(
    service: str, level: str = "info", jsonl: bool = False, stream: TextIO | None = None
) -> None:
    """Send this process's logs to ``stream`` (stderr).

    ``level`` is a level, optionally followed by exceptions for modules, as in
    ``info,dynamo.router=debug`` (the form of ``DYN_LOG``, which :class:`LogSettings` checks). A
    word that is no level is ignored. Replaces earlier handlers. Repeated warnings are limited, see
    :class:`RepeatFilter`.
    """
    if stream is None:
        never_wait_for_readers()
    target = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(target)
    handler.addFilter(RepeatFilter())
    colour = not jsonl and target.isatty() and not environ().get("NO_COLOR")
    handler.setFormatter(JsonFormatter(service) if jsonl else LineFormatter(colour))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name in _LOGGERS_PER_REQUEST:
        logging.getLogger(name).setLevel(logging.NOTSET)
    for part in level.split(","):
        name, _, word = part.strip().rpartition("=")
        number = _LEVELS.get(LOG_LEVELS.get(word.lower(), ""))
        if number is not None:
            logging.getLogger(name.replace("::", ".") or None).setLevel(number)
    for name in _LOGGERS_PER_REQUEST:
        logger = logging.getLogger(name)
        if not logger.level and logger.getEffectiveLevel() >= logging.INFO:
            logger.setLevel(logging.WARNING)
    logging.captureWarnings(True)


def never_wait_for_readers() -> None:
    """Let what this process prints or logs to a full pipe be dropped and counted. Idempotent.

    Output of C code, and of processes that this one starts, is not covered: it waits as before.
    """
    for name, original in (("stdout", sys.__stdout__), ("stderr", sys.__stderr__)):
        stream = getattr(sys, name)
        if original is None or stream is not original:
            continue
        try:
            original.flush()  # what was printed before comes first
            number = original.fileno()
            if not stat.S_ISFIFO(os.fstat(number).st_mode):
                continue
            pipe = _pipe_of(number)
        except (OSError, ValueError) as error:  # closed, or no /proc: it waits as before
            logging.getLogger(__name__).debug("%s: %s", name, error)
            continue
        writer = io.BufferedWriter(PipeWriter(number, pipe))
        text = io.TextIOWrapper(writer, original.encoding, "backslashreplace", line_buffering=True)
        setattr(sys, name, text)
        atexit.register(_finish, text, pipe)


def dropped_lines() -> int:
    """Return how many lines of output this process has dropped so far."""
    return sum(pipe.dropped for pipe in _pipes.values())


def _finish(stream: TextIO, pipe: NonBlockingPipe) -> None:
    """Write what is left, at the exit of the process; a program may have closed ``stream``."""
    with contextlib.suppress(ValueError):
        stream.flush()
    pipe.finish()


def _pipe_of(number: int) -> NonBlockingPipe:
    """Return the pipe behind a descriptor: one for stdout and stderr, if they are the same."""
    status = os.fstat(number)
    key = status.st_dev, status.st_ino
    if key not in _pipes:
        _pipes[key] = NonBlockingPipe(number)
        os.register_at_fork(after_in_child=_pipes[key].forked)
    return _pipes[key]


class PipeWriter(io.RawIOBase):
    """Writes to a pipe without waiting, in the place of the descriptor ``number``."""

    def __init__(self, number: int, pipe: NonBlockingPipe) -> None:
        super().__init__()
        self._number = number
        self._pipe = pipe

    def fileno(self) -> int:
        """Return the descriptor that was given."""
        return self._number

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Write or drop ``data``, whole lines; return its size."""
        text = bytes(data)
        self._pipe.write(text)
        return len(text)


class NonBlockingPipe:
    """The pipe behind the descriptor ``number``; what does not fit is dropped and counted.

    Lines are dropped while the pipe is more than half full. The other half is for those who do
    wait: C code and child processes. When the reader reads again, a line says how many were
    dropped. At the exit of the process the last 40 of them are written all the same, because they
    may say why it exits.

    The pipe is opened once more, because O_NONBLOCK on the descriptor itself would also hold for
    those who wait.
    """

    def __init__(self, number: int) -> None:
        self.dropped = 0
        self._lock = threading.RLock()  # not Lock: a signal handler may log
        self._unreported = 0
        self._rest = b""  # of a long text: goes before the next
        self._last: deque[bytes] = deque(maxlen=_LAST_LINES)  # of the lines dropped last
        self._most = fcntl.fcntl(number, fcntl.F_GETPIPE_SZ) // 2
        self._queued = array.array("i", [0])
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        self._descriptor = os.open(f"/proc/self/fd/{number}", flags)

    def write(self, text: bytes) -> None:
        """Write or drop ``text``. Thread-safe."""
        with self._lock:
            if not self._written(text):
                lines = max(text.count(b"\n"), 1)
                self.dropped += lines
                self._unreported += lines
                self._last.append(text[-_LAST_LINE_BYTES:])

    def finish(self) -> None:
        """Write the rest and the lines dropped last; return after a second without a reader."""
        last = b"".join(self._last)
        lost = self._unreported - last.count(b"\n")
        left = self._rest + (_DROPPED % lost if lost > 0 else b"") + last
        self._forget()
        room = select.poll()
        room.register(self._descriptor, select.POLLOUT)
        until_s = time.monotonic() + _FINISH_S
        while left and room.poll(max(until_s - time.monotonic(), 0) * 1e3):
            size = self._send(left)
            if not size:
                return
            left = left[size:]

    def forked(self) -> None:
        """Leave to the parent what is not written yet; a thread of it may have had the lock."""
        self._lock = threading.RLock()
        self._forget()

    def close(self) -> None:
        """Close the second descriptor."""
        os.close(self._descriptor)

    def _written(self, text: bytes) -> bool:
        fcntl.ioctl(self._descriptor, termios.FIONREAD, self._queued)
        if self._queued[0] > self._most:
            return False
        if self._rest:
            self._rest = self._rest[self._send(self._rest) :]
            if self._rest:  # else it could grow without a bound
                return False
        pending = (_DROPPED % self._unreported if self._unreported else b"") + text
        size = self._send(pending)
        if not size:
            return False
        self._forget()
        self._rest = pending[size:]
        return True

    def _forget(self) -> None:
        self._rest, self._unreported = b"", 0
        self._last.clear()

    def _send(self, data: bytes) -> int:
        """Write without waiting; return how many bytes."""
        try:
            return os.write(self._descriptor, data)
        except OSError:  # full after all, or its reader has closed it
            return 0


class RepeatFilter(logging.Filter):
    """Limit repeated warnings and errors of this package: 20 of a kind at once, then one a second.

    A kind is a logger and a message without its arguments. The next record that passes carries the
    number of suppressed ones as ``suppressed``. A logger set to DEBUG is not limited.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, str], _Repeats] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether ``record`` is shown. O(1)."""
        if record.levelno < logging.WARNING or not record.name.startswith("dynamo"):
            return True
        if logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
            return True
        now_s = self._clock()
        kind = (record.name, str(record.msg))
        repeats = self._kinds.get(kind)
        if repeats is None:
            if len(self._kinds) >= _REPEAT_KINDS:
                self._kinds.clear()
            repeats = self._kinds[kind] = _Repeats(now_s)
        if not repeats.passes(now_s):
            return False
        if repeats.suppressed:
            record.suppressed, repeats.suppressed = repeats.suppressed, 0
        return True


class _Repeats:
    """The token bucket of one kind of message."""

    __slots__ = ("at_s", "suppressed", "tokens")

    def __init__(self, now_s: float) -> None:
        self.tokens = _REPEAT_BURST
        self.at_s = now_s
        self.suppressed = 0

    def passes(self, now_s: float) -> bool:
        gained = (now_s - self.at_s) * _REPEATS_PER_S
        self.tokens = min(_REPEAT_BURST, self.tokens + gained)
        self.at_s = now_s
        if self.tokens < 1:
            self.suppressed += 1
            return False
        self.tokens -= 1
        return True


def counted(count: float, singular: str, plural: str = "") -> str:
    """Return ``1 request``, ``1,204 requests``; ``plural`` is for nouns that take no s."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {singular if count == 1 else plural or f'{singular}s'}"


def one_line(text: str) -> str:
    """Escape line ends and other control characters of ``text``; keep tabs.

    A message may quote a client or a worker: the quote must not look like further log lines.
    """
    return _CONTROL.sub(_escaped, text)


def terminal_text(text: str) -> str:
    """Escape control characters of ``text``, which may quote another program; keep its lines."""
    return _CONTROL_IN_LINES.sub(_escaped, text)


class LineFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z INFO dynamo.frontend: message``."""

    def __init__(self, colour: bool = False) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """Return one line; a traceback follows on indented lines."""
        level = record.levelname
        if self._colour:
            level = f"\x1b[{_COLOURS.get(level, '0')}m{level}\x1b[0m"
        text = f"{_timestamp(record)} {level} {record.name}: {one_line(record.getMessage())}"
        if suppressed := getattr(record, "suppressed", 0):
            text += f" ({suppressed} more of this kind were suppressed)"
        if record.exc_info:
            lines = _CONTROL_IN_LINES.sub(_escaped, self.formatException(record.exc_info))
            text += "\n" + textwrap.indent(lines, "  ")
        return text


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, target, message, service, and the extra fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a JSON object."""
        row = {
            "time": _timestamp(record),
            "level": record.levelname,
            "target": record.name,
            "message": record.getMessage(),
            "service": self._service,
        }
        for name, value in record.__dict__.items():
            if name not in _STANDARD:
                row[name] = value
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(row, default=str).decode()
        except TypeError:  # a lone surrogate or a large integer, which JSON itself can have
            return json.dumps(row, default=str)


_STANDARD = frozenset(
    (*logging.LogRecord("", 0, "", 0, "", (), None).__dict__, "message", "asctime", "taskName")
)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _timestamp(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"
