"""The state of each component of a statefile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynamo.serve.state.document import Document, Entry
from dynamo.serve.state.process_table import is_reserved, ledger_of, runs_here, same_process
from dynamo.serve.state.registered import RegisteredWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentStatus:
    """One entry. ``state`` is one of ready, running, starting, draining, asleep, stopped.

    ``dead_pids`` are recorded processes that do not exist any more. ``lease`` is in hexadecimal.
    """

    component: str
    service: str
    state: str
    pids: tuple[int, ...] = ()
    dead_pids: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    lease: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReport:
    """A deployment. ``gpus`` has the components that hold each GPU."""

    namespace: str
    arbiter_pid: int | None
    arbiter_alive: bool
    circus_endpoint: str
    gpus: Mapping[str, tuple[str, ...]]
    components: tuple[ComponentStatus, ...]

    @classmethod
    def of(cls, document: Document, registered: Mapping[int, RegisteredWorker]) -> StateReport:
        """Return the report of ``document``."""
        ledger = ledger_of(document)
        return cls(
            namespace=document.namespace,
            arbiter_pid=document.arbiter.pid or None,
            arbiter_alive=runs_here(document.arbiter),
            circus_endpoint=document.circus_endpoint,
            gpus={gpu: tuple(ledger.holders((gpu,))) for gpu in ledger.ids},
            components=component_statuses(document, registered),
        )


def component_statuses(
    document: Document, registered: Mapping[int, RegisteredWorker]
) -> tuple[ComponentStatus, ...]:
    """Return the status of each component, in the order of the statefile."""
    return tuple(_status(entry, registered) for entry in document.components.values())


def _status(entry: Entry, registered: Mapping[int, RegisteredWorker]) -> ComponentStatus:
    alive = tuple(
        one.pid for one in entry.processes if one.pid and same_process(one.pid, one.start_ticks)
    )
    models = [registered[pid].model for pid in alive if pid in registered]
    model = next((one for one in models if one is not None), None)
    return ComponentStatus(
        component=entry.name,
        service=entry.service,
        state=_state(entry, alive, model),
        pids=alive,
        dead_pids=tuple(pid for pid in entry.pids if pid not in alive),
        gpus=entry.gpus,
        lease=None if entry.lease is None else f"{entry.lease:x}",
        model=model,
    )


def _state(entry: Entry, alive: tuple[int, ...], model: str | None) -> str:
    if entry.draining:
        return "draining"
    if entry.asleep:
        return "asleep"
    if model is not None:
        return "ready"
    if is_reserved(entry, ()):
        return "starting"
    return "running" if alive else "stopped"
