"""The file of --router-policy-config: shared settings, classes of the queue, choice of workers.

Its form is that of Dynamo 1.6, except that the type of a policy may be a class in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dynamo.errors import ConfigError

STAGES = ("aggregated", "prefill", "decode")
BUILT_IN = "default"
"""The name of the built-in choice, which no instance may have."""
WEIGHTED = "dynamo-default-cost-fn"
"""The built-in choice with other weights."""
CLASSIFIER = "request_classifier"
"""The name of the policy that classifies requests, in logs and metrics."""
_THUNDERAGENT = "thunderagent"
_NO_THUNDERAGENT = (
    "thunderagent is not supported: the turns of an agent are not held back; remove it, "
    "--router-session-affinity-ttl-secs keeps them on one worker"
)
FLAG = "--router-policy-config"
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)]
_NotNegative = Annotated[int, Meta(ge=0)]
_Limit = Annotated[int, Meta(ge=1)]
WEIGHT_KEYS = {
    "overlap_score_credit": "overlap_score_credit",
    "overlap_score_credit_decay": "overlap_score_credit_decay",
    "prefill_load_scale": "prefill_load_scale",
    "decode_active_request_weight": "decode_active_request_weight",
    "host_cache_hit_weight": "host_cache_hit_weight",
    "disk_cache_hit_weight": "disk_cache_hit_weight",
    "shared_cache_multiplier": "shared_cache_multiplier",
    "router_temperature": "temperature",
}
"""Parameter of :data:`WEIGHTED` → field of the router's settings."""
ROUTER_KEYS = {
    "host_cache_hit_weight": "host_cache_hit_weight",
    "disk_cache_hit_weight": "disk_cache_hit_weight",
    "use_kv_events": "kv_events",
    "router_replica_sync": "replica_sync",
    "router_track_active_blocks": "track_active_blocks",
    "router_track_output_blocks": "track_output_blocks",
    "router_assume_kv_reuse": "assume_kv_reuse",
    "router_track_prefill_tokens": "track_prefill_tokens",
    "router_prefill_load_model": "prefill_load_model",
    "router_ttl_secs": "ttl_s",
    "router_approximate_cache_policy": "approximate_cache_policy",
    "router_event_threads": "event_threads",
    "shared_cache_type": "shared_cache_type",
    "router_predicted_ttl_secs": "predicted_ttl_s",
}
"""Key of ``router`` → field of the router's settings."""


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mapping of the file, whose unknown keys are errors."""


class PolicyClass(_Strict, frozen=True, kw_only=True):
    """A class of queued requests.

    It gets a share of the workers by ``quantum``, in uncached prompt tokens. Without a threshold
    its requests never wait. Limits are for each worker; 0 refuses what would wait.
    """

    name: _Name
    quantum: _Limit
    policy_family: _Name | None = None
    cache_bucket: _Name | None = None
    queue_policy: Literal["fcfs", "lcfs", "wspt"] = "fcfs"
    prefill_busy_threshold: _NotNegative | None = None
    prefill_busy_threshold_frac: Annotated[float, Meta(ge=0)] | None = None
    busy_worker_ratio: Annotated[float, Meta(gt=0, le=1)] = 1.0
    request_queue_limit_per_worker: _NotNegative | None = None
    raw_isl_token_queue_limit_per_worker: _NotNegative | None = None
    cached_token_queue_limit_per_worker: _NotNegative | None = None


class Bucket(_Strict, frozen=True, kw_only=True):
    """Prompts with at least ``min_tokens`` that no worker has cached."""

    min_tokens: _NotNegative
    bucket: _Name


class PolicyProfile(_Strict, frozen=True, kw_only=True):
    """The classes of one model, or of all others."""

    default_policy_family: _Name
    uncached_isl_buckets: list[Bucket]
    policy_classes: list[PolicyClass]

    def problem(self) -> str:
        """Return what contradicts; "" if nothing does."""
        # From 0 on and rising: each prompt has exactly one bucket.
        floors = [bucket.min_tokens for bucket in self.uncached_isl_buckets]
        if not floors or floors[0] != 0 or any(low >= high for low, high in pairwise(floors)):
            return "uncached_isl_buckets must begin with min_tokens 0 and rise"
        names = [row.name for row in self.policy_classes]
        if len(set(names)) < len(names):
            return f"policy_classes has two classes of one name: {', '.join(sorted(names))}"
        buckets = {bucket.bucket for bucket in self.uncached_isl_buckets}
        families: dict[str, list[str]] = {}
        for row in self.policy_classes:
            if (row.policy_family is None) != (row.cache_bucket is None):
                return f"class {row.name} must have both policy_family and cache_bucket, or neither"
            if row.policy_family is not None and row.cache_bucket is not None:
                families.setdefault(row.policy_family, []).append(row.cache_bucket)
        for family, covered in families.items():
            if sorted(covered) != sorted(buckets):
                return (
                    f"family {family} must have one class for each bucket: "
                    f"{', '.join(sorted(buckets))}"
                )
        if self.default_policy_family not in families:
            return f"default_policy_family {self.default_policy_family} has no classes"
        return ""


class PolicyInstance(_Strict, frozen=True, kw_only=True):
    """A policy that chooses workers: a ``type`` with parameters, under a name."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    type: Annotated[str, Meta(min_length=1)]
    parameters: dict[str, Any] = {}

    def weights(self) -> dict[str, float]:
        """Return the settings that a policy of type :data:`WEIGHTED` replaces."""
        unknown = sorted(self.parameters.keys() - WEIGHT_KEYS.keys())
        if unknown:
            raise ConfigError(
                f"policy {self.name}: unknown parameters {', '.join(unknown)}; {WEIGHTED} has "
                f"{', '.join(WEIGHT_KEYS)}"
            )
        return {WEIGHT_KEYS[key]: value for key, value in self.parameters.items()}


class RequestClassifier(_Strict, frozen=True, kw_only=True):
    """What names the class of a request, instead of its client."""

    type: Annotated[str, Meta(min_length=1)]
    parameters: dict[str, Any] = {}


class WorkerSelection(_Strict, frozen=True, kw_only=True):
    """Which policy chooses among the workers of which stage."""

    aggregated: str | None = None
    prefill: str | None = None
    decode: str | None = None
    encode: str | None = None
    instances: list[PolicyInstance] = []


class _File(_Strict, frozen=True, kw_only=True):
    router: dict[str, Any] | None = None
    default_policy_family: _Name | None = None
    uncached_isl_buckets: list[Bucket] | None = None
    policy_classes: list[PolicyClass] | None = None
    models: dict[str, PolicyProfile] = {}
    worker_selection: WorkerSelection | None = None
    request_classifier: RequestClassifier | None = None


class RouterPolicies(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy file says. Types of policies that are files lie beside it, in ``directory``."""

    directory: Path = Path()
    settings: dict[str, Any] = {}
    profile: PolicyProfile | None = None
    models: dict[str, PolicyProfile] = {}
    selection: WorkerSelection = WorkerSelection()
    classifier: PolicyInstance | None = None

    def instance(self, name: str) -> PolicyInstance | None:
        """Return the policy called ``name``, None for the built-in choice. Raises ConfigError."""
        if name == BUILT_IN:
            return None
        for policy in self.selection.instances:
            if policy.name == name:
                return policy
        names = ", ".join([BUILT_IN, *(policy.name for policy in self.selection.instances)])
        raise ConfigError(
            f"no policy is called {name!r}; those of worker_selection.instances in {FLAG} are "
            f"{names}"
        )


def read_policies(path: str | None) -> RouterPolicies:
    """Read the file at ``path``; nothing without one. Raises ConfigError."""
    if path is None:
        return RouterPolicies()
    import yaml  # takes 20 ms

    where = f"{FLAG} {path}"
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: can't be read as YAML: {error}") from None
    try:
        file = msgspec.convert(document, _File)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None
    try:
        return _checked(file, Path(path).absolute().parent)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}") from None


def _checked(file: _File, directory: Path) -> RouterPolicies:
    root = _root(file)
    for name, profile in {"the root profile": root, **file.models}.items():
        if profile is not None and profile.problem():
            raise ConfigError(f"{name}: {profile.problem()}")
    policies = RouterPolicies(
        directory=directory,
        settings=_shared(file.router or {}),
        profile=root,
        models=file.models,
        selection=file.worker_selection or WorkerSelection(),
        classifier=_classifier(file, root),
    )
    instances = policies.selection.instances
    if any(policy.type == _THUNDERAGENT for policy in instances):
        raise ConfigError(f"worker_selection.instances: {_NO_THUNDERAGENT}")
    names = [policy.name for policy in instances]
    if BUILT_IN in names:
        raise ConfigError(f"worker_selection.instances: {BUILT_IN} is the built-in choice")
    if len(set(names)) < len(names):
        raise ConfigError(f"worker_selection.instances: two have one name: {', '.join(names)}")
    if policies.selection.encode not in (None, BUILT_IN):
        raise ConfigError(
            "worker_selection.encode is not supported: there are no encode workers; remove it"
        )
    # Raises an error for the name of no policy.
    for stage in STAGES:
        policies.instance(getattr(policies.selection, stage) or BUILT_IN)
    return policies


def _classifier(file: _File, root: PolicyProfile | None) -> PolicyInstance | None:
    classifier = file.request_classifier
    if classifier is None:
        return None
    if classifier.type == _THUNDERAGENT:
        raise ConfigError(f"{CLASSIFIER}: {_NO_THUNDERAGENT}")
    if root is None and not file.models:
        raise ConfigError(
            f"{CLASSIFIER}: there are no classes to choose from; give policy_classes, or remove it"
        )
    return PolicyInstance(name=CLASSIFIER, type=classifier.type, parameters=classifier.parameters)


def _root(file: _File) -> PolicyProfile | None:
    parts = file.default_policy_family, file.uncached_isl_buckets, file.policy_classes
    family, buckets, classes = parts
    if family is None or buckets is None or classes is None:
        if parts != (None, None, None):
            raise ConfigError(
                "default_policy_family, uncached_isl_buckets and policy_classes must be given "
                "together"
            )
        return None
    return PolicyProfile(
        default_policy_family=family, uncached_isl_buckets=buckets, policy_classes=classes
    )


def _shared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings under ``router`` by our names."""
    unknown = sorted(settings.keys() - ROUTER_KEYS.keys())
    if unknown:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in unknown)
        raise ConfigError(
            f"router: unknown {', '.join(unknown)} (docs/dynamo-flags.md has {flags}); known are "
            f"{', '.join(ROUTER_KEYS)}"
        )
    for key, value in settings.items():
        if isinstance(value, list | dict):
            raise ConfigError(f"router.{key} must be a number, text, true or false")
    return {ROUTER_KEYS[key]: value for key, value in settings.items()}
