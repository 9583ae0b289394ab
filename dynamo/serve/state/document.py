"""The contents of a statefile, with names: deployment, entries, processes. Pure.

The schema is in statefiles/. Keys of a later version or of another writer are kept.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import msgspec

from dynamo.config.programs import module_of
from dynamo.protocols.records import NO_KEY, Record
from dynamo.serve.graph.facts import ListenFacts, ServiceFacts
from dynamo.serve.graph.service import watcher_name

VERSION = 1
"""The version of the format; a statefile without a version has this one."""

RUNNING = "running"
"""``state`` of an entry as long as nothing else is known."""

ASLEEP = "asleep"
"""``state`` of the entry of a worker whose engine sleeps: others may hold its GPUs."""

DRAINING = "draining"
"""``state`` of the entry of a worker that is to exit and not to be restarted."""

DRAIN, LOAD, SLEEP, WAKE = "drain", "load", "sleep", "wake"
"""The ``operation`` of a reservation: remove, add or start, put to sleep, wake a worker."""

ACTIVE, STOPPED, GIVEN_UP, ABSENT = "active", "stopped", "given up", "absent"
"""The ``status`` of a supervision."""


class RecordedProcess(Record):
    """A process of an entry; ``gpus`` has the share of each GPU that it uses."""

    pid: int = 0
    start_ticks: int = 0
    gpus: dict[str, float] = msgspec.field(default_factory=dict)
    always = frozenset({"pid", "start_ticks"})


class Supervision(Record):
    """What the arbiter does with a watcher; the entry's ``watcher``.

    ``status`` is active, stopped (by a command), given up (then ``reason`` says why) or absent (an
    entry that only has the command of the next worker). ``restarts`` counts unintended exits,
    ``last_exit`` describes the latest, ``last_words`` is what a failed process wrote before it.
    """

    status: str = ""
    reason: str = ""
    restarts: int = 0
    last_exit: str = ""
    last_words: str = ""


class OperationOwner(Record):
    """An ``operation`` on a worker, begun at ``since`` (Unix time), and the process that does it.

    One that has exited leaves the record: the operation is to be finished or undone.
    """

    pid: int = 0
    start_ticks: int = 0
    host: str = ""
    operation: str = ""
    since: float = 0.0


class Replacement(Record):
    """The arbiter replaces the processes of an entry: since when, and the GPUs it reserved."""

    since: float = 0.0
    gpus: dict[str, float] = msgspec.field(default_factory=dict)
    always = frozenset({"since", "gpus"})


class Resources(Record):
    """The GPUs of an entry. Compare them as text: one writer writes numbers, another strings."""

    allocated_gpus: tuple[str | int, ...] = ()


def written_gpus(gpus: Iterable[str]) -> tuple[str | int, ...]:
    """Return GPU ids as the statefile has them: an index as a number."""
    return tuple(int(gpu) if gpu.isdigit() else gpu for gpu in gpus)


class Entry(Record):
    """The entry of one watcher.

    ``cmd`` is the command of an entry that was written without ``argv``. ``gpus_per_worker`` is
    None if the graph says it. ``pinned`` are the GPUs that the environment of its service names:
    all of its workers run on these. ``holds_gpus`` is false for a draining worker that slept:
    another one may have its GPUs. ``asked_at`` is the Unix time of an operator's last load of its
    model, 0 for none. ``listens`` says where, for a frontend.
    """

    name: str = msgspec.field(name="watcher_name", default="")
    cmd: str = ""
    argv: tuple[str, ...] = ()
    service: str = ""
    resources: Resources = msgspec.field(default_factory=Resources)
    gpus_per_worker: float | None = None
    pinned: tuple[str | int, ...] = ()
    state: str = RUNNING
    processes: tuple[RecordedProcess, ...] = ()
    lease: int | None = None
    watcher: Supervision | None = None
    holds_gpus: bool = True
    reserved_by: OperationOwner | None = None
    replacing: Replacement | None = None
    asked_at: float = 0.0
    listens: ListenFacts | None = None
    always = frozenset({"name", "cmd", "argv", "resources", "state", "processes", "lease"})

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Self:
        """Return the entry that is ``written``."""
        entry = super().of(written)
        entry.settle_command()
        return entry

    def settle_command(self) -> None:
        """Make ``argv`` the command, unless ``cmd`` cannot be split."""
        if self.argv:
            self.cmd = ""
        else:
            with contextlib.suppress(ValueError):  # an open quote
                self.argv = tuple(shlex.split(self.cmd))

    def written(self) -> dict[str, Any]:
        """Return the JSON object. Without a process it has no ``state``: it does not run."""
        values = {**super().written(), "cmd": self.cmd or _joined(self.argv)}
        if self.state == RUNNING and not self.pids:
            del values["state"]
        return values

    def set_command(self, argv: Sequence[str]) -> None:
        """Set the command of the next process."""
        self.argv, self.cmd = tuple(argv), ""

    @property
    def program(self) -> str:
        """The Python module that it runs, "" for another program."""
        return module_of(self.argv)

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs that are assigned to it."""
        return tuple(str(gpu) for gpu in self.resources.allocated_gpus)

    def assign(self, gpus: Iterable[str]) -> None:
        """Assign ``gpus`` to it and no others."""
        self.resources = Resources(allocated_gpus=written_gpus(gpus))

    @property
    def draining(self) -> bool:
        """Whether its worker is to exit and not to be restarted."""
        return self.state == DRAINING

    @property
    def asleep(self) -> bool:
        """Whether its engine sleeps."""
        return self.state == ASLEEP

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes, those that have just exited included."""
        return tuple(process.pid for process in self.processes if process.pid)

    def clear(self) -> None:
        """Leave the command of the next worker alone."""
        self.resources, self.state, self.processes, self.lease = Resources(), RUNNING, (), None
        self.reserved_by, self.holds_gpus, self.asked_at = None, True, 0.0


@functools.lru_cache(maxsize=1024)
def _joined(argv: tuple[str, ...]) -> str:
    return shlex.join(argv)


class Arbiter(Record):
    """The process that writes the statefile, and its guard, which a person started."""

    pid: int = 0
    start_ticks: int = 0
    guard_pid: int = 0
    host: str = ""


class SystemResources(Record):
    """The GPUs of the deployment."""

    total_gpus: int = 0
    gpu_info: tuple[str | int, ...] = ()
    always = frozenset({"total_gpus", "gpu_info"})


class Environment(Record):
    """The graph as a JSON string, without the services' ``envs``, and the GPUs."""

    service_config: str = msgspec.field(name="DYNAMO_SERVICE_CONFIG", default="")
    system_resources: SystemResources = msgspec.field(
        name="SYSTEM_RESOURCES", default_factory=SystemResources
    )
    always = frozenset({"system_resources"})


class Document(Record):
    """A statefile; ``components`` are its entries by the name of the watcher.

    ``services`` has the facts of each service of the graph, in its order.
    ``directory``, which is not written, has it and the statefiles of the box's other namespaces.
    """

    version: int = VERSION
    namespace: str = ""
    circus_endpoint: str = ""
    pubsub_endpoint: str = ""
    arbiter: Arbiter = msgspec.field(default_factory=Arbiter)
    components: dict[str, Entry] = msgspec.field(default_factory=dict)
    environment: Environment = msgspec.field(default_factory=Environment)
    services: dict[str, ServiceFacts] = msgspec.field(default_factory=dict)
    directory: str = msgspec.field(default="", name=NO_KEY + "directory")
    always = frozenset({"version", "namespace", "circus_endpoint", "components", "environment"})

    @property
    def graph(self) -> Mapping[str, Any]:
        """The graph, without its ``envs``; empty if it cannot be read."""
        try:
            graph = json.loads(self.environment.service_config or "{}")
        except (ValueError, RecursionError):
            return {}
        return graph if isinstance(graph, Mapping) else {}

    def entries_of(self, service: str) -> tuple[Entry, ...]:
        """Return the entries of ``service`` by number; that of its template is 0."""
        base = watcher_name(self.namespace, service, 0)
        pattern = re.compile(re.escape(base) + r"(?:_(\d+))?")
        numbered: list[tuple[int, Entry]] = []
        for name, entry in self.components.items():
            match = pattern.fullmatch(name)
            # "A_1" may also be a service of that name.
            if match is not None and entry.service in ("", service):
                numbered.append((int(match[1] or 0), entry))
        return tuple(entry for _, entry in sorted(numbered, key=lambda pair: pair[0]))

    @classmethod
    def decoded(cls, text: bytes) -> Document | None:
        """Decode JSON ten times as fast as :meth:`of`; None unless each key and type is known."""
        try:
            document = _decoder().decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        for name, entry in document.components.items():
            entry.name = name
            entry.settle_command()
        return document

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Self:
        """Return the document that is ``written``."""
        rest = {key: value for key, value in written.items() if key != "components"}
        document = super().of(rest)
        for name, entry in written.get("components", {}).items():
            if isinstance(entry, dict):
                document.components[name] = Entry.of({**entry, "watcher_name": name})
            else:
                document.unknown.setdefault("components", {})[name] = entry
        return document

    def written(self) -> dict[str, Any]:
        """Return the JSON object."""
        components = {name: entry.written() for name, entry in self.components.items()}
        unknown = self.unknown.get("components", {})
        return {**super().written(), "components": unknown | components}


@functools.cache
def _decoder() -> msgspec.json.Decoder[Document]:
    return msgspec.json.Decoder(Document)
