"""The caller's view of one endpoint: who serves it now, and how to call one of them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dynamo.errors import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoError,
    EngineShutdown,
    InstanceGone,
    InvalidArgument,
    NoInstances,
)
from dynamo.protocols import codec
from dynamo.protocols.control import EndpointRecord, instance_key, record_decoder
from dynamo.runtime.annotated import Responses
from dynamo.runtime.context import Context
from dynamo.runtime.discovery import KeyEvent
from dynamo.runtime.requests import ClientStream, ResponseStream, StreamSink
from dynamo.runtime.requests.address import parse

if TYPE_CHECKING:
    from dynamo.runtime.distributed import DistributedRuntime

__all__ = ["Client", "OnInhibited", "OnInstances"]

OnInhibited = Callable[[int, bool], None]
"""(instance id, whether it is avoided from now on, or no longer)."""

OnInstances = Callable[[list[EndpointRecord], list[int]], None]
"""(records that came or changed, ids that went), called on the loop."""

_decode = record_decoder(EndpointRecord)
_AVOIDED = (CannotConnect, ConnectionTimeout, Disconnected, EngineShutdown)
log = logging.getLogger(__name__)


class Client:
    """Follows the instances of ``namespace/component/endpoint``. Made by ``Endpoint.client()``.

    An instance whose connection failed or broke (a death is often seen there first), or whose
    engine shuts down, is *inhibited* for ``DYN_RUNTIME_INHIBITED_DURATION_SECS`` or until discovery
    tells of it anew: :meth:`random` and :meth:`round_robin` avoid it while there are others, and
    so do routers that ask for :meth:`on_inhibited`. Spec 8.2.
    """

    def __init__(self, runtime: DistributedRuntime, path: str) -> None:
        self.path = path
        self._runtime = runtime
        self._requests = runtime.requests
        self._records: dict[int, EndpointRecord] = {}
        self._addresses: dict[int, str] = {}
        self._ids: dict[str, int] = {}
        self._inhibited: dict[int, asyncio.TimerHandle] = {}
        self._listeners: list[OnInstances] = []
        self._on_inhibited: list[OnInhibited] = []
        self._changed = asyncio.Event()
        self._turn = 0
        self._loop = asyncio.get_running_loop()
        self._watch = runtime.discovery.watch(f"v1/instances/{path}/", self._on_key)

    async def ready(self) -> None:
        """Wait until the instances that exist already are known."""
        await self._watch.ready()

    def close(self) -> None:
        """Stop following; streams in flight go on."""
        self._watch.close()
        self._listeners.clear()
        self._on_inhibited.clear()
        for instance_id in tuple(self._inhibited):
            self._relent(instance_id)

    def instance_ids(self) -> list[int]:
        """The ids of all live instances."""
        return list(self._records)

    def instances(self) -> list[EndpointRecord]:
        """The records of all live instances."""
        return list(self._records.values())

    def is_inhibited(self, instance_id: int) -> bool:
        """Whether the instance is avoided."""
        return instance_id in self._inhibited

    async def wait_for_instances(self) -> list[int]:
        """The ids as soon as there is one."""
        while not self._records:
            self._changed.clear()
            await self._changed.wait()
        return self.instance_ids()

    def on_change(self, callback: OnInstances) -> None:
        """Call ``callback`` for the instances known by now (if any) and for every change."""
        self._listeners.append(callback)
        if self._records:
            self._tell(callback, self.instances(), [])

    def on_inhibited(self, callback: OnInhibited) -> None:
        """Call ``callback`` when an instance is inhibited and when that ends."""
        self._on_inhibited.append(callback)

    def open(
        self,
        instance_id: int,
        payload: bytes,
        sink: StreamSink,
        headers: dict[str, str] | None = None,
        context: Context | None = None,
    ) -> ClientStream:
        """Send an encoded request to one instance; never blocks. Failures go to ``sink``.

        Raises InstanceGone if there is no such instance.
        """
        address = self._addresses.get(instance_id)
        if address is None:
            raise InstanceGone(
                f"Unavailable: instance_id={instance_id} not found for endpoint {self.path}"
            )
        guard = _Guard(self, instance_id, sink)
        return self._requests.open(address, self.path, headers or {}, payload, guard, context)

    async def generate(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> Responses:
        """The default way: :meth:`random`."""
        return await self.random(request, annotated, context)

    async def random(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> Responses:
        """Call any instance. Raises NoInstances."""
        return self._call(random.choice(self._usable()), request, annotated, context)

    async def round_robin(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> Responses:
        """Call the instances in turn. Raises NoInstances."""
        usable = self._usable()
        self._turn += 1
        return self._call(usable[self._turn % len(usable)], request, annotated, context)

    async def direct(
        self,
        request: Any,
        instance_id: int,
        annotated: bool = True,
        context: Context | None = None,
    ) -> Responses:
        """Call this instance. Raises WorkerUnavailable."""
        return self._call(instance_id, request, annotated, context)

    def inhibit(self, instance_id: int) -> None:
        """Avoid the instance for a while; nothing to do if it is gone."""
        if instance_id not in self._records:
            return
        before = self._inhibited.get(instance_id)
        duration_s = self._runtime.system.inhibited_duration_s
        self._inhibited[instance_id] = self._loop.call_later(duration_s, self._relent, instance_id)
        if before is not None:
            before.cancel()
            return
        for callback in tuple(self._on_inhibited):
            callback(instance_id, True)

    def _relent(self, instance_id: int) -> None:
        timer = self._inhibited.pop(instance_id, None)
        if timer is not None:
            timer.cancel()
            for callback in tuple(self._on_inhibited):
                callback(instance_id, False)

    def _usable(self) -> list[int]:
        if not self._records:
            raise NoInstances(f"Unavailable: No workers available for endpoint {self.path}")
        usable = [one for one in self._records if not self.is_inhibited(one)]
        return usable or self.instance_ids()

    def _call(
        self, instance_id: int, request: Any, annotated: bool, context: Context | None
    ) -> Responses:
        headers: dict[str, str] = {}
        if context is not None:
            headers = {key: str(value) for key, value in context.metadata.items()}
        stream = ResponseStream()
        payload = codec.encode(request)
        stream.attach(self.open(instance_id, payload, stream.sink, headers, context))
        return Responses(stream, annotated)

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
        before = self._addresses.get(record.instance_id)
        if before is not None and before != address:
            self._remove(record.instance_id)
        self._records[record.instance_id] = record
        self._addresses[record.instance_id] = address
        self._relent(record.instance_id)
        self._changed.set()
        self._tell_all([record], [])

    def _remove(self, instance_id: int) -> None:
        if self._records.pop(instance_id, None) is None:
            return
        address = self._addresses.pop(instance_id)
        self._tell_all([], [instance_id])
        self._relent(instance_id)  # afterwards: nobody shall think for a moment that it is well
        self._requests.release(address)

    def _tell_all(self, added: list[EndpointRecord], removed: list[int]) -> None:
        for callback in tuple(self._listeners):
            self._tell(callback, added, removed)

    def _tell(self, callback: OnInstances, added: list[EndpointRecord], removed: list[int]) -> None:
        try:
            callback(added, removed)
        except Exception:  # one listener must not rob the others
            log.exception("a listener of %s failed", self.path)


class _Guard:
    """Stands before the caller's sink to learn of lost connections; costs nothing per item."""

    __slots__ = ("_client", "_instance_id", "_sink", "on_data", "on_end")

    def __init__(self, client: Client, instance_id: int, sink: StreamSink) -> None:
        self._client = client
        self._instance_id = instance_id
        self._sink = sink
        self.on_data = sink.on_data
        self.on_end = sink.on_end

    def on_error(self, error: DynamoError) -> None:
        """Pass it on; a lost connection or an engine that shuts down inhibits the instance."""
        if isinstance(error, _AVOIDED):
            self._client.inhibit(self._instance_id)
        self._sink.on_error(error)


def _address(record: EndpointRecord, key: str) -> str:
    """Where the instance at ``key`` listens. InvalidArgument or ValueError: the record is bad."""
    path = record.namespace, record.component, record.endpoint
    if key != "v1/instances/" + instance_key(*path, record.instance_id):
        raise ValueError(f"it is the record of instance {record.instance_id:x} of {'/'.join(path)}")
    for kind in ("uds", "tcp"):
        if kind in record.transport:
            address = f"{kind}:{record.transport[kind]}"
            parse(address)
            return address
    raise ValueError(f"unknown transport {record.transport}")
