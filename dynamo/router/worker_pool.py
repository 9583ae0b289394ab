"""The workers of a router, their data-parallel ranks, and the dense slot of each pair."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from dynamo._fast.radix import RadixTree
from dynamo.protocols.control import RuntimeConfig

_NO_OWNER = (-1, -1)
"""The entry of a slot that no worker has; never that of a candidate."""


class Saturation:
    """Counts what now rejects every request: worker pools that are all busy, full queues.

    A frontend has one for all its models, so that a request pays for one look at ``count``.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def changed(self, saturated: bool) -> None:
        """Count one more of them, or one less."""
        self.count += 1 if saturated else -1


class DenseSlots:
    """Assigns slots where there is no prefix index, whose columns they must fit otherwise."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int], int] = {}
        self._free: list[int] = []

    def slot(self, worker: int, dp_rank: int) -> int:
        """The slot of the pair; freed slots are reused first."""
        key = (worker, dp_rank)
        if key not in self._slots:
            # Without free slots, those in use are 0 to len - 1.
            self._slots[key] = self._free.pop() if self._free else len(self._slots)
        return self._slots[key]

    def remove_worker(self, worker: int) -> int:
        """Free the worker's slots; return the number of dropped blocks, always 0."""
        for key in [key for key in self._slots if key[0] == worker]:
            self._free.append(self._slots.pop(key))
        return 0


@dataclass(frozen=True)
class Member:
    """One worker: ``slots`` by dp_rank, from ``data_parallel_start_rank`` on."""

    worker_id: int
    config: RuntimeConfig
    device_type: str
    slots: dict[int, int]


class WorkerPool:
    """The live workers. Reads are plain attributes; changes, which are rare, rebuild them.

    ``candidates`` is the column of all slots, ``owners[slot]`` its (worker_id, dp_rank), ``width``
    the length that columns indexed by slot need. ``busy`` are the workers over their busy
    thresholds, ``avoided`` those that do not answer: they are chosen only when no other remains,
    those that ``is_silent`` last. ``all_eligible`` is ``candidates`` where every request without
    constraints may go to any of them, else None. ``all_busy``: every request is rejected now, also
    one with a pin.
    """

    def __init__(self, source: RadixTree | DenseSlots) -> None:
        self._source = source
        self._slots: dict[int, dict[int, int]] = {}
        self.members: dict[int, Member] = {}
        self.owners: list[tuple[int, int]] = []
        self.candidates = array("I")
        self.busy: set[int] = set()
        self.avoided: set[int] = set()
        self.is_silent: Callable[[int], bool] = _never
        self.all_eligible: array[int] | None = None
        self.all_busy = False
        self.width = 0
        self._saturation = Saturation()

    def add(self, worker_id: int, config: RuntimeConfig, device_type: str = "cpu") -> Member:
        """Add the worker, or replace its configuration; ranks keep their slots.

        The slot of a removed rank stays assigned to the worker until :meth:`remove`: requests that
        run there still have load on it.
        """
        first = config.data_parallel_start_rank
        ranks = range(first, first + max(config.data_parallel_size, 1))
        slots = {rank: self._source.slot(worker_id, rank) for rank in ranks}
        self._slots.setdefault(worker_id, {}).update(slots)
        member = self.members[worker_id] = Member(worker_id, config, device_type, slots)
        self._rebuild()
        return member

    def slots_of(self, worker_id: int) -> list[int]:
        """Return all slots assigned to the worker, those of removed ranks included."""
        return list(self._slots.get(worker_id, {}).values())

    def remove(self, worker_id: int) -> None:
        """Remove the worker and free its slots; nothing may be booked on them any more."""
        if self.members.pop(worker_id, None) is None:
            return
        del self._slots[worker_id]
        self.busy.discard(worker_id)
        self._source.remove_worker(worker_id)
        self._rebuild()

    def set_busy(self, worker_id: int, busy: bool) -> None:
        """Mark a worker as over or under its thresholds; unknown workers are ignored."""
        if busy and worker_id in self.members:
            self.busy.add(worker_id)
        else:
            self.busy.discard(worker_id)
        self._update_eligible()

    def avoid(self, worker_id: int, avoided: bool) -> None:
        """Avoid a worker while others remain, also one that is added later; or stop avoiding it."""
        if avoided:
            self.avoided.add(worker_id)
        else:
            self.avoided.discard(worker_id)
        self._update_eligible()

    def has_answering(self) -> bool:
        """Return whether some worker answers."""
        return not self.members.keys() <= self.avoided

    def report_to(self, saturation: Saturation) -> None:
        """Count this pool there while all its workers are busy."""
        self._saturation = saturation
        if self.all_busy:
            saturation.changed(True)

    def _rebuild(self) -> None:
        # New lists instead of changed ones: the inputs of earlier decisions refer to the old.
        self.candidates = array("I")
        pairs = {
            slot: (member.worker_id, rank)
            for member in self.members.values()
            for rank, slot in member.slots.items()
        }
        self.candidates.extend(pairs)
        self.width = max(pairs, default=-1) + 1
        self.owners = [pairs.get(slot, _NO_OWNER) for slot in range(self.width)]
        self._update_eligible()

    def _update_eligible(self) -> None:
        # A worker may be avoided before it is added, and after it was removed.
        avoided = any(worker_id in self.members for worker_id in self.avoided)
        restricted = not self.candidates or self.busy or avoided
        self.all_eligible = None if restricted else self.candidates
        all_busy = bool(self.members) and len(self.busy) == len(self.members)
        if all_busy != self.all_busy:
            self.all_busy = all_busy
            self._saturation.changed(all_busy)


def _never(worker_id: int) -> bool:
    return False
