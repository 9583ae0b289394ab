"""``dynamo serve graph.yaml``: check the graph, show it or start it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dynamo.cli.background import detach
from dynamo.cli.console import Console, ConsoleLog
from dynamo.config import from_env, load_known
from dynamo.config.check import did_you_mean
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.serve import ServeSettings
from dynamo.errors import ConfigError, DynamoError
from dynamo.observability.logs import counted
from dynamo.runtime.process.paths import (
    release_sockets,
    run_dir,
    socket_path,
    state_dir,
    store_dir,
    store_path,
)
from dynamo.serve.graph.graph import Graph, parse_graph, read_text
from dynamo.serve.graph.overrides import Override, split_overrides
from dynamo.serve.graph.watchers import DeploymentPlan, GraphSource, MakePlan
from dynamo.serve.readiness import check_port
from dynamo.serve.state.events import BoxEventLog
from dynamo.serve.state.rundir import RunDirectory
from dynamo.serve.state.statefile import Statefile
from dynamo.serve.supervision.guard import hold_signals, run_guarded
from dynamo.setup.graph_plan import SOCKETS, graph_directory, prepare
from dynamo.setup.service_checks import check_engine_flags, check_engines, override_hint
from dynamo.status.deployment import STATUS_SOCKET, main_pid, running_deployment
from dynamo.status.reading import report
from dynamo.status.status_socket import StatusSocket

DESCRIPTION = "Start the services of a graph file, keep them running, end them all on Ctrl-C."
EPILOG = """overrides: --Service.key=value for every key of the file, for example
  dynamo serve examples/quickstart.yaml --Worker.ServiceArgs.workers=4 --Frontend.http-port=8001
Relative paths in the graph are relative to the directory of the graph file, where services run.
Exit status: 0 stopped, 1 a service failed and was not restarted, 2 the graph or a flag is wrong."""

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    try:
        words = sys.argv[1:] if argv is None else argv
        own, overrides = split_overrides(words)
        (settings,), unknown = load_known("dynamo serve", DESCRIPTION, [ServeSettings], own, EPILOG)
        if unknown:
            raise ConfigError(_unrecognized(unknown, settings, overrides))
        if settings.detach and not settings.dry_run:
            graph = parsed(graph_source(settings, overrides), settings.namespace)
            return detach("serve", words, graph.namespace)
        return start(settings, overrides)
    except BrokenPipeError:  # no failure: dynamo.cli.main ends without a message
        raise
    except (DynamoError, OSError) as error:
        print(f"dynamo serve: {_reason(error)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def start(settings: ServeSettings, overrides: Sequence[Override]) -> int:
    """Start the graph and keep it running, or show it with ``dry_run``; return the exit status.

    Raises DynamoError or OSError if it cannot start.
    """
    source = graph_source(settings, overrides)
    graph = parsed(source, settings.namespace)
    runtime = from_env(RuntimeSettings, namespace=graph.namespace)
    if settings.dry_run:
        planned, warnings = dry_run(graph, settings, runtime)
        _show(planned, settings, graph)
        for warning in warnings:
            print(f"dynamo serve: warning: {warning}", file=sys.stderr)
        return 0
    # From here a stop signal waits until the guard can handle it, with clean-up.
    hold_signals()
    planned = prepare(graph, settings, runtime)
    check_engines(graph)
    return _serve(planned, settings, runtime, source)


def _unrecognized(
    words: Sequence[str], settings: ServeSettings, overrides: Sequence[Override]
) -> str:
    """Return the error of unknown words, with the service that has such an option, if any."""
    problem = f"unrecognized arguments: {' '.join(words)}"
    flag = words[0].partition("=")[0]
    # With `--flag VALUE graph.yaml` the value was taken for the graph.
    for path in (settings.graph, *words):
        with contextlib.suppress(DynamoError, OSError):
            source = graph_source(replace(settings, graph=path), overrides)
            if hint := override_hint(parsed(source, settings.namespace), flag):
                return f"{problem}; {hint}"
    hint = did_you_mean(flag.lstrip("-"), [ServeSettings])
    return f"{problem}{hint}\nTry 'dynamo serve --help'."


def _reason(error: DynamoError | OSError) -> str:
    if isinstance(error, DynamoError):
        return error.message
    log.debug("the operating system raised an error", exc_info=error)
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def graph_source(settings: ServeSettings, overrides: Sequence[Override]) -> GraphSource:
    """Return the text to serve; without a ``file`` if none is served.

    Raises ConfigError if there is no text.
    """
    text, words = settings.deployment_config, [override.text for override in overrides]
    if text is not None:
        if settings.graph:
            print(
                f"dynamo serve: ignoring {settings.graph}: DYN_DEPLOYMENT_CONFIG replaces it; "
                "unset the variable to serve the file",
                file=sys.stderr,
            )
        return GraphSource(label=settings.deployment_source, text=text, overrides=words)
    if not settings.graph:
        raise ConfigError("no graph file given; try: examples/quickstart.yaml")
    file = Path(settings.graph).absolute()
    return GraphSource(file=file, label=settings.graph, text=read_text(file), overrides=words)


def parsed(source: GraphSource, namespace: str | None) -> Graph:
    """Return the graph; ``namespace`` overrides the text's. Raises ConfigError."""
    _, overrides = split_overrides(source.overrides)
    default = from_env(RuntimeSettings).namespace
    return parse_graph(source.text, source.label, overrides, namespace, default)


def dry_run(
    graph: Graph, settings: ServeSettings, runtime: RuntimeSettings
) -> tuple[DeploymentPlan, list[str]]:
    """Check all that a start checks, and vLLM's flags, which a start leaves to its workers.

    Returns the plan, and as warnings what would end or disturb a start on this machine now. Raises
    ConfigError if the graph is wrong on every machine.
    """
    planned = prepare(graph, settings, runtime)
    check_engine_flags(graph, graph_directory(graph))
    warnings = list(planned.warnings)
    try:
        check_engines(graph)
    except ConfigError as error:
        warnings.append(error.message)
    document = running_deployment(runtime)
    if document is not None:
        warnings.append(
            f"namespace {planned.namespace!r} is already served by process {main_pid(document)}; "
            "apply this graph to it with dynamo reload, or choose another --namespace"
        )
        return planned, warnings
    try:
        for spec in planned.specs:
            check_port(spec, settings.port_flag)
    except ConfigError as error:
        warnings.append(error.message)
    return planned, warnings


def _show(planned: DeploymentPlan, settings: ServeSettings, graph: Graph) -> None:
    rows = [
        {
            "name": spec.name,
            "service": spec.service,
            "command": list(spec.argv),
            "env": dict(spec.env),
            "working_dir": spec.working_dir,
            "gpus": list(spec.gpus),
            "graceful_timeout_s": spec.graceful_timeout_s,
        }
        for spec in planned.specs
    ]
    if settings.json:
        document: dict[str, Any] = {
            "namespace": planned.namespace,
            "circus_endpoint": planned.endpoint,
            "gpus": list(planned.gpu_ids),
            "config": graph.config,
            "watchers": rows,
        }
        print(json.dumps(document, indent=2, ensure_ascii=False, default=str))
        return
    print(f"namespace {planned.namespace}, control {planned.endpoint}")
    for spec in planned.specs:
        print(f"\n{spec.name}   GPUs: {', '.join(spec.gpus) or 'none'}")
        print(f"  command  {shlex.join(spec.argv)}")
        print(f"  in       {spec.working_dir}")
        for key, value in sorted(spec.env.items()):
            print(f"  env      {key}={value}")


def plan_maker(settings: ServeSettings, runtime: RuntimeSettings) -> MakePlan:
    """Return the function that checks and plans a changed graph for the running deployment."""

    def make_plan(source: GraphSource) -> DeploymentPlan:
        graph = parsed(source, runtime.namespace)
        planned = prepare(graph, settings, runtime)
        check_engines(graph)
        return planned

    return make_plan


def _serve(
    planned: DeploymentPlan, settings: ServeSettings, runtime: RuntimeSettings, source: GraphSource
) -> int:
    # Its own store is made by the first process that uses it: then an arbiter can remove it.
    store = store_dir(runtime) if runtime.file_kv else store_path(runtime)
    statefile = Statefile(state_dir(runtime), planned.namespace)
    run_directory = RunDirectory(run_dir(runtime), store, statefile)
    run_directory.acquire(settings.beside_hint)
    try:
        notes = run_directory.reconcile()
        # Only now: a crashed deployment, which reconcile() has ended, may have listened there.
        for spec in planned.specs:
            check_port(spec, settings.port_flag)
        run_directory.make_key()
        # Hold the fallback directory of long paths again: reconcile() removes a crashed one.
        for name in (*SOCKETS, STATUS_SOCKET):
            socket_path(runtime, name)
        if source.file == Path():
            source = replace(source, file=run_directory.keep_graph(source.text))
    except BaseException:
        run_directory.release()
        raise

    def body() -> int:
        # Imported here: the guard and --dry-run watch nothing.
        from dynamo.doctor.alert_watch import AlertWatch

        path = socket_path(runtime, STATUS_SOCKET)
        with StatusSocket(path, partial(report, runtime)), AlertWatch(runtime):
            make_plan = plan_maker(settings, runtime)
            return _arbiter(planned, settings, run_directory, notes, source, make_plan)

    def clean_up() -> None:
        run_directory.clear()
        release_sockets(runtime)
        run_directory.release()

    events = BoxEventLog(run_directory.path)
    return run_guarded(body, clean_up, partial(events.add, "stop", planned.namespace))


def _arbiter(
    planned: DeploymentPlan,
    settings: ServeSettings,
    run_directory: RunDirectory,
    notes: Sequence[str],
    source: GraphSource,
    make_plan: MakePlan,
) -> int:
    """Run the arbiter, in the child process of the guard."""
    # Imported here: the guard and --dry-run do not need circus.
    from dynamo.serve.deployment import Deployment

    console = Console(planned.namespace, jsonl=settings.jsonl, quiet=settings.quiet)
    root = logging.getLogger()
    root.handlers[:] = [ConsoleLog(console)]
    root.setLevel(logging.INFO)
    for noisy in ("circus", "tornado", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        for line in (*notes, *planned.warnings):
            console.announce(line, logging.WARNING)
        count = counted(len(planned.specs), "process", "processes")
        console.announce(f"starting {count} in namespace {planned.namespace!r}")

        async def deploy() -> int:  # made on its loop
            parts = (planned, settings, run_directory, console, source, make_plan)
            return await Deployment(*parts).run()

        return asyncio.run(deploy())
    except (DynamoError, OSError) as error:
        console.announce(_reason(error), logging.ERROR)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        console.close()
