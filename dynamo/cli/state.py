"""``dynamo state``: show and repair the statefile of a deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dynamo.cli.options import StateSettings
from dynamo.cli.text_table import aligned
from dynamo.config import load
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, StatefileError
from dynamo.operations.reconcile import reconcile
from dynamo.operations.steps.access import open_access
from dynamo.operations.steps.limits import ActionLimits
from dynamo.operations.steps.sleeping import check_sleepers, finish_interrupted, open_engines
from dynamo.runtime.process.paths import run_dir, state_path, store_dir, store_path
from dynamo.serve.state.document import Document, Entry
from dynamo.serve.state.process_table import is_reserved, ledger_of, runs_here, same_process
from dynamo.serve.state.registered import RegisteredWorker, registered_workers
from dynamo.serve.state.rundir import RunDirectory
from dynamo.serve.state.statefile import Statefile
from dynamo.status.deployment import chosen_runtime, hang_of

DESCRIPTION = "Show the processes, GPUs and leases of a deployment, or repair its statefile."
EPILOG = """repair is safe while the deployment and its planner run. It deletes entries without a
watcher, finishes removals that a crash interrupted, and corrects GPUs. Without a running
deployment it does what the next dynamo serve would do first: it ends processes that are left and
removes the statefile.
Exit status: 0 shown or repaired, 1 there is no deployment, or a part could not be repaired."""

_COLUMNS = ("COMPONENT", "STATE", "PIDS", "GPUS", "LEASE", "MODEL")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    (settings,) = load("dynamo state", DESCRIPTION, [StateSettings], argv, epilog=EPILOG)
    runtime = chosen_runtime(settings.namespace)
    statefile = Statefile(state_path(runtime), runtime.namespace)
    if settings.action == "show":
        print(_show(statefile, runtime, settings.json))
    elif settings.action == "repair":
        print("\n".join(_repair(statefile, runtime, settings.dry_run)))
    else:
        raise ConfigError("nothing to do; try: dynamo state show")
    return 0


def _show(statefile: Statefile, runtime: RuntimeSettings, as_json: bool) -> str:
    document = statefile.read()
    if document is None:
        raise _no_statefile(statefile)
    report = StateReport.of(document, registered_workers(store_path(runtime)))
    if as_json:
        return msgspec.json.format(msgspec.json.encode(report)).decode()
    return _text(report)


def _text(report: StateReport) -> str:
    rows = [_COLUMNS, *(_row(component) for component in report.components)]
    lines = aligned(rows)
    used = sum(bool(holders) for holders in report.gpus.values())
    life = "running" if report.arbiter_alive else "dead; see: dynamo state repair --dry-run"
    life = "hung" if report.problem else life
    lines.append(f"GPUs: {used} of {len(report.gpus)} in use")
    lines.append(f"arbiter: pid {report.arbiter_pid}, {life}")
    if report.problem:
        lines.append(report.problem)
    return "\n".join(lines)


def _row(status: ComponentStatus) -> tuple[str, ...]:
    pids = [*map(str, status.pids), *(f"{pid} (dead)" for pid in status.dead_pids)]
    return (
        status.component,
        status.state,
        ",".join(pids) or "-",
        ",".join(status.gpus) or "-",
        status.lease or "-",
        status.model or "-",
    )


def _repair(statefile: Statefile, runtime: RuntimeSettings, dry_run: bool) -> list[str]:
    try:
        document = statefile.read()
    except StatefileError:  # damaged: a running arbiter replaces it, else there is no other use
        document = Document()
    if document is None:
        raise _no_statefile(statefile)
    if not runs_here(document.arbiter):
        return _repair_dead(statefile, runtime, dry_run)
    return asyncio.run(_repair_running(runtime, dry_run)) or ["nothing to repair"]


async def _repair_running(runtime: RuntimeSettings, dry_run: bool) -> list[str]:
    async with open_access(runtime, ActionLimits()) as access:
        repairs = await reconcile(access, dry_run)
        if not dry_run:
            async with open_engines(runtime) as engines:
                repairs += await finish_interrupted(access, engines)
                repairs += await check_sleepers(access, engines)
        return repairs


def _repair_dead(statefile: Statefile, runtime: RuntimeSettings, dry_run: bool) -> list[str]:
    directory = RunDirectory(run_dir(runtime), store_dir(runtime), statefile)
    directory.acquire()  # an arbiter that runs holds the lock, also if its statefile is damaged
    try:
        if dry_run:
            return [
                f"no deployment runs in namespace {statefile.namespace!r}: its processes that are "
                f"left would be killed, and {statefile.path} removed"
            ]
        return directory.reconcile()
    finally:
        directory.release()


def _no_statefile(statefile: Statefile) -> StatefileError:
    return StatefileError(
        f"no statefile {statefile.path}: no deployment runs in namespace {statefile.namespace!r}; "
        "name another one with --namespace"
    )


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
    """A deployment. ``gpus`` has the components that hold each GPU; ``problem`` is a hang."""

    namespace: str
    arbiter_pid: int | None
    arbiter_alive: bool
    circus_endpoint: str
    gpus: Mapping[str, tuple[str, ...]]
    components: tuple[ComponentStatus, ...]
    problem: str = ""

    @classmethod
    def of(cls, document: Document, registered: Mapping[int, RegisteredWorker]) -> StateReport:
        """Return the report of ``document``."""
        ledger = ledger_of(document)
        return cls(
            namespace=document.namespace,
            arbiter_pid=document.arbiter.pid or None,
            arbiter_alive=runs_here(document.arbiter),
            problem=hang_of(document) if runs_here(document.arbiter) else "",
            circus_endpoint=document.circus_endpoint,
            gpus={gpu: tuple(ledger.holders((gpu,))) for gpu in ledger.ids},
            components=tuple(_status(entry, registered) for entry in document.components.values()),
        )


def _status(entry: Entry, registered: Mapping[int, RegisteredWorker]) -> ComponentStatus:
    alive = tuple(
        process.pid
        for process in entry.processes
        if process.pid and same_process(process.pid, process.start_ticks)
    )
    models = (registered[pid].model for pid in alive if pid in registered)
    model = next((name for name in models if name is not None), None)
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
