"""The router's settings under the names of the public API."""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
from collections.abc import Callable
from typing import Any

from dynamo.config import deprecations, environ, from_env
from dynamo.config.router import RouterSettings
from dynamo.config.router_policy import ROUTER_KEYS, WEIGHT_KEYS
from dynamo.errors import InvalidArgument

log = logging.getLogger(__name__)


class RouterMode(enum.Enum):
    """The routing mode; the value is that of ``--router-mode``."""

    RoundRobin = "round-robin"
    Random = "random"
    PowerOfTwoChoices = "power-of-two"
    KV = "kv"
    Direct = "direct"
    LeastLoaded = "least-loaded"
    DeviceAwareWeighted = "device-aware-weighted"

    def __str__(self) -> str:
        """Return the value of ``--router-mode``."""
        return self.value


@dataclasses.dataclass
class KvRouterConfig:
    """Settings of the kv mode. Those in :data:`WITHOUT_EFFECT` are accepted and have no effect."""

    overlap_score_weight: float | None = None
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    router_temperature: float = 0.0
    use_kv_events: bool = True
    _: dataclasses.KW_ONLY
    router_replica_sync: bool = False
    router_track_active_blocks: bool = True
    router_track_output_blocks: bool = False
    router_assume_kv_reuse: bool = True
    router_track_prefill_tokens: bool = True
    router_prefill_load_model: str | Callable[[int, int], float | None] = "none"
    router_ttl_secs: float = 120.0
    router_approximate_cache_policy: str = "ttl"
    router_max_tree_size: int = 1_048_576
    router_prune_target_ratio: float = 0.8
    router_queue_threshold: float | None = None
    router_event_threads: int = 1
    router_queue_policy: str = "fcfs"
    use_remote_indexer: bool = False
    serve_indexer: bool = False
    shared_cache_multiplier: float | None = None
    shared_cache_type: str = "none"
    router_predicted_ttl_secs: float | None = None
    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    decode_active_request_weight: float = 0.0
    router_duplicate_cost: float = 0.0
    router_cost: str = "blocks"
    router_policy_config: str | None = None
    conditional_disagg_enabled: bool = False
    conditional_disagg_policy: str | None = None
    conditional_disagg_eff_isl_threshold: int | None = None
    conditional_disagg_eff_isl_ratio_threshold: float | None = None
    conditional_disagg_prefill_busy_threshold: float | None = None
    conditional_disagg_decode_busy_threshold: float | None = None
    router_tracking_hash: str = "public-xxh3-v1"
    router_tracking_key_file: str | None = None
    router_tracking_key_id: str | None = None
    router_prefill_policy: str | None = None
    router_decode_policy: str | None = None
    enable_session_prefix_index: bool = False
    durable_kv_events: bool = False
    router_reset_states: bool = False
    router_snapshot_threshold: int = 1_000_000
    min_initial_workers: int = 0

    def __post_init__(self) -> None:
        weight = self.decode_active_request_weight
        if not 0 <= weight < float("inf"):
            raise ValueError(
                f"decode_active_request_weight must be finite and not negative, got {weight}"
            )

    @classmethod
    def from_json(cls, config_json: str) -> KvRouterConfig:
        """Return the config of a JSON object of fields. Raises ValueError or TypeError."""
        return cls(**json.loads(config_json))

    def copy(self) -> KvRouterConfig:
        """Return an independent copy."""
        return dataclasses.replace(self)

    def with_overrides(
        self, overlap_score_weight: float | None = None, **overrides: float | None
    ) -> KvRouterConfig:
        """Return a copy with those of the given fields that are not None."""
        overrides["overlap_score_weight"] = overlap_score_weight
        changes: dict[str, Any] = {
            name: value for name, value in overrides.items() if value is not None
        }
        return dataclasses.replace(self, **changes)

    def settings(self, **more: Any) -> RouterSettings:
        """Return the router's settings in kv mode; AIConfigurator's are in DYN_AIS_… variables.

        Raises ConfigError for a value out of range.
        """
        values = {setting: getattr(self, name) for name, setting in _SETTINGS.items()}
        model = self.router_prefill_load_model
        if isinstance(model, str):
            more["prefill_load_model"] = model
        ais = {name: value for name, value in environ().items() if name.startswith("DYN_AIS_")}
        settings = from_env(RouterSettings, ais, mode="kv", **values, **more)
        for text in deprecations(settings):
            log.warning("%s", text)
        if isinstance(model, str):
            return settings
        return dataclasses.replace(settings, prefill_load_predictor=model)


@dataclasses.dataclass(kw_only=True)
class LoadThresholdConfig:
    """The load above which a worker of a :class:`KvRouter` is busy and gets no requests.

    ValueError for a share of KV blocks outside 0..1.
    """

    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None

    def __post_init__(self) -> None:
        share = self.active_decode_blocks_threshold
        if share is not None and not 0.0 <= share <= 1.0:
            raise ValueError(
                f"active_decode_blocks_threshold must be between 0.0 and 1.0, got {share}"
            )

    def settings(self) -> dict[str, Any]:
        """Return the fields of ``RouterSettings``; none without a threshold."""
        limits = {
            name: limit for name, limit in dataclasses.asdict(self).items() if limit is not None
        }
        return {"admission_control": "token-capacity", **limits} if limits else {}


@dataclasses.dataclass
class RouterConfig:
    """A mode, the settings of the kv mode, busy thresholds, disaggregation, session affinity."""

    mode: RouterMode = RouterMode.RoundRobin
    config: KvRouterConfig | None = None
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None
    enforce_disagg: bool = False
    session_affinity_ttl_secs: float | None = None
    session_affinity_mode: str = "hard"

    @property
    def router_mode(self) -> RouterMode:
        """The mode."""
        return self.mode

    @property
    def kv_router_config(self) -> KvRouterConfig:
        """The settings of the kv mode."""
        return self.config or KvRouterConfig()

    def for_card(self) -> dict[str, Any]:
        """Return the mode and the settings that are not defaults, for a model's card.

        Raises InvalidArgument for a prefill load model that is a function.
        """
        settings, default = self.settings(), RouterConfig().settings()
        if settings.prefill_load_predictor is not None:
            raise InvalidArgument(
                "router_config: a model's card cannot carry the function given as "
                "router_prefill_load_model; name a model instead, or configure the frontend"
            )
        return {
            name: value
            for name, value in dataclasses.asdict(settings).items()
            if name == "mode" or value != getattr(default, name)
        }

    def settings(self) -> RouterSettings:
        """Return the router's settings; every threshold that is set applies. Raises ConfigError."""
        limits = {
            "active_decode_blocks_threshold": self.active_decode_blocks_threshold,
            "active_prefill_tokens_threshold": self.active_prefill_tokens_threshold,
            "active_prefill_tokens_threshold_frac": self.active_prefill_tokens_threshold_frac,
        }
        limited = any(limit is not None for limit in limits.values())
        settings = (self.config or KvRouterConfig()).settings(
            admission_control="token-capacity" if limited else "none",
            session_affinity_ttl_s=self.session_affinity_ttl_secs,
            session_affinity_mode=self.session_affinity_mode,
            enforce_disagg=self.enforce_disagg,
            **limits,
        )
        return dataclasses.replace(settings, mode=str(self.mode))


_SETTINGS = {
    **WEIGHT_KEYS,
    **ROUTER_KEYS,
    "overlap_score_weight": "overlap_score_weight",
    "router_duplicate_cost": "duplicate_cost",
    "router_cost": "cost",
    "durable_kv_events": "durable_kv_events",
    "router_reset_states": "reset_states",
    "router_snapshot_threshold": "snapshot_threshold",
    "router_max_tree_size": "max_tree_size",
    "router_prune_target_ratio": "prune_target_ratio",
    "conditional_disagg_enabled": "conditional_disagg",
    "router_queue_threshold": "queue_threshold",
    "router_queue_policy": "queue_policy",
}
del _SETTINGS["router_prefill_load_model"]  # may be a function here
"""Field of :class:`KvRouterConfig` → field of ``RouterSettings``."""

WITHOUT_EFFECT = tuple(
    field.name
    for field in dataclasses.fields(KvRouterConfig)
    if field.name not in (*_SETTINGS, "router_prefill_load_model")
    or field.name in ("durable_kv_events", "router_reset_states", "router_snapshot_threshold")
)
"""Fields that are accepted for compatibility only."""
