"""Whether an arbiter finds only alerts that are true, each time, and that of a full disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fake_os

__all__ = ["found"]

_AWAITED_S = 5.0
"""So long ago a request may have waited: the queue that is shown is not of this moment."""


def found(find: Any) -> Any:
    """Check the conditions that are found, and what the counters have grown by."""

    def checked(self: Any, facts: Any) -> Any:
        conditions = find(self, facts)
        machine = fake_os.machine()
        machine.failures += [f"{machine.current}: alert {one}" for one in _wrong(conditions, facts)]
        for key, number in self._rates._last.items():
            if number < 0:
                machine.failures.append(f"{machine.current}: {key} has grown by {number:g}")
        return conditions

    return checked


def _wrong(conditions: Any, facts: Any) -> Iterator[str]:
    from dynamo.doctor.alerts import DISK_FULL, FRONTEND_DOWN, MODEL_NOT_READY

    machine = fake_os.machine()
    rows = {one.model: one for one in facts.box.models}
    workers = {one.name: one for one in facts.box.workers}
    for key, condition in conditions.items():
        if key.alert == MODEL_NOT_READY.name:
            row = rows[key.subject]
            ended = any(workers[one].restarts for one in row.workers if one in workers)
            awaited = machine.last_asked_s(key.subject) > machine.now_s - _AWAITED_S
            if row.ready or not (ended or awaited or row.state == "failed"):
                yield f"{key}: {condition.text}: no request waits for it"
        elif key.alert == FRONTEND_DOWN.name and facts.frontends[key.subject] is not None:
            yield f"{key}: it answers"
    full = {key.subject for key in conditions if key.alert == DISK_FULL.name}
    for disk in facts.disks:
        if (disk.path in full) != (not disk.free_bytes or not disk.free_files):
            yield f"{disk}: {full} are full"
