"""Which GPUs have the free memory that an engine reserves when it starts.

Engines that sleep and programs outside the deployment hold memory of GPUs that are free according
to the statefile.

The GPU budget of the planner: what workers count in it. Pure.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

from dynamo.config.planner import PlannerSettings
from dynamo.serve.gpus.gpus import Gpu
from dynamo.serve.gpus.ledger import GpuLedger
from dynamo.serve.state.entries import ServiceEntries

_VLLM = "dynamo.vllm"
_SHARE = 0.9
"""vLLM's default for --gpu-memory-utilization."""
_SHARE_FLAG = "--gpu-memory-utilization"
_BYTES_FLAG = "--kv-cache-memory-bytes"
_GIB = 1 << 30
log = logging.getLogger(__name__)


def budget_share(service: ServiceEntries, settings: PlannerSettings) -> float:
    """Return what a worker counts in the GPU budget: as the options say, else its GPUs, else 1."""
    given = (
        settings.prefill_engine_num_gpu if service.is_prefill else settings.decode_engine_num_gpu
    )
    return given or service.gpus or 1.0


def budget_held(
    ledger: GpuLedger, services: Collection[ServiceEntries], settings: PlannerSettings
) -> float:
    """Return the GPUs of the budget that ``services`` hold now, draining workers included.

    A worker without GPUs counts as what the options say, else as 1.
    """
    total = 0.0
    for service in services:
        each = budget_share(service, settings)
        for entry in service.entries:
            if entry.name in ledger.held:
                total += ledger.amount(entry.name)
            elif entry.asleep and entry.reserved_by is None:
                continue
            elif entry.pids or entry.reserved_by is not None:
                total += each * max(1, len(entry.pids))
    return total


async def probe_gpus() -> Sequence[Gpu] | None:
    """Return the GPUs of the driver, None without one."""
    from dynamo.serve.gpus.nvml import probe  # loads the driver's library: only where it is needed

    return await asyncio.to_thread(probe)


def reserved_share(argv: Sequence[str]) -> float:
    """Return the part of a GPU's memory that the engine of this command reserves; 0 if unknown."""
    if _VLLM not in argv or any(word.startswith(_BYTES_FLAG) for word in argv):
        return 0.0
    for word, following in zip(argv, (*argv[1:], ""), strict=True):
        flag, joined, value = word.partition("=")
        if flag == _SHARE_FLAG:
            try:
                return float(value if joined else following)
            except ValueError:
                return 0.0  # the engine reports it
    return _SHARE


def crowded_gpus(gpus: Iterable[str], share: float, devices: Sequence[Gpu]) -> dict[str, str]:
    """Return those of ``gpus`` of which less than ``share`` is free, and what is wrong. Pure."""
    found = {}
    for name in gpus:
        for gpu in devices:
            named = str(gpu.index) == name or (name.startswith("GPU-") and gpu.uuid == name)
            free_bytes = gpu.memory_bytes - gpu.used_bytes
            if named and gpu.memory_bytes and free_bytes < share * gpu.memory_bytes:
                found[name] = (
                    f"GPU {name}: {free_bytes / _GIB:.1f} of {gpu.memory_bytes / _GIB:.1f} GiB "
                    f"are free, and a worker reserves {share:.0%}"
                )
    return found


async def without_room(
    gpus: Sequence[str], share: float, devices: Callable[[], Awaitable[Sequence[Gpu] | None]]
) -> frozenset[str]:
    """Return those of ``gpus`` that have too little free memory now, and log why."""
    if not share or not gpus:
        return frozenset()
    found = crowded_gpus(gpus, share, await devices() or ())
    for text in found.values():
        log.warning("%s", text)
    return frozenset(found)
