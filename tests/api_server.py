"""A small Kubernetes API server: Dynamo's custom resources and EndpointSlices, in memory.

Dynamo's resources are stored as v1alpha1 and served as v1beta1, too, unless a test says otherwise.

It has what clients depend on: resource versions, conflicts, watches with bookmarks and 410 Gone,
merge and JSON patches, status and scale subresources, discovery, tokens and verbs. `kubectl` is
its second client. Faults: an outage, hanging requests, lost answers, statuses such as 429.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import re
import ssl
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from certificates import Authority

Object = dict[str, Any]
Key = tuple[str, str, str]  # plural, namespace, name
_PATCHES = {
    "application/merge-patch+json": "merge",
    "application/strategic-merge-patch+json": "strategic",
    "application/json-patch+json": "json",
}


@dataclass(frozen=True)
class Kind:
    group: str
    version: str
    plural: str
    kind: str
    short: tuple[str, ...] = ()
    scale: bool = False
    custom: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}"


KINDS = (
    Kind("nvidia.com", "v1alpha1", "dynamographdeployments", "DynamoGraphDeployment", ("dgd",)),
    Kind(
        "nvidia.com",
        "v1alpha1",
        "dynamographdeploymentscalingadapters",
        "DynamoGraphDeploymentScalingAdapter",
        ("dgdsa",),
        scale=True,
    ),
    Kind("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice", custom=False),
)
BETA = "v1beta1"
SERVED = (*KINDS, *(replace(kind, version=BETA) for kind in KINDS if kind.custom))


class Refused(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason

    def status(self) -> Object:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
        }


@dataclass
class Faults:
    """What goes wrong now; ``statuses`` are sent first, each for one request to an object.

    ``kinds`` has the status of every request for a plural, as while the server starts.
    """

    down: bool = False
    hang: bool = False
    lose_answers: int = 0
    statuses: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    before_patch: list[Callable[[], object]] = field(default_factory=list)


class Store:
    """Objects and their history, as etcd keeps them for a real server."""

    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.version = 100
        self.history: list[tuple[int, Key, str, Object]] = []
        self.compacted = 0
        self.changed: asyncio.Event = asyncio.Event()

    def get(self, key: Key) -> Object:
        if key not in self.objects:
            raise Refused(404, "NotFound", f'{key[0]} "{key[2]}" not found')
        return self.objects[key]

    def create(self, kind: Kind, key: Key, given: Object) -> Object:
        if key in self.objects:
            raise Refused(409, "AlreadyExists", f'{key[0]} "{key[2]}" already exists')
        _validate(given)
        metadata = {
            **given["metadata"],
            "namespace": key[1],
            "uid": str(uuid.uuid4()),
            "creationTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "generation": 1,
        }
        made = {"apiVersion": kind.api_version, "kind": kind.kind, **given, "metadata": metadata}
        if kind.custom:
            made.pop("status", None)
        return self._store(key, "ADDED", made)

    def update(self, key: Key, given: Object, part: str = "") -> Object:
        """Replace an object, or only its status, if ``given`` names its version or none."""
        known = self.get(key)
        version = given.get("metadata", {}).get("resourceVersion")
        if version not in (None, "", known["metadata"]["resourceVersion"]):
            raise Refused(
                409,
                "Conflict",
                f'Operation cannot be fulfilled on {key[0]} "{key[2]}": the object has been '
                "modified; please apply your changes to the latest version and try again",
            )
        _validate(given)
        if part == "status":
            after = {**known, "status": given.get("status", {})}
        else:
            after = {**given, **({"status": known["status"]} if "status" in known else {})}
            kept = ("uid", "creationTimestamp", "generation", "resourceVersion", "namespace")
            after["metadata"] = {
                **given["metadata"],
                **{name: known["metadata"][name] for name in kept},
            }
            if after.get("spec") != known.get("spec"):
                after["metadata"]["generation"] += 1
        return known if after == known else self._store(key, "MODIFIED", after)

    def delete(self, key: Key) -> Object:
        return self._store(key, "DELETED", self.get(key))

    def compact(self) -> None:
        """Forget the history: a watch from an older version gets 410."""
        self.compacted, self.history = self.version, []

    def _store(self, key: Key, event: str, found: Object) -> Object:
        self.version += 1
        found = copy.deepcopy(found)
        found["metadata"]["resourceVersion"] = str(self.version)
        if event == "DELETED":
            del self.objects[key]
        else:
            self.objects[key] = found
        self.history.append((self.version, key, event, found))
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()
        return found


class ApiServer:
    """Serves ``store`` on loopback, over TLS with a certificate of ``authority`` if given.

    ``tokens`` has the permissions of each bearer token, such as ``get pods`` and ``list *``; empty:
    any client may do everything. `kubectl` sends a token over TLS only.
    """

    def __init__(self, authority: Authority | None = None) -> None:
        self.authority = authority
        self.store = Store()
        self.faults = Faults()
        self.tokens: dict[str, frozenset[str]] = {}
        self.requests: list[tuple[str, str]] = []
        self.bookmark_s = 0.5
        self.served = SERVED
        self.port = 0
        self.loop: asyncio.AbstractEventLoop
        self._watches: set[asyncio.Task[Any]] = set()
        self._mute: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        return f"{'http' if self.authority is None else 'https'}://127.0.0.1:{self.port}"

    def call(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` in the server's thread; return its result."""

        async def run() -> Any:
            return action()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)

    def object(self, plural: str, name: str, namespace: str = "default") -> Object:
        return copy.deepcopy(self.call(lambda: self.store.get((plural, namespace, name))))

    def put(self, plural: str, manifest: Object, namespace: str = "default") -> Object:
        """Create or replace an object, as an operator that does it by hand."""
        kind = next(one for one in KINDS if one.plural == plural)
        key = (plural, namespace, manifest["metadata"]["name"])

        def act() -> Object:
            if key in self.store.objects:
                return self.store.update(key, manifest)
            return self.store.create(kind, key, manifest)

        found: Object = self.call(act)
        return found

    def change(self, plural: str, name: str, patch: Object, part: str = "") -> Object:
        """Merge ``patch`` into an object, as another client does."""

        def act() -> Object:
            known = self.store.get((plural, "default", name))
            return self.store.update((plural, "default", name), merged(known, patch), part)

        found: Object = self.call(act)
        return found

    def set_down(self, down: bool) -> None:
        """Begin or end an outage: connections are cut, watches too."""

        def act() -> None:
            self.faults.down = down
            if down:
                self.cut_watches()

        self.call(act)

    def cut_watches(self) -> None:
        for task in self._watches:
            task.cancel()

    def mute_watches(self) -> None:
        """Send nothing more on the watches of now, and leave them open."""
        self._mute |= self._watches

    def kubeconfig(self, path: Path, token: str = "any") -> Path:
        """Write a kubeconfig for this server."""
        where = {"server": self.url}
        if self.authority is not None:
            where["certificate-authority"] = self.authority.ca
        text = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": where}],
            "users": [{"name": "me", "user": {"token": token}}],
            "contexts": [
                {
                    "name": "test",
                    "context": {"cluster": "test", "user": "me", "namespace": "default"},
                }
            ],
        }
        path.write_text(json.dumps(text))
        return path

    async def start(self) -> web.AppRunner:
        app = web.Application(middlewares=[self._gate])
        app.router.add_get("/{root:version|api|apis}", self._root)
        app.router.add_get("/apis/{group}/{version}", self._resources)
        base = "/apis/{group}/{version}/namespaces/{namespace}/{plural}"
        app.router.add_route("*", base, self._collection)
        app.router.add_get("/apis/{group}/{version}/{plural}", self._collection)
        app.router.add_route("*", base + "/{name}", self._one)
        app.router.add_route("*", base + "/{name}/{part:status|scale}", self._one)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        context = None
        if self.authority is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*self.authority.sign("api-server"))
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        self.port = runner.addresses[0][1]
        return runner

    @web.middleware  # type: ignore[untyped-decorator]
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append((request.method, request.path_qs))
        if self.faults.hang:
            await asyncio.sleep(3600)
        if self.faults.down:
            assert request.transport is not None
            request.transport.close()
            return web.Response(status=500)
        try:
            self._authorize(request)
            if self.faults.statuses and "name" in request.match_info:
                code, headers = self.faults.statuses.pop(0)
                refusal = Refused(code, "TooManyRequests", f"status {code} for the test")
                return web.json_response(refusal.status(), status=code, headers=headers)
            if (code := self.faults.kinds.get(request.match_info.get("plural", ""), 0)) != 0:
                raise Refused(code, "NotReady", f"status {code} for the test")
            answer: web.StreamResponse = await handler(request)
        except Refused as error:
            return web.json_response(error.status(), status=error.code)
        if request.method == "PATCH" and self.faults.lose_answers:
            self.faults.lose_answers -= 1
            assert request.transport is not None
            request.transport.close()
        return answer

    def _authorize(self, request: web.Request) -> None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not self.tokens:
            return
        if token not in self.tokens:
            raise Refused(401, "Unauthorized", "Unauthorized")
        plural, part = request.match_info.get("plural"), request.match_info.get("part")
        if plural is None:
            return  # discovery
        verb = {"GET": "get", "PATCH": "patch", "PUT": "update"}.get(request.method, "create")
        if verb == "get" and "name" not in request.match_info:
            verb = "watch" if "watch" in request.query else "list"
        resource = f"{plural}/{part}" if part else plural
        if not {f"{verb} {resource}", f"{verb} *"} & self.tokens[token]:
            raise Refused(403, "Forbidden", f"{resource} is forbidden: cannot {verb} resource")

    async def _root(self, request: web.Request) -> web.Response:
        roots = {
            "version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
            "api": {"kind": "APIVersions", "versions": []},
            "apis": self._groups(),
        }
        return web.json_response(roots[request.match_info["root"]])

    def _groups(self) -> Object:
        groups = []
        for group in dict.fromkeys(one.group for one in self.served):
            kinds = [one for one in self.served if one.group == group]
            versions = [
                {"groupVersion": one, "version": one.partition("/")[2]}
                for one in dict.fromkeys(kind.api_version for kind in kinds)
            ]
            groups.append({"name": group, "versions": versions, "preferredVersion": versions[0]})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}

    async def _resources(self, request: web.Request) -> web.Response:
        resources = []
        for kind in self._kinds(request):
            resource = {"name": kind.plural, "singularName": kind.kind.lower(), "namespaced": True}
            verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
            short = {"shortNames": list(kind.short)}
            resources.append({**resource, "kind": kind.kind, "verbs": verbs, **short})
            if kind.scale:
                scale = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
                name = {**resource, "name": f"{kind.plural}/scale"}
                resources.append({**name, **scale, "verbs": ["get", "patch", "update"]})
        if not resources:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        return web.json_response(
            {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": "{group}/{version}".format(**request.match_info),
                "resources": resources,
            }
        )

    def _kinds(self, request: web.Request) -> list[Kind]:
        group, version = request.match_info["group"], request.match_info["version"]
        return [one for one in self.served if (one.group, one.version) == (group, version)]

    def _kind(self, request: web.Request) -> Kind:
        for kind in self._kinds(request):
            if kind.plural == request.match_info["plural"]:
                return kind
        raise Refused(404, "NotFound", "the server could not find the requested resource")

    async def _collection(self, request: web.Request) -> web.StreamResponse:
        kind, namespace = self._kind(request), request.match_info.get("namespace", "")
        if request.method == "POST":
            given = await _body(request)
            key = (kind.plural, namespace, given["metadata"]["name"])
            return web.json_response(self.store.create(kind, key, given), status=201)
        matches = _selector(request.query)
        if request.query.get("watch") in ("1", "true"):
            return await self._watch(request, kind, namespace, matches)
        items = [
            shown(kind, found)
            for (plural, where, _), found in sorted(self.store.objects.items())
            if plural == kind.plural and where == (namespace or where) and matches(found)
        ]
        listed = {
            "kind": f"{kind.kind}List",
            "apiVersion": kind.api_version,
            "metadata": {"resourceVersion": str(self.store.version)},
            "items": items,
        }
        return web.json_response(listed)

    async def _watch(
        self,
        request: web.Request,
        kind: Kind,
        namespace: str,
        matches: Callable[[Object], bool],
    ) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        since = request.query.get("resourceVersion") or "0"
        ends_s = self.loop.time() + float(request.query.get("timeoutSeconds") or 3600)
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        try:
            async for event in self._events(kind, namespace, int(since), ends_s):
                found = event["object"]
                if task in self._mute:
                    continue
                if event["type"] in ("BOOKMARK", "ERROR") or matches(found):
                    if event["type"] == "BOOKMARK" and "allowWatchBookmarks" not in request.query:
                        continue
                    event = {**event, "object": shown(kind, found)}
                    await answer.write(json.dumps(event).encode() + b"\n")
        except ConnectionResetError:
            pass  # the client has left
        except asyncio.CancelledError:
            if request.transport is not None:  # the outage of a test
                request.transport.abort()
            raise
        finally:
            self._watches.discard(task)
            self._mute.discard(task)
        return answer

    async def _events(
        self, kind: Kind, namespace: str, since: int, ends_s: float
    ) -> AsyncIterator[Object]:
        if since and since < self.store.compacted:
            gone = Refused(410, "Expired", f"too old resource version: {since}")
            yield {"type": "ERROR", "object": gone.status()}
            return
        if not since:
            for (plural, where, _), found in sorted(self.store.objects.items()):
                if plural == kind.plural and where == namespace:
                    yield {"type": "ADDED", "object": found}
            since = self.store.version
        while self.loop.time() < ends_s:
            changed = self.store.changed
            for version, (plural, where, _), event, found in list(self.store.history):
                if version > since and plural == kind.plural and where == namespace:
                    yield {"type": event, "object": found}
            since = self.store.version
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self.bookmark_s, ends_s - self.loop.time())):
                    await changed.wait()
                continue
            bookmark = {"kind": kind.kind, "apiVersion": kind.api_version}
            yield {
                "type": "BOOKMARK",
                "object": {**bookmark, "metadata": {"resourceVersion": str(since)}},
            }

    async def _one(self, request: web.Request) -> web.Response:
        kind, part = self._kind(request), request.match_info.get("part", "")
        key = (kind.plural, request.match_info["namespace"], request.match_info["name"])
        if part == "scale" and not kind.scale:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        if request.method == "GET":
            return web.json_response(self._seen(kind, key, part))
        if request.method == "DELETE":
            self.store.delete(key)
            done = {"kind": "Status", "apiVersion": "v1", "status": "Success"}
            return web.json_response(done)
        given = await _body(request)
        if request.method == "PATCH":
            for act in self.faults.before_patch[:1]:
                self.faults.before_patch.pop(0)
                act()
            given = _patched(kind, request, self._seen(kind, key, part), given)
        elif request.method != "PUT":
            raise Refused(405, "MethodNotAllowed", "the server does not allow this method")
        if part == "scale":
            known = self.store.get(key)
            metadata = {
                **known["metadata"],
                "resourceVersion": given["metadata"].get("resourceVersion"),
            }
            spec = {**known["spec"], "replicas": given.get("spec", {}).get("replicas", 0)}
            found = self.store.update(key, {**known, "metadata": metadata, "spec": spec})
            return web.json_response(_scale(found))
        if kind.version == BETA:
            given = _stored(self.store.get(key), given)
        return web.json_response(shown(kind, self.store.update(key, given, part)))

    def _seen(self, kind: Kind, key: Key, part: str) -> Object:
        found = self.store.get(key)
        return _scale(found) if part == "scale" else shown(kind, found)


@contextlib.contextmanager
def api_server(authority: Authority | None = None) -> Iterator[ApiServer]:
    """Run an API server in a thread for the block."""
    server, started, stopped = ApiServer(authority), threading.Event(), asyncio.Event()

    async def serve() -> None:
        server.loop = asyncio.get_running_loop()
        runner = await server.start()
        started.set()
        await stopped.wait()
        server.cut_watches()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(30)
        yield server
    finally:
        server.loop.call_soon_threadsafe(stopped.set)
        thread.join()


def role(path: Path) -> frozenset[str]:
    """Return the permissions that the roles in a file of manifests give."""
    documents = [one for one in yaml.safe_load_all(path.read_text()) if one["kind"] == "Role"]
    return frozenset(
        f"{verb} {resource}"
        for document in documents
        for rule in document["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    )


def merged(known: Any, patch: Any) -> Any:
    """Return ``known`` with a JSON merge patch (RFC 7396)."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(known) if isinstance(known, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def _patched(kind: Kind, request: web.Request, known: Object, patch: Any) -> Object:
    how = _PATCHES.get(request.content_type)
    # Of the built-in kinds here all lists are atomic: a strategic patch is a merge patch.
    if how is None or (how == "strategic" and kind.custom):
        raise Refused(
            415,
            "UnsupportedMediaType",
            "the body of the request was in an unknown format - accepted media types include: "
            "application/json-patch+json, application/merge-patch+json",
        )
    found: Object
    if how != "json":
        found = merged(known, patch)
        return found
    found = copy.deepcopy(known)
    for step in patch:
        _apply(found, step)
    return found


def _apply(found: Object, step: Object) -> None:
    """Apply one operation of a JSON patch (RFC 6902) that changes no list itself."""
    *parents, last = [
        part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]
    ]
    try:
        target: Any = found
        for part in parents:
            target = target[int(part) if isinstance(target, list) else part]
        if step["op"] == "test" and target[last] != step["value"]:
            raise Refused(422, "Invalid", f"testing value {step['path']} failed")
        if step["op"] in ("remove", "replace"):
            del target[last]
        if step["op"] in ("add", "replace"):
            target[last] = step["value"]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise Refused(422, "Invalid", f"the path {step['path']} does not exist") from error


def shown(kind: Kind, found: Object) -> Object:
    """Return a stored object as the version of ``kind`` shows it."""
    if kind.version != BETA or "spec" not in found:
        return found
    made = copy.deepcopy({**found, "apiVersion": kind.api_version})
    spec, status = made["spec"], made.get("status", {})
    if "dgdRef" in spec:
        spec["dgdRef"]["componentName"] = spec["dgdRef"].pop("serviceName")
    if "services" in spec:
        services = spec.pop("services")
        spec["components"] = [_component(name, one) for name, one in services.items()]
        spec["env"] = spec.pop("envs", [])
    if "services" in status:
        status["components"] = status.pop("services")
    return made


def _component(name: str, service: Object) -> Object:
    main = service.get("extraPodSpec", {}).get("mainContainer", {})
    limits = {"nvidia.com/gpu": gpus} if (gpus := _gpus(service)) else {}
    container = {**main, "name": "main", "resources": {"limits": limits}}
    container["env"] = service.get("envs", [])
    kind = service.get("subComponentType") or service.get("componentType")
    kept: Object = {key: service[key] for key in ("replicas", "multinode") if key in service}
    template = {"spec": {"containers": [container]}}
    return {"name": name, "type": kind, **kept, "podTemplate": template}


def _gpus(service: Object) -> str:
    return str(service.get("resources", {}).get("limits", {}).get("gpu", ""))


def _stored(known: Object, given: Object) -> Object:
    """Return ``known`` with the metadata and replicas of a v1beta1 object."""
    services = copy.deepcopy(known["spec"]["services"])
    for component in given["spec"]["components"]:
        services[component["name"]]["replicas"] = component.get("replicas", 1)
    return {**known, "metadata": given["metadata"], "spec": {**known["spec"], "services": services}}


def _scale(found: Object) -> Object:
    metadata = {name: found["metadata"][name] for name in ("name", "namespace", "uid")}
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {**metadata, "resourceVersion": found["metadata"]["resourceVersion"]},
        "spec": {"replicas": found["spec"]["replicas"]},
        "status": {"replicas": found.get("status", {}).get("replicas", 0)},
    }


def _validate(given: Object) -> None:
    services = given.get("spec", {}).get("services", {})
    counts = [given.get("spec", {}).get("replicas", 0)]
    counts += [one.get("replicas", 0) for one in services.values()]
    if any(not isinstance(one, int) or one < 0 for one in counts):
        raise Refused(422, "Invalid", "replicas: Invalid value: must be an integer, at least 0")


async def _body(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except ValueError as error:
        raise Refused(400, "BadRequest", f"the body is not JSON: {error}") from error


def _selector(query: Mapping[str, str]) -> Callable[[Object], bool]:
    """Return whether an object matches the selectors: ``a=b`` and ``a in (b,c)``."""
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    label = re.fullmatch(r"([^ =]+)(?: in \((.*)\)|=(.*))", query.get("labelSelector", "") or "-=")
    assert label is not None
    wanted = (label[2] or label[3] or "").split(",")

    def matches(found: Object) -> bool:
        metadata = found["metadata"]
        if name and metadata["name"] != name:
            return False
        return label[1] == "-" or metadata.get("labels", {}).get(label[1]) in wanted

    return matches
