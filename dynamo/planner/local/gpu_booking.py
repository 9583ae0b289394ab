"""The GPUs of a deployment as its statefile assigns them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dynamo.errors import ConfigError
from dynamo.planner.connector import ActionFailed
from dynamo.planner.local.entries import entry_gpus, service_config, stated_gpus
from dynamo.serve.gpus import Allocator, Inventory
from dynamo.serve.statefile import Document

__all__ = ["free_gpus", "gpu_ids", "held_gpus"]


def free_gpus(document: Document, name: str, count: float) -> tuple[str, ...]:
    """Return ``count`` free GPUs for the watcher ``name``, those with the lowest numbers.

    A fraction below 1 is a share of one GPU. Raises ActionFailed that lists who holds them.
    """
    try:
        return _allocator(document).assign(name, count)
    except ConfigError as error:
        raise ActionFailed(error.message.partition("\nLower workers")[0]) from None


def gpu_ids(document: Document) -> list[str]:
    """Return the GPUs of the deployment, as text."""
    resources = document["environment"].get("SYSTEM_RESOURCES")
    ids = resources.get("gpu_info") if isinstance(resources, Mapping) else None
    return [str(gpu) for gpu in ids or ()]


def held_gpus(document: Document) -> Mapping[str, tuple[tuple[str, ...], float]]:
    """Return the GPUs of each entry that holds any, and the number: below 1 for a share."""
    return {name: (gpus, share) for name, gpus, share in _holders(document)}


def _allocator(document: Document) -> Allocator:
    ids = sorted(gpu_ids(document), key=_gpu_order)
    allocator = Allocator(Inventory(ids=tuple(ids), source="statefile"))
    for name, gpus, share in _holders(document):
        allocator.hold(name, gpus, share)
    return allocator


def _gpu_order(gpu: str) -> tuple[bool, int]:
    return (not gpu.isdigit(), int(gpu) if gpu.isdigit() else 0)


def _holders(document: Document) -> Iterator[tuple[str, tuple[str, ...], float]]:
    config = service_config(document)
    for name, entry in document["components"].items():
        gpus = entry_gpus(entry)
        if not gpus:
            continue
        given = config.get(str(entry.get("service")))
        args = given.get("ServiceArgs") if isinstance(given, Mapping) else None
        stated = stated_gpus(entry, args if isinstance(args, Mapping) else {})
        yield name, gpus, stated if stated and stated < 1 else float(len(gpus))
