"""One service of a graph: its program, flags and number of workers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo.config.programs import FRONTEND, PROGRAMS
from dynamo.serve.graph.model_args import MODEL_KEYS, BadArgument, ModelArgs

PYTHON = ("python", "python3")
"""Programs that stand for the interpreter of ``dynamo serve``."""
_MAX_WORKERS = 1024
SCALING_KEYS = ("min", "max", "priority")
"""Keys of ``ServiceArgs`` that only the planner uses."""


def watcher_name(namespace: str, service: str, index: int) -> str:
    """Return ``{namespace}_{service}`` for the first process, then ``…_1``, ``…_2``."""
    return f"{namespace}_{service}" + (f"_{index}" if index else "")


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The least and most workers of a service, and its ``priority``: a higher one gets GPUs first.

    None: as the planner's options say.
    """

    minimum: int | None = None
    maximum: int | None = None
    priority: int = 0


def declares_model(args: Mapping[str, Any]) -> bool:
    """Whether ``ServiceArgs`` has a key about scaling or about a model."""
    return any(args.get(key) is not None for key in (*SCALING_KEYS, *MODEL_KEYS))


def serves_model(program: str | None, declared: bool) -> bool:
    """Whether a service registers a model, and can be scaled.

    Programs of ours are known; those of others have it ``declared`` in ``ServiceArgs``.
    """
    known = PROGRAMS.get(program or "")
    return declared if known is None else known.registers_model


def read_workers(args: Mapping[str, Any]) -> int:
    """Return the number of workers at the start, 1 by default. Raises BadArgument."""
    return _integer(args, "workers", 1, 0, _MAX_WORKERS)


def read_scaling(args: Mapping[str, Any], workers: int) -> Scaling:
    """Return the scaling of a service that starts with ``workers``. Raises BadArgument."""
    minimum = _integer(args, "min", 0, 0, _MAX_WORKERS) if "min" in args else None
    if args.get("idle_timeout") is not None:
        if minimum:
            raise BadArgument("idle_timeout", f"has no effect with min: {minimum}; leave one out")
        minimum = 0
    maximum = _integer(args, "max", 1, 1, _MAX_WORKERS) if "max" in args else None
    if minimum is not None and maximum is not None and minimum > maximum:
        raise BadArgument("min", f"is {minimum}, more than max, {maximum}")
    if minimum is not None and workers < minimum:
        raise BadArgument("workers", f"is {workers}, less than min, {minimum}")
    if maximum is not None and workers > maximum:
        raise BadArgument("workers", f"is {workers}, more than max, {maximum}")
    priority = _integer(args, "priority", 0, -1000, 1000)
    return Scaling(minimum=minimum, maximum=maximum, priority=priority)


def _integer(args: Mapping[str, Any], key: str, default: int, least: int, most: int) -> int:
    value = args.get(key, default)
    # Not isinstance: `workers: true` would count as 1.
    if type(value) is not int or not least <= value <= most:
        raise BadArgument(key, f"must be an integer between {least} and {most}, got {value!r}")
    return value


def as_flags(key: str, value: Any) -> list[str]:
    """Return the words of ``key: value``, in general ``--key value``.

    ========== ==========================
    true       ``--key``
    false      ``--no-key``
    a list     ``--key`` for each item
    a mapping  its JSON
    null       nothing
    ========== ==========================

    A value that looks like a flag is joined with ``=``. Raises ValueError for any other value.
    """
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no-{key}"]
    if isinstance(value, list):
        if not are_words(value):
            raise ValueError("must be a list of words and numbers")
        return [word for item in value for word in _pair(key, as_word(item))]
    try:
        return _pair(key, as_word(value))
    except (TypeError, ValueError):
        problem = f"must be a word, a number, a list or a mapping, got {value!r}"
        raise ValueError(problem) from None


def as_word(value: Any) -> str:
    """Return a value as one word or the text of a variable; a mapping becomes JSON.

    Raises TypeError or ValueError for a value without a JSON form.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError("contains a zero byte")
        return value
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def are_words(values: Iterable[Any]) -> bool:
    """Whether each value can be a word."""
    return all(
        isinstance(value, str | int | float | bool) and "\0" not in str(value) for value in values
    )


def _pair(key: str, word: str) -> list[str]:
    return [f"--{key}={word}"] if word.startswith("-") else [f"--{key}", word]


@dataclass(frozen=True, kw_only=True)
class Service:
    """One service: ``workers`` processes of one command.

    ``module`` is set for a Python module, else ``command`` holds the words of the command.
    ``flags`` are the words that follow. ``gpu`` is per worker: None if the graph does not say,
    ``gpu_is_derived`` if it follows from the flags of the engine.
    ``envs`` overrides our variables. ``origins`` has the place of each key of ``options``.
    """

    name: str
    module: str | None
    command: tuple[str, ...]
    flags: tuple[str, ...]
    options: Mapping[str, Any]
    workers: int = 1
    scaling: Scaling = field(default_factory=Scaling)
    model_args: ModelArgs = field(default_factory=ModelArgs)
    declares_model: bool = False
    gpu: float | None = None
    gpu_is_derived: bool = False
    cpu: str | None = None
    memory: str | None = None
    envs: Mapping[str, str] = field(default_factory=dict)
    graceful_timeout_s: float | None = None
    origin: str = ""
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def program(self) -> str | None:
        """The Python module that runs, also if ``run`` is ``[python, -m, module, …]``."""
        if self.module is None and self.command[0] in PYTHON and self.command[1:2] == ("-m",):
            return self.command[2] if len(self.command) > 2 else None
        return self.module

    @property
    def serves_model(self) -> bool:
        """Whether its processes register a model."""
        return serves_model(self.program, self.declares_model)

    @property
    def words(self) -> Mapping[str, tuple[str, ...]]:
        """The words of the command line that belong to the program, by the key they come from."""
        words = {key: tuple(as_flags(key, value)) for key, value in self.options.items()}
        own = self.command[3:] if self.module is None and self.program is not None else ()
        return {"run": own, **words} if own else words

    @property
    def all_words(self) -> tuple[str, ...]:
        """The words of :attr:`words`, in order."""
        return tuple(word for words in self.words.values() for word in words)

    @property
    def is_frontend(self) -> bool:
        """Whether this service is the OpenAI frontend."""
        return self.module == FRONTEND
