"""The planner in a cluster: `kubectl` beside it, its connectors, a step of the load and back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer, api_server, role
from boxes import binary, needs
from certificates import Authority, needs_openssl
from cluster_kit import (
    ADAPTERS,
    DEPLOYMENTS,
    GRAPH,
    Operator,
    ProcessPod,
    adapter,
    cluster,
    graph,
    worker,
)
from deployment import MODEL, ROOT, Deployment, free_port
from forked_kit import run_verb
from lazy_module import LazyModule
from load_kit import under_load
from serving import Serving

from dynamo.config.planner import PlannerSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import DynamoError
from dynamo.operations.steps.limits import ActionFailed
from dynamo.planner.connector import READY, Connector
from dynamo.planner.live import local_connector
from dynamo.runtime import DistributedRuntime

kubernetes = LazyModule("dynamo.planner.kubernetes.connector")

MOCKER = (
    *("--model-path", str(MODEL), "--model-name", "tiny"),
    *("--block-size", "4", "--num-gpu-blocks-override", "48"),
)
TOKENS = 96  # 24 blocks at the end of a request: ten clients fill the caches of two workers
LOCAL = f"""
Frontend: {{run: dynamo.frontend, http-port: PORT}}
Worker:
  run: dynamo.mocker
  model-path: {MODEL}
  model-name: tiny
  ServiceArgs: {{resources: {{gpu: 1}}, graceful_timeout: 10}}
"""
needs_kubectl = needs("kubectl", "kubernetes-client")


class Kubectl:
    """The command as a user runs it, with a cache of its own."""

    def __init__(self, server: ApiServer, directory: Path) -> None:
        self.command = [
            str(binary("kubectl")),
            *("--kubeconfig", str(server.kubeconfig(directory / "kubeconfig"))),
            *("--cache-dir", str(directory / "cache")),
        ]
        self.env = {**os.environ, "HOME": str(directory)}

    def run(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, *words],
            input=stdin,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def __call__(self, *words: str, stdin: str = "") -> str:
        done = self.run(*words, stdin=stdin)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout.strip()

    @contextlib.contextmanager
    def watching(self, *words: str) -> Iterator[Iterator[str]]:
        """Yield the lines of a command that follows changes."""
        with subprocess.Popen(
            [*self.command, *words], env=self.env, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            try:
                yield (line.strip() for line in process.stdout)
            finally:
                process.kill()


@pytest.fixture
def kubectl(tmp_path: Path) -> Iterator[tuple[ApiServer, Kubectl]]:
    with api_server(Authority(tmp_path)) as server:
        yield server, Kubectl(server, tmp_path)


@needs_kubectl
@needs_openssl
def test_kubectl_is_a_second_client(kubectl: tuple[ApiServer, Kubectl]) -> None:
    """Apply, get -w, patch, scale and delete behave as with a real server."""
    _, run = kubectl
    resources = run("api-resources", "--api-group=nvidia.com", "-o", "name")
    assert resources.split() == [f"{one}.nvidia.com" for one in (DEPLOYMENTS, ADAPTERS)]
    path = ROOT / "deploy/kubernetes/graph.yaml"
    assert run("apply", "--validate=false", "-f", str(path)).endswith("created")
    assert run("apply", "--validate=false", "-f", str(path)).endswith("unchanged")
    columns = "custom-columns=N:.metadata.name,W:.spec.services.Worker.replicas"
    with run.watching("get", "dgd", "-w", "--no-headers", "-o", columns) as lines:
        assert next(lines).split() == [GRAPH, "1"]
        change = '{"spec": {"services": {"Worker": {"replicas": 2}}}}'
        assert run("patch", "dgd", GRAPH, "--type=merge", "-p", change).endswith("patched")
        assert next(lines).split() == [GRAPH, "2"]
        step = '[{"op": "replace", "path": "/spec/services/Worker/replicas", "value": 3}]'
        run("patch", "dgd", GRAPH, "--type=json", "-p", step)
        assert next(lines).split() == [GRAPH, "3"]
        text = path.read_text().replace("replicas: 1", "replicas: 4")
        assert run("apply", "--validate=false", "-f", "-", stdin=text).endswith("configured")
        assert next(lines).split() == [GRAPH, "4"]
    for words, error in (
        (("patch", "dgd", GRAPH, "-p", "{}"), "unknown format"),  # strategic: not for custom kinds
        (("patch", "dgd", GRAPH, "--type=merge", "-p", change.replace("2", "-2")), "nvalid"),
        (("get", "dgd", "other"), 'NotFound): dynamographdeployments "other" not found'),
        (("scale", "dgd", GRAPH, "--replicas=2"), "could not find the requested resource"),
        (("create", "--validate=false", "-f", str(path)), "AlreadyExists"),
    ):
        done = run.run(*words)
        assert done.returncode and error in done.stderr, (words, done.stderr)
    run("apply", "--validate=false", "-f", "-", stdin=json.dumps(adapter("Worker", 1)))
    name = f"dgdsa/{GRAPH}-worker"
    assert run("scale", name, "--replicas=3").endswith("scaled")
    assert run("get", name, "-o", "jsonpath={.spec.replicas} {.metadata.generation}") == "3 2"
    assert (
        "Expected replicas to be 1, was 3"
        in run.run(*("scale", name, "--current-replicas=1", "--replicas=5")).stderr
    )
    assert run("delete", "dgd", GRAPH).endswith("deleted")
    assert run("get", "dgd", "-o", "name") == ""


@needs_kubectl
@needs_openssl
def test_kubectl_is_refused_without_permission(kubectl: tuple[ApiServer, Kubectl]) -> None:
    server, run = kubectl
    server.tokens["reader"] = frozenset({"get *", "list *"})
    refused = run.run("get", "dgd").stderr
    assert "Unauthorized" in refused or "must be logged in" in refused
    config = run.command[run.command.index("--kubeconfig") + 1]
    server.kubeconfig(Path(config), "reader")
    assert run("get", "dgd", "-o", "name") == ""
    path = str(ROOT / "deploy/kubernetes/graph.yaml")
    assert "Forbidden" in run.run("create", "--validate=false", "-f", path).stderr


def pods(settings: RuntimeSettings, env: dict[str, str]) -> Any:
    return lambda spec: ProcessPod(settings, spec, env)


@contextlib.asynccontextmanager
async def local_system(serving: Serving) -> AsyncIterator[Connector]:
    serving.start(LOCAL.replace("PORT", str(free_port())), "--gpus", "3", wait="ready: ")
    settings = RuntimeSettings(namespace=serving.namespace, state_dir=str(serving.state_dir))
    async with local_connector.open_connector(settings, PlannerSettings()) as connector:
        yield connector
    assert serving.stop() == 0
    serving.assert_clean()


@contextlib.asynccontextmanager
async def cluster_system(serving: Serving) -> AsyncIterator[Connector]:
    settings = RuntimeSettings(namespace=serving.namespace, state_dir=str(serving.state_dir))
    env = {**serving.env, "DYN_NAMESPACE": serving.namespace, "LOGS": str(serving.tmp_path)}
    with cluster(pods(settings, env)) as (server, _):
        server.put(DEPLOYMENTS, graph(("Worker", worker(args=MOCKER))))
        runtime = DistributedRuntime(asyncio.get_running_loop(), settings)
        with pytest.MonkeyPatch.context() as patch:
            path = server.kubeconfig(serving.tmp_path / "kubeconfig")
            patch.setenv("KUBECONFIG", str(path))
            planner = PlannerSettings(environment="kubernetes", graph_deployment=GRAPH)
            async with kubernetes.open_connector(runtime, planner) as connector:
                await runtime.start()
                yield connector
        await runtime.close()


SYSTEMS = {"local": local_system, "kubernetes": cluster_system}


async def listed(connector: Connector) -> list[str]:
    """The states of the service's workers."""
    service = (await connector.services()).get("Worker")
    return ["no service"] if service is None else [one.state for one in service.workers]


async def states(connector: Connector, *wanted: str) -> None:
    """Wait until the service has workers in these states and no others."""
    seen: object = None
    try:
        async with asyncio.timeout(90):
            while seen != list(wanted):
                await asyncio.sleep(0.02)
                try:
                    seen = await listed(connector)
                except DynamoError as error:  # circus is busy, or nothing is listed yet
                    seen = error.message
    except TimeoutError:
        raise AssertionError(f"wanted {wanted}, seen {seen}") from None


@pytest.mark.parametrize("system", SYSTEMS)
async def test_one_contract_for_both_connectors(serving: Serving, system: str) -> None:
    async with SYSTEMS[system](serving) as connector:
        await states(connector, READY)
        service = (await connector.services())["Worker"]
        assert (service.model, service.pool, service.gpus_per_worker) == ("tiny", "decode", 1)
        assert (service.assigned, service.held) == (1, "")
        name = await connector.add("Worker")
        service = (await connector.services())["Worker"]
        assert [one.state for one in service.workers] == [READY, READY]
        assert service.workers[-1].name == name
        assert len({one.worker_id for one in service.workers} - {None}) == 2
        assert await connector.remove("Worker") == name
        await states(connector, READY)
        # A start that takes too long leaves nothing.
        connector.configure(replace_timeout(system, 0.05))
        with pytest.raises(ActionFailed, match=r"did not serve within 0\.05 s"):
            await connector.add("Worker")
        await states(connector, READY)
        connector.configure(replace_timeout(system, 60))
        await connector.remove("Worker")
        await states(connector)
        with pytest.raises(ActionFailed, match="Worker: no worker to remove"):
            await connector.remove("Worker")
        async with asyncio.TaskGroup() as group:  # the starts overlap
            adds = [group.create_task(connector.add("Worker")) for _ in range(2)]
        assert len({task.result() for task in adds}) == 2
        await states(connector, READY, READY)
        assert await connector.reconcile() == []


def replace_timeout(system: str, seconds: float) -> PlannerSettings:
    return PlannerSettings(environment=system, graph_deployment=GRAPH, start_timeout_s=seconds)


class Cluster:
    """A frontend, an operator with mock workers, and a planner beside them."""

    def __init__(self, deployment: Deployment, server: ApiServer, operator: Operator) -> None:
        self.deployment, self.server, self.operator = deployment, server, operator
        config = server.kubeconfig(deployment.logs / "kubeconfig", "planner")
        deployment.env["KUBECONFIG"] = str(config)
        server.tokens["planner"] = role(ROOT / "deploy/kubernetes/planner.yaml")
        server.put(DEPLOYMENTS, graph(("Worker", worker(args=MOCKER))))
        server.put(ADAPTERS, adapter("Worker", 1))
        server.put(
            "endpointslices",
            {
                "metadata": {
                    "name": "frontend-1",
                    "labels": {"kubernetes.io/service-name": f"{GRAPH}-frontend"},
                },
                "addressType": "IPv4",
                "endpoints": [{"addresses": ["127.0.0.1"], "conditions": {"ready": True}}],
                "ports": [{"name": "http", "port": deployment.port, "protocol": "TCP"}],
            },
        )
        deployment.frontend()

    def planner(self, *flags: str) -> subprocess.Popen[bytes]:
        return self.deployment.start(
            "dynamo.planner",
            *("--environment", "kubernetes", "--graph-deployment", GRAPH),
            *("--adjustment-interval", "1", "--metric-pulling-interval", "0.1"),
            *("--log-dir", str(self.deployment.logs / "tensorboard"), *flags),
        )

    def verb(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run_verb("planner", *words, env=self.deployment.env)

    def replicas(self) -> int:
        found = self.server.object(DEPLOYMENTS, GRAPH)
        return int(found["spec"]["services"]["Worker"]["replicas"])

    def until_replicas(self, count: int) -> None:
        self.deployment.until(lambda: self.replicas() == count, f"{count} replicas", 60)


@contextlib.contextmanager
def running_cluster(deployment: Deployment) -> Iterator[Cluster]:
    settings = RuntimeSettings(namespace=deployment.namespace, state_dir=str(deployment.state_dir))
    env = {**deployment.env, "LOGS": str(deployment.logs)}
    with cluster(pods(settings, env), Authority(deployment.logs)) as (server, operator):
        made = Cluster(deployment, server, operator)
        deployment.wait_for_workers()
        yield made


LOAD = (
    *("--max-gpu-budget", "3", "--decode-kv-scale-up-threshold", "0.7"),
    *("--decode-kv-scale-down-threshold", "0.3"),
)


@needs_openssl
def test_a_step_of_the_load_and_back_in_a_cluster(deployment: Deployment) -> None:
    """One replica, three, one; an outage of the API server in between changes nothing."""
    with running_cluster(deployment) as made:
        planner = made.planner(*LOAD)
        with under_load(deployment.port, clients=1, tokens=TOKENS):
            with under_load(deployment.port, clients=9, tokens=TOKENS):
                made.until_replicas(3)
                deployment.wait_for_workers(3)
                made.server.set_down(True)
                log = deployment.logs / "1-dynamo.planner.log"
                deployment.until(lambda: "services are unknown" in log.read_text(), timeout_s=60)
            assert made.replicas() == 3
            made.server.set_down(False)
            made.until_replicas(1)
            deployment.wait_for_workers(1)
        assert made.operator.counts == [1, 2, 3, 2, 1]
        report = json.loads(made.verb("explain", "--json").stdout)
        assert report["running"] and report["models"][0]["now"]["model"] == "tiny"
        refused = made.verb("set", "--min", "Worker=0")
        assert refused.returncode and "between 1 and" in refused.stderr + refused.stdout
        second = made.planner(*LOAD)
        assert second.wait(60) == 1
        assert "already scales namespace" in (deployment.logs / "2-dynamo.planner.log").read_text()
        planner.terminate()
        assert planner.wait(60) == 0
        text = log.read_text()
        assert "policy load: decode 1 -> 2" in text and "its traffic is unknown" not in text
        deployment.processes.remove(second)


@needs_openssl
def test_the_public_configuration_of_dynamos_planner_starts(deployment: Deployment) -> None:
    """As Dynamo's disagg_planner.yaml starts it: inline JSON, the names from the operator."""
    config = {
        "environment": "kubernetes",
        "backend": "vllm",
        "optimization_target": "sla",
        "enable_throughput_scaling": True,
        "enable_load_scaling": True,
        "pre_deployment_sweeping_mode": "none",
        "throughput_adjustment_interval_seconds": 60,
        "load_adjustment_interval_seconds": 5,
    }
    deployment.env |= {"DYN_PARENT_DGD_K8S_NAME": GRAPH, "DYN_PARENT_DGD_K8S_NAMESPACE": "default"}
    with running_cluster(deployment) as made:
        planner = deployment.start("dynamo.planner", "--config", json.dumps(config))
        log = deployment.logs / "1-dynamo.planner.log"
        deployment.until(lambda: "policy load+sla decides" in log.read_text(), "a policy", 60)
        planner.terminate()
        assert planner.wait(60) == 0 and made.replicas() == 1
    assert log.read_text().count("no effect here: backend, enable_throughput_scaling, ") == 1
