"""Models that come and go while a deployment runs: ``dynamo run`` beside it, ``dynamo remove``.

The arbiter changes the graph and its file; what is here asks it to, and follows new workers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from types import FrameType
from typing import Any

from dynamo.cli.options import DeploymentSettings, LoadModelSettings
from dynamo.config import load
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, DynamoError, as_argument
from dynamo.operations.reload import reload_graph, running
from dynamo.operations.steps.access import open_access
from dynamo.operations.steps.limits import ActionLimits
from dynamo.operations.targets import find_model
from dynamo.protocols.status import BoxStatus, WorkerStatus
from dynamo.runtime.process.paths import state_dir
from dynamo.serve.readiness import probe
from dynamo.serve.state.document import Document
from dynamo.serve.state.frontends import frontends_in
from dynamo.serve.state.statefile import Statefile
from dynamo.serve.supervision.supervised_process import describe_exit
from dynamo.setup.new_graph import NewGraph
from dynamo.status.deployment import chosen_runtime
from dynamo.status.reading import BoxCollector

DESCRIPTION = """Take a model out of the running deployment and out of its graph file: its workers
finish their requests and exit. Comments in the file stay."""
EPILOG = """Ctrl-C ends only the command: the model is removed nevertheless.
Exit status: 0 removed, 1 it failed, or no deployment runs, 2 there is no such model."""

_POLL_S = 0.2
TRIES = 3
"""Failures of a download after which ``dynamo run`` gives a model up; a service goes on."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo remove``; return the exit status."""
    groups: list[type[Any]] = [LoadModelSettings, DeploymentSettings]
    target, deployment = load("dynamo remove", DESCRIPTION, groups, argv, epilog=EPILOG)
    runtime = chosen_runtime(deployment.namespace)
    document = running(Statefile(state_dir(runtime), runtime.namespace))
    services = asyncio.run(_services(runtime, target.model))
    print(f"removing {target.model}: requests in flight finish", flush=True)
    reply = reload_graph(document, {"remove": services})
    print(f"removed {', '.join(services)} from {reply['file']}")
    return 0


async def _services(runtime: RuntimeSettings, model: str) -> list[str]:
    """Return the services of ``model``. Raises InvalidArgument that lists the models."""
    async with open_access(runtime, ActionLimits()) as access:
        services = find_model(access.document(), model, access.model, access.adapters)
        return [service.name for service in services]


def add(
    document: Document, runtime: RuntimeSettings, graphs: Sequence[NewGraph], dry_run: bool
) -> int:
    """Add the models of ``graphs`` to the deployment of ``document``; return the exit status.

    Returns when they are served. After Ctrl-C, or if a worker is given up, they are removed again.
    Raises DynamoError and OSError.
    """
    collector = BoxCollector(runtime)
    _check_new(graphs, collector.collect())
    keys = {f"Worker{number or ''}": graph.worker() for number, graph in enumerate(graphs)}
    reply, interrupted = _call_to_its_end(document, {"add": keys, "dry_run": dry_run})
    services = dict(zip(reply["added"], graphs, strict=True))
    models = {name: graph.served_name for name, graph in services.items()}
    try:
        if interrupted:
            raise KeyboardInterrupt
        _show(reply, services, document.namespace, dry_run)
        problem = "" if dry_run else _follow(collector, document, models)
    except KeyboardInterrupt:
        if not dry_run:
            _take_back(document, services)
        return 130
    if dry_run:
        return 0
    if problem:
        print(f"dynamo run: {problem}", file=sys.stderr)
        _take_back(document, services)
        return 1
    print(f"dynamo run: ready: {', '.join(models.values())}", file=sys.stderr)
    last = as_argument([*models.values()][-1])
    print(f"  remove: dynamo remove --namespace {document.namespace} {last}", file=sys.stderr)
    return 0


def _call_to_its_end(document: Document, request: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return the reply to ``request``, and whether Ctrl-C came before it.

    Interrupted without the reply, we would not know what to remove.
    """
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(number, before)  # a second one leaves the model to the deployment
        text = "waiting until the deployment has added it, to remove it again"
        print(f"dynamo run: {text}", file=sys.stderr, flush=True)

    before = signal.signal(signal.SIGINT, note)
    try:
        return reload_graph(document, request), interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _show(
    reply: Mapping[str, Any], services: Mapping[str, NewGraph], namespace: str, dry_run: bool
) -> None:
    for name, graph in services.items():
        print("\n  ".join((f"{name}:", *graph.worker().splitlines())))
    for line in reply["warnings"]:
        print(f"dynamo run: warning: {line}", file=sys.stderr)
    done = "would be added to the deployment" if dry_run else "added to the running deployment"
    print(f"dynamo run: {done} in namespace {namespace!r} ({reply['file']})", file=sys.stderr)


def _check_new(graphs: Sequence[NewGraph], box: BoxStatus) -> None:
    """Raise ConfigError if a model of this name is there."""
    served = {worker.model: worker.service for worker in box.workers}
    for graph in graphs:
        name = graph.served_name
        if name in {model.model for model in box.models}:
            service = served.get(name, "Worker")
            raise ConfigError(
                f"{name} is a model of namespace {box.namespace!r} already. For more copies: "
                f"dynamo reload --namespace {box.namespace} --{service}.ServiceArgs.workers=2; "
                "under another name: --name NAME"
            )


def _follow(collector: BoxCollector, document: Document, models: Mapping[str, str]) -> str:
    """Wait until frontends list the models of these services; return "" or why they will not."""
    printed = dict.fromkeys(models, "")
    while True:
        box = collector.collect()
        for service, model in models.items():
            workers = [worker for worker in box.workers if worker.service == service]
            if problem := _problem(workers, model):
                return problem
            text = _progress(workers)
            if text not in (printed[service], "ready"):
                printed[service] = text
                print(f"dynamo run: {model}: {text}", file=sys.stderr, flush=True)
        # Ready workers are not enough: a frontend lists a model once it has loaded its tokenizer.
        if asyncio.run(_are_listed(document, models.values())):
            return ""
        time.sleep(_POLL_S)


def _problem(workers: Sequence[WorkerStatus], model: str) -> str:
    """Return why a model is not going to be served; "" while it may be."""
    if not workers:
        return f"{model} was removed, or the deployment ended, before it was served"
    failed = next((worker for worker in workers if _has_failed(worker)), None)
    if failed is None:
        return ""
    remedy = f"; try: {failed.remedy}" if failed.remedy else ""
    return f"{failed.name}: {failed.cause or failed.state}{remedy}"


def _has_failed(worker: WorkerStatus) -> bool:
    """Whether it has ended for good, or could not download its model ``TRIES`` times."""
    unreachable = worker.restarts >= TRIES and worker.last_exit == describe_exit(os.EX_TEMPFAIL)
    return worker.state in ("failed", "stopped") or (worker.state == "loading" and unreachable)


def _progress(workers: Sequence[WorkerStatus]) -> str:
    """Return what the first worker that is not ready does, in tenths."""
    waiting = next((worker for worker in workers if worker.state != "ready"), workers[0])
    if waiting.progress is None:
        return waiting.state
    return f"{waiting.state} {int(waiting.progress * 10) * 10} %"


async def _are_listed(document: Document, models: Collection[str]) -> bool:
    """Whether each frontend serves all ``models``."""
    addresses = (frontend.listens.address for frontend in frontends_in(document))
    for address in filter(None, addresses):
        readiness = await probe(address)
        if readiness is None or not set(readiness.models).issuperset(models):
            return False
    return True


def _take_back(document: Document, services: Collection[str]) -> None:
    print("dynamo run: removing it again", file=sys.stderr, flush=True)
    try:
        reload_graph(document, {"remove": list(services)})
    except (DynamoError, OSError) as error:
        print(f"dynamo run: it was not removed: {error}; try: dynamo ps", file=sys.stderr)
