"""What the output of a process says about its state: its last line, and the cause of its end."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["cause_in", "last_line_in", "refusal_in", "telling_line"]

_LINE_CHARACTERS = 200
_REFUSAL_LINES = 5
_REFUSAL_CHARACTERS = 1000
# Of argparse, and of our programs: "PROG: error: MESSAGE", with a hint on the next line.
_REFUSAL = re.compile(r"\S+: error: (.+)")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_EXCEPTION = re.compile(r"(?<![\w.])[A-Za-z_][\w.]*(?:Error|Exception)(?:: .+|$)")
# vLLM's main process, of the death of one that it has started.
_ELSEWHERE = re.compile(r"root cause", re.IGNORECASE)
_FAILURE = re.compile(
    r"\b(error|fail(ed|ure)?|invalid|fatal|cannot|can't|couldn't|unable|no such)\b", re.IGNORECASE
)


def last_line_in(lines: Sequence[str]) -> str:
    """Return the last line that is not empty, as a terminal shows it, shortened; "" without one."""
    for line in reversed(lines):
        shown = _ESCAPES.sub("", line).rpartition("\r")[2].strip()
        if shown:
            return shown[:_LINE_CHARACTERS]
    return ""


def telling_line(lines: Sequence[str]) -> str:
    """Return the last line, or the exception in an earlier one that it refers to."""
    last = last_line_in(lines)
    return (_exception_in(lines) or last) if _ELSEWHERE.search(last) else last


def cause_in(lines: Sequence[str]) -> str:
    """Return the line of a failed process that most likely says why; "" without any line.

    A Python process ends with the exception. Others report the first error, and then its effects.
    """
    found = _exception_in(lines) or next((line for line in lines if _FAILURE.search(line)), "")
    return last_line_in([found]) or last_line_in(lines)


def refusal_in(lines: Sequence[str]) -> str:
    """Return the message of a program that has just rejected its settings; "" without one."""
    for line in reversed(lines[-_REFUSAL_LINES:]):
        if found := _REFUSAL.search(line):
            return found[1].strip()[:_REFUSAL_CHARACTERS]
    return ""


def _exception_in(lines: Sequence[str]) -> str:
    """Return the last exception that does not refer to another one."""
    for line in reversed(lines):
        found = _EXCEPTION.search(_ESCAPES.sub("", line))
        if found is not None and not _ELSEWHERE.search(found[0]):
            return found[0].strip()[:_LINE_CHARACTERS]
    return ""
