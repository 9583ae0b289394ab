"""Which entries of a statefile hold which GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dynamo.serve.entries import entry_gpus, service_config, stated_gpus
from dynamo.serve.statefile import ASLEEP, HOLDS_GPUS, RESERVED_BY, Document

__all__ = ["can_hold", "gpu_ids", "held_gpus"]

_ROUNDING = 1e-6


def gpu_ids(document: Document) -> list[str]:
    """Return the GPUs of the deployment, as text."""
    resources = document["environment"].get("SYSTEM_RESOURCES")
    ids = resources.get("gpu_info") if isinstance(resources, Mapping) else None
    return [str(gpu) for gpu in ids or ()]


def held_gpus(document: Document) -> Mapping[str, tuple[tuple[str, ...], float]]:
    """Return the GPUs of each entry that holds any, and the number: below 1 for a share.

    A worker that sleeps holds none.
    """
    return {name: (gpus, share) for name, gpus, share in _holders(document)}


def can_hold(document: Document, name: str) -> bool:
    """Whether the GPUs of the sleeping worker ``name`` have room for it again."""
    booked = dict.fromkeys(entry_gpus(document["components"][name]), 0.0)
    mine = {one: share for one, _, share in _booked(document)}.get(name, 0.0)
    for _, gpus, share in _holders(document):
        for gpu in gpus:
            if gpu in booked:
                booked[gpu] += min(share, 1.0)
    return all(taken + min(mine, 1.0) <= 1.0 + _ROUNDING for taken in booked.values())


def _holders(document: Document) -> Iterator[tuple[str, tuple[str, ...], float]]:
    for name, gpus, share in _booked(document):
        entry = document["components"][name]
        sleeps = entry.get("state") == ASLEEP and RESERVED_BY not in entry
        if not sleeps and entry.get(HOLDS_GPUS, True):
            yield name, gpus, share


def _booked(document: Document) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield name, GPUs and share of each entry, those of workers that sleep, too."""
    config = service_config(document)
    for name, entry in document["components"].items():
        gpus = entry_gpus(entry)
        if not gpus:
            continue
        given = config.get(str(entry.get("service")))
        args = given.get("ServiceArgs") if isinstance(given, Mapping) else None
        stated = stated_gpus(entry, args if isinstance(args, Mapping) else {})
        yield name, gpus, stated if stated and stated < 1 else float(len(gpus))
