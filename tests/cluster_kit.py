"""A cluster around the API server of the tests: an operator that turns replicas into workers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
from api_server import ApiServer, Object, api_server, merged
from certificates import Authority

from dynamo.config.runtime import RuntimeSettings
from dynamo.protocols.control import MODEL_CARDS, ModelCard, instance_key
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.process.paths import store_path
from dynamo.serve.state.registered import registered_workers

DEPLOYMENTS = "dynamographdeployments"
ADAPTERS = "dynamographdeploymentscalingadapters"
GRAPH = "my-graph"


class Pod(Protocol):
    """A pod of one worker."""

    ready: bool

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Return when its requests have finished and it has exited."""


class CardPod:
    """A worker of this process: it only registers its model."""

    def __init__(self, settings: RuntimeSettings, kind: str = "Aggregated") -> None:
        self.ready = False
        self._runtime = DistributedRuntime(None, settings)
        self._kind = kind

    async def start(self) -> None:
        await self._runtime.start()
        lease, worker_id = await self._runtime.granted(), self._runtime.instance_id
        namespace = self._runtime.settings.namespace
        card = ModelCard("tiny", "tiny", "/m", namespace, "backend", "generate", worker_id)
        card.worker_type = self._kind
        key = MODEL_CARDS + instance_key(namespace, "backend", "generate", worker_id)
        await self._runtime.discovery.put(key, msgspec.json.encode(card), lease.id)
        self.ready = True

    async def stop(self) -> None:
        await self._runtime.close()


class ProcessPod:
    """A worker process; ready once it has registered its model in file discovery."""

    def __init__(self, settings: RuntimeSettings, spec: Object, env: Mapping[str, str]) -> None:
        container = spec["extraPodSpec"]["mainContainer"]
        self._command = [sys.executable, *container["command"][1:], *container.get("args", ())]
        self._settings = settings
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def ready(self) -> bool:
        process = self._process
        if process is None or process.poll() is not None:
            return False
        found = registered_workers(store_path(self._settings)).get(process.pid)
        return found is not None and found.model is not None

    async def start(self) -> None:
        with (Path(self._env["LOGS"]) / "workers.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - it starts at once
                self._command,
                env=dict(self._env),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(self._process.wait, 60)


class Operator:
    """Reconciles the worker services of all graph deployments, as Dynamo's operator reports it.

    ``held`` pods start when the test lets them: set :attr:`starts` to False before. ``rolling``
    services have pods of an older template. An operator that is ``paused`` applies nothing.
    """

    def __init__(self, server: ApiServer, make_pod: Callable[[Object], Pod]) -> None:
        self.starts = True
        self.paused = False
        self.rolling: set[str] = set()
        self.counts: list[int] = []
        self.ended = threading.Event()
        self._server = server
        self._make_pod = make_pod
        self._pods: dict[str, list[Pod]] = {}
        self._leaving: dict[str, int] = {}

    async def run(self) -> None:
        """Reconcile after each change, and as pods change, until cancelled; then stop all pods."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    changed = self._server.store.changed
                    if not self.paused:
                        await self._reconcile(group)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await changed.wait()
        finally:
            for pods in self._pods.values():
                for pod in pods:
                    await pod.stop()
            self.ended.set()

    async def _reconcile(self, group: asyncio.TaskGroup) -> None:
        store = self._server.store
        for key, found in list(store.objects.items()):
            if key[0] == ADAPTERS:
                self._sync(found)
        for key in [key for key in store.objects if key[0] == DEPLOYMENTS]:
            found = store.objects[key]
            services = {
                name: await self._service(group, name, spec)
                for name, spec in found["spec"]["services"].items()
                if spec.get("componentType") == "worker"
            }
            ready = all(one["readyReplicas"] == one["replicas"] for one in services.values())
            status = {
                "observedGeneration": found["metadata"]["generation"],
                "state": "successful" if ready else "pending",
                "conditions": [{"type": "Ready", "status": str(ready)}],
                "services": services,
            }
            store.update(key, {"status": status}, "status")

    def _sync(self, adapter: Object) -> None:
        """Copy the replicas of an adapter to its service."""
        target, replicas = adapter["spec"]["dgdRef"], adapter["spec"]["replicas"]
        key = (DEPLOYMENTS, adapter["metadata"]["namespace"], target["name"])
        known = self._server.store.objects.get(key)
        if known is not None:
            change = {"spec": {"services": {target["serviceName"]: {"replicas": replicas}}}}
            self._server.store.update(key, merged(known, change))

    async def _service(self, group: asyncio.TaskGroup, name: str, spec: Object) -> Object:
        pods = self._pods.setdefault(name, [])
        while len(pods) < spec["replicas"]:
            pods.append(self._make_pod(spec))
            self.counts.append(len(pods))
            if self.starts:
                await pods[-1].start()
        while len(pods) > spec["replicas"]:
            # As Kubernetes does, a pod that is not ready goes first.
            pod = next((one for one in reversed(pods) if not one.ready), pods[-1])
            pods.remove(pod)
            self.counts.append(len(pods))
            self._leaving[name] = self._leaving.get(name, 0) + 1
            group.create_task(self._stop(name, pod))
        replicas = len(pods) + self._leaving.get(name, 0)
        return {
            "componentKind": "Deployment",
            "replicas": replicas,
            "updatedReplicas": 0 if name in self.rolling else replicas,
            "readyReplicas": sum(pod.ready for pod in pods),
        }

    async def _stop(self, name: str, pod: Pod) -> None:
        await pod.stop()
        self._leaving[name] -= 1


@contextlib.contextmanager
def cluster(
    make_pod: Callable[[Object], Pod], authority: Authority | None = None
) -> Iterator[tuple[ApiServer, Operator]]:
    """Run an API server and an operator for the block."""
    with api_server(authority) as server:
        operator = Operator(server, make_pod)
        running = asyncio.run_coroutine_threadsafe(operator.run(), server.loop)
        try:
            yield server, operator
        finally:
            running.cancel()
            assert operator.ended.wait(60), "pods do not exit"


def graph(*services: tuple[str, Object]) -> Object:
    """Return a graph deployment with a frontend and these services of workers."""
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": GRAPH},
        "spec": {
            "services": {
                "Frontend": {"componentType": "frontend", "replicas": 1},
                **dict(services),
            }
        },
    }


def worker(replicas: int = 1, gpus: int = 1, args: tuple[str, ...] = (), **more: Any) -> Object:
    """Return the specification of a service of mock workers."""
    container = {"command": ["python3", "-m", "dynamo.mocker"], "args": list(args)}
    return {
        "componentType": "worker",
        "replicas": replicas,
        "resources": {"limits": {"gpu": str(gpus)}},
        "extraPodSpec": {"mainContainer": container},
        **more,
    }


def adapter(service: str, replicas: int) -> Object:
    """Return the scaling adapter of a service."""
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeploymentScalingAdapter",
        "metadata": {"name": f"{GRAPH}-{service.lower()}"},
        "spec": {"replicas": replicas, "dgdRef": {"name": GRAPH, "serviceName": service}},
    }
