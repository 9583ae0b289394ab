"""The workers of an endpoint whose model cards were accepted: those that requests may go to."""

from __future__ import annotations

from dynamo.protocols.control import EndpointRecord
from dynamo.runtime.client import Client, OnInstances

__all__ = ["AdmittedWorkers"]


class AdmittedWorkers:
    """Stands between discovery's instances and the router.

    An instance is passed on when it is both alive (``client``) and accepted (:meth:`accept`), in
    whatever order that happens, and taken back when either ends.
    """

    def __init__(self, client: Client) -> None:
        self._alive: dict[int, EndpointRecord] = {}
        self._accepted: set[int] = set()
        self._listeners: list[OnInstances] = []
        client.on_change(self._changed)

    def on_change(self, callback: OnInstances) -> None:
        """Call ``callback`` for the workers known by now (if any) and for every change."""
        self._listeners.append(callback)
        known = [one for one in self._alive.values() if one.instance_id in self._accepted]
        if known:
            callback(known, [])

    def accept(self, worker_id: int) -> None:
        """The worker's card is good."""
        if worker_id not in self._accepted:
            self._accepted.add(worker_id)
            if worker_id in self._alive:
                self._tell([self._alive[worker_id]], [])

    def refuse(self, worker_id: int) -> None:
        """The worker's card is gone, or no longer good."""
        if worker_id in self._accepted:
            self._accepted.discard(worker_id)
            if worker_id in self._alive:
                self._tell([], [worker_id])

    def _changed(self, added: list[EndpointRecord], removed: list[int]) -> None:
        for worker_id in removed:
            self._alive.pop(worker_id, None)
        for record in added:
            self._alive[record.instance_id] = record
        came = [one for one in added if one.instance_id in self._accepted]
        went = [one for one in removed if one in self._accepted]
        if came or went:
            self._tell(came, went)

    def _tell(self, added: list[EndpointRecord], removed: list[int]) -> None:
        for callback in tuple(self._listeners):
            callback(added, removed)
