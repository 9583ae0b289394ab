"""The output of the processes: pipes, bounded log files, and what the last lines say."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import logging
import os
import re
import termios
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

_READ_BYTES = 65536
_LINE_BYTES = 65536
_PIPE_BYTES = 1 << 18
_TAIL_LINES = 200
_END_BYTES = 1024
_SHOWN_LINES = 20
_BAR_EVERY_S = 1.0
log = logging.getLogger(__name__)
_LINE_CHARACTERS = 1000
_CAUSE_LINES = 8
_REFUSAL_LINES = 5
_REFUSAL_CHARACTERS = 1000
# Of argparse, and of our programs: "PROG: error: MESSAGE", with a hint on the next line.
_REFUSAL = re.compile(r"(?<=\S): error: (.+)")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_EXCEPTION = re.compile(r"(?<![\w.])[A-Za-z_][\w.]*(?:Error|Exception)(?:: .+|$)")
# The next line of an exception's message: indented, or what to do.
_GOES_ON = re.compile(r"\s+\S|(To resolve|Try|Please|Decrease|Increase|Set|Use|See|Hint)\b")
# vLLM's main process, of the death of one that it has started.
_ELSEWHERE = re.compile(r"root cause", re.IGNORECASE)
_FAILURE = re.compile(
    r"\b(error|fail(ed|ure)?|invalid|fatal|cannot|can't|couldn't|unable|no such)\b", re.IGNORECASE
)


def last_line_in(lines: Sequence[str]) -> str:
    """Return the last line that is not empty, as a terminal shows it, shortened; "" without one."""
    for line in reversed(lines):
        text = _ESCAPES.sub("", line).rpartition("\r")[2].strip()
        if text:
            return text[:_LINE_CHARACTERS]
    return ""


def telling_line(lines: Sequence[str]) -> str:
    """Return the last line, or the exception in an earlier one that it refers to."""
    last = last_line_in(lines)
    return (_exception_in(lines) or last) if _ELSEWHERE.search(last) else last


def cause_in(lines: Sequence[str]) -> str:
    """Return the line of a failed process that most likely says why; "" without any line.

    A Python process ends with the exception. Others report the first error, and then its effects.
    """
    cause = _exception_in(lines) or next((line for line in lines if _FAILURE.search(line)), "")
    return last_line_in([cause]) or last_line_in(lines)


def refusal_in(lines: Sequence[str]) -> str:
    """Return the message of a program that has just rejected its settings; "" without one."""
    for line in reversed(lines[-_REFUSAL_LINES:]):
        if match := _REFUSAL.search(line):
            return match[1].strip()[:_REFUSAL_CHARACTERS]
    return ""


def _exception_in(lines: Sequence[str]) -> str:
    """Return the last exception that does not refer to another one."""
    for index in reversed(range(len(lines))):
        line = _ESCAPES.sub("", lines[index])
        match = _EXCEPTION.search(line)
        if match is not None and not _ELSEWHERE.search(match[0]):
            more = _continued(line[: match.start()], lines[index + 1 : index + _CAUSE_LINES])
            return " ".join((match[0].strip(), *more))[:_LINE_CHARACTERS]
    return ""


def _continued(prefix: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield the further lines of an exception's message; a logger repeats its ``prefix``."""
    for line in lines:
        plain = _ESCAPES.sub("", line)
        text = plain.removeprefix(prefix).strip()
        goes_on = plain.startswith(prefix) if prefix.strip() else _GOES_ON.match(plain)
        if not goes_on or not text or text.startswith("Traceback"):
            return
        yield text


class Announcer(Protocol):
    """Shows messages and output to the user. Neither call may block for long."""

    def announce(self, text: str, level: int = logging.INFO) -> None:
        """Show a message of ``dynamo serve``."""

    def output(self, watcher: str, line: bytes) -> None:
        """Show a line of a service, given without its line end."""


class LogFile:
    """A file (0600) of at most ``size_bytes``; one older file ``.1`` is kept.

    The next line creates a removed or moved file again.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self._limit = size_bytes
        self._open()

    def write(self, line: bytes) -> None:
        """Append ``line`` and a newline; a full disk drops the line, no more."""
        try:
            if not self._is_current():
                self._reopen()
            elif self._size and self._size + len(line) >= self._limit:
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                self._reopen()
            self._size += self._file.write(line + b"\n")
        except OSError as error:
            log.debug("%s: %s", self.path, error)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _is_current(self) -> bool:
        # A user or logrotate may have moved or removed the file that is open here.
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def _open(self) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        self._size = os.fstat(self._file.fileno()).st_size

    def _reopen(self) -> None:
        before = self._file
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        self._open()
        # Only now: if the new file cannot be opened, lines still go to the old one.
        before.close()


class ServiceOutput:
    """Sends a watcher's output to its log file and the terminal, and keeps the latest lines."""

    def __init__(self, watcher: str, log_file: LogFile, announcer: Announcer) -> None:
        self.watcher = watcher
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._log_file = log_file
        self._announcer = announcer

    def __call__(self, line: bytes) -> None:
        """Handle one line."""
        self._tail.append(both_ends(line))
        self._log_file.write(line)
        self._announcer.output(self.watcher, line)

    def last_line(self) -> str:
        """Return the latest line that is not empty, or the cause it refers to; shortened."""
        return telling_line(self._lines())

    def refusal(self) -> str:
        """Return the error of a program that has just refused to start; "" without one."""
        return refusal_in(self._lines())

    def tail(self) -> list[str]:
        """Return the latest 20 lines, after the cause that the last one refers to, if any."""
        lines = self._lines()
        latest = lines[-_SHOWN_LINES:]
        cause = telling_line(lines)
        repeated = not cause or any(cause in line for line in latest)
        return latest if repeated else [cause, "…", *latest]

    def _lines(self) -> list[str]:
        return [line.decode(errors="replace") for line in self._tail]

    def close(self) -> None:
        """Close the log file."""
        self._log_file.close()


def both_ends(line: bytes) -> bytes:
    """Return the beginning and the end of a long line: a search for causes reads 200 at once."""
    if len(line) <= 2 * _END_BYTES:
        return line
    return line[:_END_BYTES] + " … ".encode() + line[-_END_BYTES:]


class OutputPipe:
    """A pipe whose lines go to ``on_line``. This process reads; ``write_fd`` is for the child.

    A line of more than 64 KiB is split. A progress bar, which is redrawn after a carriage return,
    is a line each second.

    256 KiB fit, four times the default: a child that writes while this process is stopped waits
    when the pipe is full, or drops lines (see :mod:`dynamo.observability.logs`).
    """

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self._read_fd, self.write_fd = os.pipe()
        with contextlib.suppress(OSError):  # beyond the user's share of memory for pipes
            fcntl.fcntl(self.write_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self._read_fd, False)
        self._on_line = on_line
        self._partial = b""
        self._bar_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_fd, self._readable)

    def close_write_end(self) -> None:
        """Close our copy of the write end, so that the pipe ends when the child exits."""
        os.close(self.write_fd)
        self.write_fd = -1

    def close(self) -> None:
        """Read what is in the pipe and close it. Idempotent.

        Not to its end: a process that the child has started may write for ever.
        """
        if self._read_fd >= 0:
            queued = array.array("i", [0])
            fcntl.ioctl(self._read_fd, termios.FIONREAD, queued)
            left = queued[0]
            while left > 0 and (size := self._read_once(left)):
                left -= size
        self._end()

    def _readable(self) -> None:
        self._read_once()

    def _read_once(self, most: int = _READ_BYTES) -> int:
        """Read at most 64 KiB; return the number of bytes."""
        try:
            data = os.read(self._read_fd, min(most, _READ_BYTES))
        except BlockingIOError:
            return 0
        if not data:
            self._end()
            return 0
        # A read can end inside a line: its start waits for the next read.
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._on_line(line.rstrip(b"\r"))
        # A carriage return at the end may be the first half of a line end.
        if b"\r" in self._partial.rstrip(b"\r"):
            self._redrawn()
        if len(self._partial) >= _LINE_BYTES:
            self._flush()
        return len(data)

    def _redrawn(self) -> None:
        """Keep the latest state of a progress bar; send it if the last one is a second old."""
        bar = self._partial.rstrip(b"\r").rpartition(b"\r")[2]
        self._partial = b"\r" + bar
        now_s = self._loop.time()
        if now_s - self._bar_s >= _BAR_EVERY_S:
            self._bar_s = now_s
            self._on_line(bar)

    def _flush(self) -> None:
        if self._partial:
            self._on_line(self._partial)
            self._partial = b""

    def _end(self) -> None:
        if self._read_fd >= 0:
            self._flush()
            self._loop.remove_reader(self._read_fd)
            os.close(self._read_fd)
            self._read_fd = -1
        if self.write_fd >= 0:
            self.close_write_end()
