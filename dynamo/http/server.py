"""The HTTP server: a listener, its connections, and one sweep a second over their deadlines."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from dynamo.http.access import Access
from dynamo.http.connection import TOO_MANY_CONNECTIONS, HttpConnection, WriteBatch
from dynamo.http.cors import Cors
from dynamo.http.errors import ErrorBodies, HttpStatusError
from dynamo.http.exchange import Exchange, ResponseHeads
from dynamo.http.head import Head, HeadReader, HttpLimits
from dynamo.http.tls_connection import TlsConnection

log = logging.getLogger(__name__)
_DECODES_PER_TURN = 8
_REPLIED_OVER_LIMIT = 256  # connections over the limit that get a 503; more are just closed
_RESERVED = 64  # connections over the limit that may call reserved paths
_OTHERS_SHARE = 8  # one of so many connections is for clients at other addresses
_CATCH_UP_S = 0.1
_IDLE_TURNS = 16  # of the loop without a new connection: enough to read and answer the last one
_EXAMINED = 32  # connections examined to find one that can be closed


def _never(_: object) -> bool:
    return False


class HttpServer:
    """Passes every request to ``handler``, which responds at once or later through the exchange.

    ``handler`` is a plain function, so that a request costs neither task nor queue. ``on_refused``
    is called with the status of each request that was refused before it reached a route. Pass
    ``write_batch`` to share one with the handler. Without ``access``, plain HTTP needs no key.
    ``error_bodies`` are those of APIs that have their own. ``clock`` is monotonic seconds as of the
    last sweep: exact enough for deadlines. ``bodies_bytes`` is the size of the unfinished bodies of
    all connections. Requests for paths that ``is_reserved``
    accepts, and those with an operator's key, are served above the connection limit as well.
    Without ``cors``, pages of other origins cannot read responses.
    """

    def __init__(
        self,
        handler: Callable[[Exchange], None],
        limits: HttpLimits | None = None,
        on_refused: Callable[[int], None] | None = None,
        write_batch: WriteBatch | None = None,
        access: Access | None = None,
        is_reserved: Callable[[str], bool] = _never,
        error_bodies: ErrorBodies | None = None,
        cors: Cors | None = None,
    ) -> None:
        self.error_bodies = error_bodies
        self.is_reserved = is_reserved
        self.limits = limits or HttpLimits()
        self._keys = access.keys if access is not None else None
        check: Callable[[Head], None] | None = None
        if access is not None and self._keys is not None:
            check = access.check_key
        uncertified: Callable[[Head], None] | None = access.check_uncertified if access else None
        self.cors = cors
        if cors is not None:
            check, uncertified = cors.unless_preflight(check), cors.unless_preflight(uncertified)
            handler = cors.before(handler)
        self.reader = HeadReader(self.limits, check)
        self._uncertified = HeadReader(self.limits, uncertified)
        self._check_access = check
        self._over_limit = HeadReader(self.limits, self._check_reserved)
        self._readers = (self.reader, self._uncertified, self._over_limit)
        self._shares = _ClientShares(self._is_new)
        self._tls = access.tls if access else None
        self._watches = access.watches() if access else ()
        self.heads = ResponseHeads()
        self.write_batch = write_batch or WriteBatch()
        self.clock = time.monotonic()
        self.draining = False
        self.bodies_bytes = 0
        self._undecoded: deque[HttpConnection | TlsConnection] = deque()
        self.handler = handler
        self._on_refused = on_refused
        self._connections: set[HttpConnection] = set()
        self._server: asyncio.Server | None = None
        self._inherited: socket.socket | None = None
        self._admitted = 0
        self._timer: asyncio.TimerHandle | None = None
        self._all_gone: asyncio.Event | None = None

    @property
    def connections(self) -> int:
        """The number of connected clients."""
        return len(self._connections)

    async def bind(
        self,
        host: str,
        port: int,
        names: Sequence[str] | None = None,
        remedy: str = "",
        listen_fd: int | None = None,
    ) -> tuple[str, int]:
        """Bind and return the address (port 0 binds a free one). Raises OSError.

        ``listen_fd`` is a bound socket that is used instead. The host ``::`` takes IPv4, too.

        ``names`` are the hosts that requests may name beside localhost, ``host`` and IP addresses;
        ``*`` allows all. Without names every host is allowed, except on a loopback address. With
        None, nothing is checked. ``remedy`` ends the error for other hosts.
        """
        loop = asyncio.get_running_loop()
        backlog = self.limits.backlog
        if listen_fd is None and host == "::":
            listen_fd = _bind_both_families(port)
        if listen_fd is None:
            self._server = await loop.create_server(
                self._connection, host, port, backlog=backlog, start_serving=False
            )
        else:
            self._inherited = socket.socket(fileno=listen_fd)
            self._server = await loop.create_server(
                self._connection,
                sock=self._inherited,
                backlog=backlog,
                start_serving=False,
            )
        for listener in self._server.sockets:
            _detect_lost_peers(listener, self.limits.stall_timeout_s)
        bound = [listener.getsockname() for listener in self._server.sockets]
        local = all(ipaddress.ip_address(address[0]).is_loopback for address in bound)
        if names is not None and "*" not in names and (names or local):
            for reader in self._readers:
                reader.serve_only((host, *names), remedy)
        return bound[0][0], bound[0][1]

    async def listen(self) -> None:
        """Accept connections at the bound address. Raises OSError."""
        assert self._server is not None, "bind() comes first"
        self._sweep()
        if self._inherited is not None:
            self._inherited.listen(self.limits.backlog)  # uvloop ignores that this fails
        await self._server.start_serving()

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Bind, listen and return the address. Raises OSError."""
        bound = await self.bind(host, port)
        await self.listen()
        return bound

    def drain(self) -> None:
        """Close each connection after its next response, which announces it.

        Idle connections stay open: a request that is already on its way gets a response.
        """
        self.draining = True
        for connection in self._connections:
            connection.closing = True

    async def catch_up(self) -> None:
        """Serve what has come already, also while the process was stopped; at most 0.1 s."""
        loop, turns = asyncio.get_running_loop(), 0
        until_s = loop.time() + _CATCH_UP_S
        while turns < _IDLE_TURNS and loop.time() < until_s:
            admitted = self._admitted
            await asyncio.sleep(0)
            turns = turns + 1 if self._admitted == admitted else 0

    async def gone(self, timeout_s: float) -> bool:
        """Wait until no connection is left; False after the timeout."""
        if self._connections:
            self._all_gone = asyncio.Event()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._all_gone.wait()
            except TimeoutError:
                return False
        return True

    def stop_accepting(self) -> None:
        """Accept no more connections; the present ones stay."""
        if self._server is not None:
            self._server.close()

    async def close(self, timeout_s: float = 1.0) -> None:
        """Stop listening, send written bytes for at most ``timeout_s``, then abort connections."""
        self.drain()
        for connection in list(self._connections):
            connection.close_when_idle()
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        if not await self.gone(timeout_s):
            for connection in list(self._connections):
                connection.abort()
            await self.gone(timeout_s)
        if self._timer is not None:
            self._timer.cancel()
        await server.wait_closed()

    # -- called by connections

    def admit(self, connection: HttpConnection) -> bool:
        """Register a connection; False above the limit.

        A connection over the share of its client, or over the limit, takes the place of one that
        has waited for a request for a while. Where there is none, it may call the reserved paths,
        once.
        """
        self._connections.add(connection)
        self._admitted += 1
        shares = self._shares
        if shares.add(connection, self.limits.connections):
            return True
        if shares.reserve(connection):
            # One request: ``closing`` ends the connection after its response.
            connection.reader, connection.closing = self._over_limit, True
            return True
        if len(self._connections) - len(shares) > _REPLIED_OVER_LIMIT:
            connection.abort()
        return False

    def forget(self, connection: HttpConnection) -> None:
        """Remove a closed connection."""
        self._connections.discard(connection)
        self._shares.remove(connection)
        if self._all_gone is not None and not self._connections:
            self._all_gone.set()

    def refused(self, status: int) -> None:
        """Count a request that was refused before it reached a route."""
        if self._on_refused is not None:
            self._on_refused(status)

    def advance_later(self, connection: HttpConnection) -> None:
        """Advance the connection in the next loop turn, after the others."""
        asyncio.get_running_loop().call_soon(connection.advance)

    def decode_later(self, connection: HttpConnection | TlsConnection) -> None:
        """Queue a connection with a handshake, or with more chunks than it may decode in a turn."""
        self._undecoded.append(connection)
        if len(self._undecoded) == 1:
            self._schedule_decoding()

    def _connection(self) -> asyncio.Protocol:
        """A connection for a client that has just been accepted."""
        connection = HttpConnection(self)
        if self._tls is None:
            return connection
        return TlsConnection(self._tls, connection, self._uncertified, self.decode_later)

    def _is_new(self, connection: HttpConnection) -> bool:
        """Whether a client connected a second or two ago: its request may be on its way."""
        limits = self.limits
        # The first deadline of a connection is its start and the timeout of a head.
        age_s = self.clock + limits.header_timeout_s - connection.deadline
        return 0 <= age_s < 2 * limits.sweep_s

    def _check_reserved(self, head: Head) -> None:
        if self._check_access is not None:
            self._check_access(head)
        operator = head.api_key is not None and head.api_key.operator
        if not operator and not self.is_reserved(head.path):
            raise HttpStatusError(503, TOO_MANY_CONNECTIONS, retry_after_s=1)

    def _schedule_decoding(self) -> None:
        asyncio.get_running_loop().call_soon(self._decode)

    def _decode(self) -> None:
        """Decode for a few milliseconds, however many connections are queued."""
        queue = self._undecoded
        served = [queue.popleft() for _ in range(min(len(queue), _DECODES_PER_TURN))]
        # A connection that queues itself again below schedules this for an empty queue only.
        if queue:
            self._schedule_decoding()
        for connection in served:
            connection.decode()

    def _sweep(self) -> None:
        before, now = self.clock, time.monotonic()
        self.clock = now
        late_s = now - before - self.limits.sweep_s
        if late_s > self.limits.sweep_s:
            # This process was stopped, or got no CPU: what clients have sent is not read yet.
            for connection in self._connections:
                connection.deadline += late_s
        self.heads.renew()
        # A list: a connection that closes leaves the set.
        due = [connection for connection in self._connections if connection.deadline <= now]
        for connection in due:
            connection.sweep()
        for watch in self._watches:
            if watch.check():
                for reader in self._readers:
                    reader.forget_heads()
                self._end_withdrawn()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.limits.sweep_s, self._sweep)

    def _check(self) -> None:
        self._shares._check(self._connections, self.limits.connections)

    def _end_withdrawn(self) -> None:
        """Close connections that still receive events with a key that is withdrawn by now.

        Answers to a POST continue: they end soon, and rotating keys must not cut them.
        """
        for connection in list(self._connections):
            exchange = connection.subscription
            key = None if exchange is None else exchange.api_key
            if key is not None and self._keys is not None and self._keys.is_withdrawn(key):
                log.info("closed a stream of the withdrawn key %s", key.name)
                connection.abort()


class _ClientShares:
    """Divides the connections among clients, so that one cannot lock out the others.

    A client is an IPv4 address or an IPv6 network of 64 bits. It may have all connections but one
    in eight. O(1) below the limits; at the limit O(clients).
    """

    def __init__(self, is_new: Callable[[HttpConnection], bool]) -> None:
        self._is_new = is_new
        self._clients: dict[str, dict[HttpConnection, None]] = {}
        self._client_of: dict[HttpConnection, str] = {}
        self._reserved: dict[HttpConnection, None] = {}

    def __len__(self) -> int:
        return len(self._client_of) + len(self._reserved)

    def add(self, connection: HttpConnection, limit: int) -> bool:
        """Count a connection, in the place of a waiting one where necessary; False: no place."""
        client = _client_of(connection.peer)
        own = self._clients.get(client, {})
        candidates = None
        if len(own) >= limit - limit // _OTHERS_SHARE:
            candidates = own
        elif len(self._client_of) >= limit:
            # At the limit the client with the most connections gives one up.
            candidates = max(self._clients.values(), key=len)
        if candidates is not None and not self._close_waiting(candidates, self._is_new):
            return False
        self._client_of[connection] = client
        self._clients.setdefault(client, {})[connection] = None
        return True

    def reserve(self, connection: HttpConnection) -> bool:
        """Count a connection in the reserve; False when that is full.

        Here new ones are refused: a client that connects again and again must not fill the reserve.
        """
        if len(self._reserved) >= _RESERVED and not self._close_waiting(self._reserved, _never):
            return False
        self._reserved[connection] = None
        return True

    def remove(self, connection: HttpConnection) -> None:
        """Stop counting a connection. Idempotent."""
        self._reserved.pop(connection, None)
        client = self._client_of.pop(connection, None)
        if client is not None:
            own = self._clients[client]
            del own[connection]
            if not own:
                del self._clients[client]

    def _check(self, connections: Collection[HttpConnection], limit: int) -> None:
        counted = [connection for own in self._clients.values() for connection in own]
        assert len(counted) == len(self._client_of) <= limit and all(self._clients.values())
        assert set(counted) == set(self._client_of) and len(self._reserved) <= _RESERVED
        assert {*counted, *self._reserved} <= set(connections)

    def _close_waiting(
        self, candidates: dict[HttpConnection, None], spares: Callable[[HttpConnection], bool]
    ) -> bool:
        """Close the waiting connection with the next deadline among the first of ``candidates``."""
        examined = list(itertools.islice(candidates, _EXAMINED))
        waiting = [
            connection for connection in examined if connection.waiting and not spares(connection)
        ]
        if not waiting:
            for connection in examined:  # the next call examines others
                candidates[connection] = candidates.pop(connection)
            return False
        chosen = min(waiting, key=lambda connection: connection.deadline)
        self.remove(chosen)
        chosen.close()
        return True


def _client_of(peer: str | None) -> str:
    """The client of an address: an IPv6 client chooses the lower 64 bits freely."""
    if peer is None or ":" not in peer:
        return peer or ""
    address = ipaddress.IPv6Address(peer)
    mapped = address.ipv4_mapped
    return address.packed[:8].hex() if mapped is None else str(mapped)


def _bind_both_families(port: int) -> int:
    """Return a socket bound to ``::`` that takes IPv4, too: asyncio makes its own IPv6 only."""
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(("::", port))
        return bound.detach()


def _detect_lost_peers(listener: socket.socket, timeout_s: float) -> None:
    """Close connections whose client has vanished without a FIN: lost power, an unplugged cable.

    Accepted sockets inherit the options (Linux). Sent bytes may go unacknowledged for
    ``timeout_s``; a connection that only waits for its answer is probed after 15 s.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1e3))
