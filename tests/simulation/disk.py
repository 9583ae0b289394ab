"""What the disk holds of files that were changed and not synced: a loss of power may undo them.

As ext4 does it: fsync(2) of a file keeps its content and its name, fsync(2) of a directory keeps
the renames in it, and half a minute later the kernel has written everything by itself.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Disk"]

WRITTEN_BACK_S = 30.0


class _Unsynced(NamedTuple):
    """``content`` is what the disk surely holds; None: no file. ``torn``: data is missing, too."""

    content: bytes | None
    since_s: float
    torn: bool


class Disk:
    """The changes of files since their last sync; ``clock`` has the virtual time."""

    def __init__(self, dice: random.Random, clock: Callable[[], float]) -> None:
        self._dice = dice
        self._clock = clock
        self._unsynced: dict[str, _Unsynced] = {}

    def change(self, path: str, torn: bool = True) -> None:
        """A file is about to be written, or, with ``torn`` false, removed."""
        before = self._unsynced.get(path)
        if before is None or self._clock() - before.since_s > WRITTEN_BACK_S:
            before = _Unsynced(_content(path), self._clock(), False)
        self._unsynced[path] = before._replace(since_s=self._clock(), torn=torn)

    def rename(self, source: str, target: str) -> None:
        """``source`` is about to become ``target``."""
        self.change(target, torn=source in self._unsynced)
        self.change(source, torn=False)

    def sync(self, path: str) -> None:
        """fsync(2) of a file or a directory."""
        self._unsynced.pop(path, None)
        for other, change in list(self._unsynced.items()):
            if not change.torn and other.rpartition("/")[0] == path:
                del self._unsynced[other]

    def lose_power(self, unix_s: float) -> list[str]:
        """Keep, undo or tear each unsynced change; return the paths of those that are lost.

        These get the time ``unix_s``.
        """
        lost = []
        for path, change in self._unsynced.items():
            if self._clock() - change.since_s > WRITTEN_BACK_S or self._dice.random() < 0.5:
                continue
            content = change.content
            if change.torn and self._dice.random() < 0.5:
                written = _content(path) or b""
                content = written[: self._dice.randrange(len(written) + 1)]
            self._restore(Path(path), content, unix_s)
            lost.append(path)
        self._unsynced.clear()
        return lost

    def _restore(self, path: Path, content: bytes | None, unix_s: float) -> None:
        if content is None:
            path.unlink(missing_ok=True)
        elif path.parent.is_dir():
            path.write_bytes(content)
            os.utime(path, times=(unix_s, unix_s))


def _content(path: str) -> bytes | None:
    return Path(path).read_bytes() if Path(path).is_file() else None
