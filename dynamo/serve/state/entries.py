"""The entries of a statefile: services, workers, names, GPUs. Pure.

A service's first entry, ``{namespace}_{Service}``, is its template: it has the command of every
further worker, and stays without GPUs when its own worker is removed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dynamo.serve.graph.command import service_args, service_facts
from dynamo.serve.graph.facts import PREFILL, ServiceFacts
from dynamo.serve.graph.service import watcher_name
from dynamo.serve.state.document import Document, Entry, OperationOwner

Lives = Callable[[OperationOwner], bool]
"""Whether the process of a reservation still runs."""


@dataclass(frozen=True, kw_only=True)
class ServiceEntries:
    """A service of the graph that the planner may scale, with its entries by number.

    ``base`` is the name of its first watcher, whose entry is the ``template``. ``gpus`` is the
    number per worker: a fraction below 1 shares a GPU; 0 if none are assigned.
    """

    name: str
    base: str
    facts: ServiceFacts
    gpus: float
    template: Entry
    entries: tuple[Entry, ...]

    @property
    def model(self) -> str:
        """The name of its model; that of the service if only its engine has it."""
        return self.facts.model or self.name

    @property
    def is_prefill(self) -> bool:
        """Whether its workers serve prefills alone."""
        return self.facts.pool == PREFILL

    @property
    def asked_at(self) -> float:
        """The Unix time of an operator's last load of the model, 0 for none."""
        return max((entry.asked_at for entry in self.entries), default=0.0)

    def new_entry(self, name: str, argv: Sequence[str], gpus: Iterable[str]) -> Entry:
        """Return the entry of a further watcher, without processes."""
        entry = Entry(
            name=name,
            service=self.name,
            argv=tuple(argv),
            gpus_per_worker=self.gpus,
            pinned=self.template.pinned,
        )
        entry.assign(gpus)
        return entry


class ServiceWorker(NamedTuple):
    """A worker and its service."""

    service: ServiceEntries
    entry: Entry


def read_services(document: Document) -> dict[str, ServiceEntries]:
    """Return the services of the graph that register a model, by name, in its order."""
    services: dict[str, ServiceEntries] = {}
    for name, facts in facts_of(document).items():
        entries = document.entries_of(name)
        if entries and facts.registers_model:
            services[name] = ServiceEntries(
                name=name,
                base=watcher_name(document.namespace, name, 0),
                facts=facts,
                gpus=_gpus_per_worker(entries, facts),
                template=entries[0],
                entries=entries,
            )
    return services


def facts_of(document: Document) -> Mapping[str, ServiceFacts]:
    """Return the facts of each service of the graph, in its order.

    A statefile that our arbiter did not write has none: then as its graph and commands say.
    """
    if document.services:
        return document.services
    graph = document.graph
    first = {name: next(iter(document.entries_of(name)), Entry()) for name in graph}
    return {
        name: service_facts(entry.argv, service_args(graph, name), Path())
        for name, entry in first.items()
    }


def next_name(document: Document, service: str, watchers: Collection[str]) -> str:
    """Return the name of a new watcher of ``service``: the highest number plus one.

    The numbers of ``watchers`` are taken as well, in whatever case their names are.
    """
    base = watcher_name(document.namespace, service, 0)
    pattern = re.compile(re.escape(base) + r"_(\d+)", re.IGNORECASE)
    matches = (pattern.fullmatch(name) for name in (*document.components, *watchers))
    highest = max((int(match[1]) for match in matches if match), default=0)
    return watcher_name(document.namespace, service, highest + 1)


def release(document: Document, name: str) -> None:
    """Let the arbiter delete the entry when the watcher is removed: its worker is added."""
    entry = document.components.get(name)
    if entry is not None:
        entry.reserved_by = None


def delete_entry(document: Document, name: str) -> None:
    """Delete the entry of a worker that has exited; a template stays, without GPUs."""
    entry = document.components.get(name)
    if entry is None:
        return
    if _is_template(document, entry):
        entry.clear()
    else:
        del document.components[name]


def is_void(entry: Entry, lives: Lives) -> bool:
    """Whether the process that was adding this worker has exited before the arbiter received it."""
    received = entry.watcher is not None or entry.processes or entry.asleep
    return entry.reserved_by is not None and not received and not lives(entry.reserved_by)


def is_freed(document: Document, name: str) -> bool:
    """Whether the entry of a removed worker is deleted; that of a template, whether it is empty."""
    entry = document.components.get(name)
    if entry is None:
        return True
    return _is_template(document, entry) and not entry.gpus and not entry.processes


def _is_template(document: Document, entry: Entry) -> bool:
    return entry.name == watcher_name(document.namespace, entry.service, 0)


def _gpus_per_worker(entries: Collection[Entry], facts: ServiceFacts) -> float:
    stated = (stated_gpus(entry, facts) for entry in entries)
    gpus = next((number for number in stated if number is not None), None)
    return float(max(len(entry.gpus) for entry in entries)) if gpus is None else gpus


def stated_gpus(entry: Entry, facts: ServiceFacts | None) -> float | None:
    """Return the GPUs of each worker as the arbiter has written them, else as the graph says."""
    if entry.gpus_per_worker is not None:
        return entry.gpus_per_worker
    return facts.gpus if facts is not None else None
