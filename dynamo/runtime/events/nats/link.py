"""The connection to NATS: messages of subjects, in order, and a new connection after an outage."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import nats
import nats.errors

from dynamo.config.runtime import NatsSettings
from dynamo.errors import ConfigError
from dynamo.http.tls import FileWatch
from dynamo.observability.logs import counted
from dynamo.runtime.process.tasks import Tasks

OnMessage = Callable[[bytes], None]
HIGH_WATER_MESSAGES = 100_000
HIGH_WATER_BYTES = 64 * 1024 * 1024
MESSAGES_PER_TURN = 256
CONNECT_TIMEOUT_S = 3.0
PING_S = 2.0
PING_TIMEOUT_S = 4.0
RETRY_S = 0.25
CLOSE_TIMEOUT_S = 1.0
_FAILURES = (nats.errors.Error, OSError, TimeoutError)
log = logging.getLogger(__name__)


class NatsLink:
    """Sends without waiting and delivers to callbacks. Use it on the loop's thread.

    ``connected`` counts connections; ``lost`` counts messages dropped on either side because a
    queue was full. Messages sent during an outage are queued, up to the high-water marks.

    A connection that breaks or does not answer a ping is replaced by a new one with the same
    subscriptions. The library's own reconnection first waits for the dead socket to drain, which
    takes a quarter of an hour on a silently broken link.
    """

    def __init__(self, settings: NatsSettings) -> None:
        self.connected = 0
        self.lost = 0
        self._settings = settings
        self._options = _options(settings)
        paths = (settings.ca, settings.client_cert, settings.client_key)
        files = [path for path in paths if path and "tls" in self._options]
        self._certificates = FileWatch(files, self._renew_certificates)
        self._servers = [server.strip() for server in settings.servers.split(",") if server.strip()]
        self._shown = re.sub(r"//[^/@]*@", "//", settings.servers)  # without a password
        self._tasks = Tasks("nats")
        self._queue: deque[tuple[str, bytes]] = deque()
        self._queued_bytes = 0
        self._more = asyncio.Event()
        self._wanted: dict[str, OnMessage] = {}
        self._changed = asyncio.Event()
        self._client: Any = None
        self._delivered = 0

    async def start(self) -> None:
        """Connect; tries for ``DYN_NATS_START_TIMEOUT`` seconds. Raises ConfigError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.start_timeout_s
        connection: tuple[Any, asyncio.Event] | None = None
        warned = False
        for server in self._servers:
            _check(server)
        while connection is None:
            try:
                connection = await self._connect()
            except _FAILURES as error:
                refused = "authorization" in _text(error).lower()
                if refused or loop.time() + RETRY_S >= deadline:
                    raise ConfigError(
                        f"cannot use NATS at {self._shown}: {_text(error)}; start it, "
                        "or set NATS_SERVER and NATS_AUTH_*, or choose --event-plane zmq"
                    ) from error
                if not warned:
                    log.warning("waiting for NATS at %s: %s", self._shown, _text(error))
                    warned = True
                await asyncio.sleep(RETRY_S)
        self._tasks.spawn(self._run(connection), name="connection")

    async def close(self) -> None:
        """Send what is queued, if NATS accepts it in time, and close. Idempotent."""
        client = self._client
        if client is not None and self._queue:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._empty(client)
                    await client.flush()
            except _FAILURES as error:
                log.debug("queued events are lost at close: %s", _text(error))
        await self._tasks.close()

    def send(self, subject: str, data: bytes) -> bool:
        """Queue one message. Return False if the queue is full and the message is lost."""
        full = len(self._queue) >= HIGH_WATER_MESSAGES
        if full or self._queued_bytes + len(data) > HIGH_WATER_BYTES:
            self.lost += 1
            return False
        self._queue.append((subject, data))
        self._queued_bytes += len(data)
        self._more.set()
        return True

    def subscribe(self, subject: str, on_message: OnMessage) -> None:
        """Deliver messages of ``subject`` to ``on_message`` from the next loop turns on."""
        self._wanted[subject] = on_message
        self._changed.set()

    def unsubscribe(self, subject: str) -> None:
        """Reverse :meth:`subscribe`; no message is delivered after this."""
        self._wanted.pop(subject, None)
        self._changed.set()

    async def _run(self, connection: tuple[Any, asyncio.Event] | None) -> None:
        warned = False
        while True:
            if connection is not None:
                warned = False
                await self._session(*connection)
                connection = None
            try:
                connection = await self._connect()
            except _FAILURES as error:
                if not warned:
                    log.warning("NATS unavailable: %s", _text(error))
                    warned = True
                await asyncio.sleep(RETRY_S)
                self._certificates.check()

    async def _connect(self) -> tuple[Any, asyncio.Event]:
        """Return a connection, and an event that is set when the server ends it."""
        client = nats.NATS()
        ended = asyncio.Event()

        async def on_end() -> None:
            ended.set()

        async def on_error(error: Exception) -> None:
            if isinstance(error, nats.errors.SlowConsumerError):
                self._slow(error)
            else:
                log.debug("nats: %s", _text(error))

        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await client.connect(
                    servers=self._servers,
                    allow_reconnect=False,
                    connect_timeout=CONNECT_TIMEOUT_S,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=RETRY_S,
                    error_cb=on_error,
                    disconnected_cb=on_end,
                    **self._options,
                )
        except ImportError as error:
            raise ConfigError(
                f"NATS_AUTH_NKEY and _CREDENTIALS_FILE need nkeys: {error}"
            ) from error
        except BaseException:
            await self._discard(client)
            raise
        return client, ended

    async def _session(self, client: Any, ended: asyncio.Event) -> None:
        """Use the connection until it breaks."""
        self._client = client
        self.connected += 1
        if self.connected > 1:
            log.info("NATS available again")
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._subscribe(client))
                group.create_task(self._pump(client))
                group.create_task(self._ping(client))
                await ended.wait()
                raise ConnectionError("the server closed it")
        except* _FAILURES as errors:
            log.warning("the connection to NATS broke: %s", _text(errors.exceptions[0]))
        finally:
            self._client = None
            await self._discard(client)

    async def _subscribe(self, client: Any) -> None:
        subscriptions: dict[str, Any] = {}
        while True:
            self._changed.clear()
            for subject in [name for name in subscriptions if name not in self._wanted]:
                await subscriptions.pop(subject).unsubscribe()
            for subject in [name for name in self._wanted if name not in subscriptions]:
                subscriptions[subject] = await client.subscribe(
                    subject,
                    cb=self._callback(client, subject),
                    pending_msgs_limit=HIGH_WATER_MESSAGES,
                    pending_bytes_limit=HIGH_WATER_BYTES,
                )
            await self._changed.wait()

    def _callback(self, client: Any, subject: str) -> Callable[[Any], Any]:
        async def deliver(message: Any) -> None:
            on_message = self._wanted.get(subject)
            # Unsubscribed, or a late message of a replaced connection.
            if on_message is None or client is not self._client:
                return
            on_message(message.data)
            # The library calls back in a loop of its own that never yields while its queue is full.
            self._delivered += 1
            if self._delivered % MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)

        return deliver

    async def _pump(self, client: Any) -> None:
        while True:
            await self._empty(client)
            # Clear before the look: a message that is queued afterwards sets it again.
            self._more.clear()
            if not self._queue:
                await self._more.wait()

    async def _empty(self, client: Any) -> None:
        while self._queue:
            subject, data = self._queue.popleft()
            self._queued_bytes -= len(data)
            try:
                await client.publish(subject, data)
            except nats.errors.MaxPayloadError:
                self.lost += 1
                log.warning(
                    "dropped an event of %d bytes for %s: it exceeds max_payload of NATS",
                    len(data),
                    subject,
                )

    async def _ping(self, client: Any) -> None:
        while True:
            await asyncio.sleep(PING_S)
            self._certificates.check()
            # flush() sends a ping of NATS and waits for its pong.
            await client.flush(timeout=PING_TIMEOUT_S)

    def _renew_certificates(self) -> None:
        """Use renewed files for the next connection. Raises ConfigError."""
        self._options["tls"] = _tls(self._settings)

    async def _discard(self, client: Any) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await client.close()
        except _FAILURES as error:
            log.debug("nats: %s", _text(error))

    def _slow(self, error: Any) -> None:
        self.lost += 1
        # A power of two: a slow reader must not flood the log.
        if self.lost & (self.lost - 1) == 0:
            log.warning(
                "%s lost, this process reads too slowly: %s",
                counted(self.lost, "event"),
                _text(error),
            )


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _check(server: str) -> None:
    """Raise ConfigError for an invalid address."""
    try:
        parts = urlsplit(server if "://" in server else f"nats://{server}")
        usable = bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        without_user = server.rsplit("@", 1)[-1]  # without a password
        raise ConfigError(f"NATS_SERVER must be like nats://host:4222, got {without_user!r}")


def _options(settings: NatsSettings) -> dict[str, Any]:
    """Return the settings as options of the library. Raises ConfigError."""
    options = {
        "user": settings.username,
        "password": settings.password,
        "token": settings.token,
        "nkeys_seed_str": settings.nkey,
        "user_credentials": settings.credentials_file,
    }
    chosen: dict[str, Any] = {name: value for name, value in options.items() if value}
    if settings.ca or settings.client_cert or settings.insecure or "tls://" in settings.servers:
        chosen["tls"] = _tls(settings)
    return chosen


def _tls(settings: NatsSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ca)
        if settings.client_cert is not None:
            context.load_cert_chain(settings.client_cert, settings.client_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"NATS_TLS_*: {error}") from error
    if settings.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
