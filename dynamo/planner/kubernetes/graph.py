"""What a DynamoGraphDeployment says of its services: workers, replicas, rollouts. Pure.

Field names are those of ``nvidia.com/v1alpha1`` and ``v1beta1`` in the API reference of Dynamo's
operator. A component of v1beta1 is read as a service of v1alpha1, see :func:`_service`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo.prometheus_names import name_prefix
from dynamo.serve.graph.facts import DECODE, PREFILL, FrontendAddress

Manifest = Mapping[str, Any]
"""An object of the API server, as JSON."""

Patch = Mapping[str, Any] | list[dict[str, Any]]
"""A merge patch (RFC 7396), or a JSON patch (RFC 6902)."""

SERVICE_LABEL = "kubernetes.io/service-name"
"""Label of an EndpointSlice: the Service whose pods it lists."""

_POOLS = {"prefill": PREFILL, "decode": DECODE, "worker": DECODE}
_MODEL_FLAGS = ("--served-model-name", "--model-name", "--model", "--model-path")
_PREFILL_FLAGS = ("--is-prefill-worker", "--disaggregation-mode=prefill")
_UPDATING = ("Pending", "InProgress", "Restarting")
_GPU_RESOURCE = re.compile(r"/(gpu|mig-)")
_MAIN = "main"
"""The container of the worker in a pod of v1beta1."""
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
    reported = _mapping(deployment.get("status"))
    statuses = _mapping(reported.get("components") or reported.get("services"))
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
        or name_prefix.FRONTEND
        for service, spec in _services(deployment).items()
        if spec.get("componentType") == "frontend"
    }


def slice_addresses(endpoint_slice: Manifest) -> Iterator[FrontendAddress]:
    """Yield the address of each pod in an EndpointSlice: its port ``http``, else the first one."""
    ports = [port for port in endpoint_slice.get("ports") or () if port.get("port")]
    port = next(
        (candidate for candidate in ports if candidate.get("name") == "http"),
        ports[0] if ports else None,
    )
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
    service = target.get("componentName") or target.get("serviceName")
    if target.get("name") != deployment or not isinstance(service, str):
        return None
    return service, _count(spec.get("replicas"), 1)


def replicas_patch(deployment: Manifest, service: str, wanted: int) -> Patch:
    """Return what sets the replicas of a service, if ``deployment`` is still the newest version.

    A merge patch would replace the whole list of v1beta1, so that is a JSON patch.
    """
    version, components = version_of(deployment), deployment["spec"].get("components")
    if not isinstance(components, list):
        services = {service: {"replicas": wanted}}
        return {"metadata": {"resourceVersion": version}, "spec": {"services": services}}
    names = [_mapping(component).get("name") for component in components]
    index = names.index(service) if service in names else len(names)  # refused by the server
    path = f"/spec/components/{index}/replicas"
    return [
        # The server answers 409 if the object has another version by now.
        {"op": "replace", "path": "/metadata/resourceVersion", "value": version},
        {"op": "add", "path": path, "value": wanted},
    ]


def version_of(manifest: Manifest) -> str:
    """Return the version of an object, which each change of it raises."""
    return str(manifest["metadata"]["resourceVersion"])


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
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in conditions
    )


def is_of(namespace: str, worker_namespace: str) -> bool:
    """Whether a worker's namespace is that of the deployment.

    The operator appends eight hexadecimal digits of a hash of the workers' templates to it.
    """
    rest = worker_namespace.removeprefix(namespace)
    return worker_namespace.startswith(namespace) and (
        not rest or bool(_WORKER_HASH.fullmatch(rest))
    )


def _services(deployment: Manifest) -> dict[str, Manifest]:
    spec = _mapping(deployment.get("spec"))
    components = [_mapping(component) for component in spec.get("components") or ()]
    if components:
        return {str(component.get("name")): _service(component) for component in components}
    services = _mapping(spec.get("services"))
    return {name: service for name, service in services.items() if isinstance(service, Mapping)}


def _service(component: Manifest) -> Manifest:
    """Return a component of v1beta1 with the fields of a service of v1alpha1."""
    pod = _mapping(_mapping(component.get("podTemplate")).get("spec"))
    containers = [_mapping(container) for container in pod.get("containers") or ()]
    main = next((container for container in containers if container.get("name") == _MAIN), {})
    others = [container for container in containers if container is not main]
    return {
        **component,
        "componentType": component.get("type"),
        "envs": main.get("env"),
        "extraPodSpec": {"mainContainer": main, "containers": others},
    }


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

    The most that is said counts, so that the budget is never exceeded. Source of the status's
    ``gpusPerReplica``: pull request 13871 of ai-dynamo/dynamo.
    """
    pod = _mapping(spec.get("extraPodSpec"))
    main = max(_container_gpus(spec), _container_gpus(_mapping(pod.get("mainContainer"))))
    others = [_container_gpus(_mapping(container)) for container in pod.get("containers") or ()]
    nodes = max(1, _count(_mapping(spec.get("multinode")).get("nodeCount"), 1))
    return max(_amount(status.get("gpusPerReplica")), nodes * (main + sum(others)))


def _container_gpus(container: Manifest) -> float:
    resources = _mapping(container.get("resources"))
    parts = [_mapping(resources.get(part)) for part in ("limits", "requests")]
    return max((amount for part in parts for amount in _gpu_amounts(part)), default=0.0)


def _gpu_amounts(resources: Manifest) -> Iterator[float]:
    """Yield the GPUs that limits or requests name: Dynamo's ``gpu``, the extended resources of
    Kubernetes, and those in Dynamo's ``custom``."""
    for name, value in (*resources.items(), *_mapping(resources.get("custom")).items()):
        if name == "gpu" or _GPU_RESOURCE.search(str(name)):
            yield _amount(value)


def _amount(value: object) -> float:
    try:
        amount = float(value) if isinstance(value, int | float | str) else 0.0
    except ValueError:
        return 0.0
    return amount if 0 <= amount < math.inf else 0.0


def _variables(deployment: Manifest, spec: Manifest) -> dict[str, str]:
    graph = deployment["spec"].get("envs") or deployment["spec"].get("env")
    entries = (*(graph or ()), *(spec.get("envs") or ()))
    return {env["name"]: str(env["value"]) for env in entries if env.get("value") is not None}


def _reported(status: Manifest, *fields: str) -> int | None:
    """Return the first count of ``fields`` that a service's status has; None if it has none."""
    counts = (status.get(field) for field in fields)
    return next((count for count in counts if isinstance(count, int) and count >= 0), None)


def _count(value: object, default: int) -> int:
    return value if isinstance(value, int) and value >= 0 else default


def _mapping(value: object) -> Manifest:
    return value if isinstance(value, Mapping) else {}
