"""What a process may not keep in memory once all is quiet: of requests that have ended, of workers
that have gone. It would grow for ever, or count as load that nothing ends."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from decisions import check_router
from planes import EventHub
from presence import asleep

if TYPE_CHECKING:
    from box import Box
    from machine import Process

__all__ = ["check_leftovers", "check_structures", "classes"]

_EMPTY: dict[str, tuple[str, ...]] = {
    "dynamo.frontend.requests.registry:RequestRegistry": ("_active", "_engine_ids", "admitted"),
    "dynamo.frontend.requests.cold_start:ResendQueue": ("_waiting",),
    "dynamo.frontend.requests.cold_start:TrialQueue": ("_waiting", "_running"),
    "dynamo.frontend.requests.cold_start:ColdStartQueue": ("_waiting",),
    "dynamo.router.modes.picker:InflightPicker": ("_slot_of", "_prompt_tokens"),
    "dynamo.router.load.active_load:ActiveLoad": ("_reservations",),
    "dynamo.router.caches.predicted:PredictedCache": ("_leases",),
    "dynamo.router.decision.cost:CopyPolicy": ("_in_progress",),
    "dynamo.router.queue.request_queue:RequestQueue": ("_requests",),
    "dynamo.router.queue.waiting:WaitingQueue": ("isl_tokens", "cached_tokens"),
    "dynamo.router.queue.prefill:PrefillQueue": ("_pins", "_running", "waiting_tokens"),
    "dynamo.runtime.requests.client_connection:ClientConnection": ("streams", "token_sinks"),
    "dynamo.runtime.requests.server:ServerConnection": ("streams", "waiting"),
    "dynamo.runtime.requests.server:RequestServer": ("_inflight", "_unregistered"),
    "dynamo.runtime.requests.admission:AdmissionQueue": ("_running", "_queue"),
    "dynamo.http.server:HttpServer": ("bodies_bytes",),
    "dynamo.mocker.scheduler:Scheduler": ("waiting", "running"),
    "dynamo.mocker.blocks:BlockPool": ("_active",),
}
"""By class, what must be empty or 0."""


def _of_pool(pool: Any) -> Iterator[tuple[str, Collection[int]]]:
    yield "busy", pool.busy - pool.members.keys()
    client = getattr(pool.is_silent, "__self__", None)
    if client is None or not client._closed:  # a closed client notifies no pool
        yield "avoided", pool.avoided - pool.members.keys()


def _of_busy(watch: Any) -> Iterator[tuple[str, Collection[int]]]:
    members = watch._worker_pool.members
    yield "reports", watch._reports.keys() - members
    yield "at capacity", watch._at_capacity - members.keys()


def _of_client(client: Any) -> Iterator[tuple[str, Collection[int]]]:
    yield "outages", client.availability._outages.keys() - client._instances.keys()


_GONE: dict[str, Callable[[Any], Iterator[tuple[str, Collection[int]]]]] = {
    "dynamo.router.worker_pool:WorkerPool": _of_pool,
    "dynamo.router.eligibility.eligibility_filter:BusyWatch": _of_busy,
    "dynamo.runtime.endpoints.client:Client": _of_client,
}
"""By class, what it has of workers that it does not know any more."""


_PEER = "dynamo.runtime.requests.client:Peer"
_CLIENT = "dynamo.runtime.requests.client:RequestClient"
_PICKER = "dynamo.router.modes.picker:InflightPicker"
_INDEXER = "dynamo.router.caches.indexer:Indexer"
_REPORTS = "dynamo.planner.live.gpu_sharing:OnDemandRegistry"
_ROUTERS = (
    "dynamo.router.modes.kv:KvPicker",
    "dynamo.runtime.discovery.leases:LeaseTable",
)
_SELF_CHECKING = (
    "dynamo.router.queue.prefill:PrefillQueue",
    "dynamo.router.modes.picker:InflightPicker",
    "dynamo.router.load.active_load:ActiveLoad",
    "dynamo.frontend.apis.responses.store:ResponseStore",
    "dynamo.http.server:HttpServer",
    "dynamo.router.caches.predicted:PredictedCache",
    "dynamo.router.caches.predicted:OptimisticCache",
    "dynamo.mocker.scheduler:Scheduler",
    "dynamo.mocker.blocks:BlockPool",
)
"""The classes that assert their own invariants."""


def _class(name: str) -> type:
    module, _, attribute = name.partition(":")
    found: type = getattr(importlib.import_module(module), attribute)
    return found


_LATE_S = 0.5
"""A process that works may be so late."""


def classes() -> list[type]:
    """Return the classes whose objects are looked at."""
    names = dict.fromkeys((*_EMPTY, *_GONE, *_SELF_CHECKING, _REPORTS, _PEER, _CLIENT, *_ROUTERS))
    return [_class(name) for name in names]


def check_structures(box: Box) -> Iterator[str]:
    """Yield the data structures that have lost an invariant of their own."""
    for process in (*box.processes("frontend"), *box.processes("mocker")):
        if process.resting:
            continue
        yield from _engine(process)
        yield from _leases(process)
        for part in process.parts:
            yield from check_router(process, part)
            name = f"{type(part).__module__}:{type(part).__qualname__}"
            if name == _PICKER:
                yield from _without_worker(process, part)
            if name in _SELF_CHECKING or name == _INDEXER:
                try:
                    (part if name != _INDEXER else part._index)._check()
                except AssertionError as error:
                    yield f"{process}: {name} contradicts itself: {error}"


def _engine(process: Process) -> Iterator[str]:
    """What a worker has taken is in its engine, which computes something of each prompt."""
    for rank in (rank for part in process.parts for rank in getattr(part, "ranks", ())):
        for one in () if asleep(process) else rank.scheduler.running:
            if not one.transferred and (one.cached_tokens or 0) >= one.prompt_tokens:
                yield f"{process}: all {one.prompt_tokens} tokens of a prompt are cached"
        if asleep(process) and rank.load:
            yield f"{process} sleeps, and computes {rank.load} requests"
    for part in process.parts:
        admission = getattr(getattr(part, "service", None), "admission", None)
        if hasattr(part, "ranks") and admission is not None:
            load = sum(rank.load for rank in part.ranks)
            if admission.running != load:
                yield f"{process}: {admission.running} were admitted, {load} are computed"
        if type(part).__name__ == "RequestServer":
            streams = sum(len(one.streams) for one in part._connections)
            if part.inflight != streams:
                yield f"{process}: {part.inflight} streams in flight, of connections {streams}"


def _leases(process: Process) -> Iterator[str]:
    """Leases end in time, and the processes behind them are watched as long as they last."""
    machine = process.machine
    for part in process.parts:
        if type(part).__name__ != "LeaseTable" or not part._tracked or process.state != "R":
            continue
        dues = [due for one in part._tracked.values() if (due := one.deadline()) is not None]
        late_s = machine.now_s - min(dues, default=machine.now_s)
        if late_s > _LATE_S:
            yield f"{process}: a lease is over since {late_s:.2f} s"
        if dues and (part._timer is None or part._due_s > min(dues) + _LATE_S):
            yield f"{process}: it looks at its leases too late"


def check_leftovers(box: Box) -> Iterator[str]:
    """Yield what the processes of the deployment keep of what has ended."""
    for process in (*box.processes("frontend"), *box.processes("mocker")):
        for part in process.parts:
            name = f"{type(part).__module__}:{type(part).__qualname__}"
            for attribute in _EMPTY.get(name, ()):
                value = getattr(part, attribute)
                if value:
                    yield f"{process}: {name} keeps {attribute} {_shown(value)}"
            for what, workers in _GONE[name](part) if name in _GONE else ():
                if workers:
                    yield f"{process}: {name} keeps {what} of workers that left: {_shown(workers)}"
        yield from _peers(process)
    yield from _descriptors(box)
    yield from _reports(box)
    for link in EventHub.here().links:
        if link.publisher is None and link.subscriber.process.alive:
            yield f"{link.subscriber.process} connects to {link.address}, which has no publisher"


def _peers(process: Process) -> Iterator[str]:
    """A worker is probed while a client follows it."""
    named = [(f"{type(part).__module__}:{type(part).__qualname__}", part) for part in process.parts]
    clients: list[Any] = [part for name, part in named if name == _CLIENT]
    known = [peer for client in clients for peer in client._peers.values()]
    for name, part in named:
        if name == _PEER and part._timer is not None and part not in known:
            yield f"{process} probes a worker without a follower"


def _without_worker(process: Process, picker: Any) -> Iterator[str]:
    """A removed worker leaves no load in its slot, which the next one gets."""
    members = picker.worker_pool.members.values()
    known = {slot for member in members for slot in member.slots.values()}
    gone = set(picker._slot_of.values()) - known
    if gone:
        yield f"{process}: {_PICKER} counts requests in slots of no worker: {_shown(gone)}"


def _shown(value: Any) -> str:
    if isinstance(value, (int, float)):
        return f"at {value:g}"
    return f"with {len(value)}: {str(list(value)[:3])[:120]}"


def _descriptors(box: Box) -> Iterator[str]:
    """A pidfd of a process that has ended reports nothing more."""
    machine = box.machine
    kept: dict[Process, int] = {}
    for fd, (watched, _) in machine.process_ends.items():
        owner = machine.files.get(fd)
        if not watched.alive and owner is not None and owner.alive:
            kept[owner] = kept.get(owner, 0) + 1
    for process, count in kept.items():
        yield f"{process} keeps {count} descriptors of processes that have ended"


def _reports(box: Box) -> Iterator[str]:
    """A planner counts the requests of frontends that run."""
    known = {
        part.instance_id
        for process in box.processes("frontend")
        for part in process.parts
        if hasattr(part, "serving")
    }
    for process in box.processes("planner"):
        for part in process.parts:
            gone = part._reports.keys() - known if type(part).__name__ == "OnDemandRegistry" else ()
            if gone:
                yield f"{process} keeps the reports of frontends that ended: {_shown(gone)}"
