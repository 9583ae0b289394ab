"""Logs of every process: one line per event, UTC with milliseconds, or JSON lines."""

from __future__ import annotations

import json
import logging
import re
import sys
import textwrap
import time
from collections.abc import Callable
from typing import TextIO

import orjson

from dynamo.config import environ

__all__ = ["JsonFormatter", "LineFormatter", "RepeatFilter", "one_line", "setup_logging"]

_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
_LOGGERS_PER_REQUEST = ("dynamo.router.decision_log",)
"""Loggers with a line per request at INFO: silent unless named in ``level``, or at DEBUG."""

_REPEAT_BURST = 20.0
_REPEATS_PER_S = 1.0
_REPEAT_KINDS = 1000
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_CONTROL_IN_LINES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_COLOURS = {"DEBUG": "36", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "35"}


def setup_logging(
    service: str, level: str = "info", jsonl: bool = False, stream: TextIO | None = None
) -> None:
    """Send this process's logs to ``stream`` (stderr).

    ``level`` is a level, optionally followed by exceptions for modules, as in
    ``info,dynamo.router=debug`` (the form of ``DYN_LOG``). An unknown word is ignored: a typing
    error in a log level must not keep a server from starting. Replaces earlier handlers. Repeated
    warnings are limited, see :class:`RepeatFilter`.
    """
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
        number = _LEVELS.get(word.lower())
        if number is not None:
            logging.getLogger(name.replace("::", ".") or None).setLevel(number)
    for name in _LOGGERS_PER_REQUEST:
        logger = logging.getLogger(name)
        if not logger.level and logger.getEffectiveLevel() >= logging.INFO:
            logger.setLevel(logging.WARNING)
    logging.captureWarnings(True)


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


def one_line(text: str) -> str:
    """Escape line ends and other control characters of ``text``; keep tabs.

    A message may quote a client or a worker: the quote must not look like further log lines.
    """
    return _CONTROL.sub(_escaped, text)


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


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def _timestamp(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"
