"""What a deployment wrote of itself: logs and events, which stay after its end; its planner."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import io
import os
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.protocols.status import OPERATOR_EVENTS, BoxEvent, PlannerReport, PlannerSummary
from dynamo.runtime.discovery.layout import BadRecord, read_file
from dynamo.runtime.process.inotify import Inotify, Mask
from dynamo.serve.state.events import EVENTS_FILE
from dynamo.serve.state.process_table import same_process
from dynamo.serve.state.rundir import PLANNER_FILE
from dynamo.serve.supervision.output import telling_line

LogLine = tuple[str, bytes]
"""A watcher, and a line of its output without the line end."""
_T = TypeVar("_T")
_SUFFIX = ".log"
_OLDER = ".log.1"
_BATCH_S = 0.05
_AGAIN_S = 1.0
_STEP_BYTES = 1 << 16
_READ_BYTES = 1 << 20
_MASK = Mask.MODIFY | Mask.CREATE | Mask.MOVED_TO | Mask.ONLYDIR
_TIME = re.compile(rb'(?:\{"time":\s*")?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*)')
_TAIL_BYTES = 65536
_PERCENT = re.compile(r"(?<![\d.])(100|\d{1,2})(?:\.\d+)? ?%")
_LOADING = re.compile(r"download|load|fetch|shard|captur|compil|quantiz", re.IGNORECASE)

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_decode = msgspec.json.Decoder(BoxEvent).decode
_decode_report = msgspec.json.Decoder(PlannerReport).decode


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
    percent = _PERCENT.search(line)
    return int(percent[1]) / 100 if percent and _LOADING.search(line) else None


def select_watchers(directory: Path, namespace: str, name: str) -> list[str]:
    """Return the watchers with a log file in ``directory`` that ``name`` stands for: "" for all.

    ``name`` is a watcher, with or without the namespace, or a service. Raises InvalidArgument that
    lists them.
    """
    watchers = sorted(
        path.name.removesuffix(_SUFFIX) for path in directory.glob(f"{namespace}_*{_SUFFIX}")
    )
    chosen = [watcher for watcher in watchers if matches(watcher, namespace, name)]
    if not chosen:
        raise InvalidArgument(
            f"no log of {name!r} in {directory}; there are {', '.join(watchers)}"
            if watchers
            else f"no logs in {directory}: no deployment of namespace {namespace!r} has run; name "
            "another one with --namespace"
        )
    return chosen


def matches(watcher: str, namespace: str, name: str) -> bool:
    """Whether ``name`` stands for ``watcher``: is its name, that of its service, or empty."""
    if not name:
        return watcher.startswith(f"{namespace}_")
    service = re.compile(re.escape(f"{namespace}_{name}") + r"(_\d+)?")
    return watcher == name or service.fullmatch(watcher) is not None


class LogReader:
    """Reads the log files in ``directory`` of the watchers for which ``name`` stands.

    Each call returns the lines that are new since the last one, also when files were rotated,
    truncated or created since.
    """

    def __init__(self, directory: Path, namespace: str, name: str) -> None:
        self.directory = directory
        self._namespace = namespace
        self._name = name
        self._tails: dict[str, LogTail] = {}

    def last(self, count: int) -> list[LogLine]:
        """Return the last ``count`` lines of each watcher, merged by the times in them."""
        stamped = [_stamped(tail.watcher, tail.last(count)) for tail in self._followed()]
        # By the time alone, so that lines without one stay behind those that they follow.
        return [(watcher, line) for _, watcher, line in heapq.merge(*stamped, key=lambda x: x[0])]

    def read(self) -> Iterator[LogLine]:
        """Yield the new lines, watcher by watcher."""
        for tail in self._followed():
            for line in tail.read():
                yield tail.watcher, line

    def close(self) -> None:
        """Close the files. Idempotent."""
        for tail in self._tails.values():
            tail.close()
        self._tails.clear()

    def _followed(self) -> list[LogTail]:
        for path in sorted(self.directory.glob(f"{self._namespace}_*{_SUFFIX}")):
            watcher = path.name.removesuffix(_SUFFIX)
            if watcher not in self._tails and matches(watcher, self._namespace, self._name):
                self._tails[watcher] = LogTail(path, watcher)
        return list(self._tails.values())


async def follow(directory: Path, read: Callable[[], Iterable[_T]]) -> AsyncGenerator[_T, None]:
    """Yield what ``read`` returns after each change of a file in ``directory``, without an end."""
    changed = asyncio.Event()
    inotify = Inotify(changed.set)
    try:
        inotify.add(directory, _MASK, lambda name, mask: changed.set())
        while True:
            changed.clear()  # before the files are read: a write during that counts
            for item in read():
                yield item
            with contextlib.suppress(TimeoutError):  # no event comes from a directory made again
                async with asyncio.timeout(_AGAIN_S):
                    await changed.wait()
            await asyncio.sleep(_BATCH_S)  # one read for many lines
    finally:
        inotify.close()


class LogTail:
    """Reads the lines that are appended to the file ``path``, beyond rotations."""

    def __init__(self, path: Path, watcher: str) -> None:
        self.watcher = watcher
        self._path = path
        self._file: io.BufferedReader | None = None
        self._partial = b""

    def last(self, count: int) -> list[bytes]:
        """Return the last ``count`` lines, also of the older file; :meth:`read` goes on there."""
        lines: list[bytes] = []
        if self._open() and self._file is not None:
            *lines, self._partial = _end_of(self._file, count).split(b"\n")
        if len(lines) < count:
            with contextlib.suppress(OSError), self._path.with_suffix(_OLDER).open("rb") as older:
                lines = _end_of(older, count - len(lines)).split(b"\n")[:-1] + lines
        return lines[-count:] if count else []

    def whole(self) -> Iterator[bytes]:
        """Yield all complete lines, also of the older file; :meth:`read` goes on there."""
        with contextlib.suppress(OSError):
            yield from self._path.with_suffix(_OLDER).read_bytes().splitlines()
        yield from self.read()

    def read(self) -> Iterator[bytes]:
        """Yield the lines that are complete now and were not returned yet."""
        while self._open() and self._file is not None:
            if os.fstat(self._file.fileno()).st_size < self._file.tell():
                self._file.seek(0)  # truncated
            while data := self._file.read(_READ_BYTES):
                *lines, self._partial = (self._partial + data).split(b"\n")
                yield from lines
            # Else it was rotated: read to its end above, it is closed, and the new one follows.
            if self._is_current():
                return
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._partial = None, b""

    def _open(self) -> bool:
        """Open the file if it is not open; return whether there is one."""
        if self._file is None:
            with contextlib.suppress(OSError):
                self._file = self._path.open("rb")
        return self._file is not None

    def _is_current(self) -> bool:
        """Whether the open file has not been rotated; a removed one is, until there is another."""
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return True


def _end_of(file: io.BufferedReader, count: int) -> bytes:
    """Return the end of ``file`` with its last ``count`` complete lines and what follows them."""
    end = start = file.seek(0, os.SEEK_END)
    data = b""
    # One line end more than lines: it ends the line before the first of them.
    while start and data.count(b"\n") <= count:
        size = min(_STEP_BYTES, start)
        start = file.seek(start - size)
        data = file.read(size) + data
    file.seek(end)
    skipped = max(0, data.count(b"\n") - count)
    return data.split(b"\n", skipped)[-1] if skipped else data


def _stamped(watcher: str, lines: list[bytes]) -> list[tuple[bytes, str, bytes]]:
    """Return ``lines`` with their times; one without has that of the line before it."""
    stamped = []
    time = b""
    for line in lines:
        match = _TIME.match(line)
        time = match[1] if match else time
        stamped.append((time, watcher, line))
    return stamped


@dataclass(frozen=True)
class EventFilter:
    """Which events: since a time (Unix), of a model, of a worker or service of ``namespace``."""

    namespace: str
    since_s: float = 0.0
    model: str = ""
    name: str = ""

    def takes(self, event: BoxEvent) -> bool:
        """Whether the event is one of them."""
        return (
            event.at_s >= self.since_s
            and (not self.model or self.model in (event.model, event.name))
            and (not self.name or self._names(event))
        )

    def _names(self, event: BoxEvent) -> bool:
        """Whether it is of ``name``, which may be without the namespace, or that of a service.

        What operators name may be a service, too, and is then of each of its workers.
        """
        prefix = f"{self.namespace}_"
        bare, wanted = event.name.removeprefix(prefix), self.name.removeprefix(prefix)
        return matches(prefix + bare, self.namespace, wanted) or (
            event.kind in OPERATOR_EVENTS and matches(prefix + wanted, self.namespace, bare)
        )


class EventReader:
    """Reads the events in a run directory. Each call goes on where the last one ended."""

    def __init__(self, run_directory: Path) -> None:
        self.directory = (run_directory / EVENTS_FILE).parent
        self._tail = LogTail(run_directory / EVENTS_FILE, "")

    def all(self) -> list[BoxEvent]:
        """Return all events that are kept, the oldest first."""
        return list(_decoded(self._tail.whole()))

    def read(self) -> Iterator[BoxEvent]:
        """Yield the events since the last call, also after a rotation."""
        return _decoded(self._tail.read())

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._tail.close()


def parse_since(text: str, now_s: float | None = None) -> float:
    """Return the Unix time of ``30m``, ``2h``, ``1d`` ago, or of a local time in ISO 8601.

    Raises InvalidArgument.
    """
    if ago := _AGO.fullmatch(text):
        now_s = time.time() if now_s is None else now_s
        return now_s - float(ago[1]) * _UNITS_S[ago[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise InvalidArgument(
            f"--since {text!r}: give a time such as 30m, 2h, 1d, or 2026-05-04T13:00"
        ) from None


def _decoded(lines: Iterator[bytes]) -> Iterator[BoxEvent]:
    for line in lines:
        try:
            yield _decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue  # its writer crashed


def read_planner(run_directory: Path) -> PlannerReport | None:
    """Return the report of the planner that runs; None without one, or if it cannot be read."""
    try:
        report = _decode_report(read_file(run_directory / PLANNER_FILE) or b"")
    except (BadRecord, OSError, msgspec.MsgspecError):
        return None
    return report if same_process(report.pid, report.start_ticks) else None


def planner_summary(report: PlannerReport, now_s: float | None = None) -> PlannerSummary:
    """Return the report as ``top`` shows it; ``now_s`` is Unix time."""
    now_s = time.time() if now_s is None else now_s
    due = [model.next_at_s for model in report.models if model.next_at_s is not None]
    waits = report.state == "paused" or not due
    # A time in the past is of a decision in progress, or a missed one: show the next to come.
    coming = [at_s for at_s in due if at_s > now_s]
    return PlannerSummary(
        state=report.state,
        mode=report.mode,
        next_s=None if waits else min(coming, default=now_s) - now_s,
        decisions=tuple(
            f"{model.model}: {model.waits_for or model.text}" for model in report.models
        ),
    )
