"""What must hold all the time, looked at several times a second."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Any

from attempts import unwanted
from leftovers import check_structures
from machine import START_S
from presence import SERVED_BY, Span, decoders, service_of
from sums import page_of

from dynamo.protocols.control import CLEAR_KV_BLOCKS
from dynamo.protocols.kv import KV_QUERY

if TYPE_CHECKING:
    from box import Box
    from machine import Process

__all__ = ["SILENT_S", "Steady", "connections_to", "silent_too_long", "slow_drains"]

SILENT_S = 2.65
"""A worker that is stopped is noticed after 2 to 2.5 s, and bytes may travel for some time."""
_REMOVED_MODELS = ("extra", "late")
"""The histograms of a model leave with its service, those of an adapter when it is unloaded."""
_OF_A_KEY = "dynamo_frontend_api_key_requests_total"
"""It goes with its key."""
_ENDS_S = 0.25
"""So long an engine may compute when no client waits any more."""
_BACK_S = 10.0
"""A worker that was stopped is not asked again for some time."""
_KNOWN_S = 0.5
"""A worker that is new is known so soon."""
_DRAIN_S = 4.0
"""So long a frontend without requests needs to end."""
_STRUCTURES_EVERY = 4
_PAGES_EVERY = 40


class Steady:
    """Looks at engines, data structures and counters of a box that runs."""

    def __init__(self) -> None:
        self._looks = 0
        self._none_open_s = 0.0
        self._figures: dict[tuple[int, str, str], float] = {}

    def look(self, box: Box) -> Iterator[str]:
        """Yield what is wrong; call it every quarter of a second."""
        self._looks += 1
        yield from self._engines(box)
        if self._looks % _STRUCTURES_EVERY == 0:
            yield from check_structures(box)
        if self._looks % _PAGES_EVERY == 0:
            for process in (*box.processes("frontend"), *box.processes("mocker")):
                yield from self.counters(process)

    def _engines(self, box: Box) -> Iterator[str]:
        """An engine does not compute what no client waits for."""
        now_s = box.clock()
        last = Span(now_s - _BACK_S, now_s)
        if not any(span.meets(*last) for stops in box.stops.values() for span in stops):
            for process in box.processes("mocker"):
                yield from unwanted(box.machine, process)
        if "HEALTH_CHECK" in box.scenario.graph or box.has_asking_verbs:
            return  # its own requests are no client's
        if box.open or box.waiting.is_disturbed(box):
            self._none_open_s = now_s
        elif now_s - self._none_open_s > _ENDS_S:
            for process in box.processes("mocker"):
                if any(rank.load for part in process.parts if hasattr(part, "ranks")
                       for rank in part.ranks):  # fmt: skip
                    yield f"{process} computes, and no client waits for an answer"

    def counters(self, process: Process) -> Iterator[str]:
        """No counter of a process that lives falls, or is gone; those of a model that was never
        asked go with it.
        """
        page = {
            (name, str(sorted(labels.items()))): value
            for name, samples in page_of(process).items()
            if name.endswith(("_total", "_count", "_sum")) and name != _OF_A_KEY
            for labels, value in samples
            if labels.get("model") not in _REMOVED_MODELS
        }
        for (pid, name, labels), before in self._figures.items():
            if pid == process.pid and page.get((name, labels), 0.0) < before:
                found = page.get((name, labels), "gone")
                yield f"{process}: {name} {labels} was {before:g} and is {found}"
        self._figures |= {(process.pid, *key): value for key, value in page.items()}


def slow_drains(box: Box) -> Iterator[str]:
    """Yield the frontends that lived on although their last request had ended."""
    for life in box.frontend_lives:
        since_s = box.machine.stop_signals_s.get(life.pid)
        if since_s is None or life.until_s is None:
            continue
        begin_s = since_s - START_S
        port = box.life_ports[id(life)]
        ends = [
            min(one.ended_s, life.until_s)  # its last bytes may arrive after the end
            for one in box.requests
            if box.ports[one.id] == port and one.started_s <= life.until_s
        ]
        idle_s = max([begin_s, *ends])
        stops = box.stops.get(life.pid, ())
        stopped = any(one.meets(begin_s - _BACK_S, life.until_s) for one in stops)
        if not stopped and life.until_s - idle_s > _DRAIN_S:
            yield (
                f"{life.name}[{life.pid}] ended {life.until_s - idle_s:.1f} s after its last "
                "request, although it got a stop signal"
            )


def connections_to(box: Box, worker: Process) -> Iterator[tuple[Process, Any]]:
    """Yield frontends and their connections to ``worker`` that have requests of clients.

    A question to one worker, of a router or of an operator, can be answered by no other one.
    """
    lease = {one for one, owner in box.presence.owners.items() if owner is worker}
    for process in box.processes("frontend"):
        for part in process.parts:
            address = getattr(part, "address", "")
            if (
                hasattr(part, "token_sinks")
                and any(f"{one}.sock" in address for one in lease)
                and any(
                    hasattr(stream.owner, "record")
                    and stream.owner.record.endpoint not in (KV_QUERY, CLEAR_KV_BLOCKS)
                    and not _is_pinned(stream, lease)
                    for stream in part.streams.values()
                )
            ):
                yield process, part


def _is_pinned(stream: Any, leases: set[str]) -> bool:
    """Whether its client named these workers and no other: it waits until one of them goes on."""
    routing = getattr(getattr(stream.sink, "preprocessed", None), "routing", None)
    if routing is None:
        return False
    pins = routing.allowed_worker_ids or [
        worker_id
        for worker_id in (routing.backend_instance_id, routing.decode_worker_id)
        if worker_id is not None
    ]
    return bool(pins) and all(f"{worker_id:x}" in leases for worker_id in pins)


def silent_too_long(
    box: Box, worker: Process, since_s: float, busy: Container[object]
) -> Iterator[str]:
    """Yield the frontends whose requests still wait for a worker that stopped ``SILENT_S`` ago.

    Those of a model without another live worker wait for it to run again. Only connections that
    were ``busy`` then: silence of others is counted from their first request on.
    """
    now_s = box.clock()
    model = SERVED_BY.get(service_of(worker), "")
    if worker.state != "T" or not _others(box, model, worker, since_s, now_s):
        return
    for process, connection in connections_to(box, worker):
        stops = box.stops.get(process.pid, ())
        if process.state == "T" or any(one.meets(since_s - 1, now_s) for one in stops):
            continue
        if connection in busy:
            yield (
                f"{process}: requests wait for {worker}, which stopped {now_s - since_s:.2f} s ago"
            )


def _others(box: Box, model: str, worker: Process, since_s: float, now_s: float) -> bool:
    """Whether another worker of ``model`` was live all the time, and answered for a while."""
    if service_of(worker) not in decoders(model):
        return False
    for service in decoders(model):
        for other in box.presence.live(service):
            stops = box.stops.get(other.pid, ())
            if other is not worker and not any(
                one.meets(since_s - _BACK_S, now_s) for one in stops
            ):
                gaps = box.presence.gaps((other.name,), now_s)
                away = [one for one in gaps if one.since_s or one.until_s > since_s - _KNOWN_S]
                return not any(one.meets(since_s - _BACK_S, now_s) for one in away)
    return False
