"""Which engines are installed, what a model is, and which engine can serve it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo.config import environ
from dynamo.config.programs import ATTACH, ENGINES, EngineChoice, engines_for
from dynamo.errors import ConfigError
from dynamo.llm.model_source import NamedModel
from dynamo.serve.gpus.gpus import Gpu

_KINDS = {
    "directory": "a model directory",
    "hub": "an id on Hugging Face",
    "gguf": "a GGUF file",
    "gguf-repository": "GGUF files on Hugging Face",
    "ollama": "a model of Ollama",
}


def choose(
    model: NamedModel,
    wanted: str | None,
    installed: Sequence[InstalledEngine],
    flags: Sequence[str] = (),
) -> InstalledEngine:
    """Return the engine for ``model``. Raises ConfigError that says what to do instead."""
    if "--tokenizer" in flags or any(word.startswith("--tokenizer=") for word in flags):
        model = NamedModel(model.kind, model.source, model.name)
    try:
        return choose_engine(model, wanted, installed)
    except ConfigError as error:
        if model.kind == "ollama":  # most often a directory that does not exist
            raise ConfigError(
                f"no directory or file {model.name!r} here; a name without '/' is a model of "
                f"Ollama: {error.message}"
            ) from None
        raise


def probe_gpus() -> Sequence[Gpu]:
    """Return the NVIDIA GPUs of this machine."""
    from dynamo.serve.gpus.nvml import probe  # loads the driver's library

    return probe() or ()


def cached_model() -> str | None:
    """Return the id of the model that was downloaded last, from the cache of Hugging Face."""
    env = environ()
    home = Path(env.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cache = Path(env["HF_HUB_CACHE"]) if env.get("HF_HUB_CACHE") else home / "hub"
    complete = list(cache.glob("models--*--*/snapshots/*/config.json"))
    newest = max(complete, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return None
    return newest.parents[2].name.removeprefix("models--").replace("--", "/", 1)


def weights_bytes(model: NamedModel) -> int:
    """Return the size of the weights on disk; 0 if they are not here."""
    path = Path(model.source)
    if not path.is_absolute():
        return 0
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


@dataclass(frozen=True)
class InstalledEngine:
    """An engine of :data:`dynamo.config.programs.ENGINES`, found at ``source``.

    ``command`` starts its own server; it is empty for a worker of ours. ``install`` says how to
    install it, "" if it is.
    """

    name: str
    command: tuple[str, ...]
    source: str
    install: str = ""


def find_engines() -> tuple[InstalledEngine, ...]:
    """Return the installed engines; one in this environment before one in the PATH."""
    found = (_find(engine) for engine in ENGINES.values())
    return tuple(engine for engine in found if engine is not None)


def _find(engine: EngineChoice) -> InstalledEngine | None:
    if not engine.package and not engine.command:
        return InstalledEngine(engine.name, (), "dynamo")
    if engine.package and _importable(engine.package):
        command = (sys.executable, "-m", engine.launcher) if engine.launcher else ()
        return InstalledEngine(engine.name, command, "this environment")
    if program := shutil.which(engine.command[0]):
        return InstalledEngine(engine.name, (program, *engine.command[1:]), program)
    return None


def engine_names(model: NamedModel) -> tuple[str, ...]:
    """Return the engines that can serve ``model``, the preferred one first."""
    return tuple(engine.name for engine in engines_for(model.kind))


def uninstalled(name: str) -> InstalledEngine:
    """Return an engine that is still to be installed, for a graph."""
    engine = ENGINES[name]
    command = engine.command if engine.program == ATTACH else ()
    return InstalledEngine(name, command, "not installed", engine.install)


def choose_engine(
    model: NamedModel, wanted: str | None, installed: Sequence[InstalledEngine]
) -> InstalledEngine:
    """Return the engine for ``model``: the one ``wanted``, or the best that is ``installed``.

    Raises ConfigError that names what to install.
    """
    suitable = engine_names(model)
    if wanted is not None and wanted not in suitable:
        raise ConfigError(
            f"{wanted} cannot serve {model.source!r}, {_KINDS[model.kind]}; engines for it: "
            f"{', '.join(suitable)}"
        )
    names = (
        (wanted,) if wanted is not None else [name for name in suitable if ENGINES[name].automatic]
    )
    by_name = {engine.name: engine for engine in installed}
    found = [by_name[name] for name in names if name in by_name]
    usable = [engine for engine in found if _has_tokenizer(model, engine)]
    if usable:
        return usable[0]
    if found:
        raise ConfigError(
            f"vLLM needs the tokenizer of {model.source}: copy the original model's tokenizer.json,"
            " tokenizer_config.json and config.json beside it, or install llama.cpp, which reads "
            f"it from the file ({ENGINES['llama.cpp'].install})"
        )
    remedies = "".join(f"\n  {ENGINES[n].install}" for n in names if ENGINES[n].install)
    raise ConfigError(
        f"no engine for {model.source!r} ({_KINDS[model.kind]}) is installed; install "
        f"{'it' if len(names) == 1 else 'one of these'}:{remedies}"
    )


def _has_tokenizer(model: NamedModel, engine: InstalledEngine) -> bool:
    return engine.name != "vllm" or model.has_tokenizer


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a broken installation, or a module without a spec
        return False
