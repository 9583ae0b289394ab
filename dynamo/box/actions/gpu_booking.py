"""Free GPUs of a deployment, as its statefile assigns them. Pure."""

from __future__ import annotations

from collections.abc import Collection

from dynamo.box.actions.ports import ActionFailed
from dynamo.errors import ConfigError
from dynamo.serve.gpu_holders import gpu_ids, held_gpus
from dynamo.serve.gpus import Allocator, Inventory
from dynamo.serve.statefile import Document

__all__ = ["free_gpus"]


def free_gpus(
    document: Document, name: str, count: float, avoid: Collection[str] = ()
) -> tuple[str, ...]:
    """Return ``count`` free GPUs for the watcher ``name``, those with the lowest numbers.

    A fraction below 1 is a share of one GPU. GPUs to ``avoid`` have no room. Raises ActionFailed
    that lists what holds them.
    """
    allocator = _allocator(document)
    for gpu in avoid:
        allocator.hold("too little free memory", (gpu,), 1.0)
    try:
        return allocator.assign(name, count)
    except ConfigError as error:
        raise ActionFailed(error.message.partition("\nLower workers")[0]) from None


def _allocator(document: Document) -> Allocator:
    ids = sorted(gpu_ids(document), key=_gpu_order)
    allocator = Allocator(Inventory(ids=tuple(ids), source="statefile"))
    for name, (gpus, share) in held_gpus(document).items():
        allocator.hold(name, gpus, share)
    return allocator


def _gpu_order(gpu: str) -> tuple[bool, int]:
    return (not gpu.isdigit(), int(gpu) if gpu.isdigit() else 0)
