"""The server of the request plane: the listener, its connections and all endpoints of a process."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from dynamo.config.option import from_env
from dynamo.config.runtime import RequestPlaneSettings
from dynamo.errors import (
    CannotConnect,
    DynamoError,
    EngineShutdown,
    InvalidArgument,
    UnknownEndpoint,
    WorkerAtCapacity,
    WorkerLeaving,
)
from dynamo.runtime.process.sockets import RequestAddress, parse_address
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.requests.connection import FramedConnection
from dynamo.runtime.requests.frames import (
    KILL,
    OPEN,
    OVERSIZE,
    PAUSE,
    PING,
    PONG,
    RESUME,
    STOP,
    FrameError,
    pack,
    pack_error,
    parse_open,
)
from dynamo.runtime.requests.stream import (
    EndpointStats,
    PushHandler,
    ServedEndpoint,
    ServerStream,
    is_interrupt,
)
from dynamo.runtime.requests.tls import RequestTls

CLOSE_TIMEOUT_S = 2.0
SOCKET_CHECK_S = 1.0
log = logging.getLogger(__name__)


class ServerConnection(FramedConnection):
    """``streams`` maps numbers to streams in flight; ``waiting`` are those in ``drained()``."""

    def __init__(
        self,
        settings: RequestPlaneSettings,
        loop: asyncio.AbstractEventLoop,
        admit: Callable[[str], ServedEndpoint],
        connections: set[ServerConnection],
    ) -> None:
        super().__init__(settings, loop)
        self.streams: dict[int, ServerStream] = {}
        self.waiting: set[ServerStream] = set()
        self.lost: asyncio.Future[None] = loop.create_future()
        self._admit = admit
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Add this connection to the server's."""
        self._connections.add(self)
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        """Kill the streams of the client."""
        super().connection_lost(error)
        self._connections.discard(self)
        for stream in list(self.streams.values()):
            stream.cancel("kill")
        if not self.lost.done():
            self.lost.set_result(None)

    def resume_writing(self) -> None:
        """Wake the handlers that wait in ``drained()``."""
        super().resume_writing()
        waiting, self.waiting = self.waiting, set()
        for stream in waiting:
            stream.wake()

    def on_full(self) -> None:
        """Close the connection of a client that stopped reading while handlers keep sending."""
        cap = self.settings.hard_cap_bytes
        # Handlers that wait in drained() stop at the high-water mark; only others get this far.
        if self.unsent_bytes() > cap:
            self.fail(f"more than {cap} bytes are queued for a client that does not read")

    def on_frames(self, frames: list[tuple[int, int, bytes]]) -> None:
        """Open, stop, pause and kill streams."""
        for kind, number, payload in frames:
            if kind == OPEN:
                self._open(number, payload)
            elif kind in (STOP, KILL):
                stream = self.streams.get(number)
                if stream is not None:
                    stream.cancel("kill" if kind == KILL else "stop")
            elif kind in (PAUSE, RESUME):
                stream = self.streams.get(number)
                if stream is not None:
                    stream.pause(kind == PAUSE)
            elif kind == PING:
                self.write(pack(PONG, 0, payload))
            elif kind == OVERSIZE:
                self._refuse_size(number, payload)
            else:
                raise FrameError(f"a client may not send frame kind {kind}")

    def _open(self, number: int, body: bytes) -> None:
        if number in self.streams:
            raise FrameError(f"stream {number} is opened twice")
        name, headers, payload = parse_open(body)
        try:
            served = self._admit(name)
        except DynamoError as error:
            self.write(pack_error(number, error, self.settings.max_message_size_bytes))
            return
        served.stats.request_bytes.value += len(payload)
        stream = self.streams[number] = ServerStream(self, number, served, headers)
        try:
            served.handler(stream, payload)
        except BaseException as error:  # it becomes the stream's error
            stream.raised(error)
            if is_interrupt(error):
                raise

    def _refuse_size(self, number: int, size: bytes) -> None:
        limit = self.settings.max_message_size_bytes
        text = f"request of {size.decode()} bytes exceeds DYN_TCP_MAX_MESSAGE_SIZE={limit}"
        self.write(pack_error(number, InvalidArgument(text), limit))


class RequestServer:
    """Serves any number of endpoints on one UNIX or TCP socket, multiplexed.

    Order of calls: ``start``, ``register``, ``unregister``, ``drain``, ``close``. A UNIX socket
    whose file was removed is bound again within ``SOCKET_CHECK_S``.
    """

    def __init__(
        self, settings: RequestPlaneSettings | None = None, tls: RequestTls | None = None
    ) -> None:
        self.settings = settings or from_env(RequestPlaneSettings)
        self._tls = tls or RequestTls()
        self.draining = False
        self.engine_failure: type[DynamoError] | None = None
        self._listener: asyncio.AbstractServer | None = None
        self._port: socket.socket | None = None
        self._socket_path: tuple[Path, tuple[int, int]] | None = None
        self._socket_check: asyncio.TimerHandle | None = None
        self._unreachable = False
        self._tasks = Tasks("request server")
        self._connections: set[ServerConnection] = set()
        self._endpoints: dict[str, ServedEndpoint] = {}
        self._unregistered: list[ServedEndpoint] = []
        self._ended = asyncio.Event()
        self._inflight = 0

    @property
    def inflight(self) -> int:
        """The number of streams in flight on all endpoints."""
        return self._inflight

    async def start(self, address: str) -> str:
        """Listen; return the address with its actual port. CannotConnect: it is in use."""
        wanted = parse_address(address)
        if wanted.path is not None:
            await self._listen(wanted.path)
            return address
        sock = _listen_tcp(wanted)
        if self._tls.watch is not None:
            # A listener closes its socket: a second one keeps the port open for the next.
            self._port = sock.dup()
        await self._accept(sock)
        return str(wanted._replace(port=sock.getsockname()[1]))

    def renew_certificate(self) -> None:
        """Listen with the new certificate. Connections that wait to be accepted get it, too."""
        if self._listener is not None and self._port is not None and not self.draining:
            self._listener.close()
            port = self._port.dup()
            self._tasks.spawn(self._accept(port), name="listen with a new certificate")

    def register(
        self,
        endpoint: str,
        handler: PushHandler,
        *,
        stats: EndpointStats | None = None,
        graceful_shutdown: bool = True,
        on_engine_shutdown: Callable[[], None] | None = None,
    ) -> EndpointStats:
        """Serve ``endpoint`` ("ns/component/endpoint"). ValueError: it is served already.

        ``graceful_shutdown``: whether :meth:`drain` lets its streams finish or aborts them.
        ``on_engine_shutdown``: see :class:`ServedEndpoint`.
        """
        if endpoint in self._endpoints:
            raise ValueError(f"endpoint {endpoint} is already served by this process")
        stats = stats or EndpointStats()
        self._endpoints[endpoint] = ServedEndpoint(
            endpoint, handler, stats, graceful_shutdown, self._on_ended, on_engine_shutdown
        )
        return stats

    def unregister(self, endpoint: str) -> None:
        """Reject new requests with UnknownEndpoint; streams in flight continue. Idempotent."""
        served = self._endpoints.pop(endpoint, None)
        self._unregistered = [other for other in self._unregistered if other.active]
        if served is not None and served.active:
            # Kept while it has streams: a drain of the process waits for them, too.
            self._unregistered.append(served)

    def set_asleep(self, endpoint: str, asleep: bool) -> None:
        """While ``asleep``, reject new requests with WorkerLeaving; streams in flight continue."""
        served = self._endpoints.get(endpoint)
        if served is not None:
            served.asleep = asleep

    async def drain(self, timeout_s: float, endpoint: str | None = None) -> int:
        """Reject new requests, wait for those in flight; return the number of aborted streams.

        New requests get WorkerLeaving. The streams of endpoints registered with
        ``graceful_shutdown=False`` are aborted at once, the others after ``timeout_s``. With
        ``endpoint`` only that one is drained, unregistered or not.
        """
        draining = [
            served
            for served in (*self._endpoints.values(), *self._unregistered)
            if endpoint in (None, served.name)
        ]
        self.draining = self.draining or endpoint is None
        for served in draining:
            served.draining = True
        aborted = sum(self._abort_streams(served) for served in draining if not served.graceful)
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_ended(draining)
        except TimeoutError:
            aborted += sum(map(self._abort_streams, draining))
        return aborted

    async def all_ended(self, endpoint: str) -> None:
        """Wait until ``endpoint`` has no stream in flight."""
        served = self._endpoints.get(endpoint)
        await self._until_ended([] if served is None else [served])

    async def _until_ended(self, endpoints: Sequence[ServedEndpoint]) -> None:
        while any(served.active for served in endpoints):
            # One event for all endpoints: the end of a stream of another one wakes this, too.
            self._ended.clear()
            await self._ended.wait()

    def abort(self, endpoint: str) -> int:
        """End all streams of ``endpoint`` with EngineShutdown, reject new ones; return how many."""
        served = self._endpoints.get(endpoint)
        if served is None:
            return 0
        served.draining = True
        return self._abort_streams(served)

    def abort_all(self) -> None:
        """End all streams, with the ``engine_failure`` if there is one; reject new ones."""
        self.draining = True
        for served in (*self._endpoints.values(), *self._unregistered):
            self._abort_streams(served)

    async def close(self) -> None:
        """Stop listening, abort all streams, flush and close all connections. Idempotent."""
        self.draining = True
        if self._socket_check is not None:
            self._socket_check.cancel()
        # Before the listener: one of the tasks may be about to listen again.
        await self._tasks.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._port is not None:
            self._port.close()
        self._unlink()
        self.abort_all()
        connections = list(self._connections)
        for connection in connections:
            connection.close()
        if not connections:
            return
        _, stuck = await asyncio.wait(
            [connection.lost for connection in connections], timeout=CLOSE_TIMEOUT_S
        )
        for connection in connections:
            # Its client reads nothing: closing would wait for the written bytes for ever.
            if connection.lost in stuck:
                connection.abort()

    def _admit(self, endpoint: str) -> ServedEndpoint:
        served = self._endpoints.get(endpoint)
        if self.draining or (served is not None and served.draining):
            raise WorkerLeaving(f"the worker that served {endpoint} is shutting down")
        if served is None:
            raise UnknownEndpoint(f"Unknown endpoint: {endpoint}")
        if served.asleep:
            raise WorkerLeaving(f"the engine of the worker that served {endpoint} sleeps")
        if self._inflight >= self.settings.max_streams:
            raise WorkerAtCapacity("Server overloaded: worker at capacity")
        self._inflight += 1
        return served

    def _on_ended(self) -> None:
        self._inflight -= 1
        self._ended.set()

    def _connection(self) -> ServerConnection:
        loop = asyncio.get_running_loop()
        return ServerConnection(self.settings, loop, self._admit, self._connections)

    async def _accept(self, port: socket.socket) -> None:
        """Accept connections with the certificate of this moment."""
        loop = asyncio.get_running_loop()
        context = self._tls.server
        self._listener = await loop.create_server(self._connection, sock=port, ssl=context)

    async def _listen(self, path: str) -> None:
        loop = asyncio.get_running_loop()
        sock = _listen_unix(path)
        self._socket_path = Path(path), _identity(Path(path))
        self._listener = await loop.create_unix_server(self._connection, sock=sock)
        self._socket_check = loop.call_later(SOCKET_CHECK_S, self._check_socket)

    def _check_socket(self) -> None:
        assert self._socket_path is not None
        path, identity = self._socket_path
        try:
            if _identity(path) == identity:
                loop = asyncio.get_running_loop()
                self._socket_check = loop.call_later(SOCKET_CHECK_S, self._check_socket)
                return
        except OSError as error:
            log.debug("%s: %s", path, error)
        self._tasks.spawn(self._listen_again(str(path)), name="listen again")

    async def _listen_again(self, path: str) -> None:
        """Bind the removed socket again, retrying until it works. Connections stay open."""
        if self._listener is not None:
            self._listener.close()  # before binding: closing may unlink the path
        try:
            await self._listen(path)
        except CannotConnect as error:
            level = logging.DEBUG if self._unreachable else logging.ERROR
            log.log(level, "the request socket was removed, new clients cannot connect: %s", error)
            self._unreachable = True
            loop = asyncio.get_running_loop()
            self._socket_check = loop.call_later(SOCKET_CHECK_S, self._check_socket)
        else:
            self._unreachable = False
            log.warning("the request socket %s was removed, bound again", path)

    def _abort_streams(self, served: ServedEndpoint) -> int:
        streams = list(served.active)
        kind = self.engine_failure or EngineShutdown
        for stream in streams:
            stream.abort(kind(f"the worker that served {served.name} shut down"))
        return len(streams)

    def _unlink(self) -> None:
        if self._socket_path is None:
            return
        path, identity = self._socket_path
        self._socket_path = None
        try:
            if _identity(path) == identity:
                path.unlink()
        except FileNotFoundError:
            log.debug("%s was removed already", path)


def _listen_unix(path: str) -> socket.socket:
    """Bind a socket at ``path``; replace a socket file without a listener."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            sock.bind(path)
        except OSError as error:
            # The file of a killed worker stays behind and makes bind fail: only a probe can tell.
            if error.errno != errno.EADDRINUSE or _has_listener(path):
                raise
            Path(path).unlink()
            sock.bind(path)
        Path(path).chmod(0o600)
    except OSError as error:
        sock.close()
        raise CannotConnect(f"cannot listen on uds:{path}: {error}") from error
    sock.setblocking(False)
    return sock


def _identity(path: Path) -> tuple[int, int]:
    """Return the identity of a socket file: an inode number alone is reused at once."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def _has_listener(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


def _listen_tcp(address: RequestAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restart must not wait until connections of the old process leave TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address.host, address.port))
    except OSError as error:
        sock.close()
        raise CannotConnect(f"cannot listen on {address}: {error}") from error
    sock.setblocking(False)
    return sock
