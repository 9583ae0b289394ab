"""Which GPUs the workers of a statefile hold, and which a new one gets. Pure.

Unlike in Dynamo, the parent's CUDA_VISIBLE_DEVICES applies, and a shortage is an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from dynamo.serve.gpus.gpus import Allocator, Inventory, fits
from dynamo.serve.state.document import GIVEN_UP, Document, Entry
from dynamo.serve.state.entries import Lives, facts_of, is_void, stated_gpus


def gpu_ids(document: Document) -> list[str]:
    """Return the GPUs of the deployment, as text."""
    return [str(gpu) for gpu in document.environment.system_resources.gpu_info]


class GpuLedger:
    """The GPUs of the box that each worker of ``document`` holds or has reserved, by its entries.

    ``others`` are the documents of the other deployments of this box: what their workers hold is
    not free either.

    An entry holds, of each GPU, the most of

    * what is assigned to its watcher (``resources.allocated_gpus``), also between two processes,
    * what its processes use (``gpus`` of each): after a change of the assignment, until they exit,
    * what the arbiter has reserved for a process that is to start (``replacing.gpus``).

    A worker that sleeps or was given up stays assigned to its GPUs and holds none, but those that
    are reserved for its next process. Others get the GPUs of a sleeper last, so that it can wake.
    Nothing keeps a worker from GPUs that its own service's environment names (``pinned``). A
    reservation ends with the process that made it: then an entry that the arbiter never received
    holds nothing.

    It reads the document once: make another one after a change. Change that only under the lock of
    the statefile, and before a process is configured or started. ``ids`` are the GPUs if not those
    of the statefile.
    """

    def __init__(
        self,
        document: Document,
        lives: Lives,
        ids: Sequence[str] | None = None,
        others: Sequence[Document] = (),
    ) -> None:
        self.ids = sorted(gpu_ids(document) if ids is None else ids, key=_gpu_order)
        self._assigned = {name: dict(shares) for name, shares in _assigned(document)}
        self._pinned = {name for name, entry in document.components.items() if entry.pinned}
        self._sleepers = {
            gpu
            for deployment in (document, *others)
            for entry in deployment.components.values()
            if entry.asleep
            for gpu in entry.gpus
        }
        self.held = _all_held(document, self._assigned, lives)
        """The share of each GPU that each holder has, by its name; 1 is a whole one."""
        self.elsewhere = {
            f"{name} of namespace {other.namespace}": shares
            for other in others
            for name, shares in _all_held(other, dict(_assigned(other)), lives).items()
        }
        """The same of the other deployments."""

    def amount(self, name: str) -> float:
        """Return how many GPUs ``name`` holds."""
        return sum(self.held.get(name, {}).values())

    def free(self, without: Collection[str] = ()) -> dict[str, float]:
        """Return what is free of each GPU, 1 of a whole one, if ``without`` had none."""
        left = dict.fromkeys(self.ids, 1.0)
        for name, shares in self._holders():
            for gpu, share in shares.items():
                if gpu in left and name not in without:
                    # Workers on pinned GPUs may hold more than one GPU has: their owner shares it.
                    left[gpu] = max(0.0, left[gpu] - share)
        return left

    def holders(self, gpus: Collection[str], without: str = "") -> list[str]:
        """Return those that hold some of ``gpus``, those of the own deployment first."""
        return [
            n
            for n, shares in self._holders()
            if n != without and not shares.keys().isdisjoint(gpus)
        ]

    def assign(
        self,
        name: str,
        count: float,
        without: Collection[str] = (),
        avoid: Collection[str] = (),
        rank: Mapping[str, int] | None = None,
    ) -> tuple[str, ...]:
        """Return ``count`` GPUs for ``name``, lowest first; a fraction below 1 is a share of one.

        ``without``: as if these held none. GPUs to ``avoid`` have no room, those of a higher
        ``rank`` come last. Raises ConfigError that lists the holders.
        """
        return self.allocator(without, avoid).assign(name, count, rank)

    def allocator(
        self,
        without: Collection[str] = (),
        avoid: Collection[str] = (),
        inventory: Inventory | None = None,
    ) -> Allocator:
        """Return an allocator of what is free, of ``inventory`` if not of the statefile.

        See :meth:`assign`.
        """
        inventory = inventory or Inventory(ids=tuple(self.ids), source="statefile")
        allocator = Allocator(inventory, last=self._sleepers)
        for name, shares in self._holders():
            for gpu, share in shares.items() if name not in without else ():
                allocator.hold(name, (gpu,), share)
        for gpu in avoid:
            allocator.hold("too little free memory", (gpu,), 1.0)
        return allocator

    def can_hold(self, name: str) -> bool:
        """Whether the GPUs that are assigned to ``name`` have room for it, again or still."""
        if name in self._pinned:
            return True  # its owner shares them out
        free = self.free(without=(name,))
        return all(fits(free.get(gpu, 1.0), s) for gpu, s in self._assigned.get(name, {}).items())

    def _holders(self) -> Iterable[tuple[str, Mapping[str, float]]]:
        yield from self.held.items()
        yield from self.elsewhere.items()


def _all_held(
    document: Document, assigned: Mapping[str, Mapping[str, float]], lives: Lives
) -> dict[str, dict[str, float]]:
    holders = {
        name: _held(entry, assigned.get(name, {}), lives)
        for name, entry in document.components.items()
    }
    return {name: shares for name, shares in holders.items() if shares}


def _assigned(document: Document) -> Iterator[tuple[str, Mapping[str, float]]]:
    facts = facts_of(document)
    for name, entry in document.components.items():
        if entry.gpus:
            stated = stated_gpus(entry, facts.get(entry.service))
            yield name, dict.fromkeys(entry.gpus, stated if stated and stated < 1 else 1.0)


def _held(entry: Entry, assigned: Mapping[str, float], lives: Lives) -> dict[str, float]:
    reserved = entry.replacing.gpus if entry.replacing is not None else {}
    if not entry.holds_gpus or (entry.asleep and entry.reserved_by is None):
        return dict(reserved)
    totals: dict[str, float] = defaultdict(float)
    for process in entry.processes:
        for gpu, share in process.gpus.items():
            totals[gpu] += share
    for shares in (assigned if _keeps(entry, lives) else {}, reserved):
        for gpu, share in shares.items():
            totals[gpu] = max(totals[gpu], share)
    return dict(totals)


def _keeps(entry: Entry, lives: Lives) -> bool:
    """Whether the watcher has a process, or may start one without asking for its GPUs.

    One that was given up asks, also while an operation is to start it again: others may have them.
    """
    # Its status is written before its processes are gone: while one is left, the GPUs are in use.
    given_up = entry.watcher is not None and entry.watcher.status == GIVEN_UP
    return bool(entry.processes) or not (given_up or is_void(entry, lives))


def _gpu_order(gpu: str) -> tuple[bool, int]:
    # Indices by number; UUIDs behind them keep their order, because sorted() is stable.
    return (not gpu.isdigit(), int(gpu) if gpu.isdigit() else 0)
