"""From a graph file to the plan of a deployment: what needs no running process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dynamo.config import environ, from_env, to_env
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.serve import ServeSettings
from dynamo.errors import ConfigError
from dynamo.runtime.process.paths import planned_socket_path, state_path, store_path
from dynamo.serve.gpus.engine_gpus import with_engine_gpus
from dynamo.serve.graph.frontend_address import frontend_address
from dynamo.serve.graph.graph import Graph, parse_graph
from dynamo.serve.graph.overrides import Override
from dynamo.serve.graph.watchers import DRAIN_TIMEOUTS, DeploymentPlan, WatcherSpec, plan
from dynamo.serve.yamlmap import read_text
from dynamo.setup.gpu_placement import place_workers
from dynamo.setup.service_checks import check_services

__all__ = ["SOCKETS", "graph_directory", "prepare", "read_graph"]

SOCKETS = ("circus.sock", "circus-events.sock")
"""The sockets of the arbiter: control and events."""

# Settings whose variables decide how the processes find each other.
_SHARED = (
    "DYN_DISCOVERY_BACKEND",
    "DYN_FILE_KV",
    "DYN_LOCAL_STATE_DIR",
    "DYN_REQUEST_PLANE",
    "DYN_EVENT_PLANE",
)


def read_graph(source: str, overrides: Sequence[Override], namespace: str | None) -> Graph:
    """Read the graph file ``source``; ``namespace`` overrides the file's. Raises ConfigError."""
    if not source:
        raise ConfigError("no graph file given; try: examples/quickstart.yaml")
    default = from_env(RuntimeSettings).namespace
    return parse_graph(read_text(Path(source)), source, overrides, namespace, default)


def graph_directory(graph: Graph) -> Path:
    """Return the directory in which the services run: that of the graph file."""
    return Path(graph.source).absolute().parent if Path(graph.source).exists() else Path.cwd()


def prepare(graph: Graph, settings: ServeSettings, runtime: RuntimeSettings) -> DeploymentPlan:
    """Make every decision that needs no running process. Raises ConfigError."""
    env = {key: value for key, value in to_env(runtime).items() if key in _SHARED}
    env |= {name: environ()[name] for name in DRAIN_TIMEOUTS if name in environ()}
    env["DYN_LOCAL_STATE_DIR"] = str(state_path(runtime))
    env["DYN_FILE_KV"] = str(store_path(runtime))
    env["DYN_MIGRATION_LIMIT"] = str(settings.migration_limit)
    here = graph_directory(graph)
    if _shadows_us(here):
        env["PYTHONSAFEPATH"] = "1"
    check_services(graph, here, {**env, "DYN_NAMESPACE": graph.namespace})
    graph = replace(graph, services=with_engine_gpus(graph.services, here))
    specs = plan(
        graph,
        python=sys.executable,
        working_dir=str(here),
        env=env,
        graceful_timeout_s=settings.graceful_timeout_s,
    )
    if not any(spec.starts for spec in specs):
        raise ConfigError(f"{graph.source}: every service has 0 workers")
    placement = place_workers(graph, specs, settings)
    running = [spec for spec in placement.specs if spec.starts]
    _check(graph, running)
    control, events = (f"ipc://{planned_socket_path(runtime, name)}" for name in SOCKETS)
    return DeploymentPlan(
        namespace=graph.namespace,
        specs=running,
        config=graph.config,
        gpu_ids=placement.gpu_ids,
        endpoint=settings.circus_endpoint or control,
        pubsub_endpoint=events,
        warnings=placement.warnings,
        templates=[spec for spec in placement.specs if not spec.starts],
    )


def _shadows_us(directory: Path) -> bool:
    """Whether a process in ``directory`` would import another copy of this package.

    In a checkout whose package was installed elsewhere, the copy lacks the compiled modules.
    """
    other = directory / "dynamo"
    return (other / "__init__.py").is_file() and not other.samefile(Path(__file__).parents[1])


def _check(graph: Graph, specs: Sequence[WatcherSpec]) -> None:
    """Check discovery, and that each frontend has an address of its own. Raises ConfigError."""
    listening: dict[str, str] = {}
    for spec in specs:
        backend = spec.options.get("discovery-backend", spec.env.get("DYN_DISCOVERY_BACKEND"))
        if backend == "mem" and len(specs) > 1:
            raise ConfigError(
                f"{spec.name} has discovery backend mem, which is private to a process: the other "
                "services cannot find it. Unset DYN_DISCOVERY_BACKEND, or set it to file or etcd"
            )
        if spec.is_frontend:
            url = frontend_address(spec.options, {**environ(), **spec.env}).url
            if url in listening:
                raise ConfigError(
                    f"{graph.source}: {listening[url]} and {spec.name} would both listen on {url}; "
                    "give each frontend its own service and http-port"
                )
            listening[url] = spec.name
