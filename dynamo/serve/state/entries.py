"""The entries of a statefile: services, workers, names, GPUs. Pure.

A service's first entry, ``{namespace}_{Service}``, is its template: it has the command of every
further worker, and stays without GPUs when its own worker is removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo.config.programs import ATTACH
from dynamo.runtime.process.paths import expanded
from dynamo.serve.graph.service import (
    ModelArgs,
    declares_model,
    model_args_of,
    serves_model,
    watcher_name,
)
from dynamo.serve.state.document import Document, Entry, OperationOwner

Lives = Callable[[OperationOwner], bool]
"""Whether the process of a reservation still runs."""

_NAME_FLAGS = ("served-model-name", "model-name")
_MODEL_FLAGS = ("model", "model-path")
_MODE_FLAG = "disaggregation-mode"


@dataclass(frozen=True, kw_only=True)
class ServiceEntries:
    """A service of the graph that the planner may scale, with its entries by number.

    ``base`` is the name of its first watcher. ``gpus`` is the number per worker: a fraction below 1
    shares a GPU; 0 if none are assigned.
    """

    name: str
    base: str
    model: str
    is_prefill: bool
    gpus: float
    template: Entry
    entries: tuple[Entry, ...]
    minimum: int | None = None
    maximum: int | None = None
    priority: int = 0
    model_args: ModelArgs = field(default_factory=ModelArgs)

    @property
    def asked_at(self) -> float:
        """The Unix time of an operator's last load of the model, 0 for none."""
        return max((entry.asked_at for entry in self.entries), default=0.0)

    def new_entry(self, name: str, argv: Sequence[str], gpus: Iterable[str]) -> Entry:
        """Return the entry of a further watcher, without processes."""
        entry = Entry(
            name=name,
            service=self.name,
            argv=tuple(argv),
            gpus_per_worker=self.gpus,
            pinned=self.template.pinned,
        )
        entry.assign(gpus)
        return entry


def read_services(document: Document) -> dict[str, ServiceEntries]:
    """Return the services of the graph that register a model, by name."""
    config = service_config(document)
    found: dict[str, ServiceEntries] = {}
    for name, given in config.items():
        entries = _entries(document, name)
        if not entries or not isinstance(given, Mapping):
            continue
        args = given.get("ServiceArgs")
        args = args if isinstance(args, Mapping) else {}
        if not serves_model(program_of(entries[0]), declares_model(args)):
            continue
        flags = argv_flags(entries[0].argv)
        found[name] = ServiceEntries(
            name=name,
            base=watcher_name(document.namespace, name, 0),
            model=model_name(entries[0].argv) or name,
            is_prefill=flags.get(_MODE_FLAG) == "prefill",
            gpus=_gpus_per_worker(entries, args),
            template=entries[0],
            entries=entries,
            minimum=_minimum(args),
            maximum=_integer(args.get("max")),
            priority=_integer(args.get("priority")) or 0,
            model_args=model_args_of(args),
        )
    return found


def next_name(document: Document, service: str, watchers: Collection[str]) -> str:
    """Return the name of a new watcher of ``service``: the highest number plus one.

    The numbers of ``watchers`` are taken as well, in whatever case their names are.
    """
    base = watcher_name(document.namespace, service, 0)
    pattern = re.compile(re.escape(base) + r"_(\d+)", re.IGNORECASE)
    matches = (pattern.fullmatch(name) for name in (*document.components, *watchers))
    highest = max((int(match[1]) for match in matches if match), default=0)
    return watcher_name(document.namespace, service, highest + 1)


def release(document: Document, name: str) -> None:
    """Let the arbiter delete the entry when the watcher is removed: its worker is added."""
    entry = document.components.get(name)
    if entry is not None:
        entry.reserved_by = None


def delete_entry(document: Document, name: str) -> None:
    """Delete the entry of a worker that has exited; a template stays, without GPUs."""
    entry = document.components.get(name)
    if entry is None:
        return
    if _is_template(document, entry):
        entry.clear()
    else:
        del document.components[name]


def is_void(entry: Entry, lives: Lives) -> bool:
    """Whether the process that was adding this worker has exited before the arbiter received it."""
    known = entry.watcher is not None or entry.processes or entry.asleep
    return entry.reserved_by is not None and not known and not lives(entry.reserved_by)


def is_freed(document: Document, name: str) -> bool:
    """Whether the entry of a removed worker is deleted; that of a template, whether it is empty."""
    entry = document.components.get(name)
    if entry is None:
        return True
    return _is_template(document, entry) and not entry.gpus and not entry.processes


def _is_template(document: Document, entry: Entry) -> bool:
    return entry.name == watcher_name(document.namespace, entry.service, 0)


def _gpus_per_worker(entries: Collection[Entry], args: Mapping[str, Any]) -> float:
    for entry in entries:
        stated = stated_gpus(entry, args)
        if stated is not None:
            return stated
    return float(max(len(entry.gpus) for entry in entries))


def stated_gpus(entry: Entry, args: Mapping[str, Any]) -> float | None:
    """Return the GPUs of each worker as the arbiter has written them, else as the graph says."""
    resources = args.get("resources")
    graph = resources.get("gpu") if isinstance(resources, Mapping) else None
    for given in (entry.gpus_per_worker, graph):
        try:
            if given is not None:
                return float(given)
        except (TypeError, ValueError):
            continue
    return None


def service_config(document: Document) -> Mapping[str, Any]:
    """Return the graph in the statefile, without its ``envs``; empty if it cannot be read."""
    try:
        config = json.loads(document.environment.service_config or "{}")
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, Mapping) else {}


def _entries(document: Document, service: str) -> tuple[Entry, ...]:
    """Return the entries of ``service`` by number; that of the template is 0."""
    base = watcher_name(document.namespace, service, 0)
    pattern = re.compile(re.escape(base) + r"(?:_(\d+))?")
    found: list[tuple[int, Entry]] = []
    for name, entry in document.components.items():
        match = pattern.fullmatch(name)
        # "A_1" may also be a service of that name.
        if match is not None and entry.service in ("", service):
            found.append((int(match[1] or 0), entry))
    return tuple(entry for _, entry in sorted(found, key=lambda numbered: numbered[0]))


def program_of(entry: Entry) -> str:
    """Return the Python module that an entry runs, "" for another program."""
    argv = entry.argv
    return argv[2] if argv[1:2] == ("-m",) and len(argv) > 2 else ""


def model_name(argv: tuple[str, ...]) -> str:
    """Return the name under which a worker of this command registers its model, "" if unknown."""
    flags = argv_flags(argv)
    named = next((flags[flag] for flag in _NAME_FLAGS if flag in flags), "")
    if ATTACH in argv[:3]:  # NAME=SERVER_NAME,...
        named = named.partition(",")[0].partition("=")[0].strip()
    source = next((flags[flag] for flag in _MODEL_FLAGS if flag in flags), "")
    if named or not source:
        return named
    path = expanded(source)
    is_local = path.is_absolute() or source.startswith(".") or path.is_dir()
    return path.resolve().name if is_local else source


def argv_flags(argv: tuple[str, ...]) -> dict[str, str]:
    """Return the values of the flags in ``argv``, ``--name value`` and ``--name=value``."""
    found: dict[str, str] = {}
    for word, following in zip(argv, (*argv[1:], ""), strict=True):
        if word.startswith("--"):
            name, joined, value = word[2:].partition("=")
            found[name.replace("_", "-")] = value if joined else following
    return found


def _minimum(args: Mapping[str, Any]) -> int | None:
    """Return the workers that the planner keeps: none of a model with an idle timeout."""
    stated = _integer(args.get("min"))
    return 0 if stated is None and args.get("idle_timeout") is not None else stated


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
