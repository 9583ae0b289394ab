"""The circus watchers of a graph: one per process, with its command, environment and GPUs.

A command is a list of words, never a string; variables are in ``env``, not in the command.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo.config import environ
from dynamo.config.programs import FRONTEND, PROGRAMS, module_of
from dynamo.errors import ConfigError
from dynamo.serve.gpus.gpus import Allocator, Gpu, Inventory, inventory_of
from dynamo.serve.graph.command import listen_facts, service_args, service_facts
from dynamo.serve.graph.facts import FrontendAddress, ListenFacts, ServiceFacts
from dynamo.serve.graph.service import PYTHON, Service, serves_model, watcher_name

if TYPE_CHECKING:
    from dynamo.serve.graph.engine_gpus import MemoryRanks
    from dynamo.serve.graph.graph import Graph

_GPUS = "CUDA_VISIBLE_DEVICES"
_PORT = "DYN_SYSTEM_PORT"
DRAIN_TIMEOUTS = (
    "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
    "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
)
"""Variables that bound the drain of a frontend and of a worker."""

_EXIT_S = 5.0  # of a graceful timeout, for what a process does after its drain
_EXIT_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class WatcherSpec:
    """One process to keep running.

    ``env`` is added to the arbiter's environment. ``stop_stage`` orders the stop: a stage stops
    after all processes of the previous one have exited. ``index`` counts the watchers of a service.
    One that does not ``starts`` is the template of a service with 0 workers. ``pinned``: its
    service's ``envs`` name its ``gpus``; it is never moved, and its owner shares them out.
    ``listens`` says where, for the program ``dynamo.frontend``.
    """

    name: str
    service: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    working_dir: str
    graceful_timeout_s: float
    gpu: float = 0.0
    gpus: tuple[str, ...] = ()
    stop_stage: int = 1
    is_frontend: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    index: int = 0
    starts: bool = True
    declares_model: bool = False
    pinned: bool = False
    listens: ListenFacts | None = None

    @property
    def program(self) -> str:
        """The Python module that runs; "" for another program."""
        return module_of(self.argv)

    @property
    def address(self) -> FrontendAddress | None:
        """Where a frontend listens; None for other programs, and without a fixed port."""
        return self.listens.address if self.listens is not None else None

    @property
    def shares(self) -> dict[str, float]:
        """Its share of each of its GPUs: 1 of a whole one."""
        return dict.fromkeys(self.gpus, self.gpu if 0 < self.gpu < 1 else 1.0)

    @property
    def serves_model(self) -> bool:
        """Whether its processes register a model."""
        return serves_model(self.program, self.declares_model)

    @property
    def registers_model(self) -> bool:
        """Whether its processes register a model card in file discovery when they can serve."""
        return self.serves_model and self.uses_file_discovery

    @property
    def uses_file_discovery(self) -> bool:
        """Whether the program registers in files, where ``dynamo serve`` sees it."""
        backend = self.options.get("discovery-backend") or self.env.get("DYN_DISCOVERY_BACKEND")
        return backend == "file"


@dataclass(frozen=True, kw_only=True)
class DeploymentPlan:
    """All decisions made before the first process starts.

    ``templates`` are those of the services with 0 workers, which the planner starts on demand.
    ``services`` has the facts of all services, in the order of the graph.
    """

    namespace: str
    specs: Sequence[WatcherSpec]
    config: Mapping[str, Any]
    gpu_ids: tuple[str, ...]
    endpoint: str
    pubsub_endpoint: str
    warnings: Sequence[str] = ()
    templates: Sequence[WatcherSpec] = ()
    services: Mapping[str, ServiceFacts] = field(default_factory=dict)

    @property
    def all_specs(self) -> Sequence[WatcherSpec]:
        """The specs and the templates."""
        return (*self.specs, *self.templates)


@dataclass(frozen=True, kw_only=True)
class GraphSource:
    """A graph: ``text``, with ``overrides`` as words of a command line.

    ``label`` names the text in errors; services run in its directory if it is a file. ``file`` is
    read at a reload, and changed by commands that add and remove models; it is ``Path()`` until the
    run directory has a copy of a text without a file.
    """

    label: str
    text: str
    overrides: Sequence[str] = ()
    file: Path = Path()


MakePlan = Callable[[GraphSource], DeploymentPlan]
"""Blocks; raises ConfigError and OSError."""


def plan(
    graph: Graph,
    *,
    python: str,
    working_dir: str,
    env: Mapping[str, str],
    graceful_timeout_s: float,
) -> list[WatcherSpec]:
    """Return the watchers of ``graph`` in its order, without GPUs yet (see :func:`place`).

    ``env`` is common to all and overrides :func:`drain_env`; a service's ``envs`` override both.
    A service with 0 workers that registers a model gets a template, which does not start. Raises
    ConfigError if the names of two watchers differ at most in case: circus compares them in
    lower case.
    """
    config = json.dumps(graph.config, ensure_ascii=False, separators=(",", ":"), default=str)
    common = {**env, "DYN_NAMESPACE": graph.namespace, "DYNAMO_SERVICE_CONFIG": config}
    specs: list[WatcherSpec] = []
    taken: dict[str, str] = {}
    for service in graph.services:
        template = not service.workers and service.serves_model
        for index in range(1 if template else service.workers):
            name = watcher_name(graph.namespace, service.name, index)
            if name.lower() in taken:  # circus looks names up in lower case
                raise ConfigError(
                    f"{service.origin}: {service.name} and {taken[name.lower()]} both need the "
                    f"watcher {name}; rename one of them"
                )
            taken[name.lower()] = service.name
            timeout_s = _graceful(service, graceful_timeout_s)
            own = {"DYN_WATCHER_NAME": name, **_with_own_port(service.envs, index)}
            argv, variables = _argv(service, python), {**drain_env(timeout_s), **common, **own}
            specs.append(
                WatcherSpec(
                    name=name,
                    service=service.name,
                    argv=argv,
                    env=variables,
                    working_dir=working_dir,
                    graceful_timeout_s=timeout_s,
                    gpu=service.gpu or 0.0,
                    stop_stage=_stop_stage(service.module),
                    is_frontend=service.is_frontend,
                    options=service.options,
                    index=index,
                    starts=not template,
                    declares_model=service.declares_model,
                    listens=_listens(argv, variables, working_dir),
                )
            )
    return specs


def graph_facts(graph: Graph, working_dir: str) -> dict[str, ServiceFacts]:
    """Return the facts of the services of ``graph``, by their names."""
    return {
        service.name: service_facts(
            _argv(service, ""), service_args(graph.config, service.name), Path(working_dir)
        )
        for service in graph.services
    }


def _listens(argv: Sequence[str], env: Mapping[str, str], directory: str) -> ListenFacts | None:
    if module_of(argv) != FRONTEND:
        return None
    return listen_facts(argv, {**environ(), **env}, directory)  # its process inherits ours


def _stop_stage(module: str | None) -> int:
    program = PROGRAMS.get(module or "")
    return 0 if program is not None and program.stops_first else 1


def plan_added(
    name: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    planned: Iterable[WatcherSpec],
) -> WatcherSpec:
    """Plan the watcher ``name``, added to a running deployment of the ``planned`` ones.

    A watcher named ``{planned}`` or ``{planned}_{number}`` is a worker of the same service: it gets
    its directory, timeout, and environment except the GPUs and the port. Any other gets directory
    and timeout of the first planned one, and the variables common to all. ``env`` overrides, and
    names the GPUs.
    """
    specs = list(planned)
    base = next((s for s in specs if re.fullmatch(re.escape(s.name) + r"(_\d+)?", name)), None)
    module = module_of(argv)
    shared = added_env(base, name) if base else _shared_env(specs)
    named, pinned = env.get(_GPUS), base is not None and base.pinned and _GPUS not in env
    # GPUs that were assigned belong to the first worker; pinned ones are for all of them.
    if base is not None and not pinned:
        shared.pop(_GPUS, None)
    gpus = tuple(gpu for gpu in named.split(",") if gpu) if named else ()
    if base is not None and pinned:
        gpus = base.gpus
    shares = base is not None and (pinned or (0 < base.gpu < 1 and len(gpus) == 1))
    origin, variables = base or specs[0], {**shared, "DYN_WATCHER_NAME": name, **env}
    return replace(
        origin,
        name=name,
        service=base.service if base else name,
        argv=tuple(argv),
        env=variables,
        gpu=base.gpu if base and shares else float(len(gpus)),
        gpus=gpus,
        pinned=pinned,
        stop_stage=_stop_stage(module),
        is_frontend=module == FRONTEND,
        options=base.options if base and base.argv == tuple(argv) else {},
        declares_model=base is not None and base.declares_model,
        listens=_listens(argv, variables, origin.working_dir),
    )


def added_env(base: WatcherSpec, name: str) -> dict[str, str]:
    """Return the environment of the watcher ``name``: ``{base}``, or an added ``{base}_{number}``.

    The GPUs are those of ``base``.
    """
    number = name.removeprefix(base.name).removeprefix("_")
    return {**_with_own_port(base.env, int(number or 0)), "DYN_WATCHER_NAME": name}


def _with_own_port(env: Mapping[str, str], index: int) -> dict[str, str]:
    """Return ``env`` with the port of the status server raised by the ``index`` of the worker.

    The workers of a service then have successive ports. 0 and -1 are no ports.
    """
    port = env.get(_PORT, "")
    if not index or not port.isdecimal() or port == "0":
        return dict(env)
    return {**env, _PORT: str(int(port) + index)}


def _shared_env(specs: Sequence[WatcherSpec]) -> dict[str, str]:
    """Return the variables that have the same value in all ``specs``."""
    first, *others = specs
    return {k: v for k, v in first.env.items() if all(s.env.get(k) == v for s in others)}


def drain_env(graceful_timeout_s: float) -> dict[str, str]:
    """Return the drain timeouts of a process that is killed after ``graceful_timeout_s``.

    They are shorter, so that the process itself ends the streams that are left: a worker's then
    continue on another one, and it exits with status 0.
    """
    # 5 s, or a fifth of a short timeout, are left for the exit after the drain.
    seconds = graceful_timeout_s - min(_EXIT_S, _EXIT_SHARE * graceful_timeout_s)
    return dict.fromkeys(DRAIN_TIMEOUTS, f"{seconds:g}")


def with_gpus(spec: WatcherSpec, gpus: Sequence[str]) -> WatcherSpec:
    """Return ``spec`` on these GPUs."""
    return replace(spec, gpus=tuple(gpus), env={**spec.env, _GPUS: ",".join(gpus)})


def pin(
    specs: Sequence[WatcherSpec], devices: Sequence[Gpu] | None, env: Mapping[str, str]
) -> list[WatcherSpec]:
    """Record the GPUs that services name in their ``envs``, by index where ``devices`` has them.

    ``env`` is set for these, so that an index means the same device for all services.
    """
    pinned = []
    for spec in specs:
        uses = spec.gpu or spec.serves_model
        named = inventory_of(devices, spec.env[_GPUS]).ids if uses and _GPUS in spec.env else ()
        gpus = dict.fromkeys(
            next((str(gpu.index) for gpu in devices or () if gpu.is_named(name)), name)
            for name in named
        )
        if gpus:
            spec = replace(spec, gpus=tuple(gpus), pinned=True, env={**env, **spec.env})
        pinned.append(spec)
    return pinned


def place(
    specs: Sequence[WatcherSpec],
    inventory: Inventory,
    allocator: Allocator | None = None,
    ranks: MemoryRanks | None = None,
) -> list[WatcherSpec]:
    """Assign GPUs to the watchers. Raises ConfigError with a table on shortage.

    A service that sets CUDA_VISIBLE_DEVICES in its ``envs`` keeps that value, and its GPUs (see
    :func:`pin`) are not assigned to others. ``allocator`` has what other deployments hold, and
    ``ranks`` prefers GPUs with free memory.
    """
    allocator = allocator or Allocator(inventory)
    for spec in specs:
        # In a pass of its own: an earlier service must not get a GPU that a later one names.
        if spec.starts and spec.pinned:
            allocator.hold(spec.name, spec.gpus, spec.gpu or 1.0)
    placed = []
    for spec in specs:
        if not spec.gpu or _GPUS in spec.env:
            placed.append(spec)
            continue
        # A template gets no GPU, but the order in which CUDA counts them for its later workers.
        if not spec.starts:
            placed.append(replace(spec, env={**inventory.env, **spec.env}))
            continue
        gpus = allocator.assign(spec.name, spec.gpu, ranks.of(spec.service) if ranks else None)
        if ranks:
            ranks.take(spec.service, gpus)
        placed.append(with_gpus(replace(spec, env={**inventory.env, **spec.env}), gpus))
    return placed


def _argv(service: Service, python: str) -> tuple[str, ...]:
    if service.module is not None:
        return (python, "-m", service.module, *service.flags)
    program, *words = service.command
    # A graph that says "python" gets the interpreter, and so the packages, of `dynamo serve`.
    if program in PYTHON:
        program = python
    return (program, *words, *service.flags)


def _graceful(service: Service, default_s: float) -> float:
    return default_s if service.graceful_timeout_s is None else service.graceful_timeout_s
