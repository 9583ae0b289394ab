"""Logs of every process: one line an event, UTC with milliseconds, or JSON lines."""

from __future__ import annotations

import json
import logging
import re
import sys
import textwrap
import time
from typing import TextIO

import orjson

__all__ = ["JsonFormatter", "LineFormatter", "one_line", "setup_logging"]

_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
_A_LINE_A_REQUEST = ("dynamo.router.decision_log",)
"""Where INFO would be a line a request: heard only when named in ``level``, or at DEBUG."""

_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_CONTROL_IN_LINES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_COLOURS = {"DEBUG": "36", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "35"}


def setup_logging(
    service: str, level: str = "info", jsonl: bool = False, stream: TextIO | None = None
) -> None:
    """Send this process's logs to ``stream`` (stderr).

    ``level`` is a level, optionally followed by exceptions for modules, as in
    ``info,dynamo.router=debug`` (the form of ``DYN_LOG``); an unknown word is ignored, because a
    typing error in a log level should not keep a server from starting. Replaces earlier handlers.
    """
    target = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(target)
    colour = not jsonl and target.isatty()
    handler.setFormatter(JsonFormatter(service) if jsonl else LineFormatter(colour))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name in _A_LINE_A_REQUEST:
        logging.getLogger(name).setLevel(logging.NOTSET)
    for part in level.split(","):
        name, _, word = part.strip().rpartition("=")
        number = _LEVELS.get(word.lower())
        if number is not None:
            logging.getLogger(name.replace("::", ".") or None).setLevel(number)
    for name in _A_LINE_A_REQUEST:
        logger = logging.getLogger(name)
        if not logger.level and logger.getEffectiveLevel() >= logging.INFO:
            logger.setLevel(logging.WARNING)
    logging.captureWarnings(True)


def one_line(text: str) -> str:
    """``text`` with line ends and other control characters escaped, tabs kept.

    A message may quote a client or a worker: it must not look like further lines of the log.
    """
    return _CONTROL.sub(_escaped, text)


class LineFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z INFO dynamo.frontend: message``."""

    def __init__(self, colour: bool = False) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback follows on indented lines of its own."""
        level = record.levelname
        if self._colour:
            level = f"\x1b[{_COLOURS.get(level, '0')}m{level}\x1b[0m"
        text = f"{_timestamp(record)} {level} {record.name}: {one_line(record.getMessage())}"
        if record.exc_info:
            lines = _CONTROL_IN_LINES.sub(_escaped, self.formatException(record.exc_info))
            text += "\n" + textwrap.indent(lines, "  ")
        return text


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, target, message, service, and fields given as extra."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The record as a JSON object."""
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
