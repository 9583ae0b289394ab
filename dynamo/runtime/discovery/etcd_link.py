"""Calls to an etcd cluster: the first member that answers, credentials, and what an error means.

The messages and stubs are those of the ``aetcd`` package, the transport is ``grpc.aio``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import grpc
from aetcd import rpc

from dynamo.config.etcd import EtcdSettings
from dynamo.errors import ConfigError

__all__ = [
    "Change",
    "Compacted",
    "EtcdLink",
    "Listing",
    "NoLease",
    "Step",
    "Unreachable",
    "boot_time_s",
]

CALL_TIMEOUT_S = 3.0
OPS_PER_TXN = 32  # etcd takes 128, and 1.5 MiB in all
_OPTIONS = (
    # etcd refuses pings more often than every 5 s; a silent link is noticed within 9 s, which is
    # less than the default lease lasts.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)
_log = logging.getLogger(__name__)


class Unreachable(Exception):
    """No answer, or none that settles anything: the cluster is away, or without a leader."""


class NoLease(Exception):
    """The lease is not there."""


class Compacted(Exception):
    """The revision to watch from is forgotten, or the store is another one; list again."""


class _Exists(Exception):
    """There is such a lease already."""


class Change(NamedTuple):
    """A key was written, or is gone (``value`` None)."""

    key: str
    value: bytes | None


class Step(NamedTuple):
    """What a watch saw, up to ``revision``; the first one says only that the watch stands.

    ``store`` is the cluster's id and its count of elections: another id, or fewer elections than
    before, is another store under the old address.
    """

    revision: int
    changes: list[Change]
    store: tuple[int, int]


class Listing(NamedTuple):
    """The keys under a prefix at ``revision``."""

    revision: int
    keys: dict[str, bytes]


class EtcdLink:
    """One etcd cluster, over the member that answered last.

    ``breaks`` counts how often the way to it was seen broken: as long as it stands still, nothing
    can have been missed. All methods raise Unreachable, and ConfigError when etcd refuses us.
    """

    def __init__(self, settings: EtcdSettings) -> None:
        self.breaks = 0
        self.endpoints = [part.strip() for part in settings.endpoints.split(",") if part.strip()]
        if not self.endpoints:
            raise ConfigError("ETCD_ENDPOINTS names no etcd; give host:port")
        if (settings.username is None) != (settings.password is None):
            raise ConfigError("ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD go together")
        if (settings.client_cert is None) != (settings.client_key is None):
            raise ConfigError("ETCD_AUTH_CLIENT_CERT and ETCD_AUTH_CLIENT_KEY go together")
        self._settings = settings
        self._credentials = _credentials(settings, self.endpoints)
        self._channels: dict[str, Any] = {}
        self._current = 0
        self._token: str | None = None

    async def close(self) -> None:
        """Close all connections; calls in flight must have ended."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def list(self, prefix: str) -> Listing:
        """All keys under ``prefix``, as the cluster has agreed on them."""
        first = prefix.encode()
        answer = await self._call(
            lambda channel: rpc.KVStub(channel).Range,
            rpc.RangeRequest(key=first or b"\0", range_end=_range_end(first)),
        )
        return Listing(answer.header.revision, {kv.key.decode(): kv.value for kv in answer.kvs})

    async def exists(self, key: str) -> bool:
        """Whether there is such a key."""
        request = rpc.RangeRequest(key=key.encode(), count_only=True)
        answer = await self._call(lambda channel: rpc.KVStub(channel).Range, request)
        return bool(answer.count)

    async def write(self, values: Mapping[str, bytes | None], lease_id: int) -> None:
        """Put (or, with None, delete) keys. NoLease if the lease of the puts is gone."""
        operations = [_operation(key, value, lease_id) for key, value in values.items()]
        for start in range(0, len(operations), OPS_PER_TXN):
            request = rpc.TxnRequest(success=operations[start : start + OPS_PER_TXN])
            await self._call(lambda channel: rpc.KVStub(channel).Txn, request)

    async def grant(self, lease_id: int, ttl_s: float) -> bool:
        """Make the lease; False if there is one of that id. etcd counts whole seconds."""
        request = rpc.LeaseGrantRequest(ID=lease_id, TTL=max(1, -int(-ttl_s // 1)))
        try:
            await self._call(lambda channel: rpc.LeaseStub(channel).LeaseGrant, request)
        except _Exists:
            return False
        return True

    async def keep_alive(self, lease_id: int, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Let the lease last for another ttl from now. NoLease if it is gone."""

        def method(channel: Any) -> Any:
            async def once(request: Any, **options: Any) -> Any:
                call = rpc.LeaseStub(channel).LeaseKeepAlive(iter((request,)), **options)
                try:
                    answer = await call.read()
                finally:
                    call.cancel()
                if answer is grpc.aio.EOF:
                    raise Unreachable("etcd ended the stream without an answer")
                return answer

            return once

        answer = await self._call(method, rpc.LeaseKeepAliveRequest(ID=lease_id), timeout_s)
        if answer.TTL <= 0:
            raise NoLease(f"lease {lease_id:x}")

    async def revoke(self, lease_id: int) -> None:
        """End the lease and its keys. NoLease if it is gone."""
        request = rpc.LeaseRevokeRequest(ID=lease_id)
        await self._call(lambda channel: rpc.LeaseStub(channel).LeaseRevoke, request)

    async def watch(self, key: str, prefix: bool, after: int = 0) -> AsyncIterator[Step]:
        """The changes after revision ``after`` (0: from now on), a step for each of the store.

        An empty step comes first, as soon as the watch stands. Ends only by an error: Unreachable,
        or Compacted.
        """
        first = key.encode()
        request = rpc.WatchCreateRequest(
            key=first,
            range_end=_range_end(first) if prefix else b"",
            start_revision=after + 1 if after else 0,
            progress_notify=True,
        )
        index = self._current
        try:
            call = rpc.WatchStub(self._channel(index)).Watch(metadata=await self._metadata())
            try:
                await call.write(rpc.WatchRequest(create_request=request))
                async for answer in call:
                    yield self._step(answer, after)
                raise Unreachable("etcd ended the watch")
            finally:
                call.cancel()
        except grpc.aio.AioRpcError as error:
            raise self._broken(index, error) from error
        except Unreachable:
            self._lost(index)
            raise

    def _step(self, answer: Any, after: int) -> Step:
        if answer.compact_revision:
            raise Compacted(f"all before revision {answer.compact_revision}")
        if answer.canceled:
            self._token = None
            raise Unreachable(f"the watch was cancelled: {answer.cancel_reason}")
        header = answer.header
        store = (header.cluster_id, header.raft_term)
        if not answer.created:
            return Step(header.revision, [_change(event) for event in answer.events], store)
        if header.revision < after:
            raise Compacted("the store began anew")
        return Step(after, [], store)

    async def _call(
        self, method: Callable[[Any], Any], request: Any, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        for attempt in range(2):
            index = self._current
            try:
                return await method(self._channel(index))(
                    request, timeout=timeout_s, metadata=await self._metadata()
                )
            except Unreachable:
                self._lost(index)
                raise
            except grpc.aio.AioRpcError as error:
                if attempt == 0 and self._token is not None and _is_stale_token(error):
                    self._token = None
                    continue
                raise self._broken(index, error) from error
        raise AssertionError("the second attempt returns or raises")

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
            target = _target(endpoint)
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
            else:
                channel = grpc.aio.secure_channel(target, self._credentials, options=_OPTIONS)
            self._channels[endpoint] = channel
        return channel

    def _broken(self, index: int, error: Any) -> Exception:
        """What the error means: etcd away, or etcd that does not want us."""
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
        self._lost(index)
        return Unreachable(f"{where}: {code.name.lower().replace('_', ' ')}: {details}")

    def _lost(self, index: int) -> None:
        """This member failed us: try the next one from now on."""
        self.breaks += 1
        if index == self._current and len(self.endpoints) > 1:
            self._current = (index + 1) % len(self.endpoints)
            _log.info("etcd: going on with %s", self.endpoints[self._current])


def boot_time_s() -> float:
    """Seconds since boot, those that the machine slept included: leases run out meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


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
    return Change(kv.key.decode(errors="replace"), kv.value if event.type == event.PUT else None)


def _range_end(prefix: bytes) -> bytes:
    """The first key that does not start with ``prefix`` any more; one zero byte: no end."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes((head[-1] + 1,)) if head else b"\0"


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


def _credentials(settings: EtcdSettings, endpoints: Iterable[str]) -> Any:
    """TLS when a file asks for it or an endpoint begins with https, else None."""
    for endpoint in endpoints:
        _target(endpoint)
    files = (settings.ca, settings.client_key, settings.client_cert)
    if not any(files) and not any(one.startswith("https://") for one in endpoints):
        return None
    try:
        ca, key, cert = (Path(one).read_bytes() if one else None for one in files)
    except OSError as error:
        raise ConfigError(f"ETCD_AUTH_*: {error}") from error
    return grpc.ssl_channel_credentials(ca, key, cert)
