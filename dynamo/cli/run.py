"""``dynamo run MODEL``: make a graph of the model and serve it, or add it to a running one."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dynamo.cli.background import detach
from dynamo.cli.models import TRIES, add
from dynamo.cli.options import RunSettings
from dynamo.cli.serve import dry_run, start
from dynamo.config import from_env, load
from dynamo.config.programs import ENGINES, memory_share
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.serve import ServeSettings
from dynamo.errors import ConfigError, as_path
from dynamo.llm.model_source import named_model
from dynamo.operations.stored_models import running_ollama
from dynamo.runtime.process.paths import write_new
from dynamo.serve.graph.changes import with_service
from dynamo.serve.graph.graph import parse_graph
from dynamo.serve.graph.overrides import Override, split_overrides
from dynamo.serve.graph.service import duration_s
from dynamo.serve.state.document import Document
from dynamo.serve.state.frontends import frontends_in
from dynamo.setup.new_graph import NewGraph, choose, cpu_share, find_engines, probe_gpus
from dynamo.status.deployment import running_deployment
from dynamo.vllm.arguments import parse_loras

DESCRIPTION = """Serve models: make their graph, start it, end everything on Ctrl-C.
Beside a running deployment of the namespace: add them to it, and return when they are served."""
EPILOG = """Words after -- go to the engine. --Service.key=value changes a key of the graph, as in
dynamo serve.
  dynamo run Qwen/Qwen3-0.6B
  dynamo run /models/Qwen3-8B --workers 2 -- --max-model-len 8192
  dynamo run model.Q8_0.gguf --write graph.yaml
  dynamo run Qwen/Qwen3-0.6B Qwen/Qwen3-4B --idle-timeout 15m --keep Qwen/Qwen3-0.6B
Exit status: 0 stopped, 1 a service failed and was not restarted, 2 the model or a flag is wrong."""

_ELSEWHERE = "flags of the engine go to the end, after --: dynamo run MODEL -- --enforce-eager"
_SOURCE = "the graph of dynamo run"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    own, flags = words[:cut], tuple(words[cut + 1 :])
    options, overrides = split_overrides(own)
    (settings,) = load(
        "dynamo run", DESCRIPTION, [RunSettings], options, epilog=EPILOG, unknown_hint=_ELSEWHERE
    )
    graphs = _graphs(settings, flags)
    text = _text(_loaded_first(graphs))
    if settings.write is not None:
        return _write(text, settings.write, overrides)
    runtime = from_env(RuntimeSettings, namespace=settings.namespace)
    if (document := running_deployment(runtime)) is not None:
        _check_beside(document, settings, words, overrides)
        return add(document, runtime, graphs, settings.dry_run)
    if settings.dry_run:
        return _dry_run(text, overrides)
    print(text)
    _announce(graphs)
    if settings.detach:
        return detach("run", words, settings.namespace)
    return start(_serve_settings(text, settings), overrides)


def _graphs(settings: RunSettings, flags: tuple[str, ...]) -> list[NewGraph]:
    if not settings.model:
        raise ConfigError(
            "no model given; try: dynamo run Qwen/Qwen3-0.6B, or a directory or a GGUF file"
        )
    sources = (settings.model, *settings.others)
    single = {
        "words after --": flags,
        "--name": settings.served_model_name,
        "--lora": settings.lora,
    }
    if len(sources) > 1 and any(single.values()):
        what = next(name for name, value in single.items() if value)
        raise ConfigError(
            f"{what} would be for each of {len(sources)} models: start one, then add the others "
            "with dynamo run, or change a graph made with --write"
        )
    graphs = [_graph(settings, source, flags) for source in sources]
    names = [graph.served_name for graph in graphs]
    _check_times(settings, names)
    graphs = [
        replace(graph, keeps=graph.served_name in settings.keep or source in settings.keep)
        for source, graph in zip(sources, graphs, strict=True)
    ]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(
            f"two models named {', '.join(sorted(twice))}: start one, then the other with --name"
        )
    return graphs


def _check_times(settings: RunSettings, names: Sequence[str]) -> None:
    """Raise ConfigError for times and names that --idle-timeout and --keep cannot have."""
    if settings.idle_timeout is not None and not duration_s(settings.idle_timeout):
        raise ConfigError(
            f"--idle-timeout {settings.idle_timeout}: give a time such as 90s, 15m or 1h, or never"
        )
    if settings.keep and settings.idle_timeout is None:
        raise ConfigError("--keep needs --idle-timeout: without it every model stays loaded")
    models = {*names, settings.model, *settings.others}
    if unknown := [name for name in settings.keep if name not in models]:
        raise ConfigError(f"--keep {unknown[0]}: no such model; give one of {', '.join(names)}")


def _loaded_first(graphs: Sequence[NewGraph]) -> list[NewGraph]:
    """Return the graphs of a new deployment: on request, only the kept models are loaded at its
    start, and without any the first one."""
    loaded = [graph for graph in graphs if graph.keeps or graph.idle_timeout is None] or graphs[:1]
    return [
        graph if graph in loaded else replace(graph, workers=0, most=graph.workers)
        for graph in graphs
    ]


def _text(graphs: Sequence[NewGraph]) -> str:
    """Return the YAML of a graph of all models, behind one frontend."""
    text = graphs[0].text()
    for number, graph in enumerate(graphs[1:], 2):
        text = with_service(text, _SOURCE, f"Worker{number}", graph.worker())
    return text


def _graph(settings: RunSettings, source: str, flags: tuple[str, ...]) -> NewGraph:
    model = named_model(source)
    engine = choose(model, settings.engine, find_engines(), flags)
    has_gpus = bool(probe_gpus())
    gpus = settings.gpus_per_worker
    if gpus and not engine.command and not memory_share(ENGINES[engine.name].program):
        raise ConfigError(f"--gpus-per-worker {gpus}: {engine.name} uses no GPU; leave it out")
    if gpus is None:
        gpus = 1 if engine.command and has_gpus else 0
    if settings.lora and (engine.name != "vllm" or engine.command):
        raise ConfigError(
            f"--lora needs a vLLM worker of ours, and {engine.name} of {engine.source} would serve "
            f"the model; install it ({ENGINES['vllm'].install}), or give that engine its own flags "
            "after --"
        )
    copies = settings.workers * (1 + len(settings.others))
    name = settings.served_model_name
    return NewGraph(
        model=model,
        engine=engine,
        workers=settings.workers,
        gpus=gpus,
        host=settings.http_host,
        port=settings.http_port,
        namespace=settings.namespace,
        name=name,
        loras=parse_loras(settings.lora, name or model.name, "--lora"),
        flags=flags,
        idle_timeout=settings.idle_timeout,
        engine_url=running_ollama() if engine.name == "ollama" else None,
        cpu_share=None if has_gpus else cpu_share(copies),
    )


def _write(text: str, path: str, overrides: Sequence[Override]) -> int:
    if overrides:
        raise ConfigError(f"{overrides[0].text} has no effect with --write: change the file")
    try:
        write_new(Path(path), text.encode())
    except FileExistsError:
        raise ConfigError(f"{path} exists; choose another file, or remove it") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    print(f"wrote {path}; start it: dynamo serve {as_path(path)}")
    return 0


def _dry_run(text: str, overrides: Sequence[Override]) -> int:
    parsed = parse_graph(text, _SOURCE, overrides)
    runtime = from_env(RuntimeSettings, namespace=parsed.namespace)
    checked = replace(from_env(ServeSettings, dry_run=True), port_flag="--port")
    _, warnings = dry_run(parsed, checked, runtime)
    print(text, end="")
    for warning in warnings:
        print(f"dynamo run: warning: {warning}", file=sys.stderr)
    return 0


def _check_beside(
    document: Document, settings: RunSettings, words: Sequence[str], overrides: Sequence[Override]
) -> None:
    """Raise ConfigError for what a model that is added to a running deployment cannot have."""
    apart = f"for a deployment of its own: dynamo run --namespace NAME {shlex.join(words)}"
    if overrides:
        raise ConfigError(
            f"{overrides[0].text} would change namespace {document.namespace!r}, which is running: "
            f"leave it out, and change its graph with dynamo reload; or, {apart}"
        )
    addresses = (frontend.listens.address for frontend in frontends_in(document))
    for address in filter(None, addresses):
        for field, value in (("http_host", address.host), ("http_port", address.port)):
            if field in settings.given and getattr(settings, field) != value:
                raise ConfigError(
                    f"namespace {document.namespace!r} is running, and listens at {address.url}; "
                    f"leave out the address to add the model there; or, {apart}"
                )


def _announce(graphs: Sequence[NewGraph]) -> None:
    first = graphs[0]
    host = f"[{first.host}]" if ":" in first.host else first.host
    engines = [
        f"{graph.engine.name} ({graph.engine_url or graph.engine.source})" for graph in graphs
    ]
    names = ", ".join(graph.served_name for graph in graphs)
    print(
        f"dynamo run: {', '.join(dict.fromkeys(engines))} serves {names} at "
        f"http://{host}:{first.port}/v1 as soon as it is ready; Ctrl-C ends it",
        file=sys.stderr,
    )


def _serve_settings(text: str, settings: RunSettings) -> ServeSettings:
    return replace(
        from_env(ServeSettings, quiet=settings.quiet),
        deployment_config=text,
        deployment_source=_SOURCE,
        port_flag="--port",
        beside_hint="run the same command again to add the model to it",
        unreachable_starts=TRIES,
    )
