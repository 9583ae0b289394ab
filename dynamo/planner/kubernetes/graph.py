"""What a DynamoGraphDeployment says of its services: workers, replicas, rollouts. Pure.

Field names are those of ``nvidia.com/v1alpha1`` in the API reference of Dynamo's operator.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.observability.metrics import DEFAULT_FRONTEND_PREFIX
from dynamo.planner.policies.base import DECODE, PREFILL
from dynamo.serve.state.frontends import FrontendAddress

Manifest = Mapping[str, Any]
"""An object of the API server, as JSON."""

SERVICE_LABEL = "kubernetes.io/service-name"
"""Label of an EndpointSlice: the Service whose pods it lists."""

_POOLS = {"prefill": PREFILL, "decode": DECODE, "worker": DECODE}
_MODEL_FLAGS = ("--served-model-name", "--model-name", "--model", "--model-path")
_PREFILL_FLAGS = ("--is-prefill-worker", "--disaggregation-mode=prefill")
_UPDATING = ("Pending", "InProgress", "Restarting")
_GPU_RESOURCE = re.compile(r"/(gpu|mig-)")
_WORKER_HASH = re.compile(r"-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerService:
    """A service of workers. ``model`` is what its flags say, "" if they do not.

    ``listed``, ``ready`` and ``updated`` replicas are None where the operator does not report them.
    """

    name: str
    pool: str
    model: str
    gpus: float
    replicas: int
    listed: int | None
    ready: int | None
    updated: int | None


def worker_services(deployment: Manifest) -> Iterator[WorkerService]:
    """Yield the services of ``deployment`` whose pods are workers."""
    statuses = _mapping(_mapping(deployment.get("status")).get("services"))
    for name, spec in _services(deployment).items():
        pool = _pool(spec)
        if pool is None:
            continue
        status = _mapping(statuses.get(name))
        yield WorkerService(
            name=name,
            pool=pool,
            model=_model(spec),
            gpus=_gpus(spec, status),
            replicas=_count(spec.get("replicas"), 1),
            listed=_reported(status, "replicas"),
            # Of a PodCliqueScalingGroup (several nodes) there are available replicas only.
            ready=_reported(status, "availableReplicas", "readyReplicas"),
            updated=_reported(status, "updatedReplicas"),
        )


def frontend_prefixes(deployment: Manifest) -> dict[str, str]:
    """Return the prefix of the metrics of each service of frontends, by its Kubernetes Service."""
    name = deployment["metadata"]["name"]
    return {
        f"{name}-{service.lower()}": _variables(deployment, spec).get("DYN_METRICS_PREFIX")
        or DEFAULT_FRONTEND_PREFIX
        for service, spec in _services(deployment).items()
        if spec.get("componentType") == "frontend"
    }


def slice_addresses(endpoint_slice: Manifest) -> Iterator[FrontendAddress]:
    """Yield the address of each pod in an EndpointSlice: its port ``http``, else the first one."""
    ports = [port for port in endpoint_slice.get("ports") or () if port.get("port")]
    port = next((one for one in ports if one.get("name") == "http"), ports[0] if ports else None)
    if port is None:
        return
    tls = port.get("appProtocol") == "https" or port.get("name") == "https"
    for endpoint in endpoint_slice.get("endpoints") or ():
        if _mapping(endpoint.get("conditions")).get("ready") is not False:
            for address in endpoint.get("addresses") or ():
                yield FrontendAddress(str(address), int(port["port"]), tls)


def adapted_service(adapter: Manifest, deployment: str) -> tuple[str, int] | None:
    """Return service and replicas of a scaling adapter; None if it is of another deployment."""
    spec = _mapping(adapter.get("spec"))
    target = _mapping(spec.get("dgdRef"))
    if target.get("name") != deployment or not isinstance(target.get("serviceName"), str):
        return None
    return target["serviceName"], _count(spec.get("replicas"), 1)


def rollout(deployment: Manifest, service: WorkerService) -> str:
    """Return the rollout during which ``service`` must not be scaled, else "".

    Scaling is no rollout: its new replicas are of the current template.
    """
    status = _mapping(deployment.get("status"))
    if deployment["metadata"].get("deletionTimestamp"):
        return f"{deployment['metadata']['name']} is being deleted"
    for field, action in (("rollingUpdate", "rolling update"), ("restart", "restart")):
        phase = _mapping(status.get(field)).get("phase")
        if phase in _UPDATING:
            return f"a {action} is in progress (phase {phase})"
    if service.updated is not None and service.updated < (service.listed or 0):
        return f"a rollout is in progress: {service.updated} of {service.listed} replicas updated"
    return ""


def unapplied(deployment: Manifest) -> str:
    """Return which change of the deployment the operator has still to apply, else ""."""
    generation = deployment["metadata"].get("generation")
    observed = _mapping(deployment.get("status")).get("observedGeneration")
    if isinstance(generation, int) and isinstance(observed, int) and observed < generation:
        return f"the operator has not applied generation {generation} yet"
    return ""


def is_ready(deployment: Manifest) -> bool:
    """Whether the operator reports the deployment as ready, as its condition says."""
    conditions = _mapping(deployment.get("status")).get("conditions") or ()
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


def is_of(namespace: str, worker_namespace: str) -> bool:
    """Whether a worker's namespace is that of the deployment.

    The operator appends eight hexadecimal digits of a hash of the workers' templates to it.
    """
    rest = worker_namespace.removeprefix(namespace)
    return worker_namespace.startswith(namespace) and (
        not rest or bool(_WORKER_HASH.fullmatch(rest))
    )


def _services(deployment: Manifest) -> dict[str, Manifest]:
    found = _mapping(_mapping(deployment.get("spec")).get("services"))
    return {name: spec for name, spec in found.items() if isinstance(spec, Mapping)}


def _pool(spec: Manifest) -> str | None:
    """Return the pool of a service, None if its pods are no workers."""
    kind = spec.get("componentType")
    pool = _POOLS.get(str(spec.get("subComponentType") or kind))
    if kind not in _POOLS or pool is None:
        return None
    if pool == DECODE and not spec.get("subComponentType"):
        words = _flags(spec)
        if any(flag in words or flag.replace("=", " ") in words for flag in _PREFILL_FLAGS):
            return PREFILL
    return pool


def _flags(spec: Manifest) -> str:
    """Return the command of a service as one text, its words separated by one space."""
    container = _mapping(_mapping(spec.get("extraPodSpec")).get("mainContainer"))
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    return " ".join(str(word) for word in words)


def _model(spec: Manifest) -> str:
    try:
        words = shlex.split(_flags(spec))
    except ValueError:  # a quote without its end, in a script
        return ""
    for flag in _MODEL_FLAGS:
        for word, following in zip(words, (*words, "")[1:], strict=True):
            name, joined, value = word.partition("=")
            if name == flag and (value or following):
                return value if joined else following
    return ""


def _gpus(spec: Manifest, status: Manifest) -> float:
    """Return the GPUs of one replica: as the operator reports, or those of a pod times the nodes.

    The most that a place says counts, so that the budget is never exceeded.
    """
    container = _mapping(_mapping(spec.get("extraPodSpec")).get("mainContainer"))
    amounts = [
        amount
        for resources in (_mapping(spec.get("resources")), _mapping(container.get("resources")))
        for part in ("limits", "requests")
        for amount in _gpu_amounts(_mapping(resources.get(part)))
    ]
    nodes = max(1, _count(_mapping(spec.get("multinode")).get("nodeCount"), 1))
    return max([_amount(status.get("gpusPerReplica")), *(nodes * one for one in amounts)])


def _gpu_amounts(resources: Manifest) -> Iterator[float]:
    """Yield the GPUs that limits or requests name: Dynamo's ``gpu``, the extended resources of
    Kubernetes, and those in Dynamo's ``custom``."""
    for name, value in (*resources.items(), *_mapping(resources.get("custom")).items()):
        if name == "gpu" or _GPU_RESOURCE.search(str(name)):
            yield _amount(value)


def _amount(value: object) -> float:
    try:
        found = float(value) if isinstance(value, int | float | str) else 0.0
    except ValueError:
        return 0.0
    return found if 0 <= found < math.inf else 0.0


def _variables(deployment: Manifest, spec: Manifest) -> dict[str, str]:
    given = (*(deployment["spec"].get("envs") or ()), *(spec.get("envs") or ()))
    return {one["name"]: str(one["value"]) for one in given if one.get("value") is not None}


def _reported(status: Manifest, *fields: str) -> int | None:
    """Return the first count of ``fields`` that a service's status has; None if it has none."""
    counts = (status.get(field) for field in fields)
    return next((one for one in counts if isinstance(one, int) and one >= 0), None)


def _count(value: object, default: int) -> int:
    return value if isinstance(value, int) and value >= 0 else default


def _mapping(value: object) -> Manifest:
    return value if isinstance(value, Mapping) else {}
