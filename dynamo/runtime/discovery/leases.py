"""The leases of all processes as seen by one: alive, silent or ended.

A lease ends when its file is unlinked (revoked) or its process dies (pidfd, same host). A lease
whose file was not touched for its ttl is *silent*: its keys are hidden until the next touch. A
silent lease whose process cannot be watched (another host, or an earlier boot) ends after
:data:`FORGET_AFTER_TTLS`; one of a process on this host stays silent as long as the process hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo.protocols.control import LeaseRecord
from dynamo.runtime.discovery.layout import (
    BadRecord,
    decode_lease,
    names,
    read_file,
    untouched_s,
)
from dynamo.runtime.process.os_process import host_id, is_running

if TYPE_CHECKING:
    from dynamo.runtime.discovery.store_watcher import StoreWatcher

FORGET_AFTER_TTLS = 6
SLICE_S = 0.01
"""The longest time that reading thousands of files may block the loop."""
log = logging.getLogger(__name__)


class ProcessEnd:
    """Calls ``on_end`` on the loop as soon as the process ends, through a pidfd.

    ProcessLookupError: it has ended already, or its pid belongs to another process. OSError: the
    system has no descriptor left.
    """

    def __init__(self, pid: int, ticks: int, on_end: Callable[[], None]) -> None:
        self._fd = os.pidfd_open(pid)
        # After opening: the pidfd pins one process, and the start time proves that it is ours.
        if not is_running(pid, ticks):
            os.close(self._fd)
            raise ProcessLookupError(f"process {pid} of that start time has ended")
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._ended)

    def close(self) -> None:
        """Stop watching the process. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ended(self) -> None:
        self.close()
        self._on_end()


class _TrackedLease:
    """The state of one lease. Times are seconds of the loop's clock."""

    __slots__ = ("alive", "modified_ns", "process", "record", "touched_at_s")

    def __init__(self, record: LeaseRecord, touched_at_s: float, modified_ns: int) -> None:
        self.record = record
        self.alive = False
        self.touched_at_s = touched_at_s
        self.modified_ns = modified_ns
        self.process: ProcessEnd | None = None

    def deadline(self) -> float | None:
        """Return when the lease changes state without another touch, None for never."""
        if self.alive:
            return self.touched_at_s + self.record.ttl_s
        if self.process is None:
            return self.touched_at_s + self.record.ttl_s * FORGET_AFTER_TTLS
        return None


class LeaseTable:
    """Follows the files of ``directory``. Driven by :meth:`observe` and :meth:`rescan`.

    ``listener`` is called synchronously, on the loop; ``holder_died`` after ``lease_ended``.

    ``drain`` delivers pending file events. It is called before a lease counts as silent: after a
    stall of this process the touches of all others are still in the inotify queue.
    """

    def __init__(self, directory: Path, listener: StoreWatcher, drain: Callable[[], None]) -> None:
        self._directory = directory
        self._listener = listener
        self._drain = drain
        self._host = host_id()
        self._tracked: dict[int, _TrackedLease] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def is_alive(self, lease_id: int) -> bool:
        """Return whether the keys of this lease are visible."""
        lease = self._tracked.get(lease_id)
        return lease is not None and lease.alive

    def is_known(self, lease_id: int) -> bool:
        """Return whether the lease exists, silent or not. Reads the file of an unknown one."""
        if lease_id not in self._tracked:
            self.observe(f"{lease_id:x}")
        return lease_id in self._tracked

    def touched(self, name: str) -> None:
        """Note a touch of the lease file ``name``."""
        lease = self._tracked.get(_parse(name))
        if lease is None:
            self.observe(name)
            return
        try:
            status = (self._directory / name).stat()
        except FileNotFoundError:
            self._end(lease.record.lease_id)
        else:
            self._touch(lease, status)

    def observe(self, name: str) -> None:
        """Read the file ``name`` and apply its changes. One small read."""
        path = self._directory / name
        lease_id = _parse(name)
        try:
            data = read_file(path)
            record = None if data is None else decode_lease(name, data)
            status = path.stat()
        except BadRecord as error:
            self._listener.bad_file(path, str(error))
            return
        except FileNotFoundError:
            record = None
        if record is None:
            self._listener.no_file(path)
            self._end(lease_id)
            return
        lease = self._tracked.get(lease_id)
        if lease is not None and lease.record != record:  # another process took over the id
            self._end(lease_id, unlink=False)
            lease = None
        if lease is None:
            self._add(record, status)
        else:
            self._touch(lease, status)

    def rescan(self) -> Iterator[None]:
        """Compare all leases with the directory, one with each step of the result."""
        for name in {*names(self._directory), *(f"{lease_id:x}" for lease_id in self._tracked)}:
            self.observe(name)
            yield

    def close(self) -> None:
        """Stop following; the listener is not called again."""
        if self._timer is not None:
            self._timer.cancel()
        for lease in self._tracked.values():
            if lease.process is not None:
                lease.process.close()
        self._tracked.clear()

    def _add(self, record: LeaseRecord, status: os.stat_result) -> None:
        touched_at_s = self._touched_at_s(record, status)
        lease = _TrackedLease(record, touched_at_s, status.st_mtime_ns)
        # The holder may have died before anyone watched it: then the lease ends here.
        if record.host == self._host and not self._watch_process(lease):
            self._unlink(record.lease_id)
            self._listener.holder_died(record.lease_id)
            return
        self._tracked[record.lease_id] = lease
        if self._loop.time() < touched_at_s + record.ttl_s:
            lease.alive = True
            self._listener.lease_alive(record.lease_id)
        self._arm(lease.deadline())

    def _touched_at_s(self, record: LeaseRecord, status: os.stat_result) -> float:
        """Return when the lease was touched, by the loop's clock; never in the future."""
        return self._loop.time() - untouched_s(status, record.host == self._host)

    def _watch_process(self, lease: _TrackedLease) -> bool:
        record = lease.record
        try:
            lease.process = ProcessEnd(
                record.pid, record.pid_start, lambda: self._died(record.lease_id)
            )
        except ProcessLookupError:
            return False
        except OSError as error:
            log.warning("cannot watch process %d, relying on its ttl: %s", record.pid, error)
        return True

    def _touch(self, lease: _TrackedLease, status: os.stat_result) -> None:
        # Another attribute has changed, or this touch was read before.
        if status.st_mtime_ns == lease.modified_ns:
            return
        lease.modified_ns = status.st_mtime_ns
        lease.touched_at_s = self._touched_at_s(lease.record, status)
        if not lease.alive and self._loop.time() < lease.touched_at_s + lease.record.ttl_s:
            lease.alive = True
            log.info("lease %x was touched again", lease.record.lease_id)
            self._listener.lease_alive(lease.record.lease_id)
            self._arm(lease.deadline())

    def _died(self, lease_id: int) -> None:
        self._end(lease_id)
        self._listener.holder_died(lease_id)

    def _end(self, lease_id: int, unlink: bool = True) -> None:
        lease = self._tracked.pop(lease_id, None)
        if lease is None:
            return
        if lease.process is not None:
            lease.process.close()
        self._listener.lease_ended(lease_id)
        if unlink:
            self._unlink(lease_id)

    def _unlink(self, lease_id: int) -> None:
        with contextlib.suppress(OSError):  # unlinked already, or replaced by a directory
            (self._directory / f"{lease_id:x}").unlink()

    def _arm(self, due: float | None) -> None:
        """Check at ``due``, unless an earlier check is planned. O(1): there may be thousands."""
        if due is None or (self._timer is not None and self._due_s <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due
        self._timer = self._loop.call_at(due, self._check)

    def _check(self) -> None:
        """Expire what is due, for 10 ms at once: the rest follows on the next turn of the loop."""
        self._timer = None
        self._drain()
        now, soonest = self._loop.time(), None
        until_s = time.perf_counter() + SLICE_S
        # A copy: what expires leaves the table.
        for lease_id, lease in list(self._tracked.items()):
            due = lease.deadline()
            if due is not None and due <= now and time.perf_counter() < until_s:
                self._expire(lease_id, lease)
                due = lease.deadline() if lease_id in self._tracked else None
            if due is not None and (soonest is None or due < soonest):
                soonest = due
        self._arm(soonest)

    def _expire(self, lease_id: int, lease: _TrackedLease) -> None:
        # Read the file once more: an inotify event of a touch may have been lost.
        touched_at_s = lease.touched_at_s
        self.observe(f"{lease_id:x}")
        if self._tracked.get(lease_id) is not lease or lease.touched_at_s != touched_at_s:
            return
        if lease.alive:
            lease.alive = False
            log.warning(
                "lease %x was not touched for %g s, hiding its keys", lease_id, lease.record.ttl_s
            )
            self._listener.lease_silent(lease_id)
        else:
            self._end(lease_id)


def _parse(name: str) -> int:
    try:
        lease_id = int(name, 16)
    except ValueError:
        return -1
    # int() accepts signs, underscores and capitals, too: those are not names of leases.
    return lease_id if f"{lease_id:x}" == name else -1
