"""Checks the options of a process before it is started, and reports every problem at once."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dynamo.config.absent import check_variables
from dynamo.config.option import absent_of, fields_of, try_build
from dynamo.config.parser import Option, Parser, option_of
from dynamo.errors import ConfigError


@dataclass(frozen=True)
class OptionProblem:
    """What is wrong with ``key``; without a key, the text names the variable or the flags."""

    key: str
    text: str


@dataclass(frozen=True)
class CheckedOptions:
    """One instance of each group, or None if there is a problem.

    ``unknown`` has the keys whose words are of no option, with the flag without its dashes.
    """

    settings: tuple[Any, ...] | None
    problems: list[OptionProblem]
    unknown: list[tuple[str, str]]


def check_options(
    groups: Sequence[type[Any]], words_of: Mapping[str, Sequence[str]], env: Mapping[str, str]
) -> CheckedOptions:
    """Check command-line words, given by the key that they come from, over ``env``.

    Words of no option make their key *unknown*, which is no problem by itself.
    """
    parser = _parser(tuple(groups))
    problems: list[OptionProblem] = []
    unknown: list[tuple[str, str]] = []
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, words in words_of.items():
        try:
            namespace, unused = parser.read(words)
        except ConfigError as error:
            problems.append(OptionProblem(key, error.message))
            continue
        if unused:
            _sort_rest(key, unused, vars(namespace), problems, unknown)
        for name, value in vars(namespace).items():
            # Keys of a graph may be spellings of one option: model, model-path.
            if name in keys:
                text = f"sets the same option as {keys[name]}; remove one of them"
                problems.append(OptionProblem(key, text))
            keys[name], values[name] = key, value
    absent = [row for group in groups for row in absent_of(group)]
    problems += [OptionProblem("", error.message) for error in check_variables(absent, env)]
    settings = [_build(group, values, keys, env, problems) for group in groups]
    return CheckedOptions(None if problems else tuple(settings), problems, unknown)


def did_you_mean(flag: str, groups: Iterable[type[Any]]) -> str:
    """Return a hint at the option that is most like ``flag``, or an empty text."""
    flags = [
        name.lstrip("-")
        for group in groups
        for field in fields_of(group)
        for name in option_of(field).flags
    ]
    close = difflib.get_close_matches(flag.replace("_", "-"), flags, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


@functools.cache
def _parser(groups: tuple[type[Any], ...]) -> _CheckingParser:
    """Return the parser of a program: a graph has several services of one program."""
    return _CheckingParser(groups)


class _CheckingParser(Parser):
    """A parser without ``--help`` that raises ConfigError instead of exiting."""

    def __init__(self, groups: Sequence[type[Any]]) -> None:
        super().__init__("", "", None, add_help=False)
        for group in groups:
            self.add_settings("", fields_of(group), absent_of(group))

    def refuse(self, flag: str, text: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(text)

    def error(self, message: str) -> NoReturn:
        # argparse begins with `argument --flag: `, and the key names the flag already.
        raise ConfigError(message.partition(": ")[2] or message)


def _sort_rest(
    key: str,
    words: Sequence[str],
    parsed: Mapping[str, Any],
    problems: list[OptionProblem],
    unknown: list[tuple[str, str]],
) -> None:
    """Report the words that the parser did not use: of an unknown flag, or after a known one."""
    if words[0].startswith("-"):
        unknown.append((key, words[0].lstrip("-").partition("=")[0]))
    elif parsed:
        problems.append(OptionProblem(key, f"must be true or false, got {words[0]!r}"))
    else:
        problems.append(OptionProblem(key, f"has the unexpected word {words[0]!r}"))


def _build(
    group: type[Any],
    values: Mapping[str, Any],
    keys: Mapping[str, str],
    env: Mapping[str, str],
    problems: list[OptionProblem],
) -> Any:
    names = {field.name: option_of(field) for field in fields_of(group)}
    own = {name: value for name, value in values.items() if name in names}
    built, errors = try_build(group, own, env)
    for name, error in errors.items():
        key = keys.get(name, "")
        spec: Option | None = names.get(name)
        flag = spec.flags[0] if spec is not None and spec.flags else ""
        text = error.message.removeprefix(f"{flag} ") if key else error.message
        problems.append(OptionProblem(key, text))
    return built
