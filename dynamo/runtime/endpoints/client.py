"""The client of one endpoint: its live instances, and requests to them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Generator
from itertools import filterfalse
from typing import Any

from dynamo.errors import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoError,
    EngineShutdown,
    InstanceGone,
    InvalidArgument,
    NoInstances,
    Unavailable,
    WorkerSilent,
)
from dynamo.protocols import codec
from dynamo.protocols.control import INSTANCES, EndpointRecord, instance_key, record_decoder
from dynamo.runtime.discovery import Discovery, KeyEvent, Watch
from dynamo.runtime.endpoints.instances import (
    Availability,
    Instance,
    OnInhibited,
    Outage,
    RuntimeDataWatch,
)
from dynamo.runtime.endpoints.responses import NoResponses, Responses
from dynamo.runtime.process.sockets import parse_address
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.process.threads import running_loop
from dynamo.runtime.requests import ClientStream, RequestClient, ResponseStream, StreamSink
from dynamo.runtime.requests.client import OnPeer, OutageReason
from dynamo.runtime.requests.client_connection import ClientConnection, StreamOwner
from dynamo.runtime.requests.context import Context
from dynamo.runtime.requests.stream import REQUEST_ID

OnInstances = Callable[[list[EndpointRecord], list[int]], None]
"""(new and changed records, removed ids), called on the loop."""

_decode = record_decoder(EndpointRecord)
_AVOIDED = (CannotConnect, ConnectionTimeout, Disconnected, EngineShutdown)
log = logging.getLogger(__name__)


class Client:
    """Follows the instances of ``namespace/component/endpoint``. Created by ``Endpoint.client()``.

    It opens discovery at once in a running loop, else when it is first awaited. Awaiting it returns
    it with the existing instances; each call awaits it first. A failure is raised there.

    An instance is *inhibited* while its worker is silent or unreachable (:class:`Peer`), for
    ``DYN_RUNTIME_INHIBITED_DURATION_SECS`` after it responded that its engine is unavailable, and
    while its record says that it is unhealthy. :meth:`random` and :meth:`round_robin` avoid it
    while there are others, and so do routers that subscribe with :meth:`on_inhibited`. With all
    instances inhibited they are tried all the same.

    ``can_move`` returns whether anything else can take the requests of a silent instance now, which
    loses them then: another instance, unless a router with fewer workers or a fallback replaces it.

    ``start`` opens ``discovery``; ``on_end`` is called with :meth:`close` when the client closes.
    """

    def __init__(
        self,
        path: str,
        discovery: Discovery,
        requests: RequestClient,
        availability: Availability,
        tasks: Tasks,
        start: Callable[[], Awaitable[None]],
        on_end: Callable[[Callable[[], None]], None],
    ) -> None:
        self.path = path
        self.can_move: Callable[[], bool] = self._has_answering
        self._discovery = discovery
        self._requests = requests
        self._tasks = tasks
        self._start = start
        self._on_end = on_end
        self._instances: dict[int, LiveInstance] = {}
        self._ids: dict[str, int] = {}
        self.availability = availability
        self.availability.listeners.append(self._on_outage)
        self._listeners: list[OnInstances] = []
        self._changed = asyncio.Event()
        self._turn = 0
        self._watch: Watch | None = None
        self._is_ready = self._closed = False
        self._failure: Exception | None = None
        self._opening: asyncio.Task[None] | None = None
        if running_loop() is not None:
            self._begin()

    def _begin(self) -> asyncio.Task[None]:
        if self._opening is None:
            name = f"client of {self.path}"
            self._opening = self._tasks.spawn(self._open(), name=name)
        return self._opening

    def __await__(self) -> Generator[Any, None, Client]:
        return self._opened().__await__()

    async def _opened(self) -> Client:
        # wait() does not cancel what it waits for: other callers share the task.
        await asyncio.wait((self._begin(),))
        if self._failure is not None:
            raise self._failure
        if not self._is_ready:
            raise Unavailable(f"the client of {self.path} was closed before it was ready")
        return self

    async def _open(self) -> None:
        """Wait until discovery has reported the existing instances."""
        try:
            await self._start()
            if not self._closed:
                self._watch = self._discovery.watch(f"{INSTANCES}{self.path}/", self._on_key)
                await self._watch.ready()
                self._is_ready = True
        except Exception as error:  # noqa: BLE001 - raised for each caller
            self._failure = error

    def close(self) -> None:
        """Stop following; streams in flight continue."""
        self._closed = True
        self._on_end(self.close)
        if self._watch is not None:
            self._watch.close()
        self._listeners.clear()
        self.availability.close()
        for instance in self._instances.values():
            instance.unfollow(self._requests)

    def instance_ids(self) -> list[int]:
        """Return the ids of all live instances."""
        return list(self._instances)

    def instances(self) -> list[Instance]:
        """Return a description of every live instance."""
        return [
            Instance(instance.record, instance.address, self.path)
            for instance in self._instances.values()
        ]

    def records(self) -> list[EndpointRecord]:
        """Return the discovery records of all live instances."""
        return [instance.record for instance in self._instances.values()]

    def is_inhibited(self, instance_id: int) -> bool:
        """Return whether the instance is avoided."""
        return instance_id in self.availability

    def is_silent(self, instance_id: int) -> bool:
        """Return whether the worker hangs: to try it costs seconds."""
        return self.availability.is_silent(instance_id)

    def outages(self) -> dict[int, Outage]:
        """Return why each avoided instance is avoided."""
        return self.availability.outages()

    async def wait_for_instances(self) -> list[int]:
        """Wait for the first instance; return all ids."""
        if not self._is_ready:
            await self
        while not self._instances:
            self._changed.clear()
            await self._changed.wait()
        return self.instance_ids()

    async def wait_for_instance_by_runtime_data(
        self, key: str, value: str, timeout_s: float | None = None
    ) -> int:
        """Wait for one live instance whose model card has ``runtime_data[key] == value``; return
        its id. Raises TimeoutError, also while several instances match."""
        return (await self._by_runtime_data(key, value, None, timeout_s))[0]

    async def wait_for_instances_by_runtime_data(
        self, key: str, value: str, min_count: int, timeout_s: float | None = None
    ) -> list[int]:
        """As :meth:`wait_for_instance_by_runtime_data`, for at least ``min_count`` instances."""
        return await self._by_runtime_data(key, value, min_count, timeout_s)

    def on_change(self, callback: OnInstances) -> None:
        """Call ``callback`` for the live instances (if any) and for every change."""
        self._listeners.append(callback)
        if self._instances:
            self._notify(callback, self.records(), [])

    def on_inhibited(self, callback: OnInhibited) -> None:
        """Call ``callback`` for each inhibited instance, now and later, and when that ends."""
        self.availability.listeners.append(callback)
        for instance_id in self.outages():
            callback(instance_id, True)

    def open(
        self,
        instance_id: int,
        payload: bytes,
        sink: StreamSink,
        headers: dict[str, str] | None = None,
        context: Context | None = None,
    ) -> ClientStream:
        """Send an encoded request to one instance; never blocks. Failures go to ``sink``.

        Raises InstanceGone for an instance that discovery does not report.
        """
        instance = self._instances.get(instance_id)
        if instance is None:
            raise InstanceGone(
                f"Unavailable: instance_id={instance_id} not found for endpoint {self.path}"
            )
        connection = instance.connection
        if connection is None or connection.closed:
            connection = instance.connection = self._requests.connection(instance.address)
        return connection.open(self.path, headers or {}, payload, sink, context, instance)

    async def generate(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> Responses:
        """Call any instance, as :meth:`random`."""
        return await self.random(request, annotated, context)

    async def random(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> Responses:
        """Call any instance. Raises NoInstances."""
        if not self._is_ready:
            await self
        return self._call(random.choice(self._usable()), request, annotated, context)

    async def round_robin(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> Responses:
        """Call the instances in turn. Raises NoInstances."""
        if not self._is_ready:
            await self
        usable = self._usable()
        self._turn += 1
        return self._call(usable[self._turn % len(usable)], request, annotated, context)

    async def device_aware_weighted(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> Responses:
        """Call any instance, as :meth:`random`: the workers of one box have equal devices."""
        return await self.random(request, annotated, context)

    async def direct(
        self,
        request: Any,
        instance_id: int,
        annotated: bool = True,
        context: Context | None = None,
    ) -> Responses:
        """Call this instance. Raises WorkerUnavailable."""
        if not self._is_ready:
            await self
        return self._call(instance_id, request, annotated, context)

    def inhibit(self, instance_id: int, text: str = "inhibited by its caller") -> None:
        """Avoid the instance for a while; ignore one that is not live."""
        if instance_id in self._instances:
            self.availability.begin(instance_id, "answer", "shutting_down", text)

    def _has_answering(self) -> bool:
        return len(self._instances) > len(self.availability)

    def _usable(self) -> list[int]:
        if not self._instances:
            raise NoInstances(f"Unavailable: No workers available for endpoint {self.path}")
        usable = list(filterfalse(self.is_inhibited, self._instances))
        # All are avoided, some perhaps no longer with reason. One that hangs costs seconds to try.
        return usable or list(filterfalse(self.is_silent, self._instances)) or self.instance_ids()

    def _call(
        self, instance_id: int, request: Any, annotated: bool, context: Context | None
    ) -> Responses:
        headers: dict[str, str] = {}
        if context is not None:
            headers = {key: str(value) for key, value in context.metadata.items()}
        payload = codec.encode(request)
        if context is not None and context.is_stopped() and not context.is_killed():
            # The handler receives the request and its stop, as it would a moment later.
            headers[REQUEST_ID] = context.id()
            self.open(instance_id, payload, _IgnoringSink(), headers).stop()
            return NoResponses()
        stream = ResponseStream()
        stream.attach(self.open(instance_id, payload, stream.sink, headers, context))
        return Responses(stream, annotated, context)

    async def _by_runtime_data(
        self, key: str, value: str, min_count: int | None, timeout_s: float | None
    ) -> list[int]:
        if not self._is_ready:
            await self
        cards = RuntimeDataWatch(self._discovery, self.path, self._instances)
        self._listeners.append(cards.on_instances)
        try:
            async with cards:
                return await cards.wait(key, value, min_count, timeout_s)
        finally:
            if cards.on_instances in self._listeners:  # close() removes it, too
                self._listeners.remove(cards.on_instances)

    def _on_key(self, event: KeyEvent) -> None:
        if event.value is None:
            instance_id = self._ids.pop(event.key, None)
            if instance_id is not None:
                self._remove(instance_id)
            return
        try:
            record = _decode(event.value)
            address = _address(record, event.key)
        except (InvalidArgument, ValueError) as error:
            log.warning("skipping the instance %s: %s", event.key, error)
            return
        self._ids[event.key] = record.instance_id
        instance = self._instances.get(record.instance_id)
        # Another address is another listener: connection and outages of the old one do not count.
        if instance is not None and instance.address != address:
            self._remove(record.instance_id)
            instance = None
        if instance is None:
            instance = self._instances[record.instance_id] = LiveInstance(record, address, self)
        instance.record = record
        # Written again: an engine that reported itself unavailable has registered again.
        self.availability.end(record.instance_id, "answer")
        self._changed.set()
        self._notify_all([record], [])
        # After the notice: a worker that is out already is reported as inhibited from within.
        instance.follow(self._requests)
        self._apply_health(record)

    def _remove(self, instance_id: int) -> None:
        instance = self._instances.pop(instance_id, None)
        if instance is None:
            return
        # In this order: a router must not take the end of the inhibition for a recovery.
        self._notify_all([], [instance_id])
        self.availability.forget(instance_id)
        instance.unfollow(self._requests)
        self._requests.release(instance.address)

    def _apply_health(self, record: EndpointRecord) -> None:
        instance_id = record.instance_id
        if record.unhealthy:
            self.availability.begin(instance_id, "record", "unhealthy", record.unhealthy)
        else:
            self.availability.end(instance_id, "record")
        if len(self.availability):  # a stalled instance is out; this one may take its requests
            self._move_stalled()

    def _on_outage(self, instance_id: int, out: bool) -> None:
        if not out:  # later: routers get the notice of the instance first
            asyncio.get_running_loop().call_soon(self._move_stalled)

    def _move_stalled(self) -> None:
        """Move the requests of engines that have stopped computing, as soon as there are others."""
        for instance in tuple(self._instances.values()):
            if instance.record.stalled is True:
                instance.move_streams()

    def _notify_all(self, added: list[EndpointRecord], removed: list[int]) -> None:
        for callback in tuple(self._listeners):
            self._notify(callback, added, removed)

    def _notify(
        self, callback: OnInstances, added: list[EndpointRecord], removed: list[int]
    ) -> None:
        try:
            callback(added, removed)
        except Exception:
            log.exception("a listener of %s failed", self.path)


class _IgnoringSink:
    """The sink of a response without a reader."""

    def on_data(self, payload: bytes) -> None:
        """Ignore the item."""

    def on_end(self) -> None:
        """Do nothing."""

    def on_error(self, error: DynamoError) -> None:
        """Ignore the error."""


class LiveInstance(StreamOwner):
    """One live instance, and the last connection used for it; the owner of its streams."""

    __slots__ = ("_client", "_on_peer", "address", "connection", "record")

    def __init__(self, record: EndpointRecord, address: str, client: Client) -> None:
        self.record = record
        self.address = address
        self.connection: ClientConnection | None = None
        self._client = client
        self._on_peer: OnPeer | None = None

    def follow(self, requests: RequestClient) -> None:
        """Take the instance out of routing while its worker does not answer. Idempotent."""
        if self._on_peer is None:
            self._on_peer = self._peer_changed
            requests.follow(self.address, self._on_peer)

    def unfollow(self, requests: RequestClient) -> None:
        """Undo :meth:`follow`. Idempotent."""
        on_peer, self._on_peer = self._on_peer, None
        if on_peer is not None:
            requests.unfollow(self.address, on_peer)

    def failed(self, error: DynamoError) -> None:
        """Avoid an instance whose worker responds that its engine is unavailable."""
        if isinstance(error, _AVOIDED) and self._is_live():
            instance_id = self.record.instance_id
            reason: OutageReason = (
                "shutting_down" if isinstance(error, EngineShutdown) else "unreachable"
            )
            self._client.availability.begin(instance_id, "answer", reason, error.message)

    def may_move(self) -> bool:
        """Return whether its requests can be served elsewhere now."""
        return self._client.can_move()

    def move_streams(self) -> None:
        """Fail the requests of an engine that computes nothing, if another instance takes them."""
        connection = self.connection
        if connection is None:
            return
        text = f"the worker at {self.address} computes nothing: {self.record.unhealthy}"
        for stream in tuple(connection.streams.values()):
            if stream.owner is self and self.may_move():
                stream.give_up(WorkerSilent(text))

    def _is_live(self) -> bool:
        return self._client._instances.get(self.record.instance_id) is self

    def _peer_changed(self, reason: OutageReason | None, text: str) -> None:
        instance_id, availability = self.record.instance_id, self._client.availability
        if reason is None:
            availability.end(instance_id, "connection")
        else:
            availability.begin(instance_id, "connection", reason, text)


def _address(record: EndpointRecord, key: str) -> str:
    """Return the address in the record of ``key``. InvalidArgument or ValueError: it is bad."""
    path = record.namespace, record.component, record.endpoint
    if key != INSTANCES + instance_key(*path, record.instance_id):
        raise ValueError(f"it is the record of instance {record.instance_id:x} of {'/'.join(path)}")
    for kind in ("uds", "tcp"):
        if kind in record.transport:
            address = f"{kind}:{record.transport[kind]}"
            parse_address(address)
            return address
    raise ValueError(f"unknown transport {record.transport}")
