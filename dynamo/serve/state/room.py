"""Where the next worker of a service gets its GPUs, and what has to go for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from dynamo.errors import ConfigError
from dynamo.protocols.status import LoadEffect
from dynamo.serve.gpus.gpus import Gpu, fits
from dynamo.serve.state.document import GIVEN_UP, STOPPED, Document, Entry
from dynamo.serve.state.entries import ServiceEntries, ServiceWorker, read_services
from dynamo.serve.state.ledger import GpuLedger
from dynamo.serve.state.process_table import is_reserved, ledger_of

_GIB = 1 << 30


def crowded_gpus(gpus: Iterable[str], share: float, devices: Sequence[Gpu]) -> dict[str, str]:
    """Return those of ``gpus`` of which less than ``share`` is free, and what is wrong. Pure."""
    reasons = {}
    for name in gpus:
        for gpu in devices:
            free_bytes = gpu.memory_bytes - gpu.used_bytes
            if gpu.is_named(name) and gpu.memory_bytes and free_bytes < share * gpu.memory_bytes:
                reasons[name] = (
                    f"GPU {name}: {free_bytes / _GIB:.1f} of {gpu.memory_bytes / _GIB:.1f} GiB "
                    f"are free, and a worker reserves {share:.0%}"
                )
    return reasons


def sleeper_to_wake(
    document: Document, service: ServiceEntries, active: Collection[str]
) -> Entry | None:
    """Return the oldest sleeping worker of ``service`` whose GPUs are free, if any."""
    ledger = ledger_of(document)
    for entry in service.entries:
        if entry.asleep and not is_reserved(entry, active) and ledger.can_hold(entry.name):
            return entry
    return None


def sleepers_on(document: Document, gpus: Collection[str]) -> list[ServiceWorker]:
    """Return the sleeping workers that are bound to some of ``gpus``."""
    return [
        ServiceWorker(service, entry)
        for service in read_services(document).values()
        for entry in service.entries
        if entry.asleep and entry.reserved_by is None and not {*gpus}.isdisjoint(entry.gpus)
    ]


def free_gpus(ledger: GpuLedger) -> list[str]:
    """Return the GPUs that are entirely free."""
    return [gpu for gpu, left in ledger.free().items() if fits(left, 1.0)]


def in_the_way(
    document: Document, service: ServiceEntries, free: Sequence[str], crowded: Collection[str]
) -> list[ServiceWorker]:
    """Return the sleeping workers to remove, so that a worker of ``service`` has memory.

    Of the ``free`` GPUs, the ``crowded`` ones have too little memory.
    """
    if len(free) - len(crowded) >= service.gpus:
        return []
    return sleepers_on(document, crowded)


def group_rivals(
    document: Document, services: Iterable[ServiceEntries], active: Collection[str]
) -> list[str]:
    """Return the workers that are awake, of models that share a group with those of ``services``.

    No two models of a group may be awake together.
    """
    declared = read_services(document).values()
    own = {service.model for service in services}
    groups = {
        name
        for candidate in declared
        if candidate.model in own
        for name in candidate.facts.model_args.group
    }
    others = {
        candidate.model
        for candidate in declared
        if not groups.isdisjoint(candidate.facts.model_args.group)
    } - own
    return [
        entry.name
        for service in declared
        if service.model in others
        for entry in service.entries
        if is_reserved(entry, active) or (entry.pids and not entry.asleep)
    ]


def load_effects(document: Document, devices: Sequence[Gpu]) -> dict[str, LoadEffect]:
    """Return what ``dynamo load`` would do for each service without a worker, by its name."""
    return {
        service.name: _effect(document, service, devices)
        for service in read_services(document).values()
        if not any(entry.pids and not entry.asleep for entry in service.entries)
    }


def _effect(document: Document, service: ServiceEntries, devices: Sequence[Gpu]) -> LoadEffect:
    if rivals := group_rivals(document, [service], ()):
        return LoadEffect(text=f"takes turns with {', '.join(rivals)}: unload that model first")
    for entry in service.entries:
        stopped = entry.watcher is not None and entry.watcher.status in (STOPPED, GIVEN_UP)
        if stopped and not entry.asleep and not entry.draining:
            return LoadEffect(text=f"starts {entry.name} again", gpus=entry.gpus)
    if (sleeper := sleeper_to_wake(document, service, ())) is not None:
        return LoadEffect(text=f"wakes {sleeper.name}", gpus=sleeper.gpus)
    ledger = ledger_of(document)
    if not service.gpus or not ledger.ids:
        return LoadEffect(text="starts a worker, which needs no GPU")
    free = free_gpus(ledger)
    crowded = crowded_gpus(free, service.facts.memory_share, devices)
    sleepers = [entry for _, entry in in_the_way(document, service, free, crowded)]
    # The memory of a GPU whose sleeper goes is assumed to suffice.
    avoid = crowded.keys() - {gpu for entry in sleepers for gpu in entry.gpus}
    try:
        gpus = ledger.assign("a worker", service.gpus, avoid=avoid)
    except ConfigError:
        return _without_gpu(service, ledger, crowded.values())
    removes = tuple(entry.name for entry in sleepers)
    others = [entry.name for _, entry in sleepers_on(document, gpus) if entry.name not in removes]
    return LoadEffect(
        text="starts a worker", gpus=gpus, removes=removes, keeps_asleep=tuple(others)
    )


def _without_gpu(service: ServiceEntries, ledger: GpuLedger, reasons: Iterable[str]) -> LoadEffect:
    holders = tuple(ledger.holders(ledger.ids))
    needs = [f"needs {service.gpus:g} GPU{'' if service.gpus <= 1 else 's'}, more than is free"]
    return LoadEffect(text="; ".join([*needs, *reasons]), blocked_by=holders)
