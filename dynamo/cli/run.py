"""``dynamo run MODEL``: make a graph of one model and serve it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dynamo.box.engines import find_engines
from dynamo.box.new_graph import NewGraph
from dynamo.cli.graph_plan import prepare
from dynamo.cli.model_choice import choose, named_model, probe_gpus, running_ollama
from dynamo.cli.serve import start
from dynamo.config import from_env, load
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.serve import ServeSettings
from dynamo.config.setup import RunSettings
from dynamo.errors import ConfigError, DynamoError
from dynamo.serve.graph import parse_graph
from dynamo.serve.overrides import Override, split_overrides

__all__ = ["main"]

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
        print(graph.text())
        _announce(graph)
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
    planned = prepare(parsed, from_env(ServeSettings, dry_run=True), runtime)
    print(text, end="")
    for warning in planned.warnings:
        print(f"dynamo run: warning: {warning}", file=sys.stderr)
    return 0


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
