"""Defects that were fixed once, and are put back to see that the simulation finds them.

``scripts/simulate --defect NAME`` compiles a module with the old text in place of the new one. It
takes the small defects of ``scripts/mutate``, too.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from broken_module import BrokenModule
from mutant_table import MUTANTS

__all__ = ["DEFECTS", "Defect", "install"]


class Defect(NamedTuple):
    """``fixed`` is the present text of ``module``, ``broken`` the text that brings it back."""

    name: str
    module: str
    fixed: str
    broken: str
    what: str


DEFECTS = (
    Defect(
        "start-of-a-sleeper",
        "dynamo.serve.supervision.supervised",
        "if not self.is_stopped() and len(self.processes) >= self.numprocesses:",
        "if False:",
        "circusctl start of a worker that sleeps: its entry says running, its engine sleeps on.",
    ),
    Defect(
        "restart-of-a-sleeper",
        "dynamo.serve.supervision.rolling",
        "if self._record.states().get(watcher.name) == ASLEEP:",
        "if False:",
        "A restart of a worker that sleeps starts one that is awake, on the GPU of another.",
    ),
    Defect(
        "drained-while-stopped",
        "dynamo.serve.supervision.supervised",
        "        if self.arbiter.drained(self, stopped):",
        "        if not stopped and self.arbiter.drained(self, stopped):",
        "A worker that drains is stopped, and its operator is killed: its entry stays for ever.",
    ),
    Defect(
        "silence-armed-twice",
        "dynamo.router.connect.kv_router",
        "if name in self._timers:",
        "if False:",
        "A worker serves, sleeps, wakes and serves: its timer fires twice, with a KeyError.",
    ),
    Defect(
        "unknown-after-restart",
        "dynamo.frontend.models.registry",
        "if self._graph.has(name) or (none_yet",
        "if (none_yet",
        "The box starts again: 404 for a model of its graph until the planner announces it.",
    ),
    Defect(
        "lock-of-an-ended-deployment",
        "dynamo.serve.state.statefile",
        "lock.release(remove=not self.path.exists())",
        "lock.release()",
        "The deployment stops while a verb works: the verb leaves the lock of the statefile.",
    ),
    Defect(
        "files-of-a-killed-planner",
        "dynamo.serve.state.rundir",
        "        self._remove_planner()\n",
        "",
        "A planner is killed, and the deployment stops before it runs again: its files stay.",
    ),
    Defect(
        "stop-during-a-restart",
        "dynamo.serve.supervision.arbiter",
        "await self.answer()",
        "pass",
        "A stop cancels a restart or a reload: a traceback, and its client gets no answer.",
    ),
    Defect(
        "file-of-a-killed-writer",
        "dynamo.serve.state.rundir",
        'for path in self.path.glob(".*"):',
        "for path in ():",
        "A process is killed while it writes a file: its temporary file outlives the deployment.",
    ),
    Defect(
        "silent-beside-another-model",
        "dynamo.router.connect.router",
        "else pool.has_answering",
        "else client._has_answering",
        "A model's only worker is silent: its requests use up their migrations on it.",
    ),
    Defect(
        "statefile-on-a-full-disk",
        "dynamo.serve.state.record",
        "again = self._failed or self._taken",
        "again = False",
        "A change of processes on a full disk: the statefile is wrong until the next change.",
    ),
    Defect(
        "lease-on-a-full-disk",
        "dynamo.frontend.service",
        'self._tasks.spawn(self._hold_lease(), name="lease")',
        'self._tasks.spawn(self._runtime.granted(), name="lease")',
        "A frontend starts while the disk is full: it never gets its lease.",
    ),
    Defect(
        "gpus-of-a-waking-worker",
        "dynamo.serve.state.ledger",
        "(entry.asleep and entry.reserved_by is None)",
        "entry.asleep",
        "A worker that wakes holds no GPU yet: another takes it in the same moment.",
    ),
    Defect(
        "record-not-restored",
        "dynamo.runtime.discovery.file",
        "        for path, data in self.keys.items():\n            self._restore(path, data)\n",
        "",
        "The record of a worker is removed: its lease lives on, and no one finds the worker.",
    ),
    Defect(
        "descriptor-of-an-ended-process",
        "dynamo.runtime.discovery.leases",
        "            self._loop.remove_reader(self._fd)\n            os.close(self._fd)\n",
        "            self._loop.remove_reader(self._fd)\n",
        "A process ends: those that watched it keep a descriptor for ever.",
    ),
    Defect(
        "wake-of-a-killed-operator",
        "dynamo.operations.steps.sleeping",
        'return operation if operation in (SLEEP, WAKE) else ""',
        'return ""',
        "The process that wakes a worker is killed: no repair finishes or undoes the wake.",
    ),
    Defect(
        "no-migration",
        "dynamo.frontend.requests.migration",
        "self.limit = model.limit or least",
        "self.limit = 0",
        "No request goes on with another worker when its own dies.",
    ),
    Defect(
        "index-never-filled",
        "dynamo.router.caches.indexer",
        "        for event in batch.events:\n            stream = self",
        "        for event in ():\n            stream = self",
        "The router does not apply KV events: no request meets the blocks that others left.",
    ),
    Defect(
        "statefile-without-lock",
        "dynamo.serve.state.statefile",
        "lock = FileLock(self.lock_path)\n        lock.acquire()\n        try:\n            yield",
        "lock = FileLock(self.lock_path)\n        try:\n            yield",
        "Two processes change the statefile at once: the change of one is lost.",
    ),
)


def install(name: str) -> None:
    """Put the defect ``name`` in, before its module is imported. ValueError: unknown."""
    found = next((one for one in DEFECTS if one.name == name), None)
    mutant = next((one for one in MUTANTS if one.name == name and not one.is_compiled), None)
    if found is not None:
        module, text, replacement = found.module, found.fixed, found.broken
    elif mutant is not None:
        module, text, replacement = mutant.module, mutant.text, mutant.replacement
    else:
        names = ", ".join(one.name for one in DEFECTS)
        raise ValueError(
            f"--defect {name!r} is unknown; there are those of scripts/mutate, but for compiled "
            f"modules, and: {names}"
        )
    if module in sys.modules:
        raise ValueError(f"{module} is imported already")
    sys.meta_path.insert(0, BrokenModule(module, text, replacement))
