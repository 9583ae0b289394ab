"""The API server of a cluster: credentials, requests, and objects that a watch keeps current.

The extra ``dynamo-appliance[kubernetes]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from kubernetes_asyncio import client, config

from dynamo.config.option import environ
from dynamo.errors import ConfigError, DynamoError
from dynamo.planner.kubernetes.graph import Manifest, Patch

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""What Kubernetes mounts into a pod: its token, the authority of the server, its namespace."""

_MERGE_PATCH, _JSON_PATCH = "application/merge-patch+json", "application/json-patch+json"
_TIMEOUT_S = 10.0
_PATIENCE_S = 20.0  # of one request, its repetitions included
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_WATCH_S = 30  # the server ends a watch then
_SILENCE_S = _WATCH_S + 10.0  # a stream that is silent for longer is dead
_ABSENT_S = 60.0  # a kind of objects that the server does not have may be installed later
_UNLISTED = "the objects are not listed yet"
_REPEATABLE = frozenset({429, 500, 502, 503, 504})
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _EXPIRED = 401, 403, 404, 410
_NO_EVENTS = -1  # in place of a status: a watch that was silent for too long
log = logging.getLogger(__name__)


class Resource(NamedTuple):
    """A kind of objects: the group of its API, the version, and the plural in its path.

    Without a plural it is the version itself.
    """

    group: str
    version: str
    plural: str

    def __str__(self) -> str:
        return ".".join(part for part in (self.plural, self.version, self.group) if part)


DEPLOYMENTS = Resource("nvidia.com", "v1alpha1", "dynamographdeployments")
ADAPTERS = Resource("nvidia.com", "v1alpha1", "dynamographdeploymentscalingadapters")
VERSIONS = ("v1beta1", "v1alpha1")
"""Versions of Dynamo's resources, the preferred one first."""
ENDPOINT_SLICES = Resource("discovery.k8s.io", "v1", "endpointslices")


class ClusterError(DynamoError):
    """The API server refuses a request with status ``answer``, or does not answer: 0 or less."""

    code = "cluster"
    status = 502
    kind = "Bad Gateway"

    def __init__(self, message: str, answer: int = 0) -> None:
        super().__init__(message)
        self.answer = answer


class _Reply(NamedTuple):
    status: int
    retry_after: str
    body: bytes


class _Connection:
    """The client of one set of credentials, closed once it is retired and no request uses it.

    Closed earlier, the library leaves readers of answers without an end and without a timeout.
    """

    def __init__(self, api: Any) -> None:
        self._api = api
        self._users = 0
        self._retired = False

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[Any]:
        self._users += 1
        try:
            yield self._api
        finally:
            self._users -= 1
            await self._close_unused()

    async def retire(self) -> None:
        self._retired = True
        await self._close_unused()

    async def _close_unused(self) -> None:
        if self._retired and not self._users:
            await self._api.close()


class Cluster:
    """Sends requests about the objects of one namespace.

    A request that the server could not serve is repeated for 20 s, as it asks with ``Retry-After``
    or after growing pauses. Credentials are read again when the server refuses them: tokens of a
    pod change every hour.
    """

    def __init__(self, namespace: str | None) -> None:
        self.namespace = namespace or ""
        self._connection: _Connection | None = None
        self._renewing = asyncio.Lock()

    async def open(self) -> None:
        """Read the credentials: ``KUBECONFIG``, those of the pod, or ``~/.kube/config``.

        Raises ConfigError without any.
        """
        settings = client.Configuration()
        where = environ().get("KUBECONFIG")
        in_pod = not where and (ACCOUNT / "token").exists()
        try:
            if in_pod:
                config.load_incluster_config(client_configuration=settings)
                namespace = (ACCOUNT / "namespace").read_text().strip()
            else:
                loader = await config.load_kube_config(
                    config_file=where or None, client_configuration=settings
                )
                context = loader.current_context or {}
                namespace = context.get("context", {}).get("namespace", "")
        except (config.ConfigException, OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"no credentials of a Kubernetes cluster: {error}. Run the planner in a pod with a "
                "service account (deploy/kubernetes), or set KUBECONFIG"
            ) from error
        self.namespace = self.namespace or namespace or "default"
        self._connection = _Connection(client.ApiClient(configuration=settings))

    async def _renew(self, used: _Connection | None) -> None:
        """Read the credentials again, unless another request has done so since it ``used`` them."""
        async with self._renewing:
            if used is not None and self._connection is used:
                await self.open()
                await used.retire()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.retire()

    async def offered(self, resource: Resource) -> Resource | None:
        """Return ``resource`` in the first of :data:`VERSIONS` that the server has; None: in none.

        Raises ClusterError.
        """
        for version in VERSIONS:
            try:
                offer = await self._request("GET", Resource(resource.group, version, ""))
            except ClusterError as error:
                if error.answer not in (_FORBIDDEN, _NOT_FOUND):
                    raise
                continue
            if any(kind.get("name") == resource.plural for kind in offer.get("resources") or ()):
                return resource._replace(version=version)
        return None

    async def get(self, resource: Resource, name: str) -> Manifest:
        """Return an object. Raises ClusterError."""
        return await self._request("GET", resource, name)

    async def list(self, resource: Resource, selector: Mapping[str, str]) -> Manifest:
        """Return the list of the objects that match ``selector``, parameters of the request."""
        return await self._request("GET", resource, query=selector)

    async def patch(self, resource: Resource, name: str, change: Patch) -> Manifest:
        """Apply ``change`` to an object (or its subresource ``name/scale``); return the result.

        A ``resourceVersion`` in it makes the server answer 409 if the object is another by now.
        """
        return await self._request("PATCH", resource, name, body=change)

    async def follow(
        self, resource: Resource, selector: Mapping[str, str], version: str
    ) -> AsyncIterator[Manifest]:
        """Yield the events after ``version`` until the server ends the stream.

        The first item is empty: the server has accepted the request. Raises ClusterError.
        """
        query = {
            **selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_S),
        }
        try:
            timeouts_s = (_TIMEOUT_S, _SILENCE_S)
            async with self._send("GET", resource, "", query, None, timeouts_s) as answer:
                if answer.status != 200:
                    raise _refused("watch", resource, "", answer.status, await answer.read())
                yield {}
                while line := await _next_line(answer, resource):
                    event = msgspec.json.decode(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        code = int(status.get("code", 500))
                        raise ClusterError(f"watch {resource.plural}: {status['message']}", code)
                    # A bookmark has a version and no name.
                    _check(event["object"], event["type"] != "BOOKMARK")
                    yield event
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _silent(error) from error
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise ClusterError(f"watch {resource.plural}: an invalid event: {error!r}") from error

    async def _request(
        self,
        method: str,
        resource: Resource,
        name: str = "",
        query: Mapping[str, str] | None = None,
        body: Patch | None = None,
    ) -> Manifest:
        clock = asyncio.get_running_loop().time
        until_s, pause_s, renewed = clock() + _PATIENCE_S, _FIRST_PAUSE_S, False
        while True:
            used = self._connection
            try:
                reply = await self._once(method, resource, name, query or {}, body)
            except ClusterError as error:
                failure, wait_s = error, pause_s
            else:
                if reply.status < 300:
                    return _object(reply.body, resource)
                if reply.status == _UNAUTHORIZED and not renewed:
                    renewed = True
                    await self._renew(used)
                    continue
                failure = _refused(method.lower(), resource, name, reply.status, reply.body)
                if reply.status not in _REPEATABLE:
                    raise failure
                wait_s = max(pause_s, _seconds(reply.retry_after))
            if clock() + wait_s > until_s:
                raise failure
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _once(
        self,
        method: str,
        resource: Resource,
        name: str,
        query: Mapping[str, str],
        body: Patch | None,
    ) -> _Reply:
        try:
            async with self._send(method, resource, name, query, body, _TIMEOUT_S) as answer:
                retry_after = answer.headers.get("Retry-After", "")
                return _Reply(answer.status, retry_after, await answer.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _silent(error) from error

    @contextlib.asynccontextmanager
    async def _send(
        self,
        method: str,
        resource: Resource,
        name: str,
        query: Mapping[str, str],
        body: Patch | None,
        timeout_s: object,
    ) -> AsyncIterator[Any]:
        path = f"/apis/{resource.group}/{resource.version}"
        if resource.plural:
            path += f"/namespaces/{self.namespace}/{resource.plural}" + (f"/{name}" if name else "")
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = _JSON_PATCH if isinstance(body, list) else _MERGE_PATCH
        if self._connection is None:
            raise ClusterError("the connection to the API server is closed")
        async with self._connection.in_use() as api:
            answer = await api.call_api(
                *(path, method),
                query_params=list(query.items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
                # The answer as it is, not as a model that the library has generated.
                _preload_content=False,
                _request_timeout=timeout_s,
            )
            async with answer:
                yield answer


class WatchedObjects:
    """The objects of one kind that match ``selector``, by name, as the server sent them last.

    ``problem`` says why they may be out of date. An ``optional`` kind that the server does not
    have, or does not show, has no objects. Once it was listed such an answer is a fault of the
    server, which gives it while it starts, and the objects stay. ``on_change`` is called after each
    change of either.
    """

    def __init__(
        self,
        cluster: Cluster,
        resource: Resource,
        selector: Mapping[str, str],
        on_change: Callable[[], object],
        *,
        optional: bool = False,
    ) -> None:
        self.objects: dict[str, Manifest] = {}
        self.problem = _UNLISTED
        self._cluster = cluster
        self._resource = resource
        self._selector = selector
        self._on_change = on_change
        self._optional = optional
        self._listed = False
        self._version = ""

    def put(self, newer: Manifest) -> None:
        """Take a newer state of an object, from a watch or from the answer to a change."""
        current = self.objects.get(newer["metadata"]["name"])
        # The answer to a change may come before the watch's event of an older one.
        if current is None or _version_of(current) <= _version_of(newer):
            self.objects[newer["metadata"]["name"]] = newer
            self._on_change()

    async def run(self) -> None:
        """List the objects and follow their changes until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            accepted = False
            try:
                if not self._version:
                    await self._list()
                async for event in self._cluster.follow(
                    self._resource, self._selector, self._version
                ):
                    accepted, pause_s = True, _FIRST_PAUSE_S
                    self._received(event)
                # The server ends each watch after a while: the next goes on at its version.
                wait_s = _FIRST_PAUSE_S
            except ClusterError as error:
                if self._version and error.answer in (_EXPIRED, _UNAUTHORIZED):
                    self._version = ""  # a list begins again, and renews the credentials
                    continue
                may_be_absent = self._optional and not self._listed
                absent = may_be_absent and error.answer in (_FORBIDDEN, _NOT_FOUND)
                # A stream that broke is no problem if the next one begins; a silent one is.
                if not accepted or error.answer == _NO_EVENTS:
                    self._failed(error, absent)
                wait_s = _ABSENT_S if absent else pause_s
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(wait_s)

    async def _list(self) -> None:
        listed = await self._cluster.list(self._resource, self._selector)
        try:
            self.objects = {manifest["metadata"]["name"]: manifest for manifest in listed["items"]}
            self._version = str(listed["metadata"]["resourceVersion"])
        except (KeyError, TypeError) as error:
            raise ClusterError(f"{self._resource.plural}: an invalid list: {error!r}") from error
        self._listed = True
        self._current()

    def _received(self, event: Manifest) -> None:
        if not event:
            self._current()
            return
        manifest = event["object"]
        self._version = manifest["metadata"]["resourceVersion"]
        if event["type"] == "DELETED":
            self.objects.pop(manifest["metadata"]["name"], None)
            self._on_change()
        elif event["type"] != "BOOKMARK":
            self.put(manifest)

    def _current(self) -> None:
        if self.problem not in ("", _UNLISTED) and not self._optional:
            log.info("the API server answers again")
        self.problem = ""
        self._on_change()

    def _failed(self, error: ClusterError, absent: bool) -> None:
        if absent:
            self._version, self.objects = "", {}
            if error.answer == _FORBIDDEN and self.problem:
                log.warning("%s; the planner goes on without them", error.message)
        elif self.problem in ("", _UNLISTED) and not self._optional:  # once per outage
            log.warning("%s", error.message)
        self.problem = "" if absent else error.message
        self._on_change()


async def _next_line(answer: Any, resource: Resource) -> bytes:
    """Return the next line of a watch, b"" at its end. Raises ClusterError after a silence.

    A deadline of our own: the library's ends with the client of the request.
    """
    try:
        async with asyncio.timeout(_SILENCE_S):
            line: bytes = await answer.content.readline()
            return line
    except TimeoutError:
        text = f"watch {resource.plural}: the API server was silent for {_SILENCE_S:g} s"
        raise ClusterError(text, _NO_EVENTS) from None


def _object(body: bytes, resource: Resource) -> Manifest:
    try:
        manifest: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ClusterError(f"{resource.plural}: the answer cannot be read: {error}") from error
    return manifest


def _check(manifest: Manifest, named: bool) -> None:
    """Raise KeyError or TypeError unless this is an object with a version, and with a name."""
    str(manifest["metadata"]["resourceVersion"] + (manifest["metadata"]["name"] if named else ""))


def _refused(verb: str, resource: Resource, name: str, status: int, body: bytes) -> ClusterError:
    try:
        text = str(msgspec.json.decode(body, type=dict[str, Any])["message"])
    except (msgspec.MsgspecError, KeyError):
        text = f"status {status}"
    where = f"{resource}" + (f" {name}" if name else "")
    hint = ""
    if status == _FORBIDDEN:
        hint = "; its service account needs the role of deploy/kubernetes/planner.yaml"
    return ClusterError(f"the API server refuses to {verb} {where}: {text}{hint}", status)


def _silent(error: Exception) -> ClusterError:
    return ClusterError(f"the API server does not answer: {error or type(error).__name__}")


def _version_of(manifest: Manifest) -> int:
    """Return the resource version as a number, by which versions of one object are ordered."""
    version = manifest["metadata"].get("resourceVersion", "")
    return int(version) if version.isdecimal() else 0


def _seconds(retry_after: str) -> float:
    return float(retry_after) if retry_after.isdecimal() else 0.0
