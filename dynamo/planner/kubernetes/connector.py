"""The graph deployment that the planner scales in a cluster, and changes to its replicas.

A change is a patch under the version of the object that was read before, so that the changes of
others are never overwritten. The operator starts and removes the pods; nothing is to be repaired
after a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dynamo.config.planner import PlannerSettings
from dynamo.errors import ConfigError
from dynamo.observability.logs import counted
from dynamo.operations.steps.limits import ActionFailed, ActionLimits
from dynamo.planner.connector import DRAINING, READY, STARTING, ScaledService, ScaledWorker
from dynamo.planner.kubernetes.cluster import (
    ADAPTERS,
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    VERSIONS,
    Cluster,
    ClusterError,
    Resource,
    WatchedObjects,
)
from dynamo.planner.kubernetes.graph import (
    SERVICE_LABEL,
    Manifest,
    Patch,
    WorkerService,
    adapted_service,
    frontend_prefixes,
    is_of,
    is_ready,
    replicas_patch,
    rollout,
    slice_addresses,
    unapplied,
    version_of,
    worker_services,
)
from dynamo.protocols.control import MODEL_CARDS, ModelCard, decode_card
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.discovery import KeyEvent
from dynamo.runtime.process.tasks import Tasks
from dynamo.serve.graph.facts import PREFILL, FrontendAddress

_CONFLICTS = 20
_UNDO_S = 10.0
log = logging.getLogger(__name__)


class _Replicas(NamedTuple):
    """The replicas that a service is to have, and the object that sets them, as it was ``read``.

    ``path`` is the object's name, of an adapter with its subresource.
    """

    number: int
    read: Manifest
    resource: Resource
    path: str


class DynamoResources(NamedTuple):
    """Dynamo's kinds of objects, in the versions that the API server has."""

    deployments: Resource
    adapters: Resource


@dataclass(slots=True)
class _Scaling:
    """A change of replicas: to ``wanted``, 0 before it is sent; ``answered`` by the API server."""

    wanted: int = 0
    answered: bool = True


class KubernetesConnector:
    """A :class:`Connector`. Call :meth:`start` before anything else, :meth:`close` at the end.

    A replica serves once it is ready in the status of its service and has registered its model.
    Workers have numbers instead of the names of pods: the operator chooses which pod leaves.
    """

    def __init__(
        self,
        runtime: DistributedRuntime,
        cluster: Cluster,
        resources: DynamoResources,
        deployment: str,
        limits: ActionLimits,
    ) -> None:
        self.uid = ""
        self._runtime = runtime
        self._cluster = cluster
        self._resources = resources
        self._name = deployment
        self._limits = limits
        self._cards: dict[str, ModelCard] = {}
        self._tasks = Tasks("cluster")
        self._changed = asyncio.Event()
        self._changing = asyncio.Lock()
        self._expected: dict[str, int] = {}
        selector = {"fieldSelector": f"metadata.name={deployment}"}
        self._deployments = WatchedObjects(cluster, resources.deployments, selector, self._wake)
        self._adapters = WatchedObjects(cluster, resources.adapters, {}, self._wake, optional=True)
        self._slices: WatchedObjects | None = None

    async def start(self) -> None:
        """Follow the deployment. Raises ConfigError if it cannot be read, or does not exist."""
        try:
            deployment = await self._cluster.get(self._resources.deployments, self._name)
        except ClusterError as error:
            raise ConfigError(
                f"{error.message}. --graph-deployment names the deployment, --kubernetes-namespace "
                f"its namespace (now {self._cluster.namespace!r})"
            ) from error
        self.uid = str(deployment["metadata"].get("uid", ""))
        log.info("scaling %s %s", self._resources.deployments, self._name)
        services = ",".join(sorted(frontend_prefixes(deployment))) or f"{self._name}-frontend"
        selector = {"labelSelector": f"{SERVICE_LABEL} in ({services})"}
        self._slices = WatchedObjects(
            self._cluster, ENDPOINT_SLICES, selector, self._wake, optional=True
        )
        watch = self._runtime.discovery.watch(MODEL_CARDS, self._on_card)
        self._runtime.on_close(watch.close)
        for objects in (self._deployments, self._adapters, self._slices):
            self._tasks.spawn(objects.run(), name="watch")

    async def close(self) -> None:
        """Stop following the deployment. Idempotent."""
        await self._tasks.close()

    def configure(self, settings: PlannerSettings) -> None:
        """Keep within the limits of ``settings`` from now on."""
        self._limits = ActionLimits.of_planner(settings)

    async def reconcile(self) -> list[str]:
        """Repair nothing: the operator completes what a planner has begun."""
        return []

    async def services(self) -> Mapping[str, ScaledService]:
        """See :class:`Connector`. Raises ClusterError while the state of the cluster is unknown."""
        deployment = self._deployment()
        scaled = {}
        for service in worker_services(deployment):
            desired = self._desired(service)
            model = self._model(deployment, service)
            if model:
                self._expected[service.name] = desired
                scaled[service.name] = self._scaled(deployment, service, model, desired)
        return scaled

    async def frontends(self) -> dict[str, tuple[FrontendAddress, str]]:
        """Return the address of each pod of the frontends, and the prefix of its metrics, by URL.

        Raises ClusterError while the pods are unknown.
        """
        prefixes = frontend_prefixes(self._deployment())
        assert self._slices is not None
        if self._slices.problem:
            raise ClusterError(self._slices.problem)
        return {
            address.url: (address, prefixes[service])
            for endpoint_slice in self._slices.objects.values()
            if (service := endpoint_slice["metadata"].get("labels", {}).get(SERVICE_LABEL))
            in prefixes
            for address in slice_addresses(endpoint_slice)
        }

    async def add(self, service: str) -> str:
        """See :class:`Connector`."""
        self._check_rollout(service)
        change = _Scaling()
        try:
            wanted = await self._scale(service, 1, change)
            await self._until(service, lambda current: self._serves(current, wanted))
        except TimeoutError:
            await self._undo(service, change)
            raise ActionFailed(
                f"{service}: replica {wanted} did not serve within "
                f"{self._limits.start_timeout_s:g} s; it is removed again"
            ) from None
        except asyncio.CancelledError:
            await self._undo(service, change)
            raise
        return _worker(service, wanted - 1)

    def give_up(self, service: str, reason: str) -> None:
        """Do nothing: models do not share GPUs here."""

    async def remove(self, service: str) -> str:
        """See :class:`Connector`. The operator chooses the pod; its requests finish first."""
        self._check_rollout(service)
        wanted = await self._scale(service, -1, _Scaling())
        try:
            await self._until(service, lambda current: self._left(current, wanted))
        except TimeoutError:
            raise ActionFailed(
                f"{service}: replica {wanted + 1} did not exit within "
                f"{self._limits.start_timeout_s:g} s"
            ) from None
        return _worker(service, wanted)

    def _check_rollout(self, name: str) -> None:
        problem = rollout(self._deployment(), self._service(name))
        if problem:
            raise ActionFailed(f"{name}: {problem}")

    def _scaled(
        self, deployment: Manifest, service: WorkerService, model: str, desired: int
    ) -> ScaledService:
        ids = self._registered(service.pool, model)
        # While the operator removes some, more are ready than wanted.
        serving = min(self._ready(deployment, service), desired)
        # Those beyond ``desired`` have not exited: they still hold GPUs.
        total = max(desired, service.listed or 0, len(ids))
        workers = []
        for number in range(total):
            state = STARTING if number < desired else DRAINING
            worker_id = ids[number] if number < len(ids) else None
            if number < serving and worker_id is not None:
                state = READY
            name = _worker(service.name, number)
            workers.append(ScaledWorker(name=name, state=state, worker_id=worker_id))
        is_prefill = service.pool == PREFILL
        return ScaledService(
            name=service.name,
            model=model,
            pool=service.pool,
            gpus_per_worker=self._limits.worker_gpus(service.gpus, is_prefill),
            workers=tuple(workers),
            assigned=service.gpus,
            held=rollout(deployment, service) or unapplied(deployment),
        )

    def _deployment(self) -> Manifest:
        """Return the deployment as it is now. Raises ClusterError if that is unknown."""
        deployment = self._deployments.objects.get(self._name)
        problem = self._deployments.problem or self._adapters.problem
        if problem or deployment is None:
            raise ClusterError(problem or f"the deployment {self._name} was deleted")
        return deployment

    def _service(self, name: str) -> WorkerService:
        for service in worker_services(self._deployment()):
            if service.name == name:
                return service
        raise ActionFailed(f"{name}: the deployment {self._name} has no such service of workers")

    def _adapter(self, service: str) -> Manifest | None:
        for adapter in self._adapters.objects.values():
            target = adapted_service(adapter, self._name)
            if target is not None and target[0] == service:
                return adapter
        return None

    def _desired(self, service: WorkerService) -> int:
        adapter = self._adapter(service.name)
        target = None if adapter is None else adapted_service(adapter, self._name)
        return service.replicas if target is None else target[1]

    def _model(self, deployment: Manifest, service: WorkerService) -> str:
        """Return the model of a service, "" while it is unknown.

        That of the registered workers, if only this service can have started them; else what its
        flags say.
        """
        rivals = [
            candidate for candidate in worker_services(deployment) if candidate.pool == service.pool
        ]
        names = {card.display_name for card in self._own_cards(service.pool)}
        if len(rivals) == 1 and len(names) == 1:
            return names.pop()
        model = service.model or (self._limits.model or "")
        same = [rival.name for rival in rivals if rival != service and rival.model == service.model]
        if same:
            raise ClusterError(
                f"{service.name} and {same[0]} both have {service.pool} workers of model "
                f"{model or 'unknown'}, which cannot be told apart: join them in one service, or "
                "give each a --served-model-name of its own"
            )
        return model

    def _own_cards(self, pool: str) -> list[ModelCard]:
        namespace = self._runtime.settings.namespace
        return [
            card
            for card in self._cards.values()
            if card.lora_name is None
            and is_of(namespace, card.namespace)
            and (card.worker_type == "Prefill") == (pool == PREFILL)
        ]

    def _registered(self, pool: str, model: str) -> Sequence[int]:
        cards = self._own_cards(pool)
        return sorted({card.instance_id for card in cards if card.display_name == model})

    def _ready(self, deployment: Manifest, service: WorkerService) -> int:
        """Return how many replicas are ready and have registered their model."""
        model = self._model(deployment, service)
        registered = len(self._registered(service.pool, model))
        return registered if service.ready is None else min(registered, service.ready)

    def _serves(self, service: WorkerService, wanted: int) -> bool:
        desired = self._desired(service)
        if desired < wanted:
            raise ActionFailed(
                f"{service.name}: another client set {counted(desired, 'replica')} before replica "
                f"{wanted} served"
            )
        deployment = self._deployment()
        if unapplied(deployment) or (service.ready is None and not is_ready(deployment)):
            return False
        return self._ready(deployment, service) >= wanted

    def _left(self, service: WorkerService, wanted: int) -> bool:
        if self._desired(service) > wanted:
            return True  # another client took it back
        model = self._model(self._deployment(), service)
        present = max(service.listed or 0, len(self._registered(service.pool, model)))
        return present <= wanted and not unapplied(self._deployment())

    async def _until(self, name: str, condition: Callable[[WorkerService], bool]) -> None:
        """Wait until ``condition`` holds; an outage of the API server only makes it longer.

        Raises TimeoutError.
        """
        async with asyncio.timeout(self._limits.start_timeout_s):
            while True:
                self._changed.clear()
                with contextlib.suppress(ClusterError):
                    if condition(self._service(name)):
                        return
                await self._changed.wait()

    async def _scale(self, name: str, delta: int, change: _Scaling) -> int:
        """Change the replicas of a service by ``delta``; return their new number.

        Raises ActionFailed if another client has changed their number since :meth:`services`;
        ClusterError.
        """
        async with self._changing:
            expected, sent = self._expected.get(name), False
            for _ in range(_CONFLICTS):
                replicas = await self._read(name)
                if expected is None:
                    expected = replicas.number
                wanted = expected + delta
                if sent and replicas.number == wanted:
                    return self._done(name, change)  # only the answer was lost
                if replicas.number != expected:
                    self._expected[name] = replicas.number
                    # Nothing to take back: the number is another client's.
                    change.wanted = 0
                    raise ActionFailed(
                        f"{name}: another client changed its replicas from {expected} to "
                        f"{replicas.number}; the next interval decides again"
                    )
                if wanted < 0:
                    raise ActionFailed(f"{name}: no worker to remove")
                sent, change.wanted, change.answered = True, wanted, False
                if await self._write(name, replicas, wanted):
                    return self._done(name, change)
            raise ActionFailed(f"{name}: other clients changed it {_CONFLICTS} times in a row")

    def _done(self, name: str, change: _Scaling) -> int:
        log.info("%s/%s: %s", self._name, name, counted(change.wanted, "replica"))
        self._expected[name], change.answered = change.wanted, True
        return change.wanted

    async def _read(self, name: str) -> _Replicas:
        """Return the replicas as the API server has them, and keep the object."""
        adapter = self._adapter(name)
        if adapter is not None:
            path = f"{adapter['metadata']['name']}/scale"
            scale = await self._cluster.get(self._resources.adapters, path)
            return _Replicas(_replicas(scale), scale, self._resources.adapters, path)
        manifest = await self._cluster.get(self._resources.deployments, self._name)
        self._deployments.put(manifest)
        count = self._service(name).replicas
        return _Replicas(count, manifest, self._resources.deployments, self._name)

    async def _write(self, name: str, replicas: _Replicas, wanted: int) -> bool:
        """Set the replicas; return False if the object is another by now. Raises ClusterError."""
        is_adapter = replicas.resource == self._resources.adapters
        if is_adapter:
            metadata = {"resourceVersion": version_of(replicas.read)}
            change: Patch = {"metadata": metadata, "spec": {"replicas": wanted}}
        else:
            change = replicas_patch(replicas.read, name, wanted)
        try:
            after = await self._cluster.patch(replicas.resource, replicas.path, change)
        except ClusterError as error:
            if error.answer == 409:
                return False
            raise
        if not is_adapter:
            self._deployments.put(after)
        elif (adapter := self._adapter(name)) is not None:
            metadata = {**adapter["metadata"], "resourceVersion": version_of(after)}
            spec = {**adapter["spec"], "replicas": wanted}
            self._adapters.put({**adapter, "metadata": metadata, "spec": spec})
        return True

    async def _undo(self, name: str, change: _Scaling) -> None:
        """Take back a replica that was added, unless another client has changed their number."""
        if not change.wanted:
            return
        try:
            async with asyncio.timeout(_UNDO_S):
                if not change.answered:
                    if (await self._read(name)).number != change.wanted:
                        return
                    self._expected[name] = change.wanted
                await self._scale(name, -1, _Scaling())
        except (ActionFailed, ClusterError, TimeoutError) as error:
            reason = getattr(error, "message", "") or f"no answer in {_UNDO_S:g} s"
            log.warning("a start of %s is not taken back: %s", name, reason)

    def _on_card(self, event: KeyEvent) -> None:
        self._cards.pop(event.key, None)
        if event.value is not None:
            with contextlib.suppress(ValueError):  # reported by LiveSources
                self._cards[event.key] = decode_card(event.value)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()


@contextlib.asynccontextmanager
async def open_connector(
    runtime: DistributedRuntime, settings: PlannerSettings
) -> AsyncIterator[KubernetesConnector]:
    """Open a connector to the graph deployment of ``settings`` for the block."""
    cluster = Cluster(settings.kubernetes_namespace)
    limits, name = ActionLimits.of_planner(settings), settings.graph_deployment or ""
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(cluster.close)
        resources = await _open(cluster)
        connector = KubernetesConnector(runtime, cluster, resources, name, limits)
        stack.push_async_callback(connector.close)
        await connector.start()
        yield connector


async def _open(cluster: Cluster) -> DynamoResources:
    """Open ``cluster``; return Dynamo's kinds of objects there. Raises ConfigError."""
    await cluster.open()
    try:
        deployments = await cluster.offered(DEPLOYMENTS)
        adapters = await cluster.offered(ADAPTERS)
    except ClusterError as error:
        raise ConfigError(error.message) from error
    if deployments is None:
        tried = " or ".join(f"{DEPLOYMENTS.group}/{version}" for version in VERSIONS)
        raise ConfigError(
            f"the API server has no {DEPLOYMENTS.plural} in {tried}: install Dynamo's operator"
        )
    return DynamoResources(deployments, adapters or ADAPTERS)


def _worker(service: str, number: int) -> str:
    return f"{service}-{number}"


def _replicas(scale: Manifest) -> int:
    count = scale.get("spec", {}).get("replicas", 0)
    return count if isinstance(count, int) else 0
