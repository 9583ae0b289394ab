"""Calls to an etcd cluster: channels, choice of the member, credentials, translation of errors.

The messages and stubs are those of the ``aetcd`` package, the transport is ``grpc.aio``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import grpc
from aetcd import rpc

from dynamo.config.runtime import EtcdSettings
from dynamo.errors import ConfigError
from dynamo.runtime.process.tasks import Tasks

CALL_TIMEOUT_S = 3.0
PROBE_S = 3.0  # with the timeout, less than a lease lasts by default
OPS_PER_TXN = 32  # etcd takes 128, and 1.5 MiB in all
log = logging.getLogger(__name__)
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A listing of a large deployment exceeds gRPC's default of 4 MiB.
    ("grpc.max_receive_message_length", -1),
    # A replaced channel must not share the dead connection of its predecessor.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # http_proxy is for the web; etcd may even be on this machine
)


def endpoints(settings: EtcdSettings) -> list[str]:
    """Return the members of the cluster. ConfigError: a bad endpoint, or half of a credential."""
    members = [part.strip() for part in settings.endpoints.split(",") if part.strip()]
    if not members:
        raise ConfigError("ETCD_ENDPOINTS is empty; give host:port")
    if (settings.username is None) != (settings.password is None):
        raise ConfigError("ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD go together")
    if (settings.client_cert is None) != (settings.client_key is None):
        raise ConfigError("ETCD_AUTH_CLIENT_CERT and ETCD_AUTH_CLIENT_KEY go together")
    for endpoint in members:
        _target(endpoint)
    return members


def open_channel(endpoint: str, chosen: Any) -> Any:
    """Open a channel with :func:`credentials`; it connects on first use."""
    target = _target(endpoint)
    if chosen is None:
        return grpc.aio.insecure_channel(target, options=_OPTIONS)
    return grpc.aio.secure_channel(target, chosen, options=_OPTIONS)


def _target(endpoint: str) -> str:
    parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    try:
        port = parts.port or 2379
    except ValueError as error:
        raise ConfigError(f"ETCD_ENDPOINTS: {endpoint!r}: {error}") from error
    if parts.username is not None or parts.password is not None:
        raise ConfigError("ETCD_ENDPOINTS takes no user; set ETCD_AUTH_USERNAME and _PASSWORD")
    if not parts.hostname or parts.scheme not in ("", "http", "https"):
        raise ConfigError(f"ETCD_ENDPOINTS: {endpoint!r} is not host:port, http:// or https://")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port}"


def credentials(settings: EtcdSettings, members: Iterable[str]) -> Any:
    """Return TLS credentials if a file is set or an endpoint begins with https, else None."""
    files = (settings.ca, settings.client_key, settings.client_cert)
    if not any(files) and not any(member.startswith("https://") for member in members):
        return None
    try:
        ca, key, cert = (Path(file).read_bytes() if file else None for file in files)
    except OSError as error:
        raise ConfigError(f"ETCD_AUTH_*: {error}") from error
    return grpc.ssl_channel_credentials(ca, key, cert)


class Unreachable(Exception):
    """No answer, or no definite one: the cluster is unavailable or has no leader."""


class NoLease(Exception):
    """etcd has no such lease."""


class Compacted(Exception):
    """The revision to watch from was compacted, or the store is a new one: list again."""


class _Exists(Exception):
    """etcd has such a lease already."""


class Change(NamedTuple):
    """A key was written, or removed (``value`` None)."""

    key: str
    value: bytes | None


class Step(NamedTuple):
    """The changes that a watch received, up to ``revision``. A step without changes (revision 0)
    confirms the watch; the first one does.

    ``store`` is the cluster's id and its raft term: another id, or a lower term than before, means
    a new store at the old address.
    """

    revision: int
    changes: list[Change]
    store: tuple[int, int]


class Listing(NamedTuple):
    """The keys under a prefix at ``revision``."""

    revision: int
    keys: dict[str, bytes]


class EtcdLink:
    """One etcd cluster, through the member that answered last.

    ``breaks`` counts failures of the connection: while it does not change, no event was missed.
    All methods raise Unreachable, and ConfigError when etcd refuses the credentials.
    """

    def __init__(self, settings: EtcdSettings) -> None:
        self.breaks = 0
        self.endpoints = endpoints(settings)
        self._settings = settings
        self._credentials = credentials(settings, self.endpoints)
        self._channels: dict[str, Any] = {}
        self._current = 0
        self._token: str | None = None
        self._replaced: set[Any] = set()
        self._tasks = Tasks("etcd")

    async def close(self) -> None:
        """Close all connections; calls in flight must have ended."""
        await self._tasks.close()
        channels = (*self._channels.values(), *self._replaced)
        self._channels.clear()
        self._replaced.clear()
        for channel in channels:
            await channel.close()

    async def list(self, prefix: str) -> Listing:
        """Return all keys under ``prefix``, by a linearizable read."""
        first = prefix.encode()
        answer = await self._call(
            lambda channel: rpc.KVStub(channel).Range,
            rpc.RangeRequest(key=first or b"\0", range_end=_range_end(first)),
        )
        return Listing(answer.header.revision, {_name(kv): kv.value for kv in answer.kvs})

    async def exists(self, key: str) -> bool:
        """Return whether the key exists."""
        request = rpc.RangeRequest(key=key.encode(), count_only=True)
        answer = await self._call(lambda channel: rpc.KVStub(channel).Range, request)
        return bool(answer.count)

    async def write(self, values: Mapping[str, bytes | None], lease_id: int) -> None:
        """Put (or, with None, delete) keys. NoLease: the lease of the puts has ended."""
        operations = [_operation(key, value, lease_id) for key, value in values.items()]
        # Keys are independent of each other, so a write need not be atomic across transactions.
        for start in range(0, len(operations), OPS_PER_TXN):
            request = rpc.TxnRequest(success=operations[start : start + OPS_PER_TXN])
            await self._call(lambda channel: rpc.KVStub(channel).Txn, request)

    async def grant(self, lease_id: int, ttl_s: float) -> bool:
        """Grant the lease; return False if the id is taken. etcd counts whole seconds."""
        # Rounded up: -(-x // 1). A shorter lease than asked for could expire between two renewals.
        request = rpc.LeaseGrantRequest(ID=lease_id, TTL=max(1, -int(-ttl_s // 1)))
        try:
            await self._call(lambda channel: rpc.LeaseStub(channel).LeaseGrant, request)
        except _Exists:
            return False
        return True

    async def keep_alive(self, lease_id: int, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Extend the lease by its ttl from now. NoLease: it has ended."""

        def method(channel: Any) -> Any:
            async def once(request: Any, **options: Any) -> Any:
                # The method is a stream: use it for one request and one answer.
                call = rpc.LeaseStub(channel).LeaseKeepAlive(iter((request,)), **options)
                try:
                    answer = await call.read()
                finally:
                    call.cancel()
                if answer is grpc.aio.EOF:
                    raise Unreachable("etcd ended the stream without a response")
                return answer

            return once

        answer = await self._call(method, rpc.LeaseKeepAliveRequest(ID=lease_id), timeout_s)
        if answer.TTL <= 0:
            raise NoLease(f"lease {lease_id:x}")

    async def revoke(self, lease_id: int) -> None:
        """End the lease and its keys. NoLease: it has ended already."""
        request = rpc.LeaseRevokeRequest(ID=lease_id)
        await self._call(lambda channel: rpc.LeaseStub(channel).LeaseRevoke, request)

    async def watch(self, key: str, prefix: bool, after: int = 0) -> AsyncIterator[Step]:
        """Yield the changes after revision ``after`` (0: from now on), one step per transaction.

        The first step is empty and confirms the watch. Ends only by an error: Unreachable, or
        Compacted.
        """
        first = key.encode()
        request = rpc.WatchCreateRequest(
            key=first,
            range_end=_range_end(first) if prefix else b"",
            start_revision=after + 1 if after else 0,
        )
        # Remember both: other calls may move on to another member during this one.
        index = self._current
        channel = self._channel(index)
        try:
            call = rpc.WatchStub(channel).Watch(metadata=await self._metadata())
            try:
                await call.write(rpc.WatchRequest(create_request=request))
                while True:
                    yield self._step(await self._next(call, index, channel, key), after)
            finally:
                call.cancel()
        except grpc.aio.AioRpcError as error:
            raise self._broken(index, channel, error) from error
        except Unreachable:
            self._use_next_member(index, channel, silent=False)
            raise

    async def _next(self, call: Any, index: int, channel: Any, key: str) -> Any:
        """Return the next response of a watch. Probe the connection while the watch is silent."""
        # In a task of its own: to cancel the read would end the call.
        reading = self._tasks.spawn(_read(call), name="watch")
        while True:
            await asyncio.wait({reading}, timeout=PROBE_S)
            if reading.done():
                break
            # Another call failed on this channel: an event may have been lost with it.
            if index != self._current or self._channels.get(self.endpoints[index]) is not channel:
                raise Unreachable("the connection was replaced")
            await self.exists(key)
        if reading.cancelled():
            raise Unreachable("the connection was closed")
        answer = reading.result()
        if answer is grpc.aio.EOF:
            raise Unreachable("etcd ended the watch")
        if isinstance(answer, grpc.aio.AioRpcError):
            raise answer
        return answer

    def _step(self, answer: Any, after: int) -> Step:
        if answer.compact_revision:
            raise Compacted(f"all before revision {answer.compact_revision}")
        if answer.canceled:
            self._token = None
            raise Unreachable(f"the watch was cancelled: {answer.cancel_reason}")
        header, events = answer.header, answer.events
        # The watch begins at a revision that this store has not reached: it is another one.
        if answer.created and header.revision < after:
            raise Compacted("the store is a new one")
        revision = max((event.kv.mod_revision for event in events), default=0)
        store = (header.cluster_id, header.raft_term)
        return Step(revision, [_change(event) for event in events], store)

    async def _call(
        self, method: Callable[[Any], Any], request: Any, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        for attempt in range(2):  # the second one with a new token, if the first had expired
            index = self._current
            channel = self._channel(index)
            try:
                return await method(channel)(
                    request, timeout=timeout_s, metadata=await self._metadata()
                )
            except Unreachable:
                self._use_next_member(index, channel, silent=False)
                raise
            except grpc.aio.AioRpcError as error:
                if attempt == 0 and self._token is not None and _is_stale_token(error):
                    self._token = None
                    continue
                raise self._broken(index, channel, error) from error
        raise AssertionError("the second attempt returns or raises")

    async def _close_later(self, channel: Any) -> None:
        await asyncio.sleep(CALL_TIMEOUT_S + 1)
        await channel.close()
        self._replaced.discard(channel)

    async def _metadata(self) -> tuple[tuple[str, str], ...]:
        settings = self._settings
        if settings.username is None:
            return ()
        if self._token is None:
            request = rpc.AuthenticateRequest(name=settings.username, password=settings.password)
            stub = rpc.AuthStub(self._channel(self._current))
            self._token = str((await stub.Authenticate(request, timeout=CALL_TIMEOUT_S)).token)
        return (("token", self._token),)

    def _channel(self, index: int) -> Any:
        endpoint = self.endpoints[index]
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = open_channel(endpoint, self._credentials)
            self._channels[endpoint] = channel
        return channel

    def _broken(self, index: int, channel: Any, error: Any) -> Exception:
        """Translate a gRPC error: etcd unavailable, no such lease, or etcd refuses us."""
        code, details = error.code(), error.details() or ""
        where = self.endpoints[index]
        if code is grpc.StatusCode.NOT_FOUND:
            return NoLease(details)
        if "lease already exists" in details:
            return _Exists(details)
        if code in (
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.PERMISSION_DENIED,
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.FAILED_PRECONDITION,
        ):
            return ConfigError(f"etcd at {where} refuses: {details}; see ETCD_AUTH_*")
        self._use_next_member(index, channel, code is grpc.StatusCode.DEADLINE_EXCEEDED)
        return Unreachable(f"{where}: {code.name.lower().replace('_', ' ')}: {details}")

    def _use_next_member(self, index: int, channel: Any, silent: bool) -> None:
        """Count the failure of a member and use the next one.

        gRPC takes minutes to detect a silent connection, so that one is never used again. Other
        calls may still use it, so it is closed after their timeout.
        """
        self.breaks += 1
        endpoint = self.endpoints[index]
        if silent and self._channels.get(endpoint) is channel:
            del self._channels[endpoint]
            self._replaced.add(channel)
            self._tasks.spawn(self._close_later(channel), name="close")
        if index == self._current and len(self.endpoints) > 1:
            self._current = (index + 1) % len(self.endpoints)
            log.info("etcd: using member %s", self.endpoints[self._current])


def boot_time_s() -> float:
    """Return the seconds since boot, suspend included: leases expire during it, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def _read(call: Any) -> Any:
    try:
        return await call.read()
    except grpc.aio.AioRpcError as error:
        return error


def _is_stale_token(error: Any) -> bool:
    stale = "auth store is old" in (error.details() or "")
    return stale or error.code() is grpc.StatusCode.UNAUTHENTICATED


def _operation(key: str, value: bytes | None, lease_id: int) -> Any:
    name = key.encode()
    if value is None:
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=name))
    return rpc.RequestOp(request_put=rpc.PutRequest(key=name, value=value, lease=lease_id))


def _change(event: Any) -> Change:
    kv = event.kv
    return Change(_name(kv), kv.value if event.type == event.PUT else None)


def _name(kv: Any) -> str:
    """Decode the key; bytes that are not UTF-8 become backslash escapes."""
    return str(kv.key.decode(errors="backslashreplace"))


def _range_end(prefix: bytes) -> bytes:
    """Return the first key after all keys with ``prefix``; one zero byte means no end."""
    # The byte 0xff cannot be raised: drop it, and raise the one before it.
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes((head[-1] + 1,)) if head else b"\0"
