"""The workers of an endpoint that requests may go to: alive, and with an accepted model card."""

from __future__ import annotations

from dynamo.protocols.control import EndpointRecord
from dynamo.runtime.endpoints.client import Client, OnInstances


class AdmittedWorkers:
    """A filter between the instances of discovery and the router.

    It reports an instance as added when it is both alive (``client``) and admitted (:meth:`admit`),
    in any order, and as removed when either ends.
    """

    def __init__(self, client: Client) -> None:
        self._alive: dict[int, EndpointRecord] = {}
        self._admitted: set[int] = set()
        self._listeners: list[OnInstances] = []
        client.on_change(self._changed)

    def on_change(self, callback: OnInstances) -> None:
        """Call ``callback`` with the current workers, if any, and with every change."""
        self._listeners.append(callback)
        current = [one for one in self._alive.values() if one.instance_id in self._admitted]
        if current:
            callback(current, [])

    def admit(self, worker_id: int) -> None:
        """Admit the worker: its card was accepted."""
        if worker_id not in self._admitted:
            self._admitted.add(worker_id)
            if worker_id in self._alive:
                self._notify([self._alive[worker_id]], [])

    def refuse(self, worker_id: int) -> None:
        """Remove the worker: its card was removed or is no longer valid."""
        if worker_id in self._admitted:
            self._admitted.discard(worker_id)
            if worker_id in self._alive:
                self._notify([], [worker_id])

    def _changed(self, added: list[EndpointRecord], removed: list[int]) -> None:
        for worker_id in removed:
            self._alive.pop(worker_id, None)
        for record in added:
            self._alive[record.instance_id] = record
        joined = [one for one in added if one.instance_id in self._admitted]
        left = [one for one in removed if one in self._admitted]
        if joined or left:
            self._notify(joined, left)

    def _notify(self, added: list[EndpointRecord], removed: list[int]) -> None:
        for callback in tuple(self._listeners):
            callback(added, removed)
