"""What a DynamoGraphDeployment says: pools, models, GPUs, rollouts."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_kit import graph, worker

from dynamo.planner.kubernetes.graph import (
    adapted_service,
    is_of,
    rollout,
    unapplied,
    worker_services,
)


def only(spec: dict[str, Any], **status: Any) -> Any:
    found = {**graph(("Worker", spec)), "status": {"services": status}}
    (service,) = worker_services(found)
    return service


@pytest.mark.parametrize(
    ("more", "pool"),
    [
        ({}, "decode"),
        ({"componentType": "prefill"}, "prefill"),
        ({"componentType": "decode"}, "decode"),
        ({"subComponentType": "prefill"}, "prefill"),
        ({"subComponentType": "decode", "args": ("--is-prefill-worker",)}, "decode"),
        ({"args": ("--is-prefill-worker",)}, "prefill"),
        ({"args": ("--disaggregation-mode", "prefill")}, "prefill"),
        ({"args": ("--disaggregation-mode=decode",)}, "decode"),
    ],
)
def test_the_pool_of_a_service(more: dict[str, Any], pool: str) -> None:
    assert only(worker(**more)).pool == pool


@pytest.mark.parametrize("kind", ["frontend", "planner", "epp", "main", None, 7])
def test_services_without_workers(kind: object) -> None:
    pools: list[dict[str, Any]] = [{"subComponentType": pool} for pool in ("prefill", "decode")]
    for more in ({}, *pools):
        found = worker_services(graph(("Other", worker(componentType=kind, **more))))
        assert list(found) == [], more


@pytest.mark.parametrize(
    ("args", "model"),
    [
        ((), ""),
        (("--model", "Qwen/Qwen3-0.6B"), "Qwen/Qwen3-0.6B"),
        (("--model=a", "--served-model-name", "b"), "b"),
        (("exec python3 -m dynamo.vllm --model 'my model' --x",), "my model"),
        (("a script with ' a quote",), ""),
        (("--model",), ""),
    ],
)
def test_the_model_of_a_service(args: tuple[str, ...], model: str) -> None:
    assert only(worker(args=args)).model == model


def test_the_flags_of_a_service_may_be_in_its_command() -> None:
    command = ["python3", "-m", "dynamo.vllm", "--model=a", "--is-prefill-worker"]
    found = only(worker(extraPodSpec={"mainContainer": {"command": command}}))
    assert (found.model, found.pool) == ("a", "prefill")


def _container(resources: dict[str, Any]) -> dict[str, Any]:
    return {"extraPodSpec": {"mainContainer": {"resources": resources}}}


@pytest.mark.parametrize(
    ("resources", "more", "gpus"),
    [
        ({"limits": {"gpu": "2"}}, {}, 2.0),
        ({"requests": {"gpu": 1}}, {}, 1.0),
        ({"limits": {"gpu": "4"}}, {"multinode": {"nodeCount": 2}}, 8.0),
        ({"limits": {"gpu": "many"}}, {}, 0.0),
        ({"limits": {"cpu": "2"}}, {}, 0.0),
        ({"limits": {"custom": {"nvidia.com/gpu": "4"}}}, {}, 4.0),
        ({"limits": {"gpu": "1"}}, _container({"limits": {"nvidia.com/gpu": "4"}}), 4.0),
        ("none", _container({"requests": {"amd.com/gpu": 2}}), 2.0),
        ({"limits": {"nvidia.com/mig-1g.5gb": 1}}, {"multinode": {"nodeCount": 0}}, 1.0),
        ({"limits": {"gpu": "inf"}}, {}, 0.0),
        ("none", {}, 0.0),
    ],
)
def test_the_gpus_of_a_replica(resources: object, more: dict[str, Any], gpus: float) -> None:
    assert only(worker(resources=resources, **more)).gpus == gpus


def _beta(component: dict[str, Any], **status: Any) -> Any:
    spec = {"components": [{"name": "F", "type": "frontend"}, {"name": "W", **component}]}
    found = {"metadata": {"name": "g"}, "spec": spec, "status": {"components": {"W": status}}}
    (service,) = worker_services(found)
    return service


def test_a_component_of_v1beta1() -> None:
    """Its worker is the container `main`; a sidecar's GPUs count, too."""
    main = {
        "name": "main",
        "args": ["--model", "m"],
        "resources": {"limits": {"nvidia.com/gpu": 4}},
    }
    sidecar = {"name": "s", "resources": {"requests": {"nvidia.com/gpu": "1"}}}
    component = {
        "type": "prefill",
        "replicas": 3,
        "multinode": {"nodeCount": 2},
        "podTemplate": {"spec": {"containers": [sidecar, main]}},
    }
    service = _beta(component, replicas=3, availableReplicas=2)
    assert (service.name, service.pool, service.model) == ("W", "prefill", "m")
    assert (service.gpus, service.replicas, service.listed, service.ready) == (10.0, 3, 3, 2)
    assert _beta({"type": "decode"}, replicas=1, gpusPerReplica=16).gpus == 16.0
    assert _beta({"type": "worker", "podTemplate": None}).pool == "decode"
    adapter = {"spec": {"replicas": 2, "dgdRef": {"name": "g", "componentName": "W"}}}
    assert adapted_service(adapter, "g") == ("W", 2)


def test_counts_that_the_operator_does_not_report() -> None:
    service = only(worker(replicas=3))
    assert (service.replicas, service.ready, service.updated, service.listed) == (3,) + (None,) * 3
    service = only(worker(), Worker={"replicas": 1, "updatedReplicas": 1})
    assert (service.ready, service.updated, service.listed) == (None, 1, 1)
    service = only(worker(), Worker={"replicas": 2, "availableReplicas": 1})  # several nodes
    assert (service.ready, service.updated, service.listed) == (1, None, 2)
    service = only(worker(), Worker={"availableReplicas": 0, "readyReplicas": 2})
    assert service.ready == 0
    assert only(worker(), Worker={"replicas": 1, "gpusPerReplica": 8}).gpus == 8.0
    spec = worker()
    del spec["replicas"]
    assert only(spec).replicas == 1


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({}, ""),
        ({"rollingUpdate": {"phase": "Completed"}}, ""),
        ({"rollingUpdate": {"phase": "InProgress"}}, "a rolling update is in progress"),
        ({"restart": {"phase": "Restarting"}}, "a restart is in progress"),
        (
            {"services": {"Worker": {"replicas": 3, "updatedReplicas": 1, "readyReplicas": 3}}},
            "1 of 3 replicas updated",
        ),
        ({"services": {"Worker": {"replicas": 3, "updatedReplicas": 3, "readyReplicas": 1}}}, ""),
    ],
)
def test_a_rollout(status: dict[str, Any], reason: str) -> None:
    found = {**graph(("Worker", worker(3))), "status": status}
    (service,) = worker_services(found)
    assert reason in rollout(found, service) and bool(reason) == bool(rollout(found, service))


def test_a_change_that_the_operator_has_not_seen() -> None:
    found = graph(("Worker", worker()))
    found["metadata"]["generation"] = 3
    assert unapplied(found) == ""  # an operator that does not report it
    found["status"] = {"observedGeneration": 2}
    assert unapplied(found) == "the operator has not applied generation 3 yet"


@pytest.mark.parametrize(
    ("namespace", "same"),
    [
        ("ns-graph", True),
        ("ns-graph-0a1b2c3d", True),
        ("ns-graph-b", False),
        ("ns-graph-0a1b2c3d-x", False),
        ("ns", False),
    ],
)
def test_namespaces_of_workers(namespace: str, same: bool) -> None:
    assert is_of("ns-graph", namespace) == same
