"""Which engines are installed, and which of them can serve a model. Pure but for `find_engines`."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.errors import ConfigError

_INSTALL = {
    "vllm": "vLLM: pip install 'dynamo-appliance[vllm]' (from a checkout: pip install '.[vllm]')",
    "sglang": "SGLang: pip install sglang, in this environment or with `sglang` in the PATH",
    "llama.cpp": "llama.cpp: https://github.com/ggml-org/llama.cpp/releases, with `llama-server` "
    "in the PATH",
    "ollama": "Ollama: https://ollama.com/download",
}

# The engines that can serve each kind of model, the preferred one first.
_SUITABLE = {
    "directory": ("vllm", "sglang", "mocker"),
    "hub": ("vllm", "sglang", "mocker"),
    "gguf": ("llama.cpp", "vllm"),
    "gguf-repository": ("llama.cpp",),
    "ollama": ("ollama",),
}
_AUTOMATIC = ("vllm", "sglang", "llama.cpp", "ollama")
_KINDS = {
    "directory": "a model directory",
    "hub": "an id on Hugging Face",
    "gguf": "a GGUF file",
    "gguf-repository": "GGUF files on Hugging Face",
    "ollama": "a model of Ollama",
}


@dataclass(frozen=True)
class InstalledEngine:
    """An engine of :data:`dynamo.cli.options.ENGINES`, found at ``source``.

    ``command`` starts its own server; it is empty for a worker of ours. ``install`` says how to
    install it, "" if it is.
    """

    name: str
    command: tuple[str, ...]
    source: str
    install: str = ""


@dataclass(frozen=True)
class NamedModel:
    """What a user names as a model.

    ``kind`` is directory, hub (an id on Hugging Face), gguf (a file, local or there),
    gguf-repository (an id of a repository of such files) or ollama. ``source`` is what engines
    take, with absolute paths; ``name`` is its name in the API. ``has_tokenizer`` is false for a
    GGUF file without tokenizer.json beside it.
    """

    kind: str
    source: str
    name: str
    has_tokenizer: bool = True


def find_engines() -> tuple[InstalledEngine, ...]:
    """Return the installed engines; vLLM in this environment before one in the PATH."""
    found = []
    if _importable("vllm"):
        found.append(InstalledEngine("vllm", (), "this environment"))
    elif program := shutil.which("vllm"):
        found.append(InstalledEngine("vllm", (program, "serve"), program))
    if _importable("sglang"):
        command = (sys.executable, "-m", "sglang.launch_server")
        found.append(InstalledEngine("sglang", command, "this environment"))
    elif program := shutil.which("sglang"):
        found.append(InstalledEngine("sglang", (program, "serve"), program))
    if program := shutil.which("llama-server"):
        found.append(InstalledEngine("llama.cpp", (program,), program))
    if program := shutil.which("ollama"):
        found.append(InstalledEngine("ollama", (program, "serve"), program))
    found.append(InstalledEngine("mocker", (), "dynamo"))
    return tuple(found)


def engine_names(model: NamedModel) -> tuple[str, ...]:
    """Return the engines that can serve ``model``, the preferred one first."""
    return _SUITABLE[model.kind]


def uninstalled(name: str) -> InstalledEngine:
    """Return an engine that is still to be installed, for a graph."""
    commands = {
        "sglang": ("sglang", "serve"),
        "llama.cpp": ("llama-server",),
        "ollama": ("ollama", "serve"),
    }
    return InstalledEngine(name, commands.get(name, ()), "not installed", _INSTALL[name])


def choose_engine(
    model: NamedModel, wanted: str | None, installed: Sequence[InstalledEngine]
) -> InstalledEngine:
    """Return the engine for ``model``: the one ``wanted``, or the best that is ``installed``.

    Raises ConfigError that names what to install.
    """
    suitable = _SUITABLE[model.kind]
    if wanted is not None and wanted not in suitable:
        raise ConfigError(
            f"{wanted} cannot serve {model.source!r}, {_KINDS[model.kind]}; engines for it: "
            f"{', '.join(suitable)}"
        )
    names = (wanted,) if wanted is not None else [e for e in suitable if e in _AUTOMATIC]
    by_name = {engine.name: engine for engine in installed}
    found = [by_name[name] for name in names if name in by_name]
    usable = [engine for engine in found if _has_tokenizer(model, engine)]
    if usable:
        return usable[0]
    if found:
        raise ConfigError(
            f"vLLM needs the tokenizer of {model.source}: copy the original model's tokenizer.json,"
            " tokenizer_config.json and config.json beside it, or install llama.cpp, which reads "
            f"it from the file ({_INSTALL['llama.cpp']})"
        )
    remedies = "".join(f"\n  {_INSTALL[name]}" for name in names if name in _INSTALL)
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
