"""Which GPUs the workers of a statefile hold, and which a new one gets. Pure.

Unlike in Dynamo, the parent's CUDA_VISIBLE_DEVICES applies, and a shortage is an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo.errors import ConfigError
from dynamo.observability.logs import counted
from dynamo.serve.state.document import GIVEN_UP, Document, Entry
from dynamo.serve.state.entries import Lives, is_void, service_config, stated_gpus

NO_DRIVER = "no NVIDIA driver found"

_ROUNDING = 1e-6
"""What sums of fractions may miss: 15 times 0.2 is more than 3 in binary."""


def fits(free: float, needed: float) -> bool:
    """Whether ``needed`` GPUs are not more than ``free`` ones, up to rounding."""
    return needed <= free + _ROUNDING


def names_gpu(name: str, index: int, uuid: str) -> bool:
    """Return whether CUDA means the device of this index and UUID by ``name``."""
    return name == str(index) or (name.startswith("GPU-") and uuid.startswith(name))


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses a GPU; ``memory_bytes`` is 0 if unknown."""

    pid: int
    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device, with the driver's index and UUID; ``memory_bytes`` is 0 if unknown.

    ``used_bytes`` includes processes of other containers, which ``processes`` may lack.
    """

    index: int
    uuid: str = ""
    name: str = ""
    memory_bytes: int = 0
    used_bytes: int = 0
    processes: tuple[GpuProcess, ...] = ()

    def is_named(self, name: str) -> bool:
        """Return whether CUDA means this device by ``name``: its index, or how its UUID begins."""
        return names_gpu(name, self.index, self.uuid)


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The GPUs that can be assigned, as CUDA_VISIBLE_DEVICES names them and in its order.

    ``source`` says how they were found; ``env`` is set for every worker with a GPU.
    """

    ids: tuple[str, ...]
    source: str
    env: Mapping[str, str] = field(default_factory=dict)


def inventory_of(devices: Sequence[Gpu] | None, visible: str | None) -> Inventory:
    """Return all ``devices``, or those that ``visible`` (CUDA_VISIBLE_DEVICES) names.

    ``devices`` is None without a driver: then ``visible`` is not checked. As in CUDA, the list ends
    at the first invalid entry. Numbers are indices in the order of the parent's CUDA.
    """
    if visible is None:
        if devices is None:
            return Inventory(ids=(), source=NO_DRIVER)
        # The driver lists devices in PCI order; CUDA's default order is by speed.
        return Inventory(
            ids=tuple(str(gpu.index) for gpu in devices),
            source="NVIDIA driver",
            env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        )
    ids: list[str] = []
    for entry in (word.strip() for word in visible.split(",")):
        if entry in ids or not _names_a_device(entry, devices):
            break
        ids.append(entry)
    return Inventory(ids=tuple(ids), source=f"CUDA_VISIBLE_DEVICES={visible}")


def _names_a_device(entry: str, devices: Sequence[Gpu] | None) -> bool:
    if entry.isdigit():
        return devices is None or int(entry) < len(devices)
    if entry.startswith("MIG-"):
        return True
    if not entry.startswith("GPU-"):
        return False
    return devices is None or sum(gpu.uuid.startswith(entry) for gpu in devices) == 1


class Allocator:
    """Assigns GPUs, lowest first: whole ones to one worker, fractions of one to several.

    Fractions of different size do not share a GPU: ``_unit`` is the size that a GPU is split into.
    GPUs in ``last`` are assigned when no other is free.
    """

    def __init__(self, inventory: Inventory, last: Collection[str] = ()) -> None:
        self.inventory = inventory
        self._order = sorted(
            range(len(inventory.ids)), key=lambda slot: inventory.ids[slot] in last
        )
        self._left = [1.0] * len(inventory.ids)
        self._unit = [1.0] * len(inventory.ids)
        self._held: list[list[str]] = [[] for _ in inventory.ids]

    @property
    def free(self) -> int:
        """The number of GPUs that are entirely free."""
        return sum(left == 1.0 for left in self._left)

    def assign(
        self, name: str, count: float, rank: Mapping[str, int] | None = None
    ) -> tuple[str, ...]:
        """Assign ``count`` GPUs to ``name``: a whole number, or a fraction below 1 of one GPU.

        GPUs of a higher ``rank`` come after all of a lower one; without one it is 0. Raises
        ConfigError with the table of assignments.
        """
        if count <= 0 or (count > 1 and count != int(count)):
            raise ConfigError(
                f"{name}: {count:g} GPUs: must be a whole number or a fraction below 1"
            )
        ids, ranks = self.inventory.ids, {} if rank is None else rank
        order = sorted(self._order, key=lambda slot: ranks.get(ids[slot], 0))
        slots = self._shared(order, count, ranks) if count < 1 else self._whole(order, int(count))
        if not slots:
            raise ConfigError(self._shortage(name, count))
        for slot in slots:
            self._held[slot].append(name)
        return tuple(self.inventory.ids[slot] for slot in sorted(slots))

    def hold(self, name: str, gpus: Sequence[str], count: float) -> None:
        """Record that ``name`` has ``gpus`` already: all of them, or ``count`` below 1 of one.

        Ids outside the inventory are ignored.
        """
        for slot in (self.inventory.ids.index(gpu) for gpu in gpus if gpu in self.inventory.ids):
            if 0 < count < 1:
                self._take_share(slot, count)
            else:
                self._left[slot] = 0.0
            self._held[slot].append(name)

    def table(self) -> str:
        """Return the assignments as text, one line per GPU."""
        rows = [
            f"  GPU {gpu}: {', '.join(held) or 'free'}"
            for gpu, held in zip(self.inventory.ids, self._held, strict=True)
        ]
        return "\n".join(rows) or "  (none)"

    def _whole(self, order: Sequence[int], count: int) -> list[int]:
        free = [slot for slot in order if self._left[slot] == 1.0][:count]
        if len(free) < count:
            return []
        for slot in free:
            self._left[slot] = 0.0
        return free

    def _shared(self, order: Sequence[int], count: float, ranks: Mapping[str, int]) -> list[int]:
        open_ = [s for s in order if self._unit[s] == count and fits(self._left[s], count)]
        usable = [*open_, *(slot for slot in order if self._left[slot] == 1.0)]
        usable.sort(key=lambda slot: ranks.get(self.inventory.ids[slot], 0))
        for slot in usable[:1]:
            self._take_share(slot, count)
        return usable[:1]

    def _take_share(self, slot: int, count: float) -> None:
        self._unit[slot] = count
        # A rest smaller than the unit cannot be used by anyone: count it as assigned.
        left = self._left[slot] - count
        self._left[slot] = left if fits(left, count) else 0.0

    def _shortage(self, name: str, count: float) -> str:
        return (
            f"{name} needs {counted(count, 'GPU')}, "
            f"{self.free} of {len(self.inventory.ids)} free ({self.inventory.source})\n"
            f"{self.table()}\n"
            "Lower workers or resources.gpu (it is per worker), override with --gpus N, or set "
            "DYN_DISABLE_AUTO_GPU_ALLOCATION=1 to place workers yourself."
        )


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
            for one in (document, *others)
            for entry in one.components.values()
            if entry.asleep
            for gpu in entry.gpus
        }
        self.held = _all_held(document, self._assigned, lives)
        """The share of each GPU that each holder has, by its name; 1 is a whole one."""
        self.elsewhere = {
            f"{name} of namespace {other.namespace}": held
            for other in others
            for name, held in _all_held(other, dict(_assigned(other)), lives).items()
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
                    left[gpu] = max(0.0, left[gpu] - share)
        return left

    def holders(self, gpus: Collection[str], without: str = "") -> list[str]:
        """Return those that hold some of ``gpus``, those of the own deployment first."""
        return [n for n, one in self._holders() if n != without and not one.keys().isdisjoint(gpus)]

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
    held = {
        name: _held(entry, assigned.get(name, {}), lives)
        for name, entry in document.components.items()
    }
    return {name: shares for name, shares in held.items() if shares}


def _assigned(document: Document) -> Iterator[tuple[str, Mapping[str, float]]]:
    config = service_config(document)
    for name, entry in document.components.items():
        if entry.gpus:
            given = config.get(entry.service)
            args = given.get("ServiceArgs") if isinstance(given, Mapping) else None
            stated = stated_gpus(entry, args if isinstance(args, Mapping) else {})
            yield name, dict.fromkeys(entry.gpus, stated if stated and stated < 1 else 1.0)


def _held(entry: Entry, assigned: Mapping[str, float], lives: Lives) -> dict[str, float]:
    reserved = entry.replacing.gpus if entry.replacing is not None else {}
    if not entry.holds_gpus or (entry.asleep and entry.reserved_by is None):
        return dict(reserved)
    held: dict[str, float] = defaultdict(float)
    for process in entry.processes:
        for gpu, share in process.gpus.items():
            held[gpu] += share
    for shares in (assigned if _keeps(entry, lives) else {}, reserved):
        for gpu, share in shares.items():
            held[gpu] = max(held[gpu], share)
    return dict(held)


def _keeps(entry: Entry, lives: Lives) -> bool:
    """Whether the watcher has a process, or may start one without asking for its GPUs.

    One that was given up asks, also while an operation is to start it again: others may have them.
    """
    # Its status is written before its processes are gone: while one is left, the GPUs are in use.
    given_up = entry.watcher is not None and entry.watcher.status == GIVEN_UP
    return bool(entry.processes) or not (given_up or is_void(entry, lives))


def _gpu_order(gpu: str) -> tuple[bool, int]:
    return (not gpu.isdigit(), int(gpu) if gpu.isdigit() else 0)
