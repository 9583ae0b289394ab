"""YAML as plain values, with the line and column of every key, duplicates refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import yaml

from dynamo.errors import ConfigError

__all__ = ["Located", "Path", "parse_yaml"]

Path = tuple[str, ...]
_MERGE = "tag:yaml.org,2002:merge"


class Located(NamedTuple):
    """``values`` is the document; ``origins`` says for each path of keys where it was written."""

    values: dict[str, Any]
    origins: dict[Path, str]


def parse_yaml(text: str, source: str) -> Located:
    """Parse one YAML mapping with string keys. Raises ConfigError that names line and column."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{source}: the file is empty")
        origins: dict[Path, str] = {}
        _walk(node, (), source, origins, [])
        values = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{_place(source, mark)}: {problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{source}: {error}") from None
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: expected a mapping of services")
    return Located(values, origins)


def _walk(
    node: yaml.Node, path: Path, source: str, origins: dict[Path, str], above: list[yaml.Node]
) -> None:
    if node in above:
        raise ConfigError(f"{_place(source, node.start_mark)}: an alias that contains itself")
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _walk(item, (*path, "[]"), source, origins, [*above, node])
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if key.tag == _MERGE:
            continue
        place = _place(source, key.start_mark)
        if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
            raise ConfigError(f"{place}: a key must be a word; quote it if it looks like a value")
        if key.value in seen:
            first = seen[key.value].start_mark.line + 1
            raise ConfigError(f"{place}: {_name(path, key.value)} is already given in line {first}")
        seen[key.value] = key
        origins[(*path, key.value)] = place
        _walk(value, (*path, key.value), source, origins, [*above, node])


def _name(path: Path, key: str) -> str:
    return ".".join((*path, key))


def _place(source: str, mark: Any) -> str:
    return source if mark is None else f"{source}:{mark.line + 1}:{mark.column + 1}"
