"""The entries of a statefile: services, workers, names, GPUs. Pure.

A service's first entry, ``{namespace}_{Service}``, is its template: it has the command of every
further worker, and stays without GPUs when its own worker is removed.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.serve.graph.service import MODEL_PROGRAMS, watcher_name
from dynamo.serve.state.statefile import (
    ASLEEP,
    DRAINING,
    HOLDS_GPUS,
    RESERVED_BY,
    WATCHER,
    Document,
)

Lives = Callable[[Mapping[str, Any]], bool]
"""Whether the process that a ``reserved_by`` names still runs."""

_NAME_FLAGS = ("served-model-name", "model-name")
_MODEL_FLAGS = ("model", "model-path")
_MODE_FLAG = "disaggregation-mode"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The entry of one watcher; ``index`` is its number, 0 for the template."""

    name: str
    index: int
    argv: tuple[str, ...]
    gpus: tuple[str, ...] = ()
    draining: bool = False
    asleep: bool = False
    pids: tuple[int, ...] = ()
    lease: int | None = None
    reserved_by: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ServiceEntries:
    """A service of the graph that the planner may scale, with its entries by ``index``.

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


def read_services(document: Document) -> dict[str, ServiceEntries]:
    """Return the services of the graph whose program registers a model, by name."""
    config = service_config(document)
    found: dict[str, ServiceEntries] = {}
    for name, given in config.items():
        entries = tuple(sorted(_entries(document, name), key=lambda entry: entry.index))
        if not entries or not isinstance(given, Mapping) or not _serves_model(entries[0].argv):
            continue
        args = given.get("ServiceArgs")
        args = args if isinstance(args, Mapping) else {}
        flags = argv_flags(entries[0].argv)
        found[name] = ServiceEntries(
            name=name,
            base=watcher_name(document["namespace"], name, 0),
            model=_model_name(flags) or name,
            is_prefill=flags.get(_MODE_FLAG) == "prefill",
            gpus=_gpus_per_worker(document, entries, args),
            template=entries[0],
            entries=entries,
            minimum=_integer(args.get("min")),
            maximum=_integer(args.get("max")),
            priority=_integer(args.get("priority")) or 0,
        )
    return found


def read_entries(document: Document) -> list[Entry]:
    """Return all entries, those of other programs too, in the order of the statefile."""
    components = document["components"].items()
    return [_entry(name, entry, 0) for name, entry in components if isinstance(entry, dict)]


def next_name(document: Document, service: str, watchers: Collection[str]) -> str:
    """Return the name of a new watcher of ``service``: the highest number plus one.

    The numbers of ``watchers`` are taken as well, in whatever case their names are.
    """
    base = watcher_name(document["namespace"], service, 0)
    pattern = re.compile(re.escape(base) + r"_(\d+)", re.IGNORECASE)
    matches = (pattern.fullmatch(name) for name in (*document["components"], *watchers))
    highest = max((int(match[1]) for match in matches if match), default=0)
    return watcher_name(document["namespace"], service, highest + 1)


def new_entry(
    service: ServiceEntries, name: str, argv: Sequence[str], gpus: Sequence[str]
) -> dict[str, Any]:
    """Return the entry of a further watcher of ``service``, without processes."""
    return {
        "watcher_name": name,
        "cmd": shlex.join(argv),
        "argv": list(argv),
        "service": service.name,
        "resources": {"allocated_gpus": list(gpus)} if gpus else {},
        "gpus_per_worker": service.gpus,
        "state": "running",
        "processes": [],
        "lease": None,
    }


def release(document: Document, name: str) -> None:
    """Let the arbiter delete the entry when the watcher is removed: its worker is added."""
    entry = document["components"].get(name)
    if isinstance(entry, dict):
        entry.pop(RESERVED_BY, None)


def delete_entry(document: Document, name: str) -> None:
    """Delete the entry of a worker that has exited; a template stays, without GPUs."""
    entry = document["components"].get(name)
    if not isinstance(entry, dict):
        return
    if _is_template(document, name):
        entry.update(resources={}, state="running", processes=[], lease=None)
        entry.pop(RESERVED_BY, None)
        entry.pop(HOLDS_GPUS, None)
    else:
        del document["components"][name]


def is_void(entry: Mapping[str, Any], lives: Lives) -> bool:
    """Whether the process that was adding this worker has exited before the arbiter received it."""
    mark = entry.get(RESERVED_BY)
    known = WATCHER in entry or entry.get("processes") or entry.get("state") == ASLEEP
    return isinstance(mark, Mapping) and not known and not lives(mark)


def is_freed(document: Document, name: str) -> bool:
    """Whether the entry of a removed worker is deleted; that of a template, whether it is empty."""
    entry = document["components"].get(name)
    if not isinstance(entry, dict):
        return True
    return _is_template(document, name) and not entry_gpus(entry) and not entry.get("processes")


def _is_template(document: Document, name: str) -> bool:
    service = str(document["components"][name].get("service"))
    return name == watcher_name(document["namespace"], service, 0)


def entry_gpus(entry: object) -> tuple[str, ...]:
    """Return an entry's GPUs as text: one writer writes numbers, another strings."""
    resources = entry.get("resources") if isinstance(entry, Mapping) else None
    gpus = resources.get("allocated_gpus") if isinstance(resources, Mapping) else None
    return tuple(str(gpu) for gpu in gpus) if isinstance(gpus, list) else ()


def _gpus_per_worker(
    document: Document, entries: Collection[Entry], args: Mapping[str, Any]
) -> float:
    for entry in entries:
        stated = stated_gpus(document["components"][entry.name], args)
        if stated is not None:
            return stated
    return float(max(len(entry.gpus) for entry in entries))


def stated_gpus(entry: Mapping[str, Any], args: Mapping[str, Any]) -> float | None:
    """Return the GPUs of each worker as the arbiter has written them, else as the graph says."""
    resources = args.get("resources")
    graph = resources.get("gpu") if isinstance(resources, Mapping) else None
    for given in (entry.get("gpus_per_worker"), graph):
        try:
            if given is not None:
                return float(given)
        except (TypeError, ValueError):
            continue
    return None


def service_config(document: Document) -> Mapping[str, Any]:
    """Return the graph in the statefile, without its ``envs``; empty if it cannot be read."""
    try:
        config = json.loads(document["environment"].get("DYNAMO_SERVICE_CONFIG") or "{}")
    except (TypeError, ValueError):
        return {}
    return config if isinstance(config, Mapping) else {}


def _entries(document: Document, service: str) -> Iterator[Entry]:
    base = watcher_name(document["namespace"], service, 0)
    pattern = re.compile(re.escape(base) + r"(?:_(\d+))?")
    for name, entry in document["components"].items():
        match = pattern.fullmatch(name)
        if match is None or not isinstance(entry, dict):
            continue
        if entry.get("service", service) != service:  # "A_1" may also be a service of that name
            continue
        yield _entry(name, entry, int(match[1] or 0))


def _entry(name: str, entry: Mapping[str, Any], index: int) -> Entry:
    reserved = entry.get(RESERVED_BY)
    return Entry(
        name=name,
        index=index,
        argv=tuple(str(word) for word in entry.get("argv") or shlex.split(entry["cmd"])),
        gpus=entry_gpus(entry),
        draining=entry.get("state") == DRAINING,
        asleep=entry.get("state") == ASLEEP,
        pids=tuple(_pids(entry)),
        lease=_integer(entry.get("lease")),
        reserved_by=reserved if isinstance(reserved, Mapping) else None,
    )


def _pids(entry: Mapping[str, Any]) -> Iterator[int]:
    for process in entry.get("processes") or ():
        pid = _integer(process.get("pid")) if isinstance(process, Mapping) else None
        if pid is not None:
            yield pid


def _serves_model(argv: tuple[str, ...]) -> bool:
    return argv[1:2] == ("-m",) and len(argv) > 2 and argv[2] in MODEL_PROGRAMS


def _model_name(flags: Mapping[str, str]) -> str:
    """Return the name under which a worker with these flags registers its model, if known."""
    named = next((flags[flag] for flag in _NAME_FLAGS if flag in flags), "")
    source = next((flags[flag] for flag in _MODEL_FLAGS if flag in flags), "")
    if named or not source:
        return named
    path = Path(source).expanduser()
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


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
