"""What ``ServiceArgs`` says about the model of a service: its names, its fields, when it is awake.

Planner and frontends read it in the statefile, so a reload changes it without a restart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)\s*(ms|s|m|h|d)?")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}
_NAME = re.compile(r"\S(?:.{0,254}\S)?")
_NAMES = 64
HIDDEN = {False: "", True: "all", "aliases": "aliases", "all": "all"}
"""The values of ``hidden``: nothing, the model with its aliases, or its aliases alone."""
PROTECTED = ("model", "messages", "prompt", "input", "stream", "n")
"""Fields that no model may set or remove: what is asked, and the form of the answer."""


class BadArgument(ValueError):
    """The value of ``key`` in ``ServiceArgs`` is wrong; the text says how."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """The keys of one model; see :data:`MODEL_KEYS`."""

    #: Seconds without requests until its last worker goes; None: as the planner's option says.
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


MODEL_KEYS = tuple(one.name for one in fields(ModelArgs))


def read_model_args(args: Mapping[str, Any]) -> ModelArgs:
    """Return what ``ServiceArgs`` says about the model. Raises BadArgument."""
    found = {key: _READERS[key](key, args[key]) for key in MODEL_KEYS if args.get(key) is not None}
    return ModelArgs(**found)


def model_args_of(args: Mapping[str, Any]) -> ModelArgs:
    """Return the same for ``ServiceArgs`` in a statefile, where a wrong key does not count."""
    found: dict[str, Any] = {}
    for key in MODEL_KEYS:
        try:
            found |= {key: _READERS[key](key, args[key])} if args.get(key) is not None else {}
        except BadArgument:
            continue
    return ModelArgs(**found)


def merged(args: Iterable[ModelArgs]) -> ModelArgs:
    """Return the keys of one model with several services: the first service that has a key."""
    found: dict[str, Any] = {}
    for one in args:
        found |= {key: v for key in MODEL_KEYS if (v := getattr(one, key)) and not found.get(key)}
    return ModelArgs(**found)


def duration_s(value: Any) -> float | None:
    """Return the seconds of ``90``, ``90s``, ``15m``, ``1.5h`` or ``never``; None for others."""
    if value == "never":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
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
    for name, given in value.items():
        if given is None:
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
