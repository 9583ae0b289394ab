"""Makes the graph of one model: a frontend, and workers of an engine that can serve it.

``dynamo run`` starts such a graph, ``dynamo init`` writes it to a file.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dynamo.config import environ
from dynamo.config.frontend import PASS
from dynamo.config.programs import ATTACH, ENGINES, FRONTEND, PLANNER, EngineChoice, engines_for
from dynamo.errors import ConfigError, name_problem
from dynamo.llm.model_source import NamedModel
from dynamo.runtime.process.paths import expanded
from dynamo.serve.gpus.gpus import Gpu

_KINDS = {
    "directory": "a model directory",
    "hub": "an id on Hugging Face",
    "gguf": "a GGUF file",
    "gguf-repository": "GGUF files on Hugging Face",
    "ollama": "a model of Ollama",
}
_DRAIN_S = 120
_WIDE = 10_000
_CPU_SHARE = 0.5  # of the memory of a machine without a GPU, for all workers
_CPU_FILL = 0.8  # of what is available now
_SHARE = "gpu-memory-utilization"  # of the CPU's memory, too, where vLLM is built for it
_SIZED = (_SHARE, "kv-cache-memory-bytes", "kv-cache-memory", "config")
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM's --max-lora-rank
_LORAS_AT_ONCE = 8  # in a batch: each takes GPU memory for the largest rank
_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-q": "quantization",
}
_LONG = re.compile(r"--([A-Za-z][A-Za-z0-9_-]*)(?:=(.*))?", re.DOTALL)
_INTEGER = re.compile(r"-?(0|[1-9]\d{0,15})")
_DECIMAL = re.compile(r"-?(0|[1-9]\d{0,8})\.\d{0,8}[1-9]")


def choose(
    model: NamedModel,
    wanted: str | None,
    installed: Sequence[InstalledEngine],
    flags: Sequence[str] = (),
) -> InstalledEngine:
    """Return the engine for ``model``. Raises ConfigError that says what to do instead."""
    if "--tokenizer" in flags or any(word.startswith("--tokenizer=") for word in flags):
        # The flag names a tokenizer, so the model counts as one that has it.
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


def cpu_share(copies: int) -> float:
    """Return the part of this machine's memory that each of ``copies`` of vLLM takes on its CPU.

    vLLM's own default, nine tenths, is less than what is available on few machines.
    """
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    sizes = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+)", text, re.M)}
    free = sizes["MemAvailable"] / sizes["MemTotal"]
    # Two digits, rounded down: vLLM does not start with more than is available.
    return max(1, int(100 * min(_CPU_SHARE, _CPU_FILL * free) / copies)) / 100


def cached_model() -> str | None:
    """Return the id of the model that was downloaded last, from the cache of Hugging Face."""
    env = environ()
    home = expanded(env.get("HF_HOME") or "~/.cache/huggingface")
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
    candidates = (_find(engine) for engine in ENGINES.values())
    return tuple(engine for engine in candidates if engine is not None)


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
    candidates = [by_name[name] for name in names if name in by_name]
    usable = [engine for engine in candidates if _has_tokenizer(model, engine)]
    if usable:
        return usable[0]
    if candidates:
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


@dataclass(frozen=True, kw_only=True)
class NewGraph:
    """The decisions for a graph of one model.

    ``gpus`` are those of each worker; 0 without any. ``flags`` are words for the engine. ``name``
    replaces the model's own name in the API. ``engine_url`` is the address of an engine that runs
    already. ``cpu_share`` is the part of the machine's memory that vLLM may take without a GPU.
    With an ``idle_timeout`` a planner loads the model on request, up to ``most`` workers or those
    at the start, or with ``keeps`` keeps it loaded. ``loras`` are the directories of adapters by
    their names.
    """

    model: NamedModel
    engine: InstalledEngine
    workers: int = 1
    gpus: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    namespace: str = "dynamo"
    name: str | None = None
    flags: tuple[str, ...] = ()
    api_key_file: str | None = None
    ui: bool | None = None
    engine_url: str | None = None
    idle_timeout: str | None = None
    keeps: bool = False
    most: int = 1
    cpu_share: float | None = None
    loras: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Return the YAML of :meth:`document`. Raises ConfigError."""
        # A blank line before each service: their names begin with a capital letter.
        return re.sub(r"^(?=[A-Z])", "\n", _yaml(self.document()), flags=re.MULTILINE)

    def worker(self) -> str:
        """Return the YAML of the keys of the workers, for another graph. Raises ConfigError."""
        return _yaml(self.document()["Worker"])

    def document(self) -> dict[str, Any]:
        """Return the graph. Raises ConfigError for flags that the engine cannot get."""
        if problem := name_problem(self.served_name):
            raise ConfigError(f"the name {self.served_name!r} of the model {problem}: --name NAME")
        frontend: dict[str, Any] = {
            "run": FRONTEND,
            "http-host": self.host,
            "http-port": self.port,
            "router-mode": "kv",
            "router-cost": "seconds",
        }
        if self.api_key_file is not None:
            frontend["api-key-file"] = self.api_key_file
        if self.ui is not None:
            frontend["ui"] = self.ui
        if self.engine.name == "vllm" and not self._is_attached:
            frontend["unknown-fields"] = PASS  # as vLLM's server, which ignores what it lacks
        worker = self._own_worker() if not self._is_attached else self._attached_worker()
        args: dict[str, Any] = {"workers": self.workers, "graceful_timeout": _DRAIN_S}
        if self.gpus and self._is_attached and self.engine_url is None:
            args["resources"] = {"gpu": self.gpus}
        graph = {
            "namespace": self.namespace,
            "Frontend": frontend,
            "Worker": {**worker, "ServiceArgs": args},
        }
        if self.idle_timeout is not None:
            args |= {"min": self.workers} if self.keeps else {"idle_timeout": self.idle_timeout}
            args["max"] = max(self.most, self.workers)
            graph["Planner"] = {"run": PLANNER, "mode": "auto"}
        return graph

    @property
    def served_name(self) -> str:
        """The model's name in the API."""
        return self.name or self.model.name

    @property
    def share(self) -> float | None:
        """Return ``cpu_share`` for vLLM, unless its flags say how much memory it takes."""
        flags = (word.partition("=")[0].replace("_", "-") for word in self.flags)
        sized = any(flag.removeprefix("--") in _SIZED for flag in flags)
        return None if sized or self.engine.name != "vllm" else self.cpu_share

    @property
    def _is_attached(self) -> bool:
        return bool(self.engine.command)

    def _own_worker(self) -> dict[str, Any]:
        engine = ENGINES[self.engine.name]
        module = engine.program
        worker: dict[str, Any] = {"run": module, "model": self.model.source, **engine.keys}
        if self.name is not None:
            worker["served-model-name"] = self.name
        if self.gpus > 1:
            worker["tensor-parallel-size"] = self.gpus
        if self.share is not None:
            worker[_SHARE] = self.share
        if self.loras:
            worker |= self._lora_keys()
        keys = flags_as_keys(self.flags)
        if keys is None:  # the words as they are: several values, or a short flag
            worker["run"] = ["python", "-m", module, *self.flags]
            keys = {}
        if twice := sorted(keys.keys() & worker.keys()):
            raise ConfigError(
                f"--{twice[0]} after -- is already set by the command line of dynamo; remove one"
            )
        return {**worker, **keys}

    def _lora_keys(self) -> dict[str, Any]:
        """The adapters, and room for all of them at once unless flags say otherwise."""
        rank = max(map(_lora_rank, self.loras.values()))
        count = len(self.loras)
        keys: dict[str, Any] = {"lora-modules": [f"{n}={path}" for n, path in self.loras.items()]}
        flags = {word.partition("=")[0].replace("_", "-") for word in self.flags}
        if "--max-lora-rank" not in flags:
            keys["max-lora-rank"] = next(limit for limit in _LORA_RANKS if limit >= rank)
        # vLLM refuses less room in memory than in a batch.
        if flags.isdisjoint(("--max-loras", "--max-cpu-loras")):
            keys |= {"max-loras": min(count, _LORAS_AT_ONCE), "max-cpu-loras": count}
        return keys

    def _attached_worker(self) -> dict[str, Any]:
        worker: dict[str, Any] = {"run": ATTACH, "profile": self.engine.name}
        if self.engine_url is not None:
            if self.flags:
                raise ConfigError(
                    f"{self.engine.name} already runs at {self.engine_url}, so it cannot get the "
                    f"flags {shlex.join(self.flags)}; stop it first, or leave them out"
                )
            worker["url"] = self.engine_url
        else:
            worker["exec"] = _command(self)
        # The others get the name in their command, or have one model, which the name replaces.
        own = self.model.source if self.engine.name == "ollama" else self.served_name
        renamed = own != self.served_name
        worker["served-model-name"] = f"{self.served_name}={own}" if renamed else own
        return worker


def _lora_rank(directory: str) -> int:
    """Return the rank in the configuration of an adapter. Raises ConfigError."""
    path = Path(directory, "adapter_config.json")
    try:
        rank = json.loads(path.read_text(encoding="utf-8"))["r"]
        if type(rank) is int and 0 < rank <= _LORA_RANKS[-1]:
            return rank
        problem = f"its rank 'r' must be from 1 to {_LORA_RANKS[-1]}, got {rank!r:.40}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"it has no rank 'r': {type(error).__name__}: {error}"
    raise ConfigError(f"--lora: {path}: {problem}")


def _yaml(document: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=_WIDE)
    return text


def flags_as_keys(words: Sequence[str]) -> dict[str, Any] | None:
    """Return the keys of a graph for the flags in ``words``; None if they have no such form.

    ``--max-model-len 8192 --enforce-eager --no-x`` gives max-model-len, enforce-eager and x.
    """
    keys: dict[str, Any] = {}
    words = list(words)
    while words:
        word = words.pop(0)
        match = _LONG.fullmatch(f"--{_SHORT[word]}" if word in _SHORT else word)
        if match is None:
            return None
        key, value = match.groups()
        if value is None and words and not _is_flag(words[0]):
            value = words.pop(0)
        negated = value is None and key.startswith("no-")
        key = key.removeprefix("no-") if negated else key
        if key in keys or (words and not _is_flag(words[0])):
            return None  # a repeated flag, or one with several values
        keys[key] = not negated if value is None else _scalar(value)
    return keys


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _INTEGER.fullmatch(word) and not _DECIMAL.fullmatch(word)


def _scalar(word: str) -> Any:
    """Return a number if its text is exactly ``word``, else the text."""
    if _INTEGER.fullmatch(word):
        return int(word)
    return float(word) if _DECIMAL.fullmatch(word) else word


def _command(graph: NewGraph) -> str:
    """Return the command of an engine's own server, for ``exec`` of dynamo.attach."""
    name, source = graph.served_name, graph.model.source
    words = [*graph.engine.command, *_MODEL_WORDS[graph.engine.name](graph.model)]
    if graph.engine.name in ("vllm", "sglang"):
        words += ["--served-model-name", name, "--host", "127.0.0.1", "--port", "{port}"]
        if graph.gpus > 1:
            flag = "--tensor-parallel-size" if graph.engine.name == "vllm" else "--tp-size"
            words += [flag, str(graph.gpus)]
        if graph.share is not None:
            words += [f"--{_SHARE}", str(graph.share)]
        words += ["--enable-metrics"] if graph.engine.name == "sglang" else []
    elif graph.engine.name == "llama.cpp":
        words += ["--alias", name, "--host", "127.0.0.1", "--port", "{port}", "--metrics"]
        words += ["-ngl", "99"] if graph.gpus else []
    else:  # Ollama takes its address from a variable
        words = ["env", "OLLAMA_HOST=127.0.0.1:{port}", *words]
    if not source or "{port}" in source:
        raise ConfigError(f"the model {source!r} cannot be written into a command")
    return " ".join(w if "{port}" in w else shlex.quote(w) for w in (*words, *graph.flags))


def _llama_words(model: NamedModel) -> Sequence[str]:
    if model.kind == "gguf-repository":
        return "-hf", model.source
    if model.source.startswith("/"):
        return "-m", model.source
    organization, name, file = model.source.split("/", 2)
    return "--hf-repo", f"{organization}/{name}", "--hf-file", file


_MODEL_WORDS: Mapping[str, Any] = {
    "vllm": lambda model: (model.source,),
    "sglang": lambda model: ("--model-path", model.source),
    "llama.cpp": _llama_words,
    "ollama": lambda model: (),
}
