"""Which workers are live, moment by moment: what processes and files say, not what programs think.

A worker is live while its process runs, its lease and its request socket exist, and its card and
endpoint are registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from machine import START_S, Machine, Process

__all__ = [
    "API",
    "PREFILL",
    "SERVED_BY",
    "Presence",
    "Span",
    "asleep",
    "decoders",
    "gpus_of",
    "model_of",
    "service_of",
    "share_of",
]

API = "api"
"""What requests to the models of :mod:`api_worker` count as."""
PREFILL = "Prefill"
"""The service of the workers that compute prompts alone."""
SERVED_BY = {
    "Worker": "one",
    "Prefill": "one",
    "One": "one",
    "Two": "two",
    "Half": "half",
    "Extra": "extra",
    "Relay": "far",
    "Api": API,
}
"""The model of each service."""
_NEVER = float("inf")
_KINDS = ("mdc", "instances", "leases", "socket")


class Span(NamedTuple):
    """``since_s`` up to ``until_s``, in seconds of the run."""

    since_s: float
    until_s: float

    def meets(self, since_s: float, until_s: float) -> bool:
        """Whether some moment is in both."""
        return self.since_s <= until_s and since_s <= self.until_s


@dataclass
class _Worker:
    process: Process
    service: str
    files: set[str] = field(default_factory=set)
    live_since_s: float = -1.0
    continued_s: float = -_NEVER


def service_of(process: Process) -> str:
    """Return the service of a process of the graph: ``box_One_1`` is of ``One``; else ''."""
    words = process.name.split("_")
    return words[1] if len(words) > 1 and words[0] == "box" else ""


def model_of(process: Process) -> str:
    """Return the model that a worker serves; '' for other processes."""
    return SERVED_BY.get(service_of(process), "")


def asleep(process: Process) -> bool:
    """Whether the engine of a worker sleeps."""
    return any(getattr(part, "_asleep", False) for part in process.parts)


def gpus_of(process: Process) -> list[str]:
    """Return the GPUs that a worker may use."""
    return [gpu for gpu in process.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]


def share_of(process: Process) -> float:
    """Return what a worker uses of each of its GPUs."""
    return 0.5 if service_of(process) == "Half" else 1.0


def decoders(model: str) -> tuple[str, ...]:
    """Return the services whose workers answer requests for ``model``."""
    return tuple(
        service for service, served in SERVED_BY.items() if served == model and service != "Prefill"
    )


class Presence:
    """Records the spans in which each model had live workers, and how many.

    ``counts`` has, for each service and each name of a worker, (time, number of live ones) at each
    change.
    """

    def __init__(self, machine: Machine) -> None:
        self.counts: dict[str, list[tuple[float, int]]] = {}
        self.owners: dict[str, Process] = {}
        """The process of each lease."""
        self.cards: list[tuple[float, str]] = []
        """When a model card came, and of which service."""
        self.on_end: Callable[[Process], None] = lambda process: None
        self._machine = machine
        self._workers: dict[Process, _Worker] = {}
        machine.on_state = self._state_changed

    def live(self, name: str) -> list[Process]:
        """Return the live workers of a service, or of the name of a worker."""
        return [
            one.process
            for one in self._workers.values()
            if name in (one.service, one.process.name) and one.live_since_s >= 0
        ]

    def serves(self, model: str) -> bool:
        """Whether a live worker answers requests for ``model``."""
        return any(self.live(service) for service in decoders(model))

    def has_card(self, model: str) -> bool:
        """Whether a worker has registered ``model``; its endpoint follows within milliseconds."""
        return any(
            one.process.state == "R" and model_of(one.process) == model and "mdc" in one.files
            for one in self._workers.values()
        )

    def gaps(self, services: tuple[str, ...], until_s: float) -> Iterator[Span]:
        """Yield the spans in which none of ``services`` had a live worker."""
        changes = sorted(
            (
                (at_s, service, count)
                for service in services
                for at_s, count in self.counts.get(service, ())
            ),
            key=lambda change: change[0],  # those of one moment keep their order
        )
        counts: dict[str, int] = {}
        since_s = 0.0
        for at_s, service, count in changes:
            before = sum(counts.values())
            counts[service] = count
            now = sum(counts.values())
            if before and not now:
                since_s = at_s
            elif now and not before and at_s > since_s:
                yield Span(since_s, at_s)
        if not sum(counts.values()) and until_s > since_s:
            yield Span(since_s, until_s)

    def _state_changed(self, process: Process) -> None:
        if not process.alive:
            self.on_end(process)
        if process in self._workers:
            self._look(self._workers[process])

    def file_changed(self, path: Any, exists: bool) -> None:
        """A file has got its name, or lost it."""
        name = Path(path)
        kind = name.parent.name
        if name.suffix == ".sock" and name.name.count(".") == 1:
            kind = "socket"
        if kind not in _KINDS or (kind in ("mdc", "instances") and "generate" not in name.name):
            return
        words = name.name.removesuffix(".sock").split("%2F")
        if kind == "mdc" and words[-2] != "generate":
            return  # the card of an adapter
        lease = words[-1]
        current = self._machine.current
        if exists and current is not None:
            self.owners.setdefault(lease, current)
        owner = self.owners.get(lease)
        if owner is None or not model_of(owner):
            return
        worker = self._workers.get(owner)
        if worker is None:
            worker = self._workers[owner] = _Worker(owner, service_of(owner))
        if exists:
            worker.files.add(kind)
            if kind == "mdc":
                self.cards.append((self._machine.now_s - START_S, worker.service))
        else:
            worker.files.discard(kind)
        self._look(worker)

    def _look(self, worker: _Worker) -> None:
        now_s = self._machine.now_s - START_S
        live = worker.process.state == "R" and len(worker.files) == len(_KINDS)
        if live == (worker.live_since_s >= 0):
            return
        worker.live_since_s = now_s if live else -1.0
        if not worker.process.alive:
            del self._workers[worker.process]
        for name in (worker.service, worker.process.name):
            self.counts.setdefault(name, []).append((now_s, len(self.live(name))))
