"""The planner's connector to a cluster: what others change, what fails, what is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from api_server import SERVED, ApiServer
from cluster_kit import (
    ADAPTERS,
    DEPLOYMENTS,
    GRAPH,
    CardPod,
    Operator,
    adapter,
    cluster,
    graph,
    worker,
)
from lazy_module import LazyModule
from planner_kit import FakeSources, Recorder, Wanted
from until import until

from dynamo.config.planner import PlannerSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError
from dynamo.operations.steps.limits import ActionFailed
from dynamo.planner.connector import READY, STARTING, ScaledService
from dynamo.planner.kubernetes.graph import SERVICE_LABEL
from dynamo.planner.live.loop import ScalingLoop
from dynamo.runtime import DistributedRuntime

if TYPE_CHECKING:
    from dynamo.planner.kubernetes.connector import KubernetesConnector

cluster_client = LazyModule("dynamo.planner.kubernetes.cluster")
connectors = LazyModule("dynamo.planner.kubernetes.connector")

SETTINGS = PlannerSettings(
    environment="kubernetes",
    graph_deployment=GRAPH,
    mode="load",
    metric_pulling_interval_s=0.01,
    adjustment_interval_s=0.05,
)


class World:
    """A cluster with one service, its operator, and a planner's runtime beside it."""

    def __init__(self, server: ApiServer, operator: Operator, runtime: DistributedRuntime) -> None:
        self.server, self.operator, self.runtime = server, operator, runtime
        self.connector: KubernetesConnector

    async def service(self, name: str = "Worker") -> ScaledService | None:
        try:
            return (await self.connector.services()).get(name)
        except cluster_client.ClusterError:
            return None

    async def held(self) -> ScaledService:
        """Wait until the connector sees a change that the operator has not applied."""
        async with asyncio.timeout(30):
            while True:
                found = await self.service()
                if found and found.held:
                    return found
                await asyncio.sleep(0.01)

    async def unknown(self) -> None:
        """Wait until the connector does not show what may be out of date."""
        async with asyncio.timeout(30):
            while await self.service() is not None:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)

    async def ready(self, count: int, name: str = "Worker") -> ScaledService:
        """Wait until so many workers serve and no others are listed; return the service."""
        async with asyncio.timeout(30):
            while True:
                found = await self.service(name)
                if found and [one.state for one in found.workers] == [READY] * count:
                    return found
                await asyncio.sleep(0.01)

    def replicas(self, name: str = "Worker") -> int:
        found = self.server.object(DEPLOYMENTS, GRAPH)
        return int(found["spec"]["services"][name]["replicas"])

    def by_hand(self, replicas: int) -> None:
        change = {"spec": {"services": {"Worker": {"replicas": replicas}}}}
        self.server.change(DEPLOYMENTS, GRAPH, change)


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    settings = RuntimeSettings(state_dir=str(tmp_path / "state"))
    with cluster(lambda spec: CardPod(settings)) as (server, operator):
        server.put(DEPLOYMENTS, graph(("Worker", worker())))
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "config")))
        runtime = DistributedRuntime(asyncio.get_running_loop(), settings)
        made = World(server, operator, runtime)
        try:
            async with connectors.open_connector(runtime, SETTINGS) as made.connector:
                await runtime.start()
                await made.ready(1)
                yield made
        finally:
            await runtime.close()


@pytest.mark.parametrize(
    ("versions", "tried"),
    [
        ((("v1alpha1",), ("v1alpha1",)), "v1alpha1"),
        ((("v1beta1",), ("v1beta1",)), "v1beta1"),
        ((("v1beta1", "v1alpha1"), ("v1alpha1",)), "v1beta1"),
        ((("v1alpha1",), ("v1beta1", "v1alpha1")), "v1alpha1"),
    ],
)
async def test_the_versions_that_the_server_has(
    world: World, versions: tuple[tuple[str, ...], ...], tried: str, caplog: Any
) -> None:
    """Of each kind: v1beta1 if there is one. An adapter's version is its own."""
    caplog.set_level(logging.INFO)
    offered = dict(zip((DEPLOYMENTS, ADAPTERS), versions, strict=True))
    served = [one for one in SERVED if one.version in offered.get(one.plural, one.version)]
    world.server.served = tuple(served)
    async with connectors.open_connector(world.runtime, SETTINGS) as world.connector:
        await world.ready(1)
        service = await world.ready(1)
        assert (service.model, service.gpus_per_worker) == ("tiny", 1.0)
        del world.server.requests[:]
        await world.connector.add("Worker")
        await world.ready(2)
        world.server.put(ADAPTERS, adapter("Worker", 2))
        await until(lambda: world.connector._adapter("Worker"))
        await world.connector.add("Worker")
        await world.ready(3)
        found = [
            path.split("/")[3:7:3] for method, path in world.server.requests if method == "PATCH"
        ]
        assert found == [[versions[0][0], DEPLOYMENTS], [versions[1][0], ADAPTERS]]
    assert f"scaling dynamographdeployments.{tried}.nvidia.com {GRAPH}" in caplog.text
    other = PlannerSettings(environment="kubernetes", graph_deployment="other")
    with pytest.raises(
        ConfigError, match=rf"get dynamographdeployments\.{tried}\.nvidia\.com other"
    ):
        async with connectors.open_connector(world.runtime, other):
            pass


async def test_a_server_without_dynamos_operator(world: World) -> None:
    world.server.served = tuple(one for one in SERVED if not one.custom)
    with pytest.raises(ConfigError, match=r"no dynamographdeployments in nvidia.com/v1beta1 or nv"):
        async with connectors.open_connector(world.runtime, SETTINGS):
            pass


async def test_a_component_that_moves_in_the_list(world: World) -> None:
    """The place in the list of v1beta1 is that of the version that was read."""

    def moved() -> None:
        key = (DEPLOYMENTS, "default", GRAPH)
        found = world.server.store.get(key)
        services = dict(reversed(found["spec"]["services"].items()))
        services["Other"] = worker(7, componentType="planner")
        services = dict(sorted(services.items(), reverse=True))
        world.server.store.update(key, {**found, "spec": {"services": services}})

    world.server.faults.before_patch.append(moved)
    assert await world.connector.add("Worker") == "Worker-1"
    assert (world.replicas(), world.replicas("Other"), world.replicas("Frontend")) == (2, 7, 1)


async def test_what_a_service_says(world: World) -> None:
    service = await world.ready(1)
    (one,) = service.workers
    assert (service.name, service.model, service.pool) == ("Worker", "tiny", "decode")
    assert (service.gpus_per_worker, service.held, one.name) == (1.0, "", "Worker-0")
    assert one.worker_id is not None


@pytest.mark.parametrize(("args", "model"), [((), "unknown"), (("--model", "tiny"), "tiny")])
async def test_two_services_of_one_model_are_refused(
    world: World, args: tuple[str, ...], model: str
) -> None:
    services = {"Worker": worker(args=args), "Again": worker(args=args)}
    world.server.change(DEPLOYMENTS, GRAPH, {"spec": {"services": services}})
    await world.unknown()
    text = f"both have decode workers of model {model}, which cannot be told apart"
    with pytest.raises(cluster_client.ClusterError, match=text):
        await world.connector.services()


async def test_replicas_are_added_and_removed(world: World) -> None:
    assert await world.connector.add("Worker") == "Worker-1"
    service = await world.ready(2)
    assert len({one.worker_id for one in service.workers}) == 2
    async with asyncio.TaskGroup() as group:  # the starts overlap
        adds = [group.create_task(world.connector.add("Worker")) for _ in range(2)]
    assert {task.result() for task in adds} == {"Worker-2", "Worker-3"}
    assert world.replicas() == 4
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(world.connector.remove("Worker"))
    await world.ready(1)
    assert world.operator.counts == [1, 2, 3, 4, 3, 2, 1]
    assert await world.connector.remove("Worker") == "Worker-0"
    with pytest.raises(ActionFailed, match="Worker: no worker to remove"):
        await world.connector.remove("Worker")
    with pytest.raises(ActionFailed, match=f"the deployment {GRAPH} has no such service"):
        await world.connector.add("Other")


async def test_a_scaling_adapter_is_scaled_instead(world: World) -> None:
    world.server.put(ADAPTERS, adapter("Worker", 1))
    await until(lambda: world.connector._adapter("Worker"))
    await world.connector.add("Worker")
    assert world.server.object(ADAPTERS, f"{GRAPH}-worker")["spec"]["replicas"] == 2
    await world.ready(2)
    patched = [path for method, path in world.server.requests if method == "PATCH"]
    assert patched and all(path.endswith(f"{ADAPTERS}/{GRAPH}-worker/scale") for path in patched)
    world.server.faults.before_patch.append(
        lambda: world.server.store.update(
            (ADAPTERS, "default", f"{GRAPH}-worker"), adapter("Worker", 5)
        )
    )
    with pytest.raises(ActionFailed, match="changed its replicas from 2 to 5"):
        await world.connector.remove("Worker")
    await world.ready(5)


async def test_an_operator_that_scales_by_hand_at_the_same_time(world: World) -> None:
    """Whatever is set between read and write stays; other changes of the object do not matter."""

    def other_change() -> None:
        key = (DEPLOYMENTS, "default", GRAPH)
        found = world.server.store.get(key)
        labels = {"metadata": {**found["metadata"], "labels": {"team": "a"}}}
        world.server.store.update(key, {**found, **labels})

    def by_hand() -> None:
        key = (DEPLOYMENTS, "default", GRAPH)
        spec = graph(("Worker", worker(4)))["spec"]
        world.server.store.update(key, {**world.server.store.get(key), "spec": spec})

    world.server.faults.before_patch.append(other_change)
    assert await world.connector.add("Worker") == "Worker-1"
    assert world.server.object(DEPLOYMENTS, GRAPH)["metadata"]["labels"] == {"team": "a"}
    world.server.faults.before_patch.append(by_hand)
    with pytest.raises(ActionFailed, match="another client changed its replicas from 2 to 4"):
        await world.connector.add("Worker")
    await world.ready(4)
    await world.connector.remove("Worker")  # the new number is known now
    assert world.replicas() == 3


async def test_a_start_that_another_client_takes_back(world: World) -> None:
    world.operator.starts = False
    adding = asyncio.get_running_loop().create_task(world.connector.add("Worker"))
    await until(lambda: world.replicas() == 2)
    world.by_hand(1)
    with pytest.raises(ActionFailed, match="another client set 1 replica "):
        await adding
    await world.ready(1)
    assert world.replicas() == 1


@pytest.mark.parametrize("answered", [True, False])
async def test_a_cancelled_start_leaves_nothing(world: World, answered: bool) -> None:
    world.operator.starts = False
    if not answered:
        world.server.faults.before_patch.append(lambda: setattr(world.server.faults, "hang", True))
    adding = asyncio.get_running_loop().create_task(world.connector.add("Worker"))
    await until(lambda: world.server.faults.hang or world.replicas() == 2)
    if answered:
        await until(lambda: len(world.connector._expected) == 1)
    else:
        await until(lambda: world.replicas() == 2)
        world.server.call(lambda: setattr(world.server.faults, "hang", False))
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    assert world.replicas() == 1
    await world.ready(1)


async def test_a_start_that_takes_too_long(world: World) -> None:
    world.operator.starts = False
    settings = PlannerSettings(
        environment="kubernetes", graph_deployment=GRAPH, start_timeout_s=0.3
    )
    world.connector.configure(settings)
    with pytest.raises(ActionFailed, match=r"replica 2 did not serve within 0\.3 s; it is removed"):
        await world.connector.add("Worker")
    assert world.replicas() == 1


async def test_a_lost_answer_adds_one_replica_not_two(world: World) -> None:
    world.server.call(lambda: setattr(world.server.faults, "lose_answers", 1))
    assert await world.connector.add("Worker") == "Worker-1"
    assert world.replicas() == 2
    assert world.operator.counts == [1, 2]


async def test_a_busy_server_is_asked_again(world: World) -> None:
    refusals: list[tuple[int, dict[str, str]]] = [(429, {"Retry-After": "1"}), (503, {})]
    world.server.call(lambda: world.server.faults.statuses.extend(refusals))
    started_s = asyncio.get_running_loop().time()
    await world.connector.add("Worker")
    assert asyncio.get_running_loop().time() - started_s >= 1
    assert world.operator.counts == [1, 2]


async def test_an_outage_changes_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A start that was under way is waited for, and what others did is known afterwards."""
    caplog.set_level(logging.INFO)
    world.operator.starts = False
    adding = asyncio.get_running_loop().create_task(world.connector.add("Worker"))
    await until(lambda: world.replicas() == 2)
    world.server.set_down(True)
    await world.unknown()
    with pytest.raises(cluster_client.ClusterError, match="the API server does not answer"):
        await world.connector.services()
    assert not adding.done()
    world.operator.starts = True
    world.by_hand(3)
    world.server.set_down(False)
    await until(lambda: world.operator.counts[-1] == 3)
    world.by_hand(4)  # so that two more than the one that never starts serve
    await adding
    await until(lambda: "the API server answers again" in caplog.text)


async def test_a_watch_that_is_too_old_lists_again(world: World) -> None:
    world.server.set_down(True)
    await world.unknown()
    world.by_hand(3)
    world.server.call(world.server.store.compact)
    world.by_hand(2)
    world.server.call(world.server.store.compact)
    world.server.set_down(False)
    await world.ready(2)


def listings(world: World) -> int:
    paths = [path for _, path in world.server.requests if f"/{DEPLOYMENTS}?" in path]
    return sum("watch" not in path for path in paths)


async def test_bookmarks_move_a_quiet_watch_on(world: World) -> None:
    """After other objects' changes, the version of the last bookmark is not too old."""
    before = listings(world)
    for number in range(3):
        world.server.put(ADAPTERS, {**adapter("Else", number), "metadata": {"name": "else"}})
    at = world.server.call(lambda: world.server.store.version)
    await until(lambda: int(world.connector._deployments._version) >= at)
    world.server.call(world.server.store.compact)
    world.server.call(world.server.cut_watches)
    world.by_hand(2)
    await world.ready(2)
    assert listings(world) == before


async def test_credentials_that_change(world: World, tmp_path: Path) -> None:
    world.server.tokens["new"] = frozenset({"get *", "list *", "watch *", "patch *"})
    world.server.kubeconfig(tmp_path / "config", "new")
    await world.connector.add("Worker")
    world.server.call(world.server.cut_watches)
    await world.ready(2)


async def test_watches_go_on_after_two_changes_of_the_credentials(world: World) -> None:
    """A client that is closed gives the readers of its watches neither an end nor a timeout."""
    cluster = world.connector._cluster
    for _ in range(3):
        await cluster._renew(cluster._connection)
    world.by_hand(2)
    await world.ready(2)


async def test_a_watch_that_is_silent_begins_again(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dynamo.planner.kubernetes.cluster._SILENCE_S", 1.5)
    at = world.server.call(lambda: world.server.store.version)
    for watched in (world.connector._deployments, world.connector._adapters):
        # A bookmark later, its reader waits with the deadline of this test.
        watched._version = "0"
        await until(partial(_is_at, watched, at))
    world.server.call(world.server.mute_watches)
    world.by_hand(2)
    await world.ready(2)
    assert "dynamographdeployments: the API server was silent for 1.5 s" in caplog.text


@pytest.mark.parametrize("status", [403, 404])
async def test_an_adapter_stays_while_the_server_does_not_show_it(
    world: World, status: int
) -> None:
    """A server that starts answers so for a moment: what was listed once is not gone."""
    world.server.put(ADAPTERS, adapter("Worker", 1))
    await until(lambda: world.connector._adapter("Worker"))
    slices = world.connector._slices
    await until(lambda: slices and not slices.problem)
    assert slices
    refused = {ADAPTERS: status, "endpointslices": status}
    world.server.call(lambda: world.server.faults.kinds.update(refused))
    world.server.call(world.server.cut_watches)
    await until(lambda: world.connector._adapters.problem and slices.problem)
    with pytest.raises(cluster_client.ClusterError, match=f"status {status} for the test"):
        await world.connector.add("Worker")
    world.server.call(world.server.faults.kinds.clear)
    await until(lambda: not world.connector._adapters.problem)
    await until(lambda: not slices.problem)
    await world.connector.add("Worker")
    assert world.server.object(ADAPTERS, f"{GRAPH}-worker")["spec"]["replicas"] == 2


async def test_kinds_that_it_may_not_see(world: World, tmp_path: Path) -> None:
    """Without them, replicas are those of the deployment, and traffic is unknown."""
    world.server.tokens["few"] = frozenset(
        f"{verb} {DEPLOYMENTS}" for verb in ("get", "list", "watch", "patch")
    )
    world.server.kubeconfig(tmp_path / "config", "few")
    async with connectors.open_connector(world.runtime, SETTINGS) as world.connector:
        await world.ready(1)
        await world.connector.add("Worker")
        await until(lambda: world.connector._slices and not world.connector._slices.problem)
        assert await world.connector.frontends() == {}


async def test_the_pods_of_frontends(world: World) -> None:
    found = graph(("Worker", worker()))
    variable = {"name": "DYN_METRICS_PREFIX", "value": "mine"}
    found["spec"]["services"]["Frontend"]["envs"] = [variable]
    world.server.put(DEPLOYMENTS, found)
    world.server.put(
        "endpointslices",
        {
            "metadata": {"name": "a", "labels": {SERVICE_LABEL: f"{GRAPH}-frontend"}},
            "endpoints": [
                {"addresses": ["10.0.0.1"], "conditions": {"ready": True}},
                {"addresses": ["10.0.0.2"], "conditions": {"ready": False}},
                {"addresses": ["fd00::3"]},
            ],
            "ports": [{"name": "metrics", "port": 9}, {"name": "http", "port": 8000}],
        },
    )
    other = {"metadata": {"name": "b", "labels": {SERVICE_LABEL: "else"}}, "endpoints": []}
    world.server.put("endpointslices", other)
    slices = world.connector._slices
    await until(lambda: slices and not slices.problem and slices.objects)
    seen = await world.connector.frontends()
    assert list(seen) == ["http://10.0.0.1:8000", "http://[fd00::3]:8000"]
    assert {prefix for _, prefix in seen.values()} == {"mine"}


async def test_missing_permissions_are_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.server.tokens.update(reader=frozenset({"get *", "list *", "watch *"}))
    config = world.server.kubeconfig(tmp_path / "reader", "reader")
    monkeypatch.setenv("KUBECONFIG", str(config))
    async with connectors.open_connector(world.runtime, SETTINGS) as world.connector:
        await world.ready(1)
        with pytest.raises(
            cluster_client.ClusterError, match=r"refuses to patch .* deploy/kubernetes"
        ):
            await world.connector.add("Worker")
    assert world.replicas() == 1
    world.server.tokens.clear()
    world.server.tokens.update(other=frozenset())
    with pytest.raises(ConfigError, match=r"refuses to get .*: Unauthorized"):
        async with connectors.open_connector(world.runtime, SETTINGS):
            pass


async def test_a_deployment_that_does_not_exist(world: World) -> None:
    settings = PlannerSettings(environment="kubernetes", graph_deployment="other")
    with pytest.raises(ConfigError, match=r'"other" not found.*namespace .now .default'):
        async with connectors.open_connector(world.runtime, settings):
            pass


async def test_without_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no credentials of a Kubernetes cluster"):
        async with connectors.open_connector(world.runtime, SETTINGS):
            pass


async def test_the_loop_holds_during_a_rollout(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The same loop as on one machine; it goes on when the rollout has ended.

    The log says once that it waits, and that its decision goes on then.
    """
    caplog.set_level(logging.INFO)
    policy, record = Wanted(3, blocking=False), Recorder()
    world.operator.rolling.add("Worker")
    await until(lambda: _held(world))
    loop = ScalingLoop(world.connector, FakeSources(), SETTINGS, lambda _: policy, [record])
    running = asyncio.get_running_loop().create_task(loop.run())
    try:
        await until(lambda: len(record.records) > 3)
        errors = {one.pools[0].error for one in record.records}
        assert errors == {"a rollout is in progress: 0 of 1 replicas updated"}
        for change in (world.connector.add, world.connector.remove):
            with pytest.raises(ActionFailed, match="Worker: a rollout is in progress"):
                await change("Worker")
        assert world.replicas() == 1
        assert caplog.text.count("decode workers are not changed: a rollout is in progress") == 1
        assert caplog.text.count("decode 1 -> 3") == 1
        world.operator.rolling.clear()
        await until(lambda: world.replicas() == 3)
        await world.ready(3)
    finally:
        await loop.stop(5)
        await running
    assert caplog.text.count("decode 1 -> 3") == 2
    assert world.operator.counts[:3] == [1, 2, 3]  # a stop may undo a start that has not ended


def _held(world: World) -> bool:
    status = world.connector._deployments.objects[GRAPH].get("status", {})
    return bool(status.get("components", {}).get("Worker", {}).get("updatedReplicas") == 0)


async def test_a_change_that_is_refused_again_and_again_is_logged_once(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter that the server does not show: each try fails for the same reason."""
    monkeypatch.setattr("dynamo.planner.live.model_state._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("dynamo.planner.live.model_state._LONGEST_PAUSE_S", 0.01)
    policy, record = Wanted(2, blocking=False), Recorder()

    async def refuse(service: str) -> str:
        raise cluster_client.ClusterError(f"the API server refuses to patch {service}", 403)

    monkeypatch.setattr(world.connector, "add", refuse)
    loop = ScalingLoop(world.connector, FakeSources(), SETTINGS, lambda _: policy, [record])
    running = asyncio.get_running_loop().create_task(loop.run())
    await until(lambda: sum(bool(one.pools[0].error) for one in record.records) > 3)
    await loop.stop(5)
    await running
    assert caplog.text.count("the API server refuses to patch Worker") == 1


async def test_an_operator_that_is_down_is_waited_for(world: World) -> None:
    world.operator.paused = True
    adding = asyncio.get_running_loop().create_task(world.connector.add("Worker"))
    await until(lambda: world.replicas() == 2)
    service = await world.held()
    assert [one.state for one in service.workers] == [READY, STARTING]
    assert service.held == "the operator has not applied generation 2 yet"
    world.operator.paused = False
    assert await adding == "Worker-1"


def _is_at(watched: Any, version: int) -> bool:
    return int(watched._version) >= version
