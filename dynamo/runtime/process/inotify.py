"""Files watched on the event loop: one inotify instance of the process, callbacks with file names.

The kernel limits instances and watches of a user. Beyond a limit a path is read once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import enum
import errno
import itertools
import logging
import os
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

OnFileEvent = Callable[[str, int], None]
"""(name, mask): the name in the watched directory, "" for the watched path itself."""


class Mask(enum.IntFlag):
    """What happens at a path, and how it is watched, as inotify(7) names them."""

    MODIFY = 0x2
    ATTRIB = 0x4
    CLOSE_WRITE = 0x8
    MOVED_FROM = 0x40
    MOVED_TO = 0x80
    CREATE = 0x100
    DELETE = 0x200
    DELETE_SELF = 0x400
    MOVE_SELF = 0x800
    Q_OVERFLOW = 0x4000
    IGNORED = 0x8000
    ONLYDIR = 0x100_0000
    MASK_ADD = 0x2000_0000


_LIBC = ctypes.CDLL(None, use_errno=True)
_EVENT = struct.Struct("iIII")
_OVERFLOW = int(Mask.Q_OVERFLOW)
_IGNORED = int(Mask.IGNORED)
_READ_BYTES = 1 << 15
_POLL_S = 1.0
_GONE = int(Mask.IGNORED | Mask.DELETE_SELF | Mask.MOVE_SELF)
_CHANGED = int(Mask.MOVED_TO | Mask.CREATE | Mask.CLOSE_WRITE | Mask.MODIFY)
_TOUCHED = int(Mask.ATTRIB)
_DELETED = int(Mask.DELETE)
_LIMITS = {  # by the error that the kernel returns
    errno.EMFILE: "sudo sysctl fs.inotify.max_user_instances=1024",
    errno.ENOSPC: "sudo sysctl fs.inotify.max_user_watches=524288",
}
_sources: dict[asyncio.AbstractEventLoop, _Source] = {}
_reported: set[int] = set()
_descriptors = itertools.count(1)
log = logging.getLogger(__name__)


class InotifyInstance:
    """An inotify instance of the kernel. Its calls raise OSError."""

    def __init__(self) -> None:
        self.fd = _checked(_LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def add_watch(self, path: Path, mask: int) -> int:
        """Watch ``path``; return the number of the watch."""
        name = ctypes.c_char_p(os.fsencode(path))
        return _checked(_LIBC.inotify_add_watch(self.fd, name, ctypes.c_uint32(mask)))

    def rm_watch(self, number: int) -> None:
        """End the watch."""
        _checked(_LIBC.inotify_rm_watch(self.fd, number))

    def close(self) -> None:
        """End all watches."""
        os.close(self.fd)


def _checked(result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


class Inotify:
    """A group of watches. All groups of a loop share one inotify instance.

    ``on_overflow`` is called after the kernel dropped events.
    """

    def __init__(self, on_overflow: Callable[[], None]) -> None:
        self._on_overflow = on_overflow
        self._own: dict[int, _Watch] = {}
        self._closed = False
        loop = asyncio.get_running_loop()
        self._source = _sources.get(loop) or _Source(loop)
        self._source.groups.append(self)

    def add(self, path: Path, mask: Mask, on_event: OnFileEvent) -> int:
        """Watch ``path``; return the descriptor for :meth:`remove`. Raises OSError without it."""
        watch = _Watch(next(_descriptors), path, int(mask), on_event)
        self._source.add(watch, mask)
        self._own[watch.descriptor] = watch
        return watch.descriptor

    def remove(self, descriptor: int) -> None:
        """End a watch; ignore one that the kernel ended with its path."""
        watch = self._own.pop(descriptor, None)
        if watch is not None:
            self._source.remove(watch)

    def drain(self) -> None:
        """Deliver all events that the kernel has queued, and scan the paths without a watch."""
        self._source.drain()

    def scan(self) -> None:
        """Scan the paths without a watch."""
        self._source.scan()

    def close(self) -> None:
        """End all watches. Idempotent."""
        if not self._closed:
            self._closed = True
            for descriptor in list(self._own):
                self.remove(descriptor)
            self._source.leave(self)

    def overflowed(self) -> None:
        """The kernel dropped events."""
        self._on_overflow()


@dataclass(eq=False)
class _Watch:
    """One path of a group. ``number`` is that of the kernel; ``state`` is kept without one."""

    descriptor: int
    path: Path
    mask: int
    on_event: OnFileEvent
    number: int = -1
    state: _State | None = None
    ended: bool = False

    def deliver(self, name: str, mask: int) -> None:
        """Pass on an event that was asked for, or the end of the watch."""
        self.ended = self.ended or bool(mask & _IGNORED)
        if mask & (self.mask | _IGNORED):
            try:
                self.on_event(name, mask)
            except Exception:
                log.exception("handling the event of file %a failed", name)


@dataclass(frozen=True)
class _State:
    """What is at a path: its identity, and each entry with what changes when it is written."""

    identity: tuple[int, int]
    entries: dict[str, tuple[int, ...]]


class _Source:
    """The inotify instance of a loop, and a timer for the watches that it has no room for.

    The kernel has one watch for a path. So those of several groups are merged, and an event goes
    to each that asked for it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.groups: list[Inotify] = []
        self._loop = loop
        self._instance: InotifyInstance | None = None
        self._kernel: dict[int, list[_Watch]] = {}
        self._polled: list[_Watch] = []
        self._timer: asyncio.TimerHandle | None = None
        _sources[loop] = self

    def add(self, watch: _Watch, mask: Mask) -> None:
        """Begin ``watch``. Raises OSError if its path does not exist."""
        try:
            # MASK_ADD: the kernel would replace the mask of another group's watch.
            watch.number = self._open().add_watch(watch.path, mask | Mask.MASK_ADD)
        except OSError as error:
            if error.errno not in _LIMITS:
                raise
            self._poll_instead(watch, error)
            return
        self._kernel.setdefault(watch.number, []).append(watch)

    def remove(self, watch: _Watch) -> None:
        """End ``watch``; the last one of a path ends that of the kernel."""
        watch.ended = True
        if watch in self._polled:
            self._polled.remove(watch)
        watches = self._kernel.get(watch.number, [])
        if watch not in watches:
            return  # the path was removed, and the watch with it
        watches.remove(watch)
        if not watches:
            del self._kernel[watch.number]
            with contextlib.suppress(OSError):  # the path has just been removed
                self._open().rm_watch(watch.number)

    def leave(self, group: Inotify) -> None:
        """Forget ``group``; close the instance after the last one."""
        self.groups.remove(group)
        if self.groups:
            return
        _sources.pop(self._loop, None)
        if self._timer is not None:
            self._timer.cancel()
        if self._instance is not None:
            self._loop.remove_reader(self._instance.fd)
            self._instance.close()
            self._instance = None

    def drain(self) -> None:
        """Deliver what has happened until now."""
        while self._read():
            pass
        self.scan()

    def _open(self) -> InotifyInstance:
        if self._instance is None:
            instance = InotifyInstance()
            self._loop.add_reader(instance.fd, self._on_readable)
            self._instance = instance
        return self._instance

    def _on_readable(self) -> None:
        self._read()  # a part: the loop calls again for the rest

    def _read(self) -> bool:
        """Deliver some hundred events; return whether there may be more."""
        if self._instance is None:
            return False
        try:
            data = os.read(self._instance.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        self._deliver(data)
        return True

    def _deliver(self, data: bytes) -> None:
        offset = 0
        while offset < len(data):
            number, mask, _, size = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size + size
            if mask & _OVERFLOW:  # the queue was full, any number of events are missing
                for group in tuple(self.groups):
                    group.overflowed()
                continue
            watches = self._kernel.get(number, [])
            if mask & _IGNORED:  # the kernel removed the watch; it may reuse the number
                self._kernel.pop(number, None)
            # The kernel pads names with zero bytes.
            name = os.fsdecode(data[offset - size : offset].rstrip(b"\0"))
            # A copy: a callback may end any of them, which skips it here.
            for watch in tuple(watches):
                if not watch.ended:
                    watch.deliver(name, mask)

    def _poll_instead(self, watch: _Watch, error: OSError) -> None:
        watch.state = _look(watch.path)
        if watch.state is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(watch.path))
        if error.errno not in _reported:
            _reported.add(error.errno or 0)
            log.warning(
                "cannot watch files (%s): looking for changes once a second instead; "
                "raise the limit: %s",
                error.strerror,
                _LIMITS[error.errno or 0],
            )
        self._polled.append(watch)
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is None and self._polled:
            self._timer = self._loop.call_later(_POLL_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.scan()
        self._schedule()

    def scan(self) -> None:
        """Deliver the changes of the paths that the kernel does not watch."""
        for watch in tuple(self._polled):
            if watch.ended or watch.state is None:
                continue
            before = watch.state
            try:
                watch.state = _look(watch.path)
            except OSError as error:  # such as no free descriptor: the next scan finds the changes
                log.debug("cannot read %s: %s", watch.path, error)
                continue
            for name, mask in _changes(before, watch.state):
                if not watch.ended:
                    watch.deliver(name, mask)
            if watch.ended and watch in self._polled:
                self._polled.remove(watch)


def _look(path: Path) -> _State | None:
    """Return what is at ``path`` now; None without it."""
    try:
        status = path.stat()
        entries = dict(_entries(path)) if stat.S_ISDIR(status.st_mode) else {"": _written(status)}
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _State((status.st_dev, status.st_ino), entries)


def _entries(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    with os.scandir(path) as scan:
        for entry in scan:
            with contextlib.suppress(FileNotFoundError):
                yield entry.name, _written(entry.stat(follow_symlinks=False))


def _written(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _changes(before: _State, after: _State | None) -> Iterator[tuple[str, int]]:
    """Yield the events between two scans of a path."""
    if after is None or after.identity != before.identity:
        yield "", _GONE
        return
    for name, written in after.entries.items():
        if before.entries.get(name) != written:
            yield name, _CHANGED if name else _TOUCHED
    for name in before.entries.keys() - after.entries.keys():
        yield name, _DELETED
