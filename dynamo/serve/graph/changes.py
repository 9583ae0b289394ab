"""A changed graph: what it means for the watchers that run, and services edited in its text.

A watcher is replaced if its command, directory, environment or number of GPUs changed. The GPUs
themselves do not count: a running process keeps its own.

In the text, comments, order and quoting survive, which a document that is parsed and written again
would lose.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from dynamo.config.programs import PLANNER
from dynamo.errors import ConfigError
from dynamo.runtime.process.paths import write_atomic
from dynamo.serve.graph.graph import parse_yaml, read_text
from dynamo.serve.graph.watchers import WatcherSpec, added_env, with_gpus

_NOT_COMPARED = ("CUDA_VISIBLE_DEVICES", "DYNAMO_SERVICE_CONFIG")
"""The GPUs that were assigned, and the whole graph, which changes with every service."""


@dataclass(frozen=True, kw_only=True)
class GraphChanges:
    """The difference of a graph to what runs. Specs are those of the new graph.

    ``changed`` and ``kept`` have the GPUs of the running watcher if the number is the same. ``why``
    has what changed, by watcher.
    """

    added: Sequence[WatcherSpec]
    changed: Sequence[WatcherSpec]
    kept: Sequence[WatcherSpec]
    removed: Sequence[str]
    why: Mapping[str, str]

    def lines(self) -> list[str]:
        """Return one line per watcher that changes."""
        return [
            *(f"add      {spec.name}" for spec in self.added),
            *(f"restart  {spec.name}   changed: {self.why[spec.name]}" for spec in self.changed),
            *(f"remove   {name}" for name in self.removed),
        ]

    def summary(self) -> str:
        """``1 added, 2 restarted, 0 removed, 3 unchanged``."""
        return (
            f"{len(self.added)} added, {len(self.changed)} restarted, "
            f"{len(self.removed)} removed, {len(self.kept)} unchanged"
        )


def changed_settings(
    before: Mapping[str, Any], after: Mapping[str, Any], touched: Collection[str]
) -> list[str]:
    """Return a line per service that changes though none of its watchers does.

    What changes are settings of its model, or it has no workers. ``before`` and ``after`` are the
    services as written; ``touched`` are those whose watchers change.
    """
    lines = []
    for service in sorted({*before, *after} - {*touched}):
        old, new = before.get(service, {}), after.get(service, {})
        if old == new or not isinstance(old, dict) or not isinstance(new, dict):
            continue
        keys = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
        what = "removed" if not new else f"changed: {', '.join(keys)}" if old else "without workers"
        lines.append(f"set      {service}   {what}")
    return lines


def compare(
    running: Mapping[str, WatcherSpec], wanted: Sequence[WatcherSpec], planned: Collection[str]
) -> GraphChanges:
    """Compare the ``running`` watchers with the ``wanted`` ones.

    Only the watchers ``planned`` are removed, those of the last graph and workers added to them:
    others were added by command.
    """
    added, changed, kept = [], [], []
    why: dict[str, str] = {}
    for spec in wanted:
        before = running.get(spec.name)
        if before is None:
            added.append(spec)
            continue
        if before.gpus and before.gpu == spec.gpu and not spec.pinned:
            spec = with_gpus(spec, before.gpus)
        difference = _difference(before, spec)
        if difference:
            why[spec.name] = difference
            changed.append(spec)
        else:
            kept.append(spec)
    names = {spec.name for spec in wanted}
    removed = [name for name in running if name in planned and name not in names]
    return GraphChanges(added=added, changed=changed, kept=kept, removed=removed, why=why)


def added_workers(
    running: Mapping[str, WatcherSpec], planned: Collection[WatcherSpec]
) -> dict[str, str]:
    """Return the workers that were added by command to a ``planned`` service, as the planner does.

    The result has the first watcher of the service by the worker's name. A watcher with another
    command than its service is not one of its workers.
    """
    names = {spec.name for spec in planned}
    bases: dict[str, str] = {}
    for base in planned:
        # Only numbered names: the planner and `dynamo load` name added workers so.
        pattern = re.compile(re.escape(base.name) + r"_\d+")
        for name, spec in running.items():
            is_own = pattern.fullmatch(name) is not None and spec.argv == base.argv
            if is_own and not base.index and name not in names:
                bases[name] = base.name
    return bases


def follow(added: Mapping[str, str], wanted: Collection[WatcherSpec]) -> list[WatcherSpec]:
    """Return the specs of ``added`` workers (see :func:`added_workers`) in the new graph.

    A worker whose service left the graph has none.
    """
    specs = {spec.name: spec for spec in wanted}
    return [
        replace(
            specs[base],
            name=name,
            index=int(name.rpartition("_")[2]),
            env=added_env(specs[base], name),
        )
        for name, base in added.items()
        if base in specs and name not in specs
    ]


def without_removed(
    wanted: Sequence[WatcherSpec],
    started: Collection[WatcherSpec],
    running: Mapping[str, WatcherSpec],
) -> list[WatcherSpec]:
    """Leave out workers that were ``started`` from the last graph and are not ``running`` now.

    A service whose workers were all removed stays at zero. With a planner, which decides how many
    workers there are, every removed worker stays removed.
    """
    left = {spec.name for spec in started} - running.keys()
    zero = {spec.service for spec in started} - {spec.service for spec in running.values()}
    planned = any(spec.program == PLANNER for spec in wanted)
    return [
        spec
        for spec in wanted
        if not spec.serves_model or not (spec.service in zero or (planned and spec.name in left))
    ]


def without_awakening(
    changes: GraphChanges, asleep: Collection[str], draining: Collection[str]
) -> GraphChanges:
    """Start no process in place of a worker that sleeps or drains.

    One that sleeps is removed: woken, its process would serve the old definition.
    """
    changed = changes.changed
    return replace(
        changes,
        changed=[s for s in changed if s.name not in asleep and s.name not in draining],
        kept=[*changes.kept, *(spec for spec in changed if spec.name in draining)],
        removed=[*changes.removed, *(spec.name for spec in changed if spec.name in asleep)],
    )


def _difference(before: WatcherSpec, after: WatcherSpec) -> str:
    """Name what differs, without values: they may be secrets."""
    parts = {
        "command": before.argv != after.argv,
        "directory": before.working_dir != after.working_dir,
        "GPUs": before.gpu != after.gpu or bool(before.gpus) != bool(after.gpus),
        "environment": _compared_env(before) != _compared_env(after),
    }
    return ", ".join(part for part, differs in parts.items() if differs)


def _compared_env(spec: WatcherSpec) -> Mapping[str, str]:
    # Without assigned GPUs, the graph itself sets CUDA_VISIBLE_DEVICES.
    ignored = _NOT_COMPARED if spec.gpus and not spec.pinned else _NOT_COMPARED[1:]
    return {key: value for key, value in spec.env.items() if key not in ignored}


class GraphEdit:
    """Services to add, as YAML of their keys by name, and names of services to remove.

    Attributes: ``added``, the names of those to add. A name that is taken gets a number.
    """

    def __init__(self, add: Mapping[str, str], remove: Collection[str]) -> None:
        self._add = dict(add)
        self._remove = tuple(remove)

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> GraphEdit | None:
        """Return the edit in ``request`` (see ReloadGraph), None without one."""
        add, remove = request.get("add") or {}, request.get("remove") or ()
        return cls(add, remove) if add or remove else None

    @property
    def added(self) -> list[str]:
        """The names of the services to add."""
        return list(self._add)

    def choose_names(self, *texts: str) -> None:
        """Give the services to add names that no service in ``texts`` has. Raises ConfigError."""
        taken = {name for text in texts for name in parse_yaml(text, "the graph").values}
        add, self._add = self._add, {}
        for name, keys in add.items():
            self._add[free_name(name, taken | self._add.keys())] = keys

    def is_of_removed(self, word: str) -> bool:
        """Whether the override ``word`` is of a service to remove."""
        return any(word.startswith(f"--{name}.") for name in self._remove)

    def applied(self, text: str, source: str) -> str:
        """Return ``text`` with the changes. Raises ConfigError."""
        if self._remove:
            text = without_services(text, source, self._remove)
        for name, keys in self._add.items():
            text = with_service(text, source, name, keys)
        return text

    def write(self, file: Path) -> None:
        """Change ``file``; its owner, mode and line ends stay.

        After a ConfigError or OSError it is as it was. What its owner has removed from it already
        is no error.
        """
        file = file.resolve()  # a symbolic link stays one
        text = read_text(file)
        present = set(self._remove) & parse_yaml(text, str(file)).values.keys()
        edited = GraphEdit(self._add, present).applied(text, str(file))
        # ``text`` has "\n" alone: read_text translates. Keep the ending that most lines have.
        if file.read_bytes().count(b"\r\n") * 2 > text.count("\n"):
            edited = edited.replace("\n", "\r\n")
        write_atomic(file, edited.encode(), durable=True)


def free_name(name: str, taken: Collection[str]) -> str:
    """Return ``name``, or with the first number from 2 on that makes it a name not in ``taken``."""
    if name not in taken:
        return name
    return next(candidate for number in count(2) if (candidate := f"{name}{number}") not in taken)


def with_service(text: str, source: str, name: str, keys: str) -> str:
    """Return ``text`` with the service ``name`` after its last one.

    ``keys`` is the YAML of the service, without indentation. Raises ConfigError if ``text`` is no
    graph in block style, or has this service.
    """
    values = parse_yaml(text, source).values
    if name in values:
        raise ConfigError(f"{source}: there is a service {name} already")
    lines = text.splitlines()
    end = _entries(text, source)[-1][2]
    block = [f"{name}:", *(f"  {line}" if line else "" for line in keys.splitlines())]
    edited = "\n".join([*lines[:end], "", *block, *lines[end:], ""])
    return _checked(edited, source, {**values, name: parse_yaml(keys, name).values})


def without_services(text: str, source: str, names: Collection[str]) -> str:
    """Return ``text`` without the services ``names``. Comments before and after them stay.

    Raises ConfigError if one is missing, or ``text`` is no graph in block style.
    """
    entries = _entries(text, source)
    if missing := sorted(set(names) - {name for name, _, _ in entries}):
        raise ConfigError(f"{source}: there is no service {', '.join(missing)}")
    lines = text.splitlines()
    # From the end: a deletion moves the lines of all entries after it.
    for name, begin, end in reversed(entries):
        if name in names:
            if end < len(lines) and not lines[end].strip() and begin and not lines[begin - 1]:
                end += 1  # one blank line of two
            del lines[begin:end]
    while lines and not lines[-1]:
        lines.pop()
    values = parse_yaml(text, source).values
    kept = {name: value for name, value in values.items() if name not in names}
    return _checked("\n".join([*lines, ""]), source, kept)


def _entries(text: str, source: str) -> list[tuple[str, int, int]]:
    """Return (name, first line, line after the last one) of each key of the document."""
    # First, for its limits and its errors with a position.
    parse_yaml(text, source)
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise ConfigError(
            f"{source}: the services are between braces; only a graph with a line for each name "
            "can be changed by command: write it so, or change it by hand, then: dynamo reload"
        )
    lines = text.splitlines()
    return list(_spans([(key.value, key.start_mark.line) for key, _ in root.value], lines))


def _spans(keys: list[tuple[str, int]], lines: list[str]) -> Iterator[tuple[str, int, int]]:
    """Comments without indentation and blank lines after a service are not part of it."""
    following = [begin for _, begin in keys[1:]]
    for (name, begin), limit in zip(keys, [*following, len(lines)], strict=True):
        end = limit
        while end > begin + 1 and _is_between(lines[end - 1]):
            end -= 1
        yield name, begin, end


def _is_between(line: str) -> bool:
    return not line.strip() or line.startswith(("#", "..."))


def _checked(text: str, source: str, expected: Mapping[str, Any]) -> str:
    """Return ``text`` if it means what is ``expected``, whatever its layout."""
    if parse_yaml(text, source).values != expected:
        raise ConfigError(
            f"{source}: its layout is too unusual to be changed by command; change it by hand, "
            "then: dynamo reload"
        )
    return text
