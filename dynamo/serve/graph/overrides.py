"""``--Service.key=value``: overrides of a graph, parsed from a command line and merged.

Unlike in Dynamo, a merge is deep: an overridden key does not remove its siblings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dynamo.errors import ConfigError

_TOKEN = re.compile(r"--([A-Za-z_]\w*(?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)
_NUMBER = re.compile(r"-(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


class Override(NamedTuple):
    """One override: the path of keys, the typed value, and the text as given."""

    path: tuple[str, ...]
    value: Any
    text: str


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[Override]]:
    """Split ``argv`` into other tokens and overrides, each in order. Raises ConfigError.

    Accepted: ``--S.k=v``, ``--S.k v`` and ``--S.k = v``.
    """
    rest: list[str] = []
    overrides: list[Override] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        match = _TOKEN.fullmatch(token)
        if match is None:
            rest.append(token)
            continue
        name, raw = match.groups()
        if raw is None:
            if tokens[:1] == ["="]:
                tokens.pop(0)
            raw = tokens.pop(0) if tokens else None
        overrides.append(_override(name, raw))
    return rest, overrides


def _override(name: str, raw: str | None) -> Override:
    if raw is None:
        raise ConfigError(f"--{name} needs a value")
    if raw.startswith("-") and not _NUMBER.fullmatch(raw):
        raise ConfigError(f"--{name} needs a value, got {raw!r}, which looks like a flag")
    path = tuple(name.split("."))
    verbatim = path[1:3] == ("ServiceArgs", "envs")
    return Override(path, raw if verbatim else parse_value(raw), f"--{name}={raw}")


def parse_value(raw: str) -> Any:
    """Parse JSON, else an integer, a decimal, true or false in any case, else return the text."""
    try:
        # JSON has no NaN or Infinity, but json.loads() accepts them: they stay text.
        return json.loads(raw, parse_constant=str)
    except ValueError:
        pass
    for kind in (int, float):
        try:
            number = kind(raw)
        except ValueError:
            continue
        # int() and float() accept 1_000, inf and nan: these stay text.
        if "_" not in raw and abs(number) != float("inf") and number == number:
            return number
    return {"true": True, "false": False}.get(raw.lower(), raw)


def merge(values: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a copy of ``values`` with ``value`` at ``path``; mappings merge, others replace."""
    key, *deeper = path
    out = dict(values)
    old = out.get(key)
    if deeper:
        out[key] = merge(old if isinstance(old, Mapping) else {}, deeper, value)
    elif isinstance(old, Mapping) and isinstance(value, Mapping):
        for name, item in value.items():
            out[key] = merge(out[key], (name,), item)
    else:
        out[key] = value
    return out
