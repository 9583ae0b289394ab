"""The client of the request plane: one connection per worker, and its reachability."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from dynamo.config.option import from_env
from dynamo.config.runtime import RequestPlaneSettings
from dynamo.errors import CannotConnect, ConnectTimeout, Disconnected, DynamoError
from dynamo.runtime.process.sockets import RequestAddress, parse_address
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests.client_connection import ClientConnection, ClientStream, StreamSink
from dynamo.runtime.requests.context import Context
from dynamo.runtime.requests.tls import RequestTls

OutageReason = Literal["silent", "unreachable", "shutting_down", "unhealthy"]
"""Why a worker is out of routing; the label of the metrics."""
OnPeer = Callable[[OutageReason | None, str], None]
"""(reason, description) when an outage begins or gets another reason, (None, "") at its end."""
_FIRST_PAUSE_S = 0.02
_DOUBLINGS = 12
log = logging.getLogger(__name__)


class Peer:
    """The worker at one address, and the clients that follow it.

    ``connect`` opens a connection unless there is one. The pauses between two probes double from
    0.02 s to ``longest_pause_s``; they start small again after that time without a failure.

    A circuit breaker that a probe closes again, not a request. A worker is out of routing while its
    connection is silent or lost. A silent connection stays open: the first frame on it ends the
    outage. After a lost one the worker is connected and pinged again, with growing pauses; its
    answer ends the outage. Responses of the worker, errors included, never count as failures.
    """

    def __init__(self, connect: Callable[[], object], longest_pause_s: float) -> None:
        self.reason: OutageReason | None = None
        self.text = ""
        self.listeners: list[OnPeer] = []
        self._connect = connect
        self._longest_pause_s = max(longest_pause_s, _FIRST_PAUSE_S)
        self._failures = 0
        self._answered_s = float("-inf")
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def silent(self, text: str) -> None:
        """Take the worker out of routing: its connection is open, but nothing arrives."""
        if self.reason is None:
            self._set("silent", text)

    def lost(self, text: str) -> None:
        """Take the worker out of routing, and probe it after a pause."""
        if self._loop.time() - self._answered_s > self._longest_pause_s and self.reason is None:
            self._failures = 0
        if self._timer is None:
            # Bounded: after a thousand failures the product would overflow a float.
            pause_s = _FIRST_PAUSE_S * 2 ** min(self._failures, _DOUBLINGS)
            self._failures += 1
            self._timer = self._loop.call_later(min(pause_s, self._longest_pause_s), self._probe)
        if self.reason != "silent":
            self._set("unreachable", text)  # last: a listener may leave, and end the probes

    def answered(self) -> None:
        """Return the worker to routing: it has sent a frame."""
        self._answered_s = self._loop.time()
        if self.reason is not None:
            self._set(None, "")

    def close(self) -> None:
        """Stop probing; listeners are not called again."""
        self.listeners.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _probe(self) -> None:
        self._timer = None
        if self.reason is not None:
            self._connect()

    def _set(self, reason: OutageReason | None, text: str) -> None:
        if (reason, text) == (self.reason, self.text):
            return
        self.reason, self.text = reason, text
        for listener in tuple(self.listeners):
            try:
                listener(reason, text)
            except Exception:  # the other clients must be notified
                log.exception("a client of a worker failed")


class RequestClient:
    """Opens streams on any number of workers. Use it on the thread of the loop.

    A worker that :meth:`follow` names is probed while it cannot be reached, at most every
    ``longest_pause_s``.
    """

    def __init__(
        self,
        settings: RequestPlaneSettings | None = None,
        longest_pause_s: float = 5.0,
        tls: RequestTls | None = None,
    ) -> None:
        self._tls = tls or RequestTls()
        self.settings = settings or from_env(RequestPlaneSettings)
        self._longest_pause_s = longest_pause_s
        self._connections: dict[str, ClientConnection] = {}
        self._peers: dict[str, Peer] = {}
        self._tasks = Tasks("request client")

    def __len__(self) -> int:
        """Return the number of streams in flight."""
        return sum(len(connection.streams) for connection in self._connections.values())

    def open(
        self,
        address: str,
        endpoint: str,
        headers: dict[str, str],
        payload: bytes,
        sink: StreamSink,
        context: Context | None = None,
    ) -> ClientStream:
        """Send one request; connect in the background if need be. Never blocks.

        Items and failures reach ``sink`` in a later turn of the loop. ``context`` cancels the
        stream, and its id travels in the headers. InvalidArgument: ``address`` is malformed.
        """
        return self.connection(address).open(endpoint, headers, payload, sink, context)

    def connection(self, address: str) -> ClientConnection:
        """Return the connection to ``address``; a new one connects in the background.

        InvalidArgument: ``address`` is malformed.
        """
        connection = self._connections.get(address)
        return self._connect(address) if connection is None else connection

    def release(self, address: str) -> None:
        """Close the connection of a draining worker after its last stream."""
        connection = self._connections.get(address)
        if connection is not None:
            connection.close_when_idle()

    def follow(self, address: str, listener: OnPeer) -> None:
        """Call ``listener`` when the worker at ``address`` stops answering and when it answers."""
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(
                lambda: self.connection(address), self._longest_pause_s
            )
        peer.listeners.append(listener)
        if peer.reason is not None:
            listener(peer.reason, peer.text)

    def unfollow(self, address: str, listener: OnPeer) -> None:
        """Undo one :meth:`follow`; the last one ends the probes."""
        peer = self._peers[address]
        peer.listeners.remove(listener)
        if not peer.listeners:
            peer.close()
            del self._peers[address]

    def silent(self, connection: ClientConnection, text: str) -> None:
        """The connection is open, but the worker does not answer pings."""
        peer = self._peers.get(connection.address)
        if peer is not None:
            peer.silent(text)

    def answered(self, connection: ClientConnection) -> None:
        """A silent or probing connection has received a frame."""
        peer = self._peers.get(connection.address)
        if peer is not None:
            peer.answered()

    def lost(self, connection: ClientConnection, error: DynamoError | None) -> None:
        """The connection is closed; None: on purpose. Called before its streams fail."""
        address = connection.address
        # Lost before: the address may have a newer connection.
        if self._connections.get(address) is not connection:
            return
        del self._connections[address]
        peer = self._peers.get(address)
        if peer is not None and error is not None:
            peer.lost(error.message)

    async def close(self) -> None:
        """Fail what is in flight with Disconnected and close all connections. Idempotent."""
        for peer in self._peers.values():
            peer.close()
        await self._tasks.close()
        for connection in list(self._connections.values()):
            connection.lose(Disconnected("the request client was closed"), fault=False)

    def _connect(self, address: str) -> ClientConnection:
        target = parse_address(address)
        loop = asyncio.get_running_loop()
        connection = ClientConnection(self.settings, loop, address, self)
        self._tasks.spawn(self._dial(connection, target), name=f"connect {address}")
        self._connections[address] = connection
        peer = self._peers.get(address)
        if peer is not None and peer.reason is not None:
            connection.probe()
        return connection

    async def _dial(self, connection: ClientConnection, target: RequestAddress) -> None:
        loop, timeout_s = asyncio.get_running_loop(), self.settings.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                if target.path is not None:
                    await loop.create_unix_connection(lambda: connection, target.path)
                else:
                    await self._dial_tcp(connection, target)
        except TimeoutError:
            text = f"no connection to {connection.address} within {timeout_s:g} s"
            connection.lose(ConnectTimeout(text))
        except (OSError, ValueError) as error:
            connection.lose(CannotConnect(f"cannot connect to {connection.address}: {error}"))

    async def _dial_tcp(self, connection: ClientConnection, target: RequestAddress) -> None:
        loop, context = asyncio.get_running_loop(), self._tls.client
        host_port = target.host, target.port
        if context is None:
            await loop.create_connection(lambda: connection, *host_port)
            return
        name = self._tls.server_name or target.host
        await loop.create_connection(
            lambda: connection, *host_port, ssl=context, server_hostname=name
        )
