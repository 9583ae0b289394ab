"""What can follow on a command line of ``dynamo``: verbs, options and values. Pure but for files.

The options of a verb are the groups that it passes to ``load``, found in its source: importing a
verb takes up to a second, and a shell waits for each answer.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dynamo.config.modules import settings_groups
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
_FILE_ENDS = ("_file", "_path", "_dir", "write", "trace", "output", "directory")
_HELP = ("--help", "show the options")
_LOADERS = ("load", "load_known")


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
    options = verb_options(verbs, verb, words[0] if words else "")
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


def verb_options(verbs: Verbs, verb: str, subverb: str = "") -> VerbOptions:
    """Return the options of ``dynamo verb``, or of ``dynamo verb subverb`` if it has that one."""
    loads = _loads(verbs[verb][0])
    subverbs = tuple(name[1] for name in loads if len(name) == 2)
    groups = loads.get((verb, subverb)) or loads.get((verb,))
    if groups is None:  # it runs a module
        groups = settings_groups(f"dynamo.{verb}") or ()
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
    return VerbOptions(flags, tuple(words), subverbs)


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
    if verb in ("run", "init") and kind == "models":
        kind = "files"  # a model that is not served yet
    if kind:
        yield from map(Completion, values(kind, text))


def _prefixed(prefix: str, found: Iterable[Completion]) -> Iterator[Completion]:
    return (Completion(prefix + one.word, one.text) for one in found)


def _is_switch(field: Field[Any]) -> bool:
    return isinstance(field.default, bool) or field.type in ("bool", "bool | None")


def _takes_value(field: Field[Any] | None) -> bool:
    return field is not None and not _is_switch(field)


@functools.cache
def _loads(module: str) -> dict[tuple[str, ...], tuple[type[Any], ...]]:
    """Return the groups of each ``load("dynamo verb …", …, [groups], …)`` in ``module``.

    Also in the modules of its ``_VERBS``. The key is the words after ``dynamo``.
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return {}
    nodes = list(ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))))
    source = _Source.of(nodes)
    found: dict[tuple[str, ...], tuple[type[Any], ...]] = {}
    for call in nodes:
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in _LOADERS:
            name, groups = call.args[0], call.args[2]
            if isinstance(name, ast.Constant):
                found[tuple(str(name.value).split()[1:])] = source.groups(groups)
    if isinstance(subverbs := source.values.get("_VERBS"), ast.Dict):
        for value in subverbs.values:
            if isinstance(value, ast.Constant):
                found |= _loads(str(value.value))
    return found


@dataclass(frozen=True)
class _Source:
    """The names of a module: classes of options by their module, and what is assigned."""

    classes: Mapping[str, str]
    values: Mapping[str, ast.expr]

    @classmethod
    def of(cls, nodes: Sequence[ast.AST]) -> _Source:
        classes: dict[str, str] = {}
        values: dict[str, ast.expr] = {}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dynamo.config."):
                classes.update((alias.name, str(node.module)) for alias in node.names)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                values[node.targets[0].id] = node.value
        return cls(classes, values)

    def groups(self, given: ast.expr) -> tuple[type[Any], ...]:
        """Return the classes in the list ``given``, or in the one of that name."""
        found = self.values.get(given.id, given) if isinstance(given, ast.Name) else given
        items = found.elts if isinstance(found, ast.List | ast.Tuple) else []
        names = [item.id for item in items if isinstance(item, ast.Name)]
        return tuple(_group(self.classes[name], name) for name in names if name in self.classes)


def _group(module: str, name: str) -> type[Any]:
    group: type[Any] = getattr(importlib.import_module(module), name)
    return group
