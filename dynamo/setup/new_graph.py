"""Makes the graph of one model: a frontend, and workers of an engine. Pure.

``dynamo run`` starts such a graph, ``dynamo init`` writes it to a file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from dynamo.config.programs import ATTACH, ENGINES, FRONTEND, PLANNER
from dynamo.errors import ConfigError
from dynamo.llm.model_source import NamedModel
from dynamo.setup.engines import InstalledEngine

_DRAIN_S = 120
_WIDE = 10_000
_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-q": "quantization",
}
_LONG = re.compile(r"--([A-Za-z][A-Za-z0-9_-]*)(?:=(.*))?", re.DOTALL)
_INTEGER = re.compile(r"-?(0|[1-9]\d{0,15})")
_DECIMAL = re.compile(r"-?(0|[1-9]\d{0,8})\.\d{0,8}[1-9]")


@dataclass(frozen=True, kw_only=True)
class NewGraph:
    """The decisions for a graph of one model.

    ``gpus`` are those of each worker; 0 without any. ``flags`` are words for the engine. ``name``
    replaces the model's own name in the API. ``engine_url`` is the address of an engine that runs
    already. With an ``idle_timeout`` a planner loads the model on request, up to ``most`` workers
    or those at the start, or with ``keeps`` keeps it loaded.
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
    engine_url: str | None = None
    idle_timeout: str | None = None
    keeps: bool = False
    most: int = 1

    def text(self) -> str:
        """Return the YAML of :meth:`document`. Raises ConfigError."""
        return re.sub(r"^(?=[A-Z])", "\n", _yaml(self.document()), flags=re.MULTILINE)

    def worker(self) -> str:
        """Return the YAML of the keys of the workers, for another graph. Raises ConfigError."""
        return _yaml(self.document()["Worker"])

    def document(self) -> dict[str, Any]:
        """Return the graph. Raises ConfigError for flags that the engine cannot get."""
        frontend: dict[str, Any] = {
            "run": FRONTEND,
            "http-host": self.host,
            "http-port": self.port,
            "router-mode": "kv",
            "router-cost": "seconds",
        }
        if self.api_key_file is not None:
            frontend["api-key-file"] = self.api_key_file
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
            graph["Planner"] = {"run": PLANNER}
        return graph

    @property
    def served_name(self) -> str:
        """The model's name in the API."""
        return self.name or self.model.name

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
        keys = flags_as_keys(self.flags)
        if keys is None:  # the words as they are: several values, or a short flag
            worker["run"] = ["python", "-m", module, *self.flags]
            keys = {}
        if twice := sorted(keys.keys() & worker.keys()):
            raise ConfigError(
                f"--{twice[0]} after -- is already set by the command line of dynamo; remove one"
            )
        return {**worker, **keys}

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
