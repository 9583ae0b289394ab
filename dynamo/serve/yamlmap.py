"""YAML as plain values, with line and column of every key; duplicate keys are errors."""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

import yaml

from dynamo.errors import ConfigError

__all__ = [
    "MAX_EXPANDED_CHARS",
    "MAX_TEXT_BYTES",
    "Path",
    "YamlDocument",
    "parse_yaml",
    "read_text",
]

MAX_TEXT_BYTES = 256 * 1024
MAX_EXPANDED_CHARS = 1_000_000
_CHARS_A_VALUE = 20
"""Added to the text of each value, which limits a graph to 50,000 values."""


Path = tuple[str, ...]
_MERGE = "tag:yaml.org,2002:merge"


class YamlDocument(NamedTuple):
    """``values`` is the document; ``origins`` maps each path of keys to its position."""

    values: dict[str, Any]
    origins: dict[Path, str]


def read_text(path: pathlib.Path) -> str:
    """Return the text of a file, at most one character more than :func:`parse_yaml` accepts.

    Raises ConfigError.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}") from None


def parse_yaml(text: str, source: str) -> YamlDocument:
    """Parse one YAML mapping with string keys. Raises ConfigError with line and column.

    Limits: ``MAX_TEXT_BYTES`` of text, ``MAX_EXPANDED_CHARS`` after expansion of all aliases.
    """
    if len(text.encode(errors="surrogatepass")) > MAX_TEXT_BYTES:
        raise ConfigError(f"{source}: a graph is at most {MAX_TEXT_BYTES:,} bytes of YAML")
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{source}: the file is empty")
        visitor = _Visitor(source)
        visitor.visit(node, (), [])
        values = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{_place(source, mark)}: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: {error}") from None
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: expected a mapping of services")
    return YamlDocument(values, visitor.origins)


class _Visitor:
    """Visits each node once per use, before aliases are expanded.

    YAML nodes carry their position, the values constructed from them do not. The visit before the
    construction also bounds alias expansion ("billion laughs").
    """

    def __init__(self, source: str) -> None:
        self.origins: dict[Path, str] = {}
        self._source = source
        self._chars = 0

    def visit(self, node: yaml.Node, path: Path, above: list[yaml.Node]) -> None:
        """Check ``node`` and its children; record the positions of their keys."""
        self._chars += _CHARS_A_VALUE + len(node.value)
        if self._chars > MAX_EXPANDED_CHARS:
            raise ConfigError(
                f"{_place(self._source, node.start_mark)}: with all aliases expanded, the graph "
                f"is larger than {MAX_EXPANDED_CHARS:,} characters"
            )
        if node in above:  # nodes compare by identity
            place = _place(self._source, node.start_mark)
            raise ConfigError(f"{place}: an alias that contains itself")
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self.visit(item, (*path, "[]"), [*above, node])
        elif isinstance(node, yaml.MappingNode):
            self._mapping(node, path, [*above, node])

    def _mapping(self, node: yaml.MappingNode, path: Path, above: list[yaml.Node]) -> None:
        seen: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                self.visit(value, (*path, "<<"), above)
                continue
            place = _place(self._source, key.start_mark)
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise ConfigError(
                    f"{place}: a key must be text; quote it if it looks like another value"
                )
            if key.value in seen:
                first = seen[key.value].start_mark.line + 1
                name = _name(path, key.value)
                raise ConfigError(f"{place}: {name} is already set in line {first}")
            seen[key.value] = key
            self.origins[(*path, key.value)] = place
            self.visit(value, (*path, key.value), above)


def _name(path: Path, key: str) -> str:
    return ".".join((*path, key))


def _place(source: str, mark: Any) -> str:
    return source if mark is None else f"{source}:{mark.line + 1}:{mark.column + 1}"
