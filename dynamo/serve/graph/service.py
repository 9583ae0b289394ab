"""One service of a graph: its program, flags, number of workers, and what it says of its model."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dynamo.config.programs import FRONTEND, PROGRAMS

_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)\s*(ms|s|m|h|d)?")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}
_NAME = re.compile(r"\S(?:.{0,254}\S)?")
_NAMES = 64
HIDDEN = {False: "", True: "all", "aliases": "aliases", "all": "all"}
"""The values of ``hidden``: nothing, the model with its aliases, or its aliases alone."""
PROTECTED = ("model", "messages", "prompt", "input", "stream", "n")
"""Fields that no model may set or remove: what is asked, and the form of the answer."""
PYTHON = ("python", "python3")
"""Programs that stand for the interpreter of ``dynamo serve``."""
_MAX_WORKERS = 1024
SCALING_KEYS = ("min", "max", "priority")
"""Keys of ``ServiceArgs`` that only the planner uses."""


class BadArgument(ValueError):
    """The value of ``key`` in ``ServiceArgs`` is wrong; the text says how."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """The keys of one model; see :data:`MODEL_KEYS`."""

    #: Seconds without requests until its last worker is stopped; None: the planner's option.
    idle_timeout: float | None = None
    #: Groups of models; no two models of one are awake at a time.
    group: tuple[str, ...] = ()
    #: Further names for requests.
    aliases: tuple[str, ...] = ()
    #: What ``/v1/models`` leaves out: "", "aliases" or "all".
    hidden: str = ""
    #: Values of fields that a request leaves out.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: Fields that are removed from requests.
    forbid: tuple[str, ...] = ()
    #: Whether chat streams begin with the progress of the load, as reasoning text.
    show_loading: bool = False


MODEL_KEYS = tuple(key.name for key in fields(ModelArgs))


def read_model_args(args: Mapping[str, Any]) -> ModelArgs:
    """Return what ``ServiceArgs`` says about the model. Raises BadArgument."""
    values = {key: _READERS[key](key, args[key]) for key in MODEL_KEYS if args.get(key) is not None}
    return ModelArgs(**values)


def model_args_of(args: Mapping[str, Any]) -> ModelArgs:
    """Return the same for ``ServiceArgs`` in a statefile, where a wrong key does not count."""
    values: dict[str, Any] = {}
    for key in MODEL_KEYS:
        try:
            values |= {key: _READERS[key](key, args[key])} if args.get(key) is not None else {}
        except BadArgument:
            continue
    return ModelArgs(**values)


def merged(args: Iterable[ModelArgs]) -> ModelArgs:
    """Return the keys of one model with several services: the first service that has a key."""
    values: dict[str, Any] = {}
    for service in args:
        values |= {
            key: v for key in MODEL_KEYS if (v := getattr(service, key)) and not values.get(key)
        }
    return ModelArgs(**values)


def duration_s(value: Any) -> float | None:
    """Return the seconds of ``90``, ``90s``, ``15m``, ``1.5h`` or ``never``; None for others."""
    if value == "never":
        return math.inf
    match = _DURATION.fullmatch(str(value).strip())
    return None if match is None else float(match[1]) * _UNIT_S[match[2]]


def _duration(key: str, value: Any) -> float:
    seconds = duration_s(value)
    if not seconds:
        raise BadArgument(key, f"must be a time such as 90s, 15m or 1h, or never, got {value!r}")
    return seconds


def _names(key: str, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(
        isinstance(name, str) and _NAME.fullmatch(name) and name.isprintable() for name in names
    ):
        raise BadArgument(key, f"must be a name or a list of names, got {value!r}")
    if len(names) > _NAMES:
        raise BadArgument(key, f"has {len(names)} names, at most {_NAMES} are allowed")
    return tuple(dict.fromkeys(names))


def _hidden(key: str, value: Any) -> str:
    if not isinstance(value, bool | str) or value not in HIDDEN:
        raise BadArgument(key, f"must be true, false or aliases, got {value!r}")
    return HIDDEN[value]


def _defaults(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadArgument(key, f"must be a mapping of fields to values, got {value!r}")
    for name, default in value.items():
        if default is None:
            raise BadArgument(key, f"{name} has no value")
    return dict(zip(_fields(key, list(value)), value.values(), strict=True))


def _fields(key: str, value: Any) -> tuple[str, ...]:
    names = _names(key, value)
    for name in names:
        if name in PROTECTED:
            raise BadArgument(key, f"cannot change {name}: {', '.join(PROTECTED)} are the client's")
    return names


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadArgument(key, f"must be true or false, got {value!r}")
    return value


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "idle_timeout": _duration,
    "group": _names,
    "aliases": _names,
    "hidden": _hidden,
    "defaults": _defaults,
    "forbid": _fields,
    "show_loading": _flag,
}


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
    ours = PROGRAMS.get(program or "")
    return declared if ours is None else ours.registers_model


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
