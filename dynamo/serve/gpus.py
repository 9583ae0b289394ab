"""Which worker gets which GPUs. Pure: an inventory and requests in, identifiers out. Spec 2.

Unlike the original, the parent's CUDA_VISIBLE_DEVICES is honoured and a shortage is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynamo.errors import ConfigError

__all__ = ["Allocator", "Gpu", "Inventory", "inventory_of"]

_EPSILON = 1e-9


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device: its number and UUID as the driver has them, ``memory_bytes`` 0 if unknown."""

    index: int
    uuid: str = ""
    name: str = ""
    memory_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The GPUs that may be given out, as CUDA_VISIBLE_DEVICES names them, in its order.

    ``source`` says where they come from; ``env`` is set for every worker that gets one.
    """

    ids: tuple[str, ...]
    source: str
    env: Mapping[str, str] = field(default_factory=dict)


def inventory_of(devices: Sequence[Gpu] | None, visible: str | None) -> Inventory:
    """What may be given out: all ``devices``, or those that CUDA_VISIBLE_DEVICES ``visible`` names.

    ``devices`` is None without a driver: then ``visible`` is believed. As in CUDA, the list ends
    at the first entry that names no device. Numbers count as the parent's CUDA counts them.
    """
    if visible is None:
        if devices is None:
            return Inventory(ids=(), source="no NVIDIA driver found")
        # nvidia-smi's order, which is not CUDA's default one.
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
    """Gives out GPUs, lowest first: whole ones to one worker, fractions of one to several."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self._left = [1.0] * len(inventory.ids)
        self._unit = [1.0] * len(inventory.ids)
        self._held: list[list[str]] = [[] for _ in inventory.ids]

    @property
    def free(self) -> int:
        """GPUs that nobody holds a part of."""
        return sum(left == 1.0 for left in self._left)

    def assign(self, name: str, count: float) -> tuple[str, ...]:
        """``count`` GPUs for ``name``: a whole number, or a fraction below 1 of one.

        Raises ConfigError with the table of who holds what.
        """
        if count <= 0 or (count > 1 and count != int(count)):
            raise ConfigError(f"{name}: {count:g} GPUs: a whole number or a fraction below 1")
        slots = self._shared(count) if count < 1 else self._whole(int(count))
        if not slots:
            raise ConfigError(self._shortage(name, count))
        for slot in slots:
            self._held[slot].append(name)
        return tuple(self.inventory.ids[slot] for slot in slots)

    def table(self) -> str:
        """Who holds what, one line per GPU."""
        rows = [
            f"  GPU {gpu}: {', '.join(held) or 'free'}"
            for gpu, held in zip(self.inventory.ids, self._held, strict=True)
        ]
        return "\n".join(rows) or "  (none)"

    def _whole(self, count: int) -> list[int]:
        free = [slot for slot, left in enumerate(self._left) if left == 1.0][:count]
        if len(free) < count:
            return []
        for slot in free:
            self._left[slot] = 0.0
        return free

    def _shared(self, count: float) -> list[int]:
        slots = range(len(self._left))
        open_ = [s for s in slots if self._unit[s] == count and self._left[s] >= count - _EPSILON]
        found = (open_ or [s for s in slots if self._left[s] == 1.0])[:1]
        for slot in found:
            self._unit[slot] = count
            left = self._left[slot] - count
            self._left[slot] = left if left >= count - _EPSILON else 0.0
        return found

    def _shortage(self, name: str, count: float) -> str:
        return (
            f"{name} needs {count:g} GPU{'' if count == 1 else 's'}, "
            f"{self.free} of {len(self.inventory.ids)} free ({self.inventory.source})\n"
            f"{self.table()}\n"
            "Lower workers or resources.gpu (it is per worker), pretend with --gpus N, or set "
            "DYN_DISABLE_AUTO_GPU_ALLOCATION=1 to place workers yourself."
        )
