"""Inotify on the event loop: many watches, one descriptor, callbacks with file names."""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path

import asyncinotify
from asyncinotify import Mask

from dynamo.errors import ConfigError

__all__ = ["Inotify", "OnFileEvent"]

OnFileEvent = Callable[[str, int], None]
"""(name, mask): the name in the watched directory, "" for the watched path itself."""

_EVENT = struct.Struct("iIII")
_OVERFLOW = int(Mask.Q_OVERFLOW)
_IGNORED = int(Mask.IGNORED)
_READ_BYTES = 1 << 16
log = logging.getLogger(__name__)


class Inotify:
    """One inotify descriptor. ``on_overflow`` is called after the kernel dropped events.

    ConfigError: the system allows no further inotify instance.
    """

    def __init__(self, on_overflow: Callable[[], None]) -> None:
        try:
            self._source = asyncinotify.Inotify()
        except OSError as error:
            raise ConfigError(
                f"cannot watch files: {error}; raise fs.inotify.max_user_instances"
            ) from error
        self._on_overflow = on_overflow
        self._callbacks: dict[int, OnFileEvent] = {}
        self._watches: dict[int, asyncinotify.Watch] = {}
        self._fd = self._source.fd
        os.set_blocking(self._fd, False)
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self.drain)

    def add(self, path: Path, mask: Mask, on_event: OnFileEvent) -> int:
        """Watch ``path``; return the descriptor for :meth:`remove`."""
        watch = self._source.add_watch(path, mask)
        self._callbacks[watch.wd] = on_event
        self._watches[watch.wd] = watch
        return watch.wd

    def remove(self, descriptor: int) -> None:
        """End a watch; ignore one that the kernel ended with its path."""
        self._callbacks.pop(descriptor, None)
        watch = self._watches.pop(descriptor, None)
        if watch is None or self._closed:
            return
        try:
            self._source.rm_watch(watch)
        except OSError:
            return  # the path was removed, and the watch with it

    def drain(self) -> None:
        """Deliver all events that the kernel has queued."""
        while not self._closed:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return
            self._deliver(data)

    def close(self) -> None:
        """End all watches. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._callbacks.clear()
            self._watches.clear()
            self._source.close()

    def _deliver(self, data: bytes) -> None:
        offset = 0
        while offset < len(data):
            descriptor, mask, _, size = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size + size
            if mask & _OVERFLOW:  # the queue was full, any number of events are missing
                self._on_overflow()
                continue
            callback = self._callbacks.get(descriptor)
            if mask & _IGNORED:  # the kernel removed the watch; it may reuse the descriptor
                self._callbacks.pop(descriptor, None)
                self._watches.pop(descriptor, None)
            if callback is not None:
                name = os.fsdecode(data[offset - size : offset].rstrip(b"\0"))
                try:
                    callback(name, mask)
                except Exception:
                    log.exception("handling the event of file %a failed", name)
