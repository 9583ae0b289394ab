"""Watched files, by the kernel and, beyond its limits, by looking again."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from dynamo.runtime.process import inotify
from dynamo.runtime.process.inotify import Inotify, Mask


def exhausted(*_: object) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.usefixtures("needs_inotify")
@pytest.mark.parametrize("polled", [False, True])
async def test_a_directory_that_is_replaced_ends_its_watch(
    tmp_path: Path, polled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watcher has to read all of it: what it has read was another directory."""
    if polled:
        monkeypatch.setattr(inotify, "InotifyInstance", exhausted)
    watched, other = tmp_path / "watched", tmp_path / "other"
    watched.mkdir()
    other.mkdir()
    events: list[tuple[str, int]] = []
    group = Inotify(lambda: None)
    group.add(watched, Mask.CREATE | Mask.DELETE, lambda name, mask: events.append((name, mask)))
    (watched / "file").touch()
    group.drain()
    (watched / "file").unlink()
    group.drain()
    assert [name for name, _ in events] == ["file", "file"]
    other.rename(watched)
    group.drain()
    name, mask = events[-1]
    assert name == "" and mask & Mask.IGNORED
    (watched / "file").touch()
    group.drain()
    assert len(events) == 3
    group.close()
