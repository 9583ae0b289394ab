"""``dynamo run MODEL``: make a graph of one model and serve it."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from dynamo.cli.detach import detach
from dynamo.cli.options import RunSettings
from dynamo.cli.serve import dry_run, start
from dynamo.config import from_env, load
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.serve import ServeSettings
from dynamo.errors import ConfigError, DynamoError, StatefileError
from dynamo.serve.graph.frontend_address import FrontendAddress
from dynamo.serve.graph.graph import parse_graph
from dynamo.serve.graph.overrides import Override, split_overrides
from dynamo.serve.readiness import free_port
from dynamo.serve.state.document import Document
from dynamo.setup.engines import choose, find_engines, named_model, probe_gpus, running_ollama
from dynamo.setup.new_graph import NewGraph
from dynamo.status.deployment import main_pid, running_deployment

DESCRIPTION = "Serve one model: make its graph, start it, end everything on Ctrl-C."
EPILOG = """Words after -- go to the engine. --Service.key=value changes a key of the graph, as in
dynamo serve.
  dynamo run Qwen/Qwen3-0.6B
  dynamo run /models/Qwen3-8B --workers 2 -- --max-model-len 8192
  dynamo run model.Q8_0.gguf --write graph.yaml
Exit status: 0 stopped, 1 a service failed and was not restarted, 2 the model or a flag is wrong."""

_SOURCE = "the graph of dynamo run"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    own, flags = words[:cut], tuple(words[cut + 1 :])
    try:
        rest, overrides = split_overrides(own)
        (settings,) = load("dynamo run", DESCRIPTION, [RunSettings], rest, epilog=EPILOG)
        graph = _graph(settings, flags)
        if settings.write is not None:
            return _write(graph, settings.write, overrides)
        if settings.dry_run:
            return _dry_run(graph, overrides)
        _refuse_second(graph, own, flags)
        print(graph.text())
        _announce(graph)
        if settings.detach:
            return detach("run", words, graph.namespace)
        return start(_serve_settings(graph.text(), settings), overrides)
    except BrokenPipeError:
        raise
    except (DynamoError, OSError) as error:
        print(f"dynamo run: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _graph(settings: RunSettings, flags: tuple[str, ...]) -> NewGraph:
    if not settings.model:
        raise ConfigError(
            "no model given; try: dynamo run Qwen/Qwen3-0.6B, or a directory or a GGUF file"
        )
    model = named_model(settings.model)
    engine = choose(model, settings.engine, find_engines(), flags)
    gpus = settings.gpus_per_worker
    if gpus is None:
        gpus = 1 if engine.command and probe_gpus() else 0
    return NewGraph(
        model=model,
        engine=engine,
        workers=settings.workers,
        gpus=gpus,
        host=settings.http_host,
        port=settings.http_port,
        namespace=settings.namespace,
        name=settings.served_model_name,
        flags=flags,
        engine_url=running_ollama() if engine.name == "ollama" else None,
    )


def _write(graph: NewGraph, path: str, overrides: Sequence[Override]) -> int:
    if overrides:
        raise ConfigError(f"{overrides[0].text} has no effect with --write: change the file")
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(graph.text())
    except FileExistsError:
        raise ConfigError(f"{path} exists; choose another file, or remove it") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    print(f"wrote {path}; start it: dynamo serve {shlex.quote(path)}")
    return 0


def _dry_run(graph: NewGraph, overrides: Sequence[Override]) -> int:
    text = graph.text()
    parsed = parse_graph(text, _SOURCE, overrides)
    runtime = from_env(RuntimeSettings, namespace=parsed.namespace)
    _, warnings = dry_run(parsed, from_env(ServeSettings, dry_run=True), runtime)
    print(text, end="")
    for warning in warnings:
        print(f"dynamo run: warning: {warning}", file=sys.stderr)
    return 0


def _refuse_second(graph: NewGraph, own: Sequence[str], flags: Sequence[str]) -> None:
    """Raise StatefileError with the remedies if the namespace of ``graph`` is being served."""
    document = running_deployment(from_env(RuntimeSettings, namespace=graph.namespace))
    if document is None:
        return
    pid = main_pid(document)
    words = [*own, "--namespace", _as_namespace(graph.served_name)]
    port = free_port(FrontendAddress(graph.host, graph.port)) or "PORT"
    words += ["--port", str(port), *(("--", *flags) if flags else ())]
    raise StatefileError(
        f"namespace {graph.namespace!r} is already served by process {pid}. One of:\n"
        f"- beside it: dynamo run {shlex.join(words)}\n"
        f"- instead of it: kill {pid}\n"
        "- in the same API: add this service to its graph file, then: dynamo reload GRAPH\n"
        "  (without a file: dynamo run ITS_MODEL --write GRAPH)\n"
        f"{textwrap.indent(graph.service(_free_name(document)).rstrip(), '    ')}"
    )


def _free_name(document: Document) -> str:
    """Return a name that no service of a running deployment has."""
    taken = {entry.service for entry in document.components.values()}
    return next(name for number in count(2) if (name := f"Worker{number}") not in taken)


def _as_namespace(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:32].strip("-") or "second"


def _announce(graph: NewGraph) -> None:
    engine = graph.engine
    place = graph.engine_url or engine.source
    host = f"[{graph.host}]" if ":" in graph.host else graph.host
    print(
        f"dynamo run: {engine.name} ({place}) serves {graph.served_name} at "
        f"http://{host}:{graph.port}/v1 as soon as it is ready; Ctrl-C ends it",
        file=sys.stderr,
    )


def _serve_settings(text: str, settings: RunSettings) -> ServeSettings:
    made = from_env(ServeSettings, quiet=settings.quiet)
    return replace(made, deployment_config=text, deployment_source=_SOURCE)
