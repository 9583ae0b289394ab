"""What must be so of the files of a deployment with each change: the statefile, leases, records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_os
from presence import asleep

if TYPE_CHECKING:
    from box import Box
    from machine import Machine

__all__ = ["Order", "check_after_power_loss", "written"]


def written(write: Any) -> Any:
    """Check what each process writes into the statefile."""

    def checked(self: Any, document: Any) -> None:
        write(self, document)
        machine = fake_os.machine()
        machine.failures += [f"{machine.current} wrote: {one}" for one in _of_document(document)]

    return checked


def _of_document(document: Any) -> Iterator[str]:
    from dynamo.serve.state.document import STOPPED
    from dynamo.serve.state.process_table import ledger_of

    held: dict[str, float] = defaultdict(float)
    for shares in ledger_of(document).held.values():
        for gpu, share in shares.items():
            held[gpu] += share
    yield from (f"GPU {gpu} {share:g} times" for gpu, share in held.items() if share > 1.001)
    lived = {one.name for one in fake_os.machine().lived}
    for name, entry in document.components.items():
        stopped = entry.watcher is not None and entry.watcher.status == STOPPED
        if stopped and name not in lived and entry.reserved_by is None and not entry.draining:
            yield f"{name} is stopped, it was never started"
        pids = [one.pid for one in entry.processes]
        if len(set(pids)) != len(pids):
            yield f"{name} with processes {pids}"
        if not entry.asleep or entry.reserved_by is not None:
            continue
        for pid in pids:
            process = fake_os.machine().processes.get(pid)
            if process is not None and process.alive and not asleep(process):
                yield f"{name} is asleep, {process} is awake"


class Order:
    """The order in which files leave: a lease first, so that no record is put under it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._removed: dict[str, int] = {}

    def file(self, path: Any, exists: bool) -> None:
        """A file has come, or left."""
        machine, name = self._machine, Path(path)
        lease = name.name.rpartition("%2F")[2]
        if exists or machine.current is None:
            return
        if name.parent.name == "leases":
            if self._removed.get(lease) == machine.steps:
                text = f"{machine.current} removed the records of lease {lease} before it"
                machine.failures.append(text)
        elif name.parent.parent.name == "v1":
            self._removed[lease] = machine.steps


def check_after_power_loss(box: Box) -> Iterator[str]:
    """A loss of power leaves a statefile that can be read, or none."""
    from dynamo.errors import StatefileError
    from dynamo.serve.state.statefile import Statefile

    try:
        Statefile(box.state, "box").read()
    except StatefileError as error:
        yield f"after the loss of power: {error.message}"
