"""Options of the router. Names, defaults: Dynamo's router guide."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dynamo.config.absent import ROUTER, ROUTER_PROCESS, AbsentFlag
from dynamo.config.option import from_env, option, variable
from dynamo.config.router_kv import CacheSettings, CostSettings, DisaggSettings, LoadSettings
from dynamo.config.router_policy import (
    BUILT_IN,
    FLAG,
    STAGES,
    WEIGHTED,
    PolicyInstance,
    RouterPolicies,
    read_policies,
)
from dynamo.errors import ConfigError

_JETSTREAM = "there is no JetStream mode; a router requests missed events from the workers"
ROUTER_MODES = (
    "round-robin",
    "random",
    "power-of-two",
    "least-loaded",
    "device-aware-weighted",
    "direct",
    "kv",
)

_LOAD_AWARE = {
    "mode": "kv",
    "cost": "blocks",
    "kv_events": False,
    "overlap_score_credit": 0.0,
    "assume_kv_reuse": False,
    "track_active_blocks": True,
    "track_prefill_tokens": True,
    "shared_cache_type": "none",
    "predicted_ttl_s": None,
}
"""What --load-aware sets, whatever other options say."""


@dataclass(frozen=True, kw_only=True)
class ModeSettings:
    """How a worker is chosen."""

    mode: str = option(
        "round-robin",
        "--router-mode",
        choices=ROUTER_MODES,
        aliases={name.replace("-", "_"): name for name in ROUTER_MODES},
        heading="router: mode",
        help="how a worker is chosen for a request",
    )
    kv_cache_block_size: int | None = option(
        None, minimum=1, help="tokens in a KV block; default: what the worker's model card says"
    )
    temperature: float = option(
        0.0,
        "--router-temperature",
        minimum=0,
        help="randomness of the choice; 0 takes the cheapest worker",
    )


# Dataclasses collect the fields of the last base first: --help lists disaggregation, mode, cost,
# caches, load, and then the fields of the class itself.
@dataclass(frozen=True, kw_only=True)
class RouterSettings(LoadSettings, CacheSettings, CostSettings, ModeSettings, DisaggSettings):
    """router: mode, cost, load tracking, KV events"""

    absent: ClassVar[tuple[AbsentFlag, ...]] = ROUTER
    replica_sync: bool = option(
        False,
        "--router-replica-sync",
        heading="router, mode kv: other routers of the same workers",
        help="kv mode: count as load the requests that other routers sent to the same workers",
    )
    max_index_blocks: int = variable(
        8_388_608,
        "DYN_ROUTER_MAX_INDEX_BLOCKS",
        minimum=1,
        help="cap on blocks in the prefix index (about 64 bytes each); rejected blocks are counted",
    )
    active_request_expiry_s: float = variable(
        3600.0,
        "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",
        minimum=1,
        help="age at which the load of a request that never ended is dropped",
    )
    encoder_cuda_to_cpu_ratio: float = variable(
        8.0,
        minimum=0,
        exclusive_minimum=True,
        help="device-aware-weighted: requests a GPU worker gets for each one of a CPU worker",
    )
    queue_threshold: float | None = option(
        None,
        "--router-queue-threshold",
        minimum=0,
        exclusive_minimum=True,
        heading="router, mode kv: queue",
        help="requests wait while every worker has more active prefill tokens than this fraction "
        "of its max_num_batched_tokens",
    )
    queue_policy: str = option(
        "fcfs",
        "--router-queue-policy",
        choices=("fcfs", "lcfs", "wspt"),
        help="order at equal strict priority: first come, last come, or least work by weight",
    )
    queue_limit: int = variable(
        4096,
        "DYN_ROUTER_QUEUE_LIMIT",
        minimum=1,
        help="requests that may wait; further ones are rejected as overload",
    )
    overlap_refresh_after_s: float = variable(
        10.0,
        "DYN_ROUTER_OVERLAP_REFRESH_AFTER_SECS",
        minimum=0,
        help="recompute the overlap of requests that wait longer; 0: not before dispatch",
    )
    session_affinity_ttl_s: float | None = option(
        None,
        "--router-session-affinity-ttl-secs",
        minimum=1,
        maximum=31_536_000,
        heading="router: sessions",
        help="keep a session (X-Dynamo-Session-ID) on its worker until idle for this long",
    )
    session_affinity_mode: str = option(
        "hard",
        "--router-session-affinity-mode",
        choices=("hard", "soft"),
        help="a session whose worker is overloaded is rejected (hard) or moves (soft)",
    )
    session_limit: int = variable(
        262_144,
        "DYN_ROUTER_SESSION_AFFINITY_MAX_SESSIONS",
        minimum=1,
        help="sessions kept; above, the one idle longest is dropped",
    )
    admission_control: str = option(
        "none",
        choices=("token-capacity", "none"),
        heading="router: busy workers",
        help="token-capacity: workers over a busy threshold get no requests; none: ignore them",
    )
    active_decode_blocks_threshold: float | None = option(
        None,
        minimum=0.0,
        maximum=1.0,
        help="share of a worker's KV blocks in use above which it is busy",
    )
    active_prefill_tokens_threshold: int | None = option(
        None, minimum=0, help="tokens being prefilled above which a worker is busy"
    )
    active_prefill_tokens_threshold_frac: float | None = option(
        None, minimum=0, help="the same as a fraction of the worker's max_num_batched_tokens"
    )
    policy_config: str | None = option(
        None,
        FLAG,
        metavar="FILE",
        heading="router, mode kv: policies",
        help="YAML file with shared settings, classes of the queue and policies that choose "
        "workers; flags and variables win over its settings",
    )
    prefill_policy: str | None = option(
        None, "--router-prefill-policy", help="policy of that file for prefill workers, or default"
    )
    decode_policy: str | None = option(
        None, "--router-decode-policy", help="policy of that file for decode workers, or default"
    )
    selection_policy: str | None = variable(
        None,
        "DYN_ROUTER_WORKER_SELECTION_POLICY",
        help="policy of that file for all workers, or default",
    )
    policies: RouterPolicies | None = None
    """What the policy file says; :func:`with_policies` reads it."""
    stage: str = "aggregated"
    """The work of the workers, which decides the policy."""
    given: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    load_aware: bool = option(
        False,
        env="DYN_ROUTER_LOAD_AWARE",
        heading="router: presets",
        help="choose workers by load alone: mode kv without caches and KV events",
    )
    durable_kv_events: bool = option(
        False,
        "--router-durable-kv-events",
        deprecated=_JETSTREAM,
        heading="accepted, but without effect",
        help="accepted, no effect",
    )
    reset_states: bool = option(
        False, "--router-reset-states", deprecated=_JETSTREAM, help="accepted, no effect"
    )
    snapshot_threshold: int = option(
        1_000_000,
        "--router-snapshot-threshold",
        minimum=1,
        deprecated=_JETSTREAM,
        help="accepted, no effect",
    )

    def __post_init__(self) -> None:
        """Set what --load-aware means. Raises ConfigError."""
        super().__post_init__()
        if self.load_aware:
            for name, value in _LOAD_AWARE.items():
                object.__setattr__(self, name, value)

    def overridden(self, values: Mapping[str, Any]) -> RouterSettings:
        """Return these settings with ``values`` in place; unknown names are ignored.

        Raises ConfigError for a value out of range.
        """
        names = {field.name for field in dataclasses.fields(self)}
        names -= {"policies", "stage", "given"}
        chosen = {name: value for name, value in values.items() if name in names}
        # Built apart: that converts and checks the values as those of flags.
        built = from_env(RouterSettings, {}, **chosen)
        return dataclasses.replace(self, **{name: getattr(built, name) for name in chosen})

    @property
    def selection(self) -> PolicyInstance | None:
        """The policy that chooses among the workers of :attr:`stage`; None: the built-in choice."""
        if self.policies is None:
            return None
        own = {"prefill": self.prefill_policy, "decode": self.decode_policy}.get(self.stage)
        name = own or self.selection_policy or getattr(self.policies.selection, self.stage)
        return self.policies.instance(name or BUILT_IN)

    def at_stage(self, stage: str) -> RouterSettings:
        """Return the settings for workers of ``stage``. Raises ConfigError."""
        settings = dataclasses.replace(self, stage=stage)
        policy = settings.selection
        if policy is None or policy.type != WEIGHTED:
            return settings
        return settings.overridden(policy.weights())

    @property
    def prefill_weight(self) -> float:
        """The weight of prefill in the cost; the older name wins when it is given."""
        weight = self.overlap_score_weight
        return self.prefill_load_scale if weight is None else weight

    @property
    def in_seconds(self) -> bool:
        """Whether workers are compared by seconds, which needs to know what each has cached."""
        return self.cost == "seconds" and self.uses_index

    @property
    def uses_index(self) -> bool:
        """Whether prefix overlap matters at all: kv mode, weight not zero."""
        return self.mode == "kv" and self.overlap_score_weight != 0 and not self.load_aware

    def block_size_for(self, worker_tokens: int) -> int:
        """Return the block size to route with, for workers with blocks of ``worker_tokens``.

        With KV events, :attr:`kv_cache_block_size` overrides it.
        """
        if self.uses_index and self.kv_events:
            return self.kv_cache_block_size or worker_tokens
        return worker_tokens

    @property
    def predicts(self) -> bool:
        """Whether the router's own decisions fill the index, instead of the workers' events."""
        return self.uses_index and not self.kv_events


def with_policies(settings: RouterSettings) -> RouterSettings:
    """Return ``settings`` with what their policy file says, which is read once.

    Raises ConfigError.
    """
    names = settings.prefill_policy, settings.decode_policy, settings.selection_policy
    if settings.policies is not None or not any((settings.policy_config, *names)):
        return settings
    policies = read_policies(settings.policy_config)
    shared = {
        name: value for name, value in policies.settings.items() if name not in settings.given
    }
    try:
        merged = dataclasses.replace(settings.overridden(shared), policies=policies)
        # Now, so that weights out of range end the start, and not the first request.
        for stage in STAGES:
            merged.at_stage(stage)
    except ConfigError as error:
        raise ConfigError(f"{FLAG} {settings.policy_config}: {error.message}") from None
    return merged


@dataclass(frozen=True, kw_only=True)
class RouterProcessSettings:
    """standalone router: the workers"""

    absent: ClassVar[tuple[AbsentFlag, ...]] = ROUTER_PROCESS
    endpoint: str | None = option(
        None,
        env="DYN_ROUTER_ENDPOINT",
        metavar="NS.COMPONENT.ENDPOINT",
        help="the workers' endpoint",
    )
    block_size: int = option(
        128,
        "--router-block-size",
        "--block-size",
        minimum=1,
        help="tokens in a KV block of the workers",
    )
