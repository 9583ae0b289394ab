"""The graph file: services, flags, numbers of workers and GPUs; its YAML with lines and columns.

Pure: text in, a checked :class:`Graph` out. Every error names file, line and key.
"""

from __future__ import annotations

import difflib
import pathlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import yaml

from dynamo.config.runtime import NAMESPACE_RULE, is_namespace
from dynamo.errors import ConfigError
from dynamo.serve.graph.overrides import Override, merge
from dynamo.serve.graph.service import (
    MODEL_KEYS,
    PYTHON,
    SCALING_KEYS,
    BadArgument,
    Service,
    are_words,
    as_flags,
    as_word,
    declares_model,
    read_model_args,
    read_scaling,
    read_workers,
)

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_FLAG = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = ("run", "ServiceArgs", "common-configs")
_SERVICE_ARGS = ("workers", "resources", "envs", "graceful_timeout", *SCALING_KEYS, *MODEL_KEYS)
_RESOURCES = ("gpu", "cpu", "memory")
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
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:  # a control character
        raise ConfigError(f"{source}: {error}") from None
    try:
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{source}: the file is empty")
        visitor = _Visitor(source)
        visitor.visit(node, (), [])
        # After the visit, which bounds what this expands.
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
        # The value of a scalar is its text, that of other nodes the list of their children.
        self._chars += _CHARS_A_VALUE + len(node.value)
        if self._chars > MAX_EXPANDED_CHARS:
            raise ConfigError(
                f"{_place(self._source, node.start_mark)}: with all aliases expanded, the graph "
                f"is larger than {MAX_EXPANDED_CHARS:,} characters"
            )
        if node in above:  # nodes compare by identity
            position = _place(self._source, node.start_mark)
            raise ConfigError(f"{position}: an alias that contains itself")
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
            position = _place(self._source, key.start_mark)
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise ConfigError(
                    f"{position}: a key must be text; quote it if it looks like another value"
                )
            if key.value in seen:
                first = seen[key.value].start_mark.line + 1
                name = _name(path, key.value)
                raise ConfigError(f"{position}: {name} is already set in line {first}")
            seen[key.value] = key
            self.origins[(*path, key.value)] = position
            self.visit(value, (*path, key.value), above)


def _name(path: Path, key: str) -> str:
    return ".".join((*path, key))


def _place(source: str, mark: Any) -> str:
    return source if mark is None else f"{source}:{mark.line + 1}:{mark.column + 1}"


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The checked graph. ``config`` is the resolved document, without the services' ``envs``."""

    namespace: str
    services: tuple[Service, ...]
    config: Mapping[str, Any]
    source: str


def parse_graph(
    text: str,
    source: str,
    overrides: Sequence[Override] = (),
    namespace: str | None = None,
    default_namespace: str = "dynamo",
) -> Graph:
    """Parse the graph in ``text`` and apply ``overrides``; ``namespace`` overrides the text's.

    Raises ConfigError that starts with ``source:line:column``, or with the override.
    """
    reader = _Reader(parse_yaml(text, source), source)
    for override in overrides:
        reader.override(override)
    return reader.graph(namespace, default_namespace)


class _Reader:
    def __init__(self, document: YamlDocument, source: str) -> None:
        self.values = document.values
        self.origins = document.origins
        self.source = source

    def override(self, override: Override) -> None:
        name = override.path[0]
        services = [key for key in self.values if key != "namespace"]
        if name not in services:
            raise ConfigError(
                f"{override.text}: no service {name!r} in {self.source}; it has "
                f"{', '.join(services) or 'none'}{_hint(name, services)}"
            )
        self.values = merge(self.values, override.path, override.value)
        self.origins[override.path] = override.text

    def fail(self, path: Sequence[str], problem: str) -> NoReturn:
        """Raise an error for the key at ``path``, at the position of its nearest parent."""
        position = self.source
        for size in range(len(path), 0, -1):
            if tuple(path[:size]) in self.origins:
                position = self.origins[tuple(path[:size])]
                break
        raise ConfigError(f"{position}: {'.'.join(path)} {problem}")

    def graph(self, namespace: str | None, default_namespace: str) -> Graph:
        requested = namespace if namespace is not None else self.values.get("namespace")
        name = default_namespace if requested is None else requested
        if not is_namespace(name):
            self.fail(("namespace",), f"{NAMESPACE_RULE}, got {name!r}")
        common = self.mapping(("Common",), self.values.get("Common"))
        names = [key for key in self.values if key not in ("namespace", "Common")]
        services = tuple(self.service(key, common) for key in names)
        if not services:
            self.fail((), "has no service")
        self._distinct(names)
        return Graph(
            namespace=name,
            services=services,
            config={**self._public(names), "namespace": name},
            source=self.source,
        )

    def service(self, name: str, common: Mapping[str, Any]) -> Service:
        if not _NAME.fullmatch(name):
            self.fail(
                (name,), "is not a service name: a letter, then up to 63 letters, digits, '_'"
            )
        hint = _hint(name, ("namespace", "Common", *_RESERVED))
        values = self.mapping((name,), self.values[name], required=True, hint=hint)
        if hint and "run" not in values:
            self.fail((name,), f"is no service: it has no run{hint}")
        module, command = self._run(name, values.get("run"))
        # Common keys first; a key of the service itself replaces the common one.
        options = {**self._subscribed(name, values, common)}
        options.update((key, values[key]) for key in values if key not in _RESERVED)
        flags = [word for key, value in options.items() for word in self._flag(name, key, value)]
        args = self.mapping((name, "ServiceArgs"), values.get("ServiceArgs"))
        self._known((name, "ServiceArgs"), args, _SERVICE_ARGS)
        resources = self.mapping((name, "ServiceArgs", "resources"), args.get("resources"))
        self._known((name, "ServiceArgs", "resources"), resources, _RESOURCES)
        try:
            workers = read_workers(args)
            scaling = read_scaling(args, workers)
            model_args = read_model_args(args)
        except BadArgument as error:
            self.fail((name, "ServiceArgs", error.key), str(error))
        return Service(
            name=name,
            module=module,
            command=command,
            flags=tuple(flags),
            options=options,
            workers=workers,
            scaling=scaling,
            model_args=model_args,
            declares_model=declares_model(args),
            gpu=self._gpu(name, resources),
            cpu=_text(resources.get("cpu")),
            memory=_text(resources.get("memory")),
            envs=self._envs(name, args),
            graceful_timeout_s=self._graceful(name, args),
            origin=self.origins.get((name,), self.source),
            origins={key: self._place(name, key) for key in options},
        )

    def mapping(
        self, path: tuple[str, ...], value: Any, required: bool = False, hint: str = ""
    ) -> Mapping[str, Any]:
        if value is None and not required:
            return {}
        if not isinstance(value, Mapping):
            self.fail(path, f"must be a mapping, got {value!r}{hint}")
        return value

    def _run(self, name: str, run: Any) -> tuple[str | None, tuple[str, ...]]:
        path = (name, "run")
        if run is None:
            self.fail(path, "is missing: a Python module such as dynamo.frontend, or a command")
        if isinstance(run, str) and _MODULE.fullmatch(run):
            return run, ()
        try:
            words = shlex.split(run) if isinstance(run, str) else run
        except ValueError as error:
            self.fail(path, f"is not a command: {error}")
        if not isinstance(words, list) or not words or not are_words(words):
            self.fail(path, f"must be a module, a command or a list of words, got {run!r}")
        if words[0] in PYTHON and words[1:2] == ["-m"] and len(words) == 3:
            return words[2], ()
        return None, tuple(str(word) for word in words)

    def _subscribed(
        self, name: str, values: Mapping[str, Any], common: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        wanted = values.get("common-configs") or []
        path = (name, "common-configs")
        if not isinstance(wanted, list) or not all(isinstance(key, str) for key in wanted):
            self.fail(path, f"must be a list of keys of Common, got {wanted!r}")
        for key in wanted:
            if key not in common and key not in values:
                self.fail(path, f"names {key!r}, which Common does not have{_hint(key, common)}")
        return {key: common[key] for key in wanted if key not in values}

    def _flag(self, name: str, key: str, value: Any) -> list[str]:
        path = (name, key)
        if _plain(key) in _RESERVED_PLAIN:
            self.fail(path, f"is unknown{_hint(key, _RESERVED)}")
        if not _FLAG.fullmatch(key):
            self.fail(path, "is not a flag: a letter, then letters, digits, '-', '_' or '.'")
        try:
            return as_flags(key, value)
        except ValueError as error:
            self.fail(path, str(error))

    def _place(self, name: str, key: str) -> str:
        places = (self.origins.get((part, key)) for part in (name, "Common"))
        return next(filter(None, places), self.source)

    def _gpu(self, name: str, resources: Mapping[str, Any]) -> float | None:
        raw = resources.get("gpu")
        if raw is None:
            return None
        try:
            value = float(raw)
        except (TypeError, ValueError):
            value = -1.0
        # The bound excludes infinity and NaN, for which int() raises.
        whole = value == int(value) if abs(value) < 1e6 else False
        if isinstance(raw, bool) or not (0 <= value < 1 or (whole and value >= 0)):
            path = (name, "ServiceArgs", "resources", "gpu")
            self.fail(path, f"must be a whole number of GPUs or a fraction below 1, got {raw!r}")
        return value

    def _envs(self, name: str, args: Mapping[str, Any]) -> Mapping[str, str]:
        path = (name, "ServiceArgs", "envs")
        envs = self.mapping(path, args.get("envs"))
        for key, value in envs.items():
            if not _VARIABLE.fullmatch(key):
                self.fail((*path, key), "is not a variable name")
            if not are_words([value]):
                self.fail((*path, key), "must be text (quote it)")
        return {key: as_word(value) for key, value in envs.items()}

    def _graceful(self, name: str, args: Mapping[str, Any]) -> float | None:
        value = args.get("graceful_timeout")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
            path = (name, "ServiceArgs", "graceful_timeout")
            self.fail(path, f"must be a number of seconds, got {value!r}")
        return float(value)

    def _known(
        self, path: tuple[str, ...], values: Mapping[str, Any], allowed: Sequence[str]
    ) -> None:
        for key in values:
            if key not in allowed:
                self.fail(
                    (*path, key), f"is unknown; allowed: {', '.join(allowed)}{_hint(key, allowed)}"
                )

    def _distinct(self, names: Sequence[str]) -> None:
        seen: dict[str, str] = {}
        for name in names:
            if name.lower() in seen:
                self.fail((name,), f"differs from {seen[name.lower()]} only in case")
            seen[name.lower()] = name

    def _public(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the document without ``envs``, which may hold secrets.

        It goes to DYNAMO_SERVICE_CONFIG and into the statefile.
        """
        out = dict(self.values)
        for name in names:
            args = self.values[name].get("ServiceArgs")
            if args and "envs" in args:
                public = {key: value for key, value in args.items() if key != "envs"}
                out[name] = {**self.values[name], "ServiceArgs": public}
        return out


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _hint(word: str, candidates: Iterable[str]) -> str:
    names = {_plain(name): name for name in candidates}
    close = difflib.get_close_matches(_plain(word), list(names), n=1)
    return f" (did you mean {names[close[0]]}?)" if close else ""


def _plain(key: str) -> str:
    return key.lower().replace("-", "").replace("_", "")


_RESERVED_PLAIN = {_plain(key) for key in _RESERVED}
