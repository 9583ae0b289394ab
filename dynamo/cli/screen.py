"""A terminal that shows frames of lines and reads keys; it is restored at every exit."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from types import FrameType

from dynamo.config import environ

__all__ = ["Screen", "Wakeup"]

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"  # other buffer, no cursor, no wrapping, clear
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_STYLES = {
    "title": "1",
    "head": "2;4",
    "chosen": "7",
    "bad": "31",
    "warn": "33",
    "dim": "2",
}
_COLOURED = ("bad", "warn")
_SEQUENCES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b": "escape",
}
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_READ_BYTES = 1024


class Wakeup:
    """Ends a wait of :meth:`Screen.keys` from another thread or a signal handler."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)

    def wake(self) -> None:
        """End the wait, or the next one."""
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            os.write(self._write_fd, b"\0")

    def clear(self) -> None:
        """Forget the wakes so far."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.read_fd, _READ_BYTES)) == _READ_BYTES:
                pass

    def close(self) -> None:
        """Close both ends."""
        os.close(self.read_fd)
        os.close(self._write_fd)


class Screen:
    """The terminal on standard input and output. Use :meth:`opened`."""

    def __init__(self, wakeup: Wakeup) -> None:
        self._wakeup = wakeup
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._before = termios.tcgetattr(self._in)
        self._shown: list[str] = []
        self._size = (0, 0)
        self._styles = _STYLES
        if environ().get("NO_COLOR"):
            self._styles = {name: _STYLES[name] for name in _STYLES if name not in _COLOURED}

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        columns, rows = shutil.get_terminal_size()
        return columns, rows

    @contextlib.contextmanager
    def opened(self) -> Iterator[Screen]:
        """Own the terminal for the block; SIGTERM and SIGHUP end it with SystemExit."""
        before = {number: signal.signal(number, _end) for number in _ENDING}
        before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: self._wakeup.wake())
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        try:
            self._enter()
            yield self
        finally:
            self._leave()
            for number, handler in before.items():
                signal.signal(number, handler)

    def draw(self, lines: Sequence[tuple[str, str]]) -> None:
        """Show a frame; write only the lines that differ from those shown."""
        if self._size != self.size:
            self._size, self._shown = self.size, []
        parts = [] if self._shown else ["\x1b[2J"]
        rows = [self._styled(style, text) for style, text in lines]
        before = [*self._shown, *[None] * (len(rows) - len(self._shown))]
        for number, (row, old) in enumerate(zip(rows, before, strict=False), 1):
            if row != old:
                # Clear first: behind a full row the cursor is still on its last character.
                parts.append(f"\x1b[{number};1H\x1b[K{row}")
        if len(rows) < len(self._shown):
            parts.append(f"\x1b[{len(rows) + 1};1H\x1b[J")
        self._shown = rows
        self._write("".join(parts))

    def keys(self, timeout_s: float) -> list[str]:
        """Wait for keys, a wake or the timeout; return the keys: letters, or ``up``, ``escape``."""
        ready, _, _ = select.select([self._in, self._wakeup.read_fd], [], [], max(0.0, timeout_s))
        self._wakeup.clear()
        if self._in not in ready:
            return []
        data = os.read(self._in, _READ_BYTES)
        if not data:
            raise EOFError  # the terminal is gone
        return list(_decoded(data.decode(errors="ignore")))

    def _enter(self) -> None:
        tty.setcbreak(self._in)
        self._shown = []
        self._write(_ENTER)

    def _leave(self) -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal may be gone
            self._write(_LEAVE)
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._before)

    def _suspend(self, number: int, stack: FrameType | None) -> None:
        """Handle Ctrl-Z: restore the terminal, stop, and own it again when continued."""
        self._leave()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self._enter()
        self._wakeup.wake()

    def _styled(self, style: str, text: str) -> str:
        code = self._styles.get(style)
        return f"\x1b[{code}m{text}\x1b[0m" if code and text else text

    def _write(self, text: str) -> None:
        data = text.encode(sys.stdout.encoding, "replace")
        while data:
            data = data[os.write(self._out, data) :]


def _end(number: int, stack: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _decoded(text: str) -> Iterator[str]:
    while text:
        name = next((one for one in _SEQUENCES if text.startswith(one)), text[0])
        yield _SEQUENCES.get(name, name)
        text = text[len(name) :]
