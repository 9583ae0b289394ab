"""Which workers a name on the command line or in a request stands for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from dynamo.errors import InvalidArgument, as_argument
from dynamo.operations.steps.limits import ActionFailed
from dynamo.serve.graph.facts import DECODE, ServiceFacts
from dynamo.serve.state.document import Document, Entry
from dynamo.serve.state.entries import ServiceEntries, ServiceWorker, facts_of, read_services
from dynamo.serve.state.process_table import is_reserved


@dataclass(frozen=True, kw_only=True)
class ActionTarget:
    """The watcher of ``entry``. ``owner`` is its service, None if that registers no model."""

    entry: Entry
    service: str
    owner: ServiceEntries | None

    @property
    def name(self) -> str:
        """The name of the watcher."""
        return self.entry.name


def find_processes(document: Document, name: str, watchers: Collection[str]) -> list[ActionTarget]:
    """Return the watcher ``name``, or all of the service ``name``, without those that are removed.

    ``watchers`` are those of the arbiter. A watcher is found without the namespace before its name,
    too. Raises InvalidArgument that lists the names.
    """
    targets = _all_targets(document)
    namespace = document.namespace
    # A watcher goes before a service, and both before a name without the namespace.
    chosen = [target for target in targets if target.name == name]
    chosen = chosen or [target for target in targets if target.service == name]
    chosen = chosen or [target for target in targets if target.name == f"{namespace}_{name}"]
    if not chosen:
        wrong = f"no service or worker {name!r}" if name else "name a service or a worker"
        raise InvalidArgument(f"{wrong} in namespace {namespace!r}: {_listed(targets)}")
    running = [target for target in chosen if target.entry.pids or target.name in watchers]
    if not running:
        model = next((target.owner.model for target in chosen if target.owner), "")
        how = f"start one with: dynamo load {as_argument(model)}" if model else "try: dynamo reload"
        raise InvalidArgument(f"{name} has no process now; {how}")
    return running


def named_processes(
    document: Document,
    name: str,
    watchers: Collection[str],
    registered: Callable[[Entry], str | None],
) -> list[ActionTarget]:
    """Return the same; without such a service or watcher, those of the model ``name``."""
    try:
        return find_processes(document, name, watchers)
    except InvalidArgument:
        try:
            services = find_model(document, name, registered)
        except InvalidArgument:
            services = []
        if not services:
            raise
    return [
        target
        for service in services
        for target in find_processes(document, service.name, watchers)
    ]


def find_workers(
    document: Document,
    name: str,
    watchers: Collection[str],
    registered: Callable[[Entry], str | None],
) -> list[ServiceWorker]:
    """Return the same, for names of workers that register a model, services and models alone.

    Those of other programs than ours count once they have ``registered`` their model.
    """
    targets = named_processes(document, name, watchers, registered)
    workers = [
        ServiceWorker(owner, target.entry)
        for target in targets
        if (owner := _owner(target, registered))
    ]
    if not workers:
        others = [target for target in _all_targets(document) if _owner(target, registered)]
        raise InvalidArgument(
            f"{name} is not a worker that registers a model, so only dynamo restart applies to it; "
            f"the workers are {_listed(others)}"
        )
    return workers


def _owner(
    target: ActionTarget, registered: Callable[[Entry], str | None]
) -> ServiceEntries | None:
    """Return the service of a worker, None for a process that is none."""
    entry, model = target.entry, registered(target.entry)
    if target.owner is not None or model is None:
        return target.owner
    return ServiceEntries(
        name=target.service,
        base=entry.name,
        facts=ServiceFacts(program=entry.program, model=model, pool=DECODE),
        gpus=len(entry.gpus),
        template=entry,
        entries=(entry,),
    )


def find_model(
    document: Document,
    model: str,
    registered: Callable[[Entry], str | None],
    adapters: Callable[[Entry], Collection[str]] = lambda entry: (),
) -> list[ServiceEntries]:
    """Return the services of ``model``; ``registered`` returns the model of a running worker.

    Raises InvalidArgument that lists the models, or names the service of one of its ``adapters``.
    """
    models: dict[str, list[ServiceEntries]] = {}
    for service in read_services(document).values():
        names = {registered(entry) for entry in service.entries} - {None}
        for name in names or {service.model}:
            models.setdefault(str(name), []).append(service)
    if model not in models:
        graph = facts_of(document)  # without a service that is being removed
        entries = [e for e in document.components.values() if e.service in graph]
        own = next((e.service for e in entries if registered(e) == model), "")
        if own and model:
            raise InvalidArgument(
                f"{model} is served by {own}, a program of your own: to load, unload and scale its "
                f"workers, add min, max or priority to {own}.ServiceArgs in the graph, then: "
                "dynamo reload"
            )
        base = next((entry.service for entry in entries if model in adapters(entry)), "")
        if base:
            raise InvalidArgument(
                f"{model} is an adapter, or a further model, of the workers of {base}, and comes "
                f"and goes with them: change {base} in the graph, then: dynamo reload"
            )
        wrong = f"no model {model!r}" if model else "name a model"
        raise InvalidArgument(
            f"{wrong} in namespace {document.namespace!r}: {', '.join(sorted(models)) or 'none'}"
        )
    return models[model]


def restartable(targets: Iterable[ActionTarget], active: Collection[str]) -> list[ActionTarget]:
    """Return those that may be restarted now. Raises ActionFailed if there are none."""
    ready, problems = [], []
    for target in targets:
        if target.entry.asleep:
            problems.append(f"{target.name} sleeps; wake it first with: dynamo wake {target.name}")
        elif target.entry.draining:
            problems.append(f"{target.name} is being drained and is not started again")
        elif is_reserved(target.entry, active):
            problems.append(f"{target.name} is being started or removed; wait for its end")
        else:
            ready.append(target)
    if not ready:
        raise ActionFailed("; ".join(problems))
    return ready


def _all_targets(document: Document) -> list[ActionTarget]:
    owners = {
        entry.name: service
        for service in read_services(document).values()
        for entry in service.entries
    }
    return [
        ActionTarget(
            entry=entry,
            service=entry.service,
            owner=owners.get(entry.name),
        )
        for entry in document.components.values()
    ]


def _listed(targets: Iterable[ActionTarget]) -> str:
    """List services with their workers."""
    services: dict[str, list[str]] = {}
    for target in targets:
        services.setdefault(target.service, []).append(target.name)
    return (
        "; ".join(f"{name} ({', '.join(watchers)})" for name, watchers in services.items())
        or "none"
    )
