"""Which checks `dynamo doctor` makes for a graph, for a running deployment, and without both."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo.cli.options import DoctorSettings
from dynamo.config import environ, from_env
from dynamo.config.frontend import FrontendSettings
from dynamo.config.router import RouterSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.serve import ServeSettings
from dynamo.doctor.deployment import (
    check_block_sizes,
    check_events,
    check_frontends,
    check_listeners,
    check_names,
)
from dynamo.doctor.facts import DiskFacts, Finding, FrontendFacts, LimitFacts
from dynamo.doctor.gpus import check_engines, check_gpus
from dynamo.doctor.machine import check_clock, check_disks, check_limits, check_memory
from dynamo.doctor.read_deployment import (
    Deployed,
    FrontendGraph,
    find_running,
    frontends_of,
    read_frontends,
    read_listeners,
)
from dynamo.doctor.read_machine import (
    file_system,
    read_clock,
    read_engines,
    read_gpus,
    read_limits,
    read_memory,
)
from dynamo.doctor.read_workers import GraphNeeds, graph_needs, read_router, read_workers
from dynamo.errors import ConfigError
from dynamo.runtime.process.paths import state_path, store_path
from dynamo.serve.graph.graph import Graph, parse_graph
from dynamo.serve.state.entries import service_config
from dynamo.setup.graph_plan import prepare, read_graph
from dynamo.setup.service_checks import check_engines as check_graph_engines
from dynamo.status.components import chosen_runtime
from dynamo.vllm.engine import TESTED_VERSIONS

Part = tuple[str, Callable[[], Iterable[Finding]]]
"""The name of a part, and the function that reads its facts and returns its findings."""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What is examined. ``graph`` is the one that was named, or that of the running deployment.

    ``is_file``: it was named, so that it is checked as `dynamo serve` would check it.
    """

    runtime: RuntimeSettings
    deployed: Deployed
    graph: Graph | None
    is_file: bool

    @classmethod
    def of(cls, settings: DoctorSettings) -> Examination:
        """Return the examination that a user asked for. Raises ConfigError for a wrong graph."""
        graph = read_graph(settings.graph, (), settings.namespace) if settings.graph else None
        runtime = chosen_runtime(graph.namespace if graph else settings.namespace)
        name = runtime.namespace
        deployed = find_running(state_path(runtime), name)
        if graph is None and deployed.document is not None:
            text = json.dumps(service_config(deployed.document))
            with contextlib.suppress(ConfigError):  # of a later version: examine the rest
                graph = parse_graph(text, "the running graph", (), name)
        return cls(runtime=runtime, deployed=deployed, graph=graph, is_file=bool(settings.graph))

    def parts(self) -> list[Part]:
        """Return the checks by name, each of which blocks while it reads its facts."""
        needs = self._needs()
        return [
            ("GPUs and engines", self._gpus),
            ("limits", lambda: check_limits(self._limits(needs))),
            ("memory", lambda: check_memory(read_memory(needs.shards))),
            ("disks", lambda: check_disks(self._disks(needs))),
            ("clock", lambda: check_clock(read_clock())),
            ("deployment", self._deployment),
        ]

    def _limits(self, needs: GraphNeeds) -> LimitFacts:
        processes = 0 if self.deployed.document else needs.processes
        return read_limits(needs.files, needs.transfers_blocks, processes)

    def _frontends(self) -> list[FrontendGraph]:
        if self.graph is None:  # what a graph without options would have
            return [FrontendGraph("Frontend", from_env(FrontendSettings), from_env(RouterSettings))]
        return frontends_of(self.graph.services)

    def _directory(self) -> Path:
        return Path(self.graph.source).absolute().parent if self.graph else Path.cwd()

    def _needs(self) -> GraphNeeds:
        if self.graph is None:
            return GraphNeeds()
        return graph_needs(self.graph.services, self._frontends(), self._directory())

    def _gpus(self) -> Iterator[Finding]:
        gpus = read_gpus(frozenset(self.deployed.owners))
        yield from check_gpus(gpus)
        yield from check_engines(read_engines({"vllm": TESTED_VERSIONS}), gpus)

    def _disks(self, needs: GraphNeeds) -> DiskFacts:
        settings = from_env(ServeSettings)
        env = environ()
        home = env.get("HF_HUB_CACHE") or env.get("HF_HOME") or "~/.cache/huggingface"
        models = Path(home).expanduser().absolute()
        return DiskFacts(
            state=file_system(state_path(self.runtime)),
            models=file_system(models) if needs.downloads else None,
            log_bytes=int(2 * needs.processes * settings.log_size_mb * 1e6),
        )

    def _deployment(self) -> Iterator[Finding]:
        frontends, silent = read_frontends(self._frontends(), self.deployed)
        yield from check_frontends(frontends)
        yield from self._running(frontends, silent)

    def _running(
        self, frontends: Sequence[FrontendFacts], silent: tuple[tuple[str, int], ...]
    ) -> Iterator[Finding]:
        document = self.deployed.document
        services = self.graph.services if self.graph else ()
        router = read_router(services, self._frontends(), silent)
        workers = []
        if document is not None:
            yield from check_listeners(list(read_listeners(self.deployed, frontends)))
            if self.runtime.discovery_backend == "file":
                workers = read_workers(store_path(self.runtime), document)
            yield from check_names(workers)
            yield from check_events(workers, router)
        yield from check_block_sizes(workers, router)

    def graph_findings(self) -> Iterator[Finding]:
        """Check a graph that was named as `dynamo serve` does before a start."""
        if self.graph is None or not self.is_file:
            return
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                planned = prepare(self.graph, from_env(ServeSettings), self.runtime)
                check_graph_engines(self.graph)
        except ConfigError as error:
            head, *lines = error.message.split("\n  ")
            for problem in lines or [head]:
                yield Finding(
                    check="graph",
                    severity="error",
                    summary=problem,
                    cause="dynamo serve refuses the graph",
                    remedy=f"dynamo serve {self.graph.source} --dry-run",
                )
            return
        count = len(planned.specs)
        yield Finding(
            check="graph", severity="ok", summary=f"{self.graph.source}: {count} processes"
        )
        if self.deployed.document is None:  # else its own engines hold the memory
            for warning in planned.warnings:
                if not warning.startswith("GPU "):  # who holds it is a finding of its own
                    yield Finding(
                        check="vram",
                        severity="warning",
                        summary=warning,
                        cause="the engine may end when it starts",
                        remedy=f"dynamo serve {self.graph.source} --dry-run",
                    )
