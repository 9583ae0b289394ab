"""What can follow on a command line of ``dynamo``: verbs, options and values. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass
from typing import Any

from dynamo.cli.verb_options import subverbs, verb_groups
from dynamo.config.option import fields_of
from dynamo.config.parser import Option

__all__ = ["Completion", "Values", "candidates", "verb_options"]

Verbs = Mapping[str, tuple[str, str]]
"""Verb → (module, help)."""

Values = Callable[[str, str], Iterable[str]]
"""The values of a kind (files, graphs, services, models, namespaces) for the text so far."""

_KINDS = {
    "graph": "graphs",
    "namespace": "namespaces",
    "service": "services",
    "name": "services",
    "model": "models",
}
_OTHER_KINDS = {
    ("run", "model"): "files",  # it is not served yet
    ("init", "model"): "files",
    ("key", "name"): "",  # a new one
    ("install-service", "name"): "",
}
_FILE_ENDS = ("_file", "_path", "_dir", "write", "trace", "output", "directory")
_HELP = ("--help", "show the options")


@dataclass(frozen=True)
class Completion:
    """A word that can follow, and what it means."""

    word: str
    text: str = ""


@dataclass(frozen=True)
class VerbOptions:
    """The options of a verb: by flag, and its words without a flag, in order."""

    flags: Mapping[str, Field[Any]]
    words: tuple[Field[Any], ...]
    subverbs: tuple[str, ...] = ()


def candidates(
    verbs: Verbs, words: Sequence[str], current: str, values: Values
) -> Iterator[Completion]:
    """Yield what can replace ``current``, which follows ``words`` (without ``dynamo`` itself)."""
    found = _all(verbs, list(words), current, values)
    return (one for one in found if one.word.startswith(current))


def _all(verbs: Verbs, words: list[str], current: str, values: Values) -> Iterator[Completion]:
    if not words:
        yield from (Completion(verb, text) for verb, (_, text) in verbs.items())
        yield Completion(*_HELP)
        return
    verb = words.pop(0)
    if verb not in verbs or "--" in words:
        return
    options = verb_options(verb, words[0] if words else "")
    if options.subverbs and not words:
        yield from (Completion(word) for word in options.subverbs)
    flag, joined, _ = current.partition("=")
    if joined and flag in options.flags:
        text = current[len(flag) + 1 :]
        yield from _prefixed(flag + "=", _values_of(verb, options.flags[flag], text, values))
    elif words and _takes_value(options.flags.get(words[-1])):
        yield from _values_of(verb, options.flags[words[-1]], current, values)
    elif current.startswith("-"):
        yield from _flags(options)
        graph = next((word for word in words if word.endswith((".yaml", ".yml"))), "")
        yield from (Completion(word) for word in values(f"overrides:{graph}", current))
    else:
        place = _place(words, options)
        if place < len(options.words):
            yield from _values_of(verb, options.words[place], current, values)


def verb_options(verb: str, subverb: str = "") -> VerbOptions:
    """Return the options of ``dynamo verb``, or of ``dynamo verb subverb`` if it has that one."""
    groups = verb_groups(verb, subverb)
    flags: dict[str, Field[Any]] = {}
    words: list[Field[Any]] = []
    for field in (field for group in groups for field in fields_of(group)):
        spec: Option = field.metadata["option"]
        if spec.flags and not spec.flags[0].startswith("-"):
            words.append(field)
        for flag in spec.flags:
            if flag.startswith("-"):
                flags[flag] = field
                if _is_switch(field) and not flag.startswith("--no-"):
                    flags[f"--no-{flag[2:]}"] = field
    return VerbOptions(flags, tuple(words), subverbs(verb))


def _flags(options: VerbOptions) -> Iterator[Completion]:
    for flag, field in options.flags.items():
        spec: Option = field.metadata["option"]
        if not spec.deprecated and not (flag.startswith("--no-") and flag not in spec.flags):
            yield Completion(flag, spec.help)
    yield Completion(*_HELP)


def _place(words: Sequence[str], options: VerbOptions) -> int:
    """Return how many words without a flag ``words`` has."""
    count, is_value = 0, False
    for word in words:
        if not is_value and not word.startswith("-"):
            count += 1
        is_value = not is_value and _takes_value(options.flags.get(word))
    return count - (bool(options.subverbs) and bool(words) and words[0] in options.subverbs)


def _values_of(verb: str, field: Field[Any], text: str, values: Values) -> Iterator[Completion]:
    spec: Option = field.metadata["option"]
    if spec.choices:
        yield from map(Completion, spec.choices)
        return
    kind = _KINDS.get(field.name) or ("files" if field.name.endswith(_FILE_ENDS) else "")
    kind = _OTHER_KINDS.get((verb, field.name), kind)
    if kind:
        yield from map(Completion, values(kind, text))


def _prefixed(prefix: str, found: Iterable[Completion]) -> Iterator[Completion]:
    return (Completion(prefix + one.word, one.text) for one in found)


def _is_switch(field: Field[Any]) -> bool:
    return isinstance(field.default, bool) or field.type in ("bool", "bool | None")


def _takes_value(field: Field[Any] | None) -> bool:
    return field is not None and not _is_switch(field)
