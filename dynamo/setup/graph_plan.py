"""From a graph file to the plan of a deployment, GPUs included: what needs no running process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dynamo.config import environ, from_env, to_env
from dynamo.config.programs import memory_share
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.serve import ServeSettings
from dynamo.errors import ConfigError, StatefileError
from dynamo.runtime.process.paths import expanded, planned_socket_path, state_path, store_path
from dynamo.serve.gpus.gpus import NO_DRIVER, Gpu, Inventory, inventory_of
from dynamo.serve.graph.engine_gpus import (
    EngineFlags,
    EngineMemory,
    MemoryRanks,
    engine_flags,
    memory_warnings,
    with_engine_gpus,
)
from dynamo.serve.graph.graph import Graph, parse_graph, read_text
from dynamo.serve.graph.overrides import Override
from dynamo.serve.graph.service import Service
from dynamo.serve.graph.watchers import (
    DRAIN_TIMEOUTS,
    DeploymentPlan,
    WatcherSpec,
    graph_facts,
    pin,
    place,
    plan,
)
from dynamo.serve.state.document import Document
from dynamo.serve.state.process_table import ledger_of, runs_here
from dynamo.serve.state.statefile import Statefile
from dynamo.setup.model_checks import model_warnings
from dynamo.setup.service_checks import check_services

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
_SMALLER = ("quantization", "cpu-offload-gb", "cpu-offload-bytes")
_MODEL_FLAGS = ("model", "model-path")


@dataclass(frozen=True)
class Placement:
    """The watchers with their GPUs, all GPUs that can be assigned, and warnings."""

    specs: list[WatcherSpec]
    gpu_ids: tuple[str, ...]
    warnings: tuple[str, ...]


def place_workers(
    graph: Graph,
    specs: list[WatcherSpec],
    settings: ServeSettings,
    deployed: Document | None = None,
) -> Placement:
    """Assign GPUs to ``specs`` of ``graph``. Raises ConfigError on shortage.

    ``deployed`` is what of the namespace runs now: its GPUs are free, those of other deployments
    beside it are not. Without an NVIDIA driver, a number of GPUs that only follows from the
    engine's flags is ignored: the engine may be built for another device.
    """
    devices, inventory = _inventory(specs, settings)
    deployed = deployed or Document(namespace=graph.namespace)
    specs = pin(specs, devices or None, inventory.env)
    warnings: list[str] = []
    if settings.disable_gpu_allocation:
        return Placement(specs, inventory.ids, ())
    if inventory.source == NO_DRIVER:
        derived = {service.name for service in graph.services if service.gpu_is_derived}
        unplaced = dict.fromkeys(spec.service for spec in specs if spec.service in derived)
        warnings += [
            f"{name}: {NO_DRIVER}; it is started without an assigned GPU" for name in unplaced
        ]
        specs = [replace(spec, gpu=0.0) if spec.service in derived else spec for spec in specs]
    needs = _needs(graph, specs) if devices else {}
    ledger = ledger_of(deployed, inventory.ids)
    # As if the namespace held nothing: what it has now is free for its own graph.
    allocator = ledger.allocator(without=ledger.held, inventory=inventory)
    ours = {gpu for entry in deployed.components.values() for gpu in entry.gpus}
    specs = place(specs, inventory, allocator, MemoryRanks(devices, needs, ours))
    if devices:
        warnings += memory_warnings(specs, devices, needs)
    return Placement(specs, inventory.ids, tuple(warnings))


def _inventory(
    specs: Sequence[WatcherSpec], settings: ServeSettings
) -> tuple[Sequence[Gpu], Inventory]:
    if settings.gpus is not None:
        ids = tuple(str(index) for index in range(settings.gpus))
        return (), Inventory(ids=ids, source=f"--gpus {settings.gpus}")
    if not any(spec.gpu for spec in specs):
        return (), Inventory(ids=(), source="no service asks for a GPU")
    from dynamo.serve.gpus.nvml import (
        probe,  # loads the driver's library: only for graphs that need it
    )

    devices = probe()
    return devices or (), inventory_of(devices, environ().get("CUDA_VISIBLE_DEVICES"))


def _needs(graph: Graph, specs: Sequence[WatcherSpec]) -> Mapping[str, EngineMemory]:
    directories = {spec.service: Path(spec.working_dir) for spec in specs if spec.gpu or spec.gpus}
    return {
        service.name: _memory(service, directories[service.name])
        for service in graph.services
        if memory_share(service.program) and service.name in directories
    }


def _memory(service: Service, directory: Path) -> EngineMemory:
    flags = engine_flags(service.all_words, directory)
    weights_bytes = _weights_bytes(flags, directory) // flags.shards
    return EngineMemory(weights_bytes, flags.memory_share(service.program))


def _weights_bytes(flags: EngineFlags, directory: Path) -> int:
    """Return the size of the weights on disk; 0 if unknown, or if they get smaller in memory."""
    values = flags.values
    source = next((str(values[name]) for name in _MODEL_FLAGS if name in values), "")
    if not source or values.get("load-format") == "dummy" or any(n in values for n in _SMALLER):
        return 0
    path = directory / expanded(source)
    if not path.exists():
        from dynamo.llm.model_source import resolve_model  # takes 0.3 s: only for a cached model

        try:
            path = resolve_model(source, download=False).path
        except ConfigError:
            return 0
    if path.is_file():
        return path.stat().st_size
    for pattern in ("*.safetensors", "*.bin"):
        if sizes := [file.stat().st_size for file in path.glob(pattern)]:
            return sum(sizes)
    return 0


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
        # Else `python -m` imports from the working directory first.
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
    placement = place_workers(graph, specs, settings, _deployed(graph.namespace, runtime))
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
        warnings=(*placement.warnings, *model_warnings(graph)),
        templates=[spec for spec in placement.specs if not spec.starts],
        services=graph_facts(graph, str(here)),
    )


def _deployed(namespace: str, runtime: RuntimeSettings) -> Document:
    """Return the statefile of the running deployment, else an empty one in its place."""
    directory = state_path(runtime)
    document = None
    with contextlib.suppress(StatefileError):  # a start replaces it
        document = Statefile(directory, namespace).read()
    if document is not None and runs_here(document.arbiter):
        return document
    return Document(namespace=namespace, directory=str(directory))


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
        if spec.listens is not None and spec.listens.problem:
            raise ConfigError(spec.listens.problem)
        if spec.is_frontend and spec.address is not None:
            url = spec.address.url
            if url in listening:
                raise ConfigError(
                    f"{graph.source}: {listening[url]} and {spec.name} would both listen on {url}; "
                    "give each frontend its own service and http-port"
                )
            listening[url] = spec.name
