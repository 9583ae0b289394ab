"""Services added to and removed from the text of a graph; the rest of it stays as it is.

Comments, order and quoting survive, which a document that is parsed and written again would lose.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from dynamo.errors import ConfigError
from dynamo.runtime.process.paths import write_atomic
from dynamo.serve.graph.graph import parse_yaml, read_text


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
        """Change ``file``; its mode stays. After a ConfigError or OSError it is as it was.

        What its owner has removed from it already is no error.
        """
        file = file.resolve()  # a symbolic link stays one
        text = read_text(file)
        present = set(self._remove) & parse_yaml(text, str(file)).values.keys()
        made = GraphEdit(self._add, present).applied(text, str(file))
        write_atomic(file, made.encode(), durable=True)


def free_name(name: str, taken: Collection[str]) -> str:
    """Return ``name``, or with the first number from 2 on that makes it a name not in ``taken``."""
    if name not in taken:
        return name
    return next(found for number in count(2) if (found := f"{name}{number}") not in taken)


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
    made = "\n".join([*lines[:end], "", *block, *lines[end:], ""])
    return _checked(made, source, {**values, name: parse_yaml(keys, name).values})


def without_services(text: str, source: str, names: Collection[str]) -> str:
    """Return ``text`` without the services ``names``. Comments before and after them stay.

    Raises ConfigError if one is missing, or ``text`` is no graph in block style.
    """
    entries = _entries(text, source)
    if missing := sorted(set(names) - {name for name, _, _ in entries}):
        raise ConfigError(f"{source}: there is no service {', '.join(missing)}")
    lines = text.splitlines()
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
