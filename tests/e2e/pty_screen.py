"""A command on a pseudo-terminal: its screen as lines of text, keys, and the terminal's state."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["PtyScreen"]

ROWS, COLUMNS = 40, 150
_PART = re.compile(r"\x1b\[\??([\d;]*)([A-Za-z])|([^\x1b]+)")


class PtyScreen:
    """Runs ``command`` with a terminal of 40 lines and 150 columns."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.before: list[Any] = termios.tcgetattr(slave)
        # These would override the size of the terminal.
        env = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command, env={**env, "TERM": "xterm"}, stdin=slave, stdout=slave, stderr=slave
        )
        self._slave = slave
        self.output = ""
        self._lines = [[" "] * COLUMNS for _ in range(ROWS)]
        self._at = (0, 0)

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> str:
        """Return the first line on the screen that has ``pattern``, once there is one."""
        deadline = time.monotonic() + timeout_s
        while True:
            for line in self.lines():
                if re.search(pattern, line):
                    return line
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no {pattern!r} in:\n" + "\n".join(self.lines())
            if select.select([self._master], [], [], left_s)[0]:
                self._read()

    def lines(self) -> list[str]:
        """The screen."""
        return ["".join(line).rstrip() for line in self._lines]

    def press(self, keys: str) -> None:
        """Send keys."""
        os.write(self._master, keys.encode())

    def resize(self, rows: int, columns: int) -> None:
        """Change the size; the process gets SIGWINCH, as it is not the terminal's leader."""
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    def ended(self) -> int:
        """Wait for the exit; return its status. The terminal must be as before."""
        status = self.process.wait(10)
        while select.select([self._master], [], [], 0)[0]:
            self._read()
        assert termios.tcgetattr(self._slave) == self.before
        assert self.output.count("\x1b[?1049h") == self.output.count("\x1b[?1049l")
        assert self.output.rindex("\x1b[?25h") > self.output.rindex("\x1b[?25l")
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def _read(self) -> None:
        text = os.read(self._master, 1 << 16).decode(errors="ignore")
        self.output += text
        for match in _PART.finditer(text):
            if match[3]:
                self._put(match[3])
            elif match[2] == "H":
                row, column = (int(one) for one in match[1].split(";"))
                self._at = (row - 1, column - 1)
            elif match[2] == "K":
                row, column = self._at
                self._lines[row][column:] = [" "] * (COLUMNS - column)
            elif match[2] == "J":
                first = 0 if match[1] == "2" else self._at[0]
                for row in range(first, ROWS):
                    self._lines[row] = [" "] * COLUMNS

    def _put(self, text: str) -> None:
        row, column = self._at
        for character in text:
            if character.isprintable() and column < COLUMNS:
                self._lines[row][column] = character
                column += 1
        self._at = (row, column)
