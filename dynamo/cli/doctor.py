"""``dynamo doctor``: choose the checks, run them, say what disturbs a deployment and what to do."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dynamo.cli.options import DoctorSettings
from dynamo.config import from_env, load
from dynamo.config.frontend import FrontendSettings
from dynamo.config.router import RouterSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.serve import ServeSettings
from dynamo.doctor.deployment import (
    check_arbiter,
    check_block_sizes,
    check_events,
    check_frontends,
    check_listeners,
    check_names,
)
from dynamo.doctor.facts import DiskFacts, Finding, LimitFacts
from dynamo.doctor.machine import (
    check_clock,
    check_cpu_memory,
    check_disks,
    check_engines,
    check_gpus,
    check_limits,
    check_memory,
)
from dynamo.doctor.read_deployment import (
    Deployed,
    FrontendGraph,
    GraphNeeds,
    find_running,
    frontends_of,
    graph_needs,
    read_frontends,
    read_listeners,
    read_router,
    read_workers,
)
from dynamo.doctor.read_machine import (
    file_system,
    models_path,
    read_clock,
    read_engines,
    read_gpus,
    read_limits,
    read_memory,
)
from dynamo.errors import ConfigError, as_path
from dynamo.observability.logs import counted
from dynamo.runtime.process.paths import state_path, store_path
from dynamo.serve.graph.graph import Graph, parse_graph
from dynamo.serve.state.process_table import environment
from dynamo.setup.graph_plan import prepare, read_graph
from dynamo.setup.service_checks import check_engines as check_graph_engines
from dynamo.status.deployment import chosen_runtime, hang_of
from dynamo.vllm.engine import TESTED_VERSIONS

DESCRIPTION = "Check this machine and a deployment: drivers, limits, disks, ports, KV events."
EPILOG = """Nothing is changed. Each finding has a remedy: a command, or a key of the graph.
Exit status: 0 no errors (there may be warnings), 1 errors, 2 the arguments are wrong."""
_PROGRESS_S = 0.4
_MARKS = {"ok": "ok", "warning": "WARN", "error": "ERROR"}
_COLOURS = {"ok": 32, "warning": 33, "error": 31}
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
            text = json.dumps(deployed.document.graph)
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

    def _needs(self) -> GraphNeeds:
        if self.graph is None:
            return GraphNeeds()
        directory = Path(self.graph.source).absolute().parent
        return graph_needs(self.graph.services, self._frontends(), directory)

    def _gpus(self) -> Iterator[Finding]:
        gpus = read_gpus(frozenset(self.deployed.owners))
        yield from check_gpus(gpus)
        engines = read_engines({"vllm": TESTED_VERSIONS}, *self._environment())
        yield from check_engines(engines, gpus)
        if any(engine.is_cpu_build and engine.name == "vllm" for engine in engines):
            running = self.deployed.document is not None  # its own workers hold the memory
            yield check_cpu_memory(read_memory(1), 0.0 if running else self._needs().cpu_share)

    def _environment(self) -> tuple[str, str | None]:
        """Return the Python and the PATH with which the deployment runs, else ours."""
        document = self.deployed.document
        if document is None:
            return sys.executable, None
        commands = (entry.argv for entry in document.components.values())
        pythons = (
            argv[0] for argv in commands if argv[1:2] == ("-m",) and Path(argv[0]).is_absolute()
        )
        return next(pythons, sys.executable), environment(document.arbiter.pid).get("PATH")

    def _disks(self, needs: GraphNeeds) -> DiskFacts:
        settings = from_env(ServeSettings)
        return DiskFacts(
            state=file_system(state_path(self.runtime)),
            models=file_system(models_path()) if needs.downloads else None,
            # 2: rotation keeps one older file of each process.
            log_bytes=int(2 * needs.processes * settings.log_size_mb * 1e6),
        )

    def _deployment(self) -> Iterator[Finding]:
        frontends, silent = read_frontends(self._frontends(), self.deployed)
        yield from check_frontends(frontends)
        document = self.deployed.document
        services = self.graph.services if self.graph else ()
        router = read_router(services, self._frontends(), silent)
        workers = []
        if document is not None:
            yield check_arbiter(document.arbiter.pid, document.namespace, hang_of(document))
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
                yield Finding.error(
                    "graph",
                    problem,
                    cause="dynamo serve refuses the graph",
                    remedy=f"dynamo serve {as_path(self.graph.source)} --dry-run",
                )
            return
        count = counted(len(planned.specs), "process", "processes")
        yield Finding.ok("graph", f"{self.graph.source}: {count}")
        if self.deployed.document is None:  # else its own engines hold the memory
            for warning in planned.warnings:
                if not warning.startswith("GPU "):  # who holds it is a finding of its own
                    yield Finding.warning(
                        "vram",
                        warning,
                        cause="the engine may end when it starts",
                        remedy=f"dynamo serve {as_path(self.graph.source)} --dry-run",
                    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    (settings,) = load("dynamo doctor", DESCRIPTION, [DoctorSettings], argv, epilog=EPILOG)
    examination = Examination.of(settings)
    # Not beside the others: it changes the working directory for a moment.
    findings = [*examination.graph_findings(), *_run(examination.parts())]
    if settings.json:
        document = {"findings": findings, "errors": _count(findings, "error")}
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    else:
        print(_text(findings))
    return 1 if _count(findings, "error") else 0


def _run(parts: Sequence[Part]) -> list[Finding]:
    """Run all parts at once; return their findings in the order of the parts."""
    with ThreadPoolExecutor(len(parts)) as pool:
        futures = {pool.submit(_findings, run): name for name, run in parts}
        _show_progress(futures)
        return [finding for future in futures for finding in future.result()]


def _findings(run: Callable[[], Iterable[Finding]]) -> list[Finding]:
    return list(run())


def _show_progress(futures: dict[Future[Any], str]) -> None:
    """Name on a terminal what takes long."""
    pending = wait(futures, _PROGRESS_S).not_done
    if not sys.stderr.isatty():
        return
    while pending:
        names = ", ".join(name for future, name in futures.items() if future in pending)
        print(f"\r\x1b[Kchecking: {names} …", end="", file=sys.stderr, flush=True)
        pending = wait(pending, _PROGRESS_S).not_done
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _count(findings: Iterable[Finding], severity: str) -> int:
    return sum(finding.severity == severity for finding in findings)


def _text(findings: Sequence[Finding]) -> str:
    width = min(shutil.get_terminal_size().columns, 100)
    lines = [line for finding in findings for line in _lines(finding, width)]
    counts = {word: _count(findings, word) for word in ("error", "warning")}
    total = ", ".join(counted(count, word) for word, count in counts.items())
    return "\n".join((*lines, "", total))


def _lines(finding: Finding, width: int) -> Iterable[str]:
    mark = f"{_MARKS[finding.severity]:<6}"
    indent = " " * len(mark)
    summary = textwrap.fill(
        finding.summary, width - len(mark), subsequent_indent=indent, break_long_words=False
    )
    yield f"{_coloured(mark, finding.severity)}{summary}"
    if finding.cause:
        yield textwrap.fill(finding.cause, width, initial_indent=indent, subsequent_indent=indent)
    if finding.remedy:  # one line: it is made to be copied
        yield f"{indent}-> {finding.remedy}"


def _coloured(text: str, severity: str) -> str:
    return f"\x1b[{_COLOURS[severity]}m{text}\x1b[0m" if sys.stdout.isatty() else text
