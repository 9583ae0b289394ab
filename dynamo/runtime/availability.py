"""Which instances of an endpoint are out of routing, why, and since when."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dynamo.observability.metrics import Registry, counter, gauge
from dynamo.runtime.requests.peer import OutageReason

__all__ = ["Availability", "OnInhibited", "Outage", "OutageSource"]

OnInhibited = Callable[[int, bool], None]
"""(instance id, True: avoided from now on; False: no longer)."""

OutageSource = Literal["connection", "answer", "record"]
"""Where an outage was observed: on the connection (ended by the next frame of the worker), in an
error that the worker sent (ended by a timer), in its discovery record."""

_OUT = gauge(
    "dynamo_request_plane_unavailable_workers", "Registered workers out of routing", "endpoint"
)
_OUTAGES = counter(
    "dynamo_request_plane_worker_outages_total",
    "Times that a registered worker was taken out of routing",
    "endpoint reason",
)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outage:
    """Why an instance gets no requests while there are others. ``since_s`` is the loop's time."""

    reason: OutageReason
    text: str
    since_s: float


class Availability:
    """The outages of the instances of the endpoint ``path``, by instance and source.

    An instance is out while it has an outage of any source. ``listeners`` are called when the first
    begins and when the last one ends.
    """

    def __init__(self, path: str, metrics: Registry, answer_outage_s: float) -> None:
        self.listeners: list[OnInhibited] = []
        self._path = path
        self._answer_outage_s = answer_outage_s
        self._outages: dict[int, dict[OutageSource, Outage]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._loop = asyncio.get_running_loop()
        self._gauge = metrics.child(_OUT, path)
        self._counter = metrics.family(_OUTAGES)

    def __contains__(self, instance_id: int) -> bool:
        """Return whether the instance is out."""
        return instance_id in self._outages

    def __len__(self) -> int:
        """Return the number of instances that are out."""
        return len(self._outages)

    def is_silent(self, instance_id: int) -> bool:
        """Return whether the worker of the instance does not answer pings."""
        found = self._outages.get(instance_id)
        return found is not None and any(one.reason == "silent" for one in found.values())

    def outages(self) -> dict[int, Outage]:
        """Return the first outage of every instance that is out."""
        return {one: next(iter(found.values())) for one, found in self._outages.items()}

    def begin(
        self, instance_id: int, source: OutageSource, reason: OutageReason, text: str
    ) -> None:
        """Take the instance out. An outage that ``answer`` reports ends by itself."""
        found = self._outages.get(instance_id)
        if source == "answer":
            if found is not None and ("connection" in found or "record" in found):
                return  # the error of a stream on that worker: the same outage
            self._arm(instance_id)
        if found is not None and source in found and found[source].reason == reason:
            return
        outage = Outage(reason, text, self._loop.time())
        self._counter[self._path, reason].value += 1
        log.warning(
            "worker %x of %s gets no requests while others can take them: %s (%s)",
            instance_id,
            self._path,
            text,
            reason,
        )
        if found is not None:
            found[source] = outage
            return
        self._outages[instance_id] = {source: outage}
        self._gauge.value = len(self._outages)
        self._notify(instance_id, True)

    def end(self, instance_id: int, *sources: OutageSource) -> None:
        """End the outages of the instance from these sources; ignore unknown ones."""
        found = self._outages.get(instance_id)
        if found is None:
            return
        ended = [found.pop(source) for source in sources if source in found]
        if "answer" not in found:
            self._disarm(instance_id)
        if found or not ended:
            return
        del self._outages[instance_id]
        seconds = self._loop.time() - min(one.since_s for one in ended)
        log.info(
            "worker %x of %s gets requests again after %.1f s", instance_id, self._path, seconds
        )
        self._gauge.value = len(self._outages)
        self._notify(instance_id, False)

    def forget(self, instance_id: int) -> None:
        """Remove an instance that is not registered any longer."""
        self._disarm(instance_id)
        if self._outages.pop(instance_id, None) is not None:
            self._gauge.value = len(self._outages)
            self._notify(instance_id, False)

    def close(self) -> None:
        """End all outages without a call of the listeners."""
        self.listeners.clear()
        for instance_id in tuple(self._outages):
            self.forget(instance_id)

    def _arm(self, instance_id: int) -> None:
        self._disarm(instance_id)
        self._timers[instance_id] = self._loop.call_later(
            self._answer_outage_s, self.end, instance_id, "answer"
        )

    def _disarm(self, instance_id: int) -> None:
        timer = self._timers.pop(instance_id, None)
        if timer is not None:
            timer.cancel()

    def _notify(self, instance_id: int, out: bool) -> None:
        for listener in tuple(self.listeners):
            listener(instance_id, out)
