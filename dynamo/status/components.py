"""The deployment that a command means, and the state of each component of its statefile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dynamo.config import environ, from_env
from dynamo.config.runtime import RuntimeSettings, check_namespace
from dynamo.errors import ConfigError, StatefileError
from dynamo.runtime.process.paths import state_path
from dynamo.serve.state.document import Document, Entry
from dynamo.serve.state.process_table import is_reserved, ledger_of, runs_here, same_process
from dynamo.serve.state.registered import RegisteredWorker
from dynamo.serve.state.statefile import Statefile


def chosen_runtime(namespace: str | None) -> RuntimeSettings:
    """Return the settings of the deployment that a command means.

    That is the one of ``namespace`` or ``DYN_NAMESPACE``; without them the default one if it
    exists, else the only one. Raises ConfigError if several run, or the name is no namespace.
    """
    runtime = from_env(RuntimeSettings)
    check_namespace(runtime.namespace if namespace is None else namespace)
    if namespace is not None:
        return replace(runtime, namespace=namespace)
    directory = state_path(runtime)
    default = directory / f"{runtime.namespace}.json"
    if "DYN_NAMESPACE" in environ() or default.exists():
        return runtime
    found = sorted(path.stem for path in directory.glob("*.json"))
    if len(found) > 1:
        found = [*_running(directory, found)] or found
    if len(found) > 1:
        raise ConfigError(
            f"several deployments exist; choose one with --namespace: {', '.join(found)}"
        )
    return replace(runtime, namespace=found[0]) if found else runtime


def running_deployment(runtime: RuntimeSettings) -> Document | None:
    """Return the statefile of the namespace of ``runtime`` if its arbiter runs, else None."""
    return _read_running(state_path(runtime), runtime.namespace)


def main_pid(document: Document) -> int:
    """Return the process that a user started: the guard of a running deployment."""
    return document.arbiter.guard_pid or document.arbiter.pid


def _running(directory: Path, namespaces: list[str]) -> Iterator[str]:
    for namespace in namespaces:
        if _read_running(directory, namespace) is not None:
            yield namespace


def _read_running(directory: Path, namespace: str) -> Document | None:
    try:
        document = Statefile(directory, namespace).read()
    except StatefileError:
        return None
    return document if document is not None and runs_here(document.arbiter) else None


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
