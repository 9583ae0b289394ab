"""Which models a reload has removed from the graph, by the statefile of ``dynamo serve``.

A model without workers is unavailable for a while, unless the graph has no service for it any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from dynamo.errors import StatefileError
from dynamo.serve.state.entries import ServiceEntries, read_services
from dynamo.serve.state.statefile import Statefile

__all__ = ["GraphModels"]

_POLL_S = 2.0


class GraphModels:
    """The services of the graph that each model has, or had.

    A model that was never one of the graph's is not removed by it, such as that of a worker that a
    person has started.
    """

    def __init__(self, statefile: Statefile) -> None:
        self._statefile = statefile
        self._modified_ns = 0
        self._stated: dict[str, str] = {}
        self._leases: dict[int, str] = {}
        self._services: dict[str, dict[str, str]] = {}

    async def run(
        self, workers: Callable[[], Mapping[str, Collection[int]]], remove: Callable[[str], bool]
    ) -> None:
        """Call ``remove`` with each model that is removed, until it returns True.

        ``workers()`` are the worker ids of each model that is known now, those on demand too.
        """
        while True:
            await asyncio.sleep(_POLL_S)
            await self._read()
            for model in self.removed(workers()):
                if remove(model):
                    del self._services[model]

    def read(self, services: Mapping[str, ServiceEntries]) -> None:
        """Take the services of the statefile as it is now."""
        self._stated = {name: service.model for name, service in services.items()}
        self._leases = {
            entry.lease: name
            for name, service in services.items()
            for entry in service.entries
            if entry.lease is not None
        }

    def removed(self, workers: Mapping[str, Collection[int]]) -> list[str]:
        """Return the models whose services have left the graph, or serve another model now."""
        for model, ids in workers.items():
            mine = {name for name, stated in self._stated.items() if stated == model}
            mine |= {self._leases[one] for one in ids if one in self._leases}
            if mine:
                self._services.setdefault(model, {}).update({n: self._stated[n] for n in mine})
        return [
            model
            for model, services in self._services.items()
            if not any(self._stated.get(name) == stated for name, stated in services.items())
        ]

    async def _read(self) -> None:
        """Read the statefile if it has changed; without one the graph is as it was."""
        try:
            modified_ns = self._statefile.path.stat().st_mtime_ns
            if modified_ns == self._modified_ns:
                return
            self._modified_ns = modified_ns
            self.read(await asyncio.to_thread(self._read_services))
        except (OSError, StatefileError):
            return

    def _read_services(self) -> Mapping[str, ServiceEntries]:
        document = self._statefile.read()
        if document is None:
            raise FileNotFoundError(self._statefile.path)
        return read_services(document)
