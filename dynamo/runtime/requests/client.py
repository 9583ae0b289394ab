"""The client of the request plane: one connection per address, responses pushed to sinks."""

from __future__ import annotations

import asyncio

from dynamo.config.option import from_env
from dynamo.config.requests import RequestPlaneSettings
from dynamo.errors import CannotConnect, ConnectTimeout, Disconnected, DynamoError
from dynamo.runtime.process.sockets import RequestAddress, parse_address
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests.client_connection import ClientConnection, ClientStream, StreamSink
from dynamo.runtime.requests.context import Context
from dynamo.runtime.requests.peer import OnPeer, Peer

__all__ = ["RequestClient"]


class RequestClient:
    """Opens streams on any number of workers. Use it on the thread of the loop.

    A worker that :meth:`follow` names is probed while it cannot be reached, at most every
    ``longest_pause_s``.
    """

    def __init__(
        self, settings: RequestPlaneSettings | None = None, longest_pause_s: float = 5.0
    ) -> None:
        self.settings = settings or from_env(RequestPlaneSettings)
        self._longest_pause_s = longest_pause_s
        self._connections: dict[str, ClientConnection] = {}
        self._peers: dict[str, Peer] = {}
        self._tasks = Tasks("request client")

    def __len__(self) -> int:
        """Return the number of streams in flight."""
        return sum(len(connection.streams) for connection in self._connections.values())

    def open(  # noqa: PLR0913 - the parts of one request
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
        """See :class:`ConnectionOwner`."""
        peer = self._peers.get(connection.address)
        if peer is not None:
            peer.silent(text)

    def answered(self, connection: ClientConnection) -> None:
        """See :class:`ConnectionOwner`."""
        peer = self._peers.get(connection.address)
        if peer is not None:
            peer.answered()

    def lost(self, connection: ClientConnection, error: DynamoError | None) -> None:
        """See :class:`ConnectionOwner`."""
        address = connection.address
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
                    await loop.create_connection(lambda: connection, target.host, target.port)
        except TimeoutError:
            text = f"no connection to {connection.address} within {timeout_s:g} s"
            connection.lose(ConnectTimeout(text))
        except (OSError, ValueError) as error:
            connection.lose(CannotConnect(f"cannot connect to {connection.address}: {error}"))
