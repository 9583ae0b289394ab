"""The GPUs of a machine, and which of them a worker gets. Pure.

Unlike in Dynamo, the parent's CUDA_VISIBLE_DEVICES applies, and a shortage is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo.errors import ConfigError
from dynamo.observability.logs import counted

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
    # CUDA takes an abbreviated UUID only if it names one device.
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
        # Exact: 1.0 is the start value of an untouched GPU, never the result of a subtraction.
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
            f"  GPU {gpu}: {', '.join(names) or 'free'}"
            for gpu, names in zip(self.inventory.ids, self._held, strict=True)
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
        # GPUs that are shared already come first, so that whole ones stay free.
        usable = [*open_, *(slot for slot in order if self._left[slot] == 1.0)]
        # Stable: within a rank the order above stays.
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
