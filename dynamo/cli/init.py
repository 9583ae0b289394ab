"""``dynamo init``: ask for model, engine, GPUs and access, and write a graph."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from dynamo.cli.key import add_key
from dynamo.cli.options import InitSettings
from dynamo.config import environ, from_env, load
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.serve import ServeSettings
from dynamo.errors import ConfigError, DynamoError, as_path
from dynamo.llm.model_source import NamedModel, named_model
from dynamo.observability.logs import counted
from dynamo.operations.stored_models import running_ollama
from dynamo.runtime.process.paths import write_atomic
from dynamo.serve.gpus.gpus import Gpu
from dynamo.serve.graph.graph import Graph, parse_graph, read_text
from dynamo.setup.graph_plan import prepare
from dynamo.setup.llama_swap import convert
from dynamo.setup.new_graph import (
    InstalledEngine,
    NewGraph,
    cached_model,
    choose,
    cpu_share,
    engine_names,
    find_engines,
    probe_gpus,
    uninstalled,
    weights_bytes,
)

DESCRIPTION = """Write the graph of one model: asks four questions, each with a default.
With --from, convert a configuration of llama-swap."""
EPILOG = """An empty answer takes the default in brackets. A file is never replaced unasked.
Exit status: 0 written, 1 it cannot be written, 2 an answer or a flag is wrong."""

_FALLBACK = "Qwen/Qwen3-0.6B"
_KEYS = "keys.txt"
_KEY_NAME = "admin"
_PLACES = re.compile(r"(\d{1,4})(?:\s*[x*]\s*(\d{1,2}))?")
_ACCESS = {
    "local": "this machine alone",
    "keys": "the network, with API keys",
    "open": "the network, without keys",
}
_FILL = 0.85  # of a GPU's memory, for weights and some KV blocks

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    (settings,) = load("dynamo init", DESCRIPTION, [InitSettings], argv, epilog=EPILOG)
    _write(settings, _Questions(settings))
    return 0


@dataclass(frozen=True)
class _Questions:
    """Asks on the terminal, or takes the defaults with ``--yes``."""

    settings: InitSettings

    def ask(self, question: str, default: str, parse: Callable[[str], T]) -> T:
        """Return the parsed answer; a wrong one is explained and asked for again.

        Raises ConfigError at the end of input, and for a wrong default with ``--yes``.
        """
        while True:
            if self.settings.yes:
                return parse(default)
            try:
                text = input(f"{question} [{default}]: ").strip() or default
            except EOFError:
                raise ConfigError("no answer; give --yes to take the defaults") from None
            try:
                return parse(text)
            except ConfigError as error:
                print(f"  {error.message}")

    def model(self) -> NamedModel:
        """Ask for the model."""
        if self.settings.model:
            return named_model(self.settings.model)
        return self.ask(
            "Model (a directory, a GGUF file, an id on Hugging Face, a name of Ollama)",
            cached_model() or _FALLBACK,
            named_model,
        )

    def engine(self, model: NamedModel) -> InstalledEngine:
        """Ask for the engine: one that is installed, or that will be."""
        installed = find_engines()
        if self.settings.engine is not None:
            return _engine(model, self.settings.engine, installed)
        names = engine_names(model)
        default = names[0]
        with contextlib.suppress(ConfigError):
            default = choose(model, None, installed).name
        ready = {engine.name for engine in installed}
        choices = ", ".join(name if name in ready else f"{name} (not installed)" for name in names)
        return self.ask(f"Engine: {choices}", default, lambda text: _engine(model, text, installed))

    def places(self, model: NamedModel, gpus: Sequence[Gpu]) -> tuple[int, int]:
        """Ask for the number of workers and the GPUs of each."""
        settings = self.settings
        per_worker = settings.gpus_per_worker
        if per_worker is None:
            per_worker = _gpus_needed(weights_bytes(model), gpus)
        workers = settings.workers or max(1, len(gpus) // per_worker if per_worker else 1)
        question = "Workers: copies of the model (no GPU was found)"
        if gpus:
            question = f"Workers x GPUs of each ({len(gpus)} x {gpus[0].name})"
        default = f"{workers}x{per_worker}" if gpus else str(workers)
        return self.ask(question, default, lambda text: _places(text, len(gpus)))

    def access(self) -> str:
        """Ask who may use the models."""
        if self.settings.access is not None:
            return self.settings.access
        choices = ", ".join(f"{name} ({text})" for name, text in _ACCESS.items())
        local = self.settings.http_host in ("127.0.0.1", "localhost", "::1")
        return self.ask(f"Access: {choices}", "local" if local else "keys", _access)

    def ui(self) -> bool:
        """Ask whether operators get the web page, which is off on a network by default."""
        if self.settings.ui is not None:
            return self.settings.ui
        question = "Web page at /ui, for operators' keys (yes or no)"
        return self.ask(question, "yes", lambda text: text[:1].lower() == "y")


def _engine(model: NamedModel, name: str, installed: Sequence[InstalledEngine]) -> InstalledEngine:
    if any(engine.name == name for engine in installed) or name not in engine_names(model):
        return choose(model, name, installed)
    return uninstalled(name)


def _places(text: str, gpus: int) -> tuple[int, int]:
    match = _PLACES.fullmatch(text)
    workers, per_worker = (int(match[1]), int(match[2] or min(1, gpus))) if match else (0, 0)
    if not 1 <= workers <= 1024:
        raise ConfigError(f"a number of workers such as 2, or 2x4 with 4 GPUs each, got {text!r}")
    if workers * per_worker > gpus:
        raise ConfigError(
            f"{workers} workers with {per_worker} GPUs need {workers * per_worker}, not {gpus}"
        )
    return workers, per_worker


def _access(text: str) -> str:
    if text not in _ACCESS:
        raise ConfigError(f"one of {', '.join(_ACCESS)}, got {text!r}")
    return text


def _gpus_needed(weights: int, gpus: Sequence[Gpu]) -> int:
    """Return the smallest power of two of GPUs that holds the weights; 1 if they are unknown."""
    if not gpus:
        return 0
    # Powers of two divide the attention heads of nearly every model, as tensor parallelism needs.
    count = 1
    memory = min(gpu.memory_bytes for gpu in gpus)
    while memory and weights > count * memory * _FILL and 2 * count <= len(gpus):
        count *= 2
    return count


def _write(settings: InitSettings, questions: _Questions) -> None:
    path = Path(settings.write)
    if path.exists() and not _may_replace(path, settings.yes):
        raise ConfigError(f"{path} is kept; choose another file with --write")
    if settings.source is not None:
        _write_converted(settings, settings.source, path)
        return
    model = questions.model()
    engine = questions.engine(model)
    devices = probe_gpus()
    workers, gpus = questions.places(model, devices)
    access = questions.access()
    with_keys = access == "keys"
    graph = NewGraph(
        model=model,
        engine=engine,
        workers=workers,
        gpus=gpus,
        host=_host(settings.http_host, access),
        port=settings.http_port,
        namespace=settings.namespace,
        name=settings.served_model_name,
        api_key_file=_KEYS if with_keys else None,
        ui=questions.ui() if with_keys else settings.ui,
        engine_url=running_ollama() if engine.name == "ollama" else None,
        cpu_share=None if devices else cpu_share(workers),
    )
    # Without the key file, which does not exist yet.
    _checked(replace(graph, api_key_file=None).text(), "the new graph")
    keys = path.absolute().parent / _KEYS
    key = add_key(str(keys), _KEY_NAME, "operator") if with_keys and not keys.exists() else ""
    _replace(path, f"# {graph.served_name} on {engine.name}\n{graph.text()}")
    print(_next_steps(graph, path, key))


def _write_converted(settings: InitSettings, source: str, path: Path) -> None:
    """Write the graph of a configuration of llama-swap; say what it does not have."""
    if settings.model or settings.engine or settings.served_model_name or settings.access == "keys":
        raise ConfigError("--from takes models and engines from the file: leave out other answers")
    host = "0.0.0.0" if settings.access == "open" else settings.http_host
    address = {"namespace": settings.namespace, "http-host": host, "http-port": settings.http_port}
    converted = convert(read_text(Path(source)), source, environ(), address)
    # Checked beside its file: relative paths in commands are relative to it.
    graph = _checked(converted.text, str(path))
    # In one line each, as comments of the file: names may have any character.
    left_out = [" ".join(line.split()) for line in converted.left_out]
    comments = "".join(f"# left out: {line}\n" for line in left_out)
    text = f"# from {Path(source).name}\n{comments}{converted.text}"
    _replace(path, text, 0o600 if converted.has_secrets else 0o666)
    if converted.has_secrets:
        path.chmod(0o600)  # a file that was there keeps its mode
        print(f"{path} has keys or values of your environment: its mode is 0600")
    for line in left_out:
        print(f"left out: {line}")
    # 2: the frontend and the planner.
    print(_steps(path, [f"wrote {path}: {counted(len(graph.services) - 2, 'model')}"]))


def _replace(path: Path, text: str, mode: int = 0o666) -> None:
    # The file behind a link: the link stays.
    file = path.resolve()
    try:
        write_atomic(file, text.encode(), durable=file.exists(), mode=mode)
    except OSError as error:
        raise DynamoError(f"cannot write {path}: {error.strerror}") from None


def _may_replace(path: Path, yes: bool) -> bool:
    # --yes asks nothing, and a file is never replaced unasked.
    if yes:
        return False
    try:
        return input(f"{path} exists; replace it? [no]: ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _host(host: str, access: str) -> str:
    if access == "local":
        return "127.0.0.1"
    return "0.0.0.0" if host in ("127.0.0.1", "localhost") else host


def _checked(text: str, source: str) -> Graph:
    """Return the graph, checked as `dynamo serve --dry-run` does. Raises ConfigError."""
    graph = parse_graph(text, source)
    runtime = from_env(RuntimeSettings, namespace=graph.namespace)
    prepare(graph, from_env(ServeSettings, dry_run=True), runtime)
    return graph


def _next_steps(graph: NewGraph, path: Path, key: str) -> str:
    lines = [f"wrote {path}"]
    keys = path.absolute().parent / _KEYS
    if key:
        lines += [f"wrote {keys} with the key of {_KEY_NAME}, shown once:", f"  {key}"]
    if graph.api_key_file is not None:
        file = shlex.quote(str(keys))
        lines += [f"a key for a colleague: dynamo key add NAME --api-key-file {file}"]
    if graph.engine.install:
        lines += [f"first install {graph.engine.install}"]
    return _steps(path, lines)


def _steps(path: Path, lines: Sequence[str]) -> str:
    file = as_path(str(path))
    return "\n".join(
        (
            *lines,
            "next:",
            f"  dynamo doctor {file}            # is this machine ready?",
            f"  dynamo serve {file}             # start it; Ctrl-C ends it",
            f"  dynamo install-service {file}   # or let systemd run it",
        )
    )
