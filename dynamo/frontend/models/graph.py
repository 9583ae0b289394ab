"""The models of the graph: which services have them, and what it says about each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping

from dynamo.errors import ConfigError, StatefileError
from dynamo.runtime.process.inotify import Inotify, Mask
from dynamo.runtime.process.threads import in_file_thread
from dynamo.serve.graph.service import ModelArgs, merged
from dynamo.serve.state.entries import ServiceEntries, read_services
from dynamo.serve.state.statefile import Statefile

_POLL_S = 2.0
"""Where changes of the statefile are not reported, and until a model's last worker has left."""
log = logging.getLogger(__name__)


class GraphModels:
    """The services of the graph that each model has, or had, by the statefile of ``dynamo serve``.

    A model without workers is unavailable for a while, unless a reload has removed all of these.
    A model that was never one of the graph's is not removed by it, such as that of a worker that a
    person has started. ``args`` are what the graph says about its models, by name; ``on_args`` is
    called when they have changed. ``names`` are the models that workers of the graph will register;
    empty unless the box ``is_alone``, or if a worker may register others.
    """

    def __init__(
        self,
        statefile: Statefile,
        is_alone: bool = False,
        on_args: Callable[[], None] = lambda: None,
    ) -> None:
        self._statefile = statefile
        self._is_alone = is_alone
        self.names: list[str] = []
        self._modified_ns = 0
        self._stated: dict[str, str] = {}
        self._leases: dict[int, str] = {}
        self._services: dict[str, dict[str, str]] = {}
        self.args: Mapping[str, ModelArgs] = {}
        self._on_args = on_args
        self._changed = asyncio.Event()
        self._joined: dict[str, set[int]] = {}  # since the graph was last compared with the models

    def joined(self, model: str, worker_id: int) -> None:
        """Note a worker, which may have left again before the statefile is read."""
        self._joined.setdefault(model, set()).add(worker_id)
        self._changed.set()

    def left(self) -> None:
        """Note that a model has lost its last worker, so that it may be forgotten."""
        self._changed.set()

    @property
    def hint(self) -> str:
        """The names that will be served, for an error; "" if others may be, too."""
        return f"; this deployment loads {', '.join(self.names)}" if self.names else ""

    async def run(
        self, workers: Callable[[], Mapping[str, Collection[int]]], remove: Callable[[str], bool]
    ) -> None:
        """Call ``remove`` with each model that is removed, until it returns True.

        ``workers()`` are the worker ids of each model that is known now, those on demand too.
        """
        with self._watched():
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._changed.wait()
                self._changed.clear()  # before the file is read: a change during that counts
                # By the leases of the file so far, too: these workers may not be in the next one.
                self._note(self._joined)
                await self.load()
                for model in self.removed(workers()):
                    if remove(model):
                        del self._services[model]

    def read(self, services: Mapping[str, ServiceEntries]) -> None:
        """Take the services of the statefile as it is now."""
        self._stated = {name: service.model for name, service in services.items()}
        has_others = any(service.facts.further_models for service in services.values())
        self.names = sorted({*self._stated.values()}) if self._is_alone and not has_others else []
        self._leases = {
            entry.lease: name
            for name, service in services.items()
            for entry in service.entries
            if entry.lease is not None
        }
        models = {service.model for service in services.values()}
        args = {
            model: merged(
                service.facts.model_args for service in services.values() if service.model == model
            )
            for model in models
        }
        if args != self.args:
            self.args = args
            self._on_args()

    def removed(self, workers: Mapping[str, Collection[int]]) -> list[str]:
        """Return the models whose services have left the graph, or serve another model now."""
        self._note(self._joined)
        self._joined.clear()
        self._note(workers)
        return [
            model
            for model, services in self._services.items()
            if not any(self._stated.get(name) == stated for name, stated in services.items())
        ]

    def _note(self, workers: Mapping[str, Collection[int]]) -> None:
        """Note the services of each model, by its name and by the leases of its ``workers``."""
        for model, ids in workers.items():
            services = {name for name, stated in self._stated.items() if stated == model}
            services |= {self._leases[lease] for lease in ids if lease in self._leases}
            if services:
                stated = {name: self._stated[name] for name in services}
                self._services.setdefault(model, {}).update(stated)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Report each new statefile as a change."""
        path = self._statefile.path
        with contextlib.ExitStack() as stack:
            try:
                inotify = Inotify(self._changed.set)
                stack.callback(inotify.close)
                inotify.add(path.parent, Mask.MOVED_TO | Mask.ONLYDIR, self._on_file)
            except (ConfigError, OSError) as error:
                log.debug("%s is read every %.0f s: %s", path, _POLL_S, error)
            yield

    def _on_file(self, name: str, mask: int) -> None:
        if name == self._statefile.path.name:
            self._changed.set()

    def has(self, model: str) -> bool:
        """Whether a service of the graph serves ``model``, which may have no worker yet."""
        return model in self._stated.values() or any(
            model in args.aliases for args in self.args.values()
        )

    async def load(self) -> None:
        """Read the statefile if it has changed; without one the graph is as it was."""
        try:
            modified_ns = self._statefile.path.stat().st_mtime_ns
            if modified_ns == self._modified_ns:
                return
            # Noted before the read: a file that is replaced during it is read again.
            self._modified_ns = modified_ns
            self.read(await in_file_thread(self._read_services))
        except (OSError, StatefileError):
            return

    def _read_services(self) -> Mapping[str, ServiceEntries]:
        document = self._statefile.read()
        if document is None:
            raise FileNotFoundError(self._statefile.path)
        return read_services(document)
