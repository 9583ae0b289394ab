"""The instances of an endpoint: what callers see of them, and which are out of routing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Literal

from dynamo.observability.metrics import Registry, counter, gauge
from dynamo.protocols.control import MODEL_CARDS, EndpointRecord, decode_card
from dynamo.runtime.discovery import Discovery, KeyEvent
from dynamo.runtime.requests.client import OutageReason

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
        by_source = self._outages.get(instance_id)
        return by_source is not None and any(
            outage.reason == "silent" for outage in by_source.values()
        )

    def outages(self) -> dict[int, Outage]:
        """Return the first outage of every instance that is out."""
        return {
            instance_id: next(iter(by_source.values()))
            for instance_id, by_source in self._outages.items()
        }

    def begin(
        self, instance_id: int, source: OutageSource, reason: OutageReason, text: str
    ) -> None:
        """Take the instance out. An outage that ``answer`` reports ends by itself."""
        by_source = self._outages.get(instance_id)
        if source == "answer":
            if by_source is not None and ("connection" in by_source or "record" in by_source):
                return  # the error of a stream on that worker: the same outage
            self._arm(instance_id)
        if by_source is not None and source in by_source and by_source[source].reason == reason:
            return
        outage = Outage(reason, text, asyncio.get_running_loop().time())
        self._counter[self._path, reason].value += 1
        log.warning(
            "worker %x of %s gets no requests while others can take them: %s (%s)",
            instance_id,
            self._path,
            text,
            reason,
        )
        if by_source is not None:
            by_source[source] = outage
            return
        self._outages[instance_id] = {source: outage}
        self._gauge.value = len(self._outages)
        self._notify(instance_id, True)

    def end(self, instance_id: int, *sources: OutageSource) -> None:
        """End the outages of the instance from these sources; ignore unknown ones."""
        by_source = self._outages.get(instance_id)
        if by_source is None:
            return
        ended = [by_source.pop(source) for source in sources if source in by_source]
        if "answer" not in by_source:
            self._disarm(instance_id)
        if by_source or not ended:
            return
        del self._outages[instance_id]
        seconds = asyncio.get_running_loop().time() - min(outage.since_s for outage in ended)
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
        self._timers[instance_id] = asyncio.get_running_loop().call_later(
            self._answer_outage_s, self.end, instance_id, "answer"
        )

    def _disarm(self, instance_id: int) -> None:
        timer = self._timers.pop(instance_id, None)
        if timer is not None:
            timer.cancel()

    def _notify(self, instance_id: int, out: bool) -> None:
        for listener in tuple(self.listeners):
            listener(instance_id, out)


class TransportType:
    """How to reach an instance: ``kind`` is tcp or uds, ``address`` a host and port or a path."""

    __slots__ = ("address", "kind")

    def __init__(self, kind: str, address: str) -> None:
        self.kind = kind
        self.address = address

    def __repr__(self) -> str:
        return f"TransportType({self.kind}, {self.address})"


class Instance:
    """One live instance of an endpoint."""

    __slots__ = ("component", "device_type", "endpoint", "instance_id", "namespace", "transport")

    def __init__(self, record: EndpointRecord, address: str, path: str) -> None:
        kind, _, where = address.partition(":")
        suffix = f"/{record.instance_id:x}/{path}" if kind == "tcp" else ""
        self.instance_id: int = record.instance_id
        self.namespace = record.namespace
        self.component = record.component
        self.endpoint = record.endpoint
        self.device_type: str | None = record.device_type
        self.transport = TransportType(kind, where + suffix)

    def __repr__(self) -> str:
        path = f"{self.namespace}/{self.component}/{self.endpoint}"
        return f"Instance({path}/{self.instance_id})"


class RuntimeDataWatch:
    """The ``runtime_data`` in the model cards of an endpoint; use it in ``async with``.

    ``live`` holds the ids of the instances that discovery reports; call :meth:`on_instances` when
    it changes. Cards of LoRA adapters repeat their worker's data and count once.
    """

    def __init__(self, discovery: Discovery, path: str, live: Container[int]) -> None:
        self._live = live
        self._cards: dict[str, tuple[int, dict[str, Any]]] = {}
        self._changed = asyncio.Event()
        self._watch = discovery.watch(f"{MODEL_CARDS}{path}/", self._on_key)

    async def __aenter__(self) -> RuntimeDataWatch:
        await self._watch.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watch.close()

    async def wait(
        self, key: str, value: str, min_count: int | None, timeout_s: float | None
    ) -> list[int]:
        """Return the sorted ids of the live instances whose data has the text ``value`` at ``key``.

        Waits for ``min_count`` of them, with None for exactly one. Raises TimeoutError.
        """
        matching: list[int] = []
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    # Before the look: a change after it must end the wait below.
                    self._changed.clear()
                    matching = self._matching(key, value)
                    if len(matching) == 1 if min_count is None else len(matching) >= min_count:
                        return matching
                    await self._changed.wait()
        except TimeoutError:
            wanted = (
                "one endpoint instance" if min_count is None else f"{min_count} endpoint instances"
            )
            raise TimeoutError(
                f'Timed out waiting for {wanted} with runtime_data["{key}"] == "{value}"; '
                f"last_match_count={len(matching)}, matching_ids={matching}"
            ) from None

    def _matching(self, key: str, value: str) -> list[int]:
        return sorted(
            {
                instance_id
                for instance_id, data in self._cards.values()
                if instance_id in self._live and data.get(key) == value
            }
        )

    def on_instances(self, *_: object) -> None:
        """Check again: an instance may join discovery after its card."""
        self._changed.set()

    def _on_key(self, event: KeyEvent) -> None:
        self._cards.pop(event.key, None)
        if event.value is not None:
            try:
                card = decode_card(event.value)
            except ValueError:
                return
            self._cards[event.key] = (card.instance_id, card.runtime_config.runtime_data)
        self._changed.set()
