"""An option is a dataclass field with a flag, a variable, a range and a help text.

A settings group is a frozen dataclass whose fields are made by :func:`option`, :func:`flag`,
:func:`argument` and :func:`variable`. Flags override variables, and variables override defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from dynamo.config.absent import AbsentFlag, check_variables
from dynamo.config.parser import Option, Parser, option_of
from dynamo.errors import ConfigError

T = TypeVar("T")
_TRUE = frozenset(("true", "1", "yes", "on"))
_FALSE = frozenset(("false", "0", "no", "off", "none", ""))
_UNSET = ("", "None")
_GIVEN = "given"
"""Field of a group that gets the names of the options that a flag or a variable has set."""
_DUMP = "dump_config_to"
"""Field that names a file for the settings of all groups."""
_SECRETS = ("api_key", "password", "token")
"""Fields that this file does not have."""


def option(default: Any, *flags: str, env: str | tuple[str, ...] = (), **how: Any) -> Any:
    """Return a field that a flag and a variable set; ``how`` are fields of :class:`Option`.

    Unless stated, the flag of ``http_port`` is ``--http-port``, and the variable of that is
    ``DYN_HTTP_PORT``.
    """

    def spec(name: str) -> Option:
        stated = flags or (_flag(name),)
        variable = f"DYN_{stated[0].removeprefix('--').replace('-', '_').upper()}"
        return Option(stated, (env,) if isinstance(env, str) else env or (variable,), **how)

    return _field(default, spec)


def flag(default: Any, *flags: str, **how: Any) -> Any:
    """Return a field as :func:`option` does, without a variable."""
    return _field(default, lambda name: Option(flags or (_flag(name),), (), **how))


def argument(default: Any, **how: Any) -> Any:
    """Return a field that a word without a flag sets, without a variable."""
    return _field(default, lambda name: Option((name,), (), **how))


def variable(default: Any, *env: str, **how: Any) -> Any:
    """Return a field without a flag; unless stated, the variable of ``tls_key`` is DYN_TLS_KEY."""
    return _field(default, lambda name: Option((), env or (f"DYN_{name.upper()}",), **how))


def _field(default: Any, spec: Callable[[str], Option]) -> Any:
    # A field learns its name only when its class is made: option_of() calls ``spec`` with it.
    return dataclasses.field(default=default, metadata={"option": spec})


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def environ() -> dict[str, str]:
    """Return a copy of the process environment, for a child process."""
    return dict(os.environ)


def preset(variable: str, value: str) -> None:
    """Set ``variable``, which a library reads, unless the user has set it."""
    os.environ.setdefault(variable, value)


def load(
    prog: str,
    description: str,
    groups: Sequence[type[Any]],
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    epilog: str | None = None,
    unknown_hint: str = "",
) -> tuple[Any, ...]:
    """Build one instance of each group, in order, from ``argv`` over ``env`` over defaults.

    Exits with status 2 and a one-line message for a bad flag or variable, 0 after ``--help``.
    ``unknown_hint`` says where flags go that are like none of these.
    """
    parser = _parser(prog, description, groups, epilog)
    arguments, unknown = parser.read(argv)
    if unknown:
        hint = parser.did_you_mean(unknown)
        if not hint and unknown_hint and unknown[0].startswith("-"):
            hint = f"; {unknown_hint}"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return _build_all(parser, arguments, groups, env)


def load_known(
    prog: str,
    description: str,
    groups: Sequence[type[Any]],
    argv: Sequence[str] | None = None,
    epilog: str | None = None,
) -> tuple[tuple[Any, ...], list[str]]:
    """Build the groups as :func:`load` does; return them and the arguments of no group, in order.

    For a program that passes flags on. Such a flag may have its value as a separate argument.
    """
    parser = _parser(prog, description, groups, epilog)
    arguments, unknown = parser.read(argv)
    return _build_all(parser, arguments, groups, None), unknown


def from_env(group: type[T], env: Mapping[str, str] | None = None, **values: Any) -> T:
    """Build ``group`` from ``values`` over variables over defaults. Raises ConfigError."""
    return _build(group, values, os.environ if env is None else env)


def to_env(settings: Any) -> dict[str, str]:
    """Return the variables from which :func:`from_env` rebuilds ``settings`` in a child process."""
    out: dict[str, str] = {}
    for field in fields_of(type(settings)):
        value = getattr(settings, field.name)
        spec = option_of(field)
        if spec.env and value is not None:
            out[spec.env[0]] = _text(value)
    return out


def deprecations(settings: Any) -> list[str]:
    """Return a warning for each deprecated field of ``settings`` that is not at its default."""
    return [
        f"{(*spec.flags, *spec.env)[0]} is deprecated: {spec.deprecated}"
        for field in fields_of(type(settings))
        if (spec := option_of(field)).deprecated and getattr(settings, field.name) != field.default
    ]


def _parser(prog: str, description: str, groups: Sequence[type[Any]], epilog: str | None) -> Parser:
    parser = Parser(prog, description, epilog)
    for group in groups:
        title = (group.__doc__ or group.__name__).split("\n")[0]
        parser.add_settings(title, fields_of(group), absent_of(group))
    return parser


def _build_all(
    parser: Parser,
    arguments: argparse.Namespace,
    groups: Sequence[type[Any]],
    env: Mapping[str, str] | None,
) -> tuple[Any, ...]:
    variables = os.environ if env is None else env
    absent = [row for group in groups for row in absent_of(group)]
    try:
        # One error at a time, as argparse does; check_options() collects those of a graph.
        for error in check_variables(absent, variables):
            raise error
        built = tuple(_build(group, vars(arguments), variables) for group in groups)
        _dump(built)
        return built
    except ConfigError as error:
        parser.error(error.message)


def _dump(groups: Sequence[Any]) -> None:
    """Write ``groups`` to the file that one of them names, if any. Raises ConfigError."""
    path = next((name for group in groups if (name := getattr(group, _DUMP, None))), None)
    if path is None:
        return
    document = {
        type(group).__name__: {
            field.name: "(hidden)" if field.name in _SECRETS else getattr(group, field.name)
            for field in fields_of(type(group))
        }
        for group in groups
    }
    # The processes of a graph may name one file: each replaces it whole.
    temporary = Path(f"{path}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(document, indent=2), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"--dump-config-to {path}: can't be written: {error}") from None


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(value) if isinstance(value, tuple) else str(value)


def fields_of(group: type[Any]) -> list[dataclasses.Field[Any]]:
    """Return the fields of ``group`` that are options."""
    return [field for field in dataclasses.fields(group) if "option" in field.metadata]


def absent_of(group: type[Any]) -> tuple[AbsentFlag, ...]:
    """Return the flags of Dynamo that a program with ``group`` refuses."""
    absent: tuple[AbsentFlag, ...] = getattr(group, "absent", ())
    return absent


@functools.cache
def _types(group: type[Any]) -> dict[str, tuple[type[Any], bool]]:
    """Return the type of each field of ``group``, and whether it may be None."""
    hints = typing.get_type_hints(group)  # it compiles each of them: a millisecond a group
    return {field.name: _type(hints[field.name]) for field in fields_of(group)}


def _type(hint: Any) -> tuple[type[Any], bool]:
    """Return the type of a field with this hint, and whether it may be None."""
    nullable = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        nullable = len(members) < len(typing.get_args(hint))
        hint = members[0]
    return (typing.get_origin(hint) or hint), nullable


def _build(group: type[T], arguments: Mapping[str, Any], env: Mapping[str, str]) -> T:
    built, problems = try_build(group, arguments, env)
    if built is None:
        raise ConfigError(next(problem.message for problem in problems.values()))
    return built


def try_build(
    group: type[T], arguments: Mapping[str, Any], env: Mapping[str, str]
) -> tuple[T | None, dict[str, ConfigError]]:
    """Build ``group`` like :func:`from_env`, or return every problem, by the name of its field.

    The name is "" for settings that contradict each other.
    """
    values: dict[str, Any] = {}
    problems: dict[str, ConfigError] = {}
    types_of = _types(cast(Any, group))
    for field in fields_of(group):
        spec = option_of(field)
        kind, nullable = types_of[field.name]
        name, raw = _source(field, spec, arguments, env)
        if raw is None:
            continue
        try:
            values[field.name] = _convert(name, raw, kind, nullable, spec)
        except ConfigError as error:
            problems[field.name] = error
    if problems:
        return None, problems
    if hasattr(group, _GIVEN):
        values[_GIVEN] = frozenset(values)
    try:
        return group(**values), {}
    except ConfigError as error:
        return None, {"": error}


def _source(
    field: dataclasses.Field[Any],
    spec: Option,
    arguments: Mapping[str, Any],
    env: Mapping[str, str],
) -> tuple[str, Any]:
    """Return the flag or variable that sets ``field``, for errors, and its raw value."""
    if field.name in arguments:
        return (spec.flags[0] if spec.flags else field.name), arguments[field.name]
    for variable in spec.env:
        if variable in env:
            raw: Any = env[variable]
            return variable, raw.split() if spec.repeat else raw
    return "", None


def _convert(name: str, raw: Any, kind: type[Any], nullable: bool, spec: Option) -> Any:
    if nullable and raw in _UNSET:
        return None
    if spec.repeat:
        return tuple(raw)
    if kind is bool:
        return _truth(name, raw)
    if kind in (int, float):
        return _number(name, raw, kind, spec)
    value = spec.aliases.get(raw, raw)
    if spec.choices and value not in spec.choices:
        instead = f"; {spec.retired[value]}" if value in spec.retired else ""
        raise ConfigError(f"{name} must be one of {', '.join(spec.choices)}, got {raw!r}{instead}")
    return value


def _truth(name: str, raw: Any) -> bool:
    word = str(raw).strip().lower()
    if word not in _TRUE and word not in _FALSE:
        raise ConfigError(f"{name} must be true, 1, yes or on, or false, 0, no or off, got {raw!r}")
    return word in _TRUE


def _number(name: str, raw: Any, kind: Callable[[Any], Any], spec: Option) -> Any:
    try:
        value = kind(raw)
        is_finite = math.isfinite(value)
    except (TypeError, ValueError, OverflowError):  # a list or .inf of a file, 400 digits
        word = "an integer" if kind is int else "a number"
        raise ConfigError(f"{name} must be {word}, got {raw!r}") from None
    low, high = spec.minimum, spec.maximum
    above = low is None or (value > low if spec.exclusive_minimum else value >= low)
    if not is_finite or not above or (high is not None and value > high):
        raise ConfigError(f"{name} must be {_range(spec, kind is int)}, got {raw}")
    return value


def _range(spec: Option, whole: bool) -> str:
    if spec.minimum is not None and spec.maximum is not None:
        return f"between {spec.minimum} and {spec.maximum}"
    if spec.minimum is not None:
        finite = "" if whole else "a finite value "
        return f"{finite}{'>' if spec.exclusive_minimum else '>='} {spec.minimum}"
    return "a finite value" if spec.maximum is None else f"a finite value <= {spec.maximum}"
