"""The last line that a process wrote, and how far it says that loading is. Log files only."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dynamo.serve.last_output import telling_line

__all__ = ["last_line", "progress_in"]

_TAIL_BYTES = 65536
_PERCENT = re.compile(r"(?<![\d.])(100|\d{1,2})(?:\.\d+)? ?%")
_LOADING = re.compile(r"download|load|fetch|shard|captur|compil|quantiz", re.IGNORECASE)


def last_line(path: Path, since_s: float = 0.0) -> str:
    """Return the last line of a log file that is not empty, or the cause it refers to; shortened.

    "" without one, and if nothing was written since ``since_s`` (Unix time).
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mtime < since_s:
                return ""
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return telling_line(text.split("\n"))


def progress_in(line: str) -> float | None:
    """Return the share (0 to 1) that a line about loading or downloading says; None if none."""
    found = _PERCENT.search(line)
    return int(found[1]) / 100 if found and _LOADING.search(line) else None
