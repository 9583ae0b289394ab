"""Knobs of the router. Spec 4; seeds: router guide, routing concepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dynamo.config.disagg import DisaggSettings
from dynamo.config.option import option

__all__ = ["ROUTER_MODES", "RouterSettings"]

_JETSTREAM = "there is no JetStream mode; a router asks the workers for what it missed"
ROUTER_MODES = (
    "round-robin",
    "random",
    "power-of-two",
    "least-loaded",
    "device-aware-weighted",
    "direct",
    "kv",
)


@dataclass(frozen=True, kw_only=True)
class RouterSettings(DisaggSettings):
    """router: mode, cost, load tracking, KV events"""

    mode: str = option(
        "round-robin",
        "--router-mode",
        env="DYN_ROUTER_MODE",
        choices=ROUTER_MODES,
        aliases={name.replace("-", "_"): name for name in ROUTER_MODES},
        heading="router: mode",
        help="how a worker is chosen for a request",
    )
    kv_cache_block_size: int | None = option(
        None,
        "--kv-cache-block-size",
        env="DYN_KV_CACHE_BLOCK_SIZE",
        minimum=1,
        help="tokens in a KV block; default: what the worker's model card says",
    )
    temperature: float = option(
        0.0,
        "--router-temperature",
        env="DYN_ROUTER_TEMPERATURE",
        minimum=0,
        help="randomness of the choice; 0 takes the cheapest worker",
    )
    overlap_score_weight: float | None = option(
        None,
        "--router-kv-overlap-score-weight",
        "--kv-overlap-score-weight",
        env=("DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT", "DYN_OVERLAP_SCORE_WEIGHT"),
        minimum=0,
        heading="router, mode kv: what a worker costs",
        help="weight of prefill against decode, over --router-prefill-load-scale; "
        "0 ignores prefix caches altogether",
    )
    prefill_load_scale: float = option(
        1.0,
        "--router-prefill-load-scale",
        env="DYN_ROUTER_PREFILL_LOAD_SCALE",
        minimum=0,
        help="weight of a block to prefill against an active block",
    )
    overlap_score_credit: float = option(
        1.0,
        "--router-kv-overlap-score-credit",
        env="DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
        minimum=0,
        help="share of a block of prefill that a cached block saves",
    )
    overlap_score_credit_decay: float = option(
        0.0,
        "--router-kv-overlap-score-credit-decay",
        env="DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
        minimum=0,
        help="how fast the credit falls on a worker with excess active prefill",
    )
    host_cache_hit_weight: float = option(
        0.75,
        "--router-host-cache-hit-weight",
        env="DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
        minimum=0.0,
        maximum=1.0,
        help="share of a block of prefill that a block in host memory saves",
    )
    disk_cache_hit_weight: float = option(
        0.25,
        "--router-disk-cache-hit-weight",
        env="DYN_ROUTER_DISK_CACHE_HIT_WEIGHT",
        minimum=0.0,
        maximum=1.0,
        help="share of a block of prefill that a block on disk saves",
    )
    shared_cache_multiplier: float | None = option(
        None,
        "--shared-cache-multiplier",
        env="DYN_SHARED_CACHE_MULTIPLIER",
        minimum=0,
        help="share of a block of prefill that a block in the shared cache saves; default: none",
    )
    shared_cache_type: str = option(
        "none",
        "--shared-cache-type",
        env="DYN_SHARED_CACHE_TYPE",
        choices=("none", "hicache"),
        help="hicache: blocks that any worker reports on an external tier count for all workers",
    )
    decode_active_request_weight: float = option(
        0.0,
        "--router-decode-active-request-weight",
        env="DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
        minimum=0,
        help="blocks that each running request of a worker adds to its cost",
    )
    duplicate_cost: float = option(
        0.0,
        "--router-duplicate-cost",
        env="DYN_ROUTER_DUPLICATE_COST",
        minimum=0,
        help="blocks of prefill that a block costs where it would be computed although another "
        "worker holds it, times the cached share of the prompt; waived once queueing has cost more",
    )
    kv_events: bool = option(
        True,
        "--router-kv-events",
        "--kv-events",
        env="DYN_ROUTER_USE_KV_EVENTS",
        heading="router, mode kv: what is cached where",
        help="follow the workers' KV events; without, caches are predicted from own decisions",
    )
    event_threads: int = option(
        1,
        "--router-event-threads",
        env="DYN_ROUTER_EVENT_THREADS",
        minimum=1,
        maximum=64,
        help="with KV events: above 1, so many threads receive and apply them beside the event "
        "loop",
    )
    ttl_s: float = option(
        120.0,
        "--router-ttl-secs",
        env="DYN_ROUTER_TTL_SECS",
        minimum=0,
        exclusive_minimum=True,
        help="without KV events: how long a block is believed to stay cached",
    )
    predicted_ttl_s: float | None = option(
        None,
        "--router-predicted-ttl-secs",
        env="DYN_ROUTER_PREDICTED_TTL_SECS",
        minimum=0,
        exclusive_minimum=True,
        help="with KV events: how long a prompt is believed cached where it was sent, whatever "
        "the worker has told so far; default: not at all",
    )
    max_tree_size: int = option(
        1_048_576,
        "--router-max-tree-size",
        env="DYN_ROUTER_MAX_TREE_SIZE",
        minimum=1,
        help="without KV events: blocks believed to be cached, on all workers, before pruning",
    )
    prune_target_ratio: float = option(
        0.8,
        "--router-prune-target-ratio",
        env="DYN_ROUTER_PRUNE_TARGET_RATIO",
        minimum=0.0,
        maximum=1.0,
        help="without KV events: share of --router-max-tree-size that pruning leaves",
    )
    approximate_cache_policy: str = option(
        "ttl",
        "--router-approximate-cache-policy",
        env="DYN_ROUTER_APPROXIMATE_CACHE_POLICY",
        choices=("ttl", "lru"),
        help="without KV events: forget blocks by age, or as a worker of known capacity would",
    )
    track_active_blocks: bool = option(
        True,
        "--router-track-active-blocks",
        "--track-active-blocks",
        env="DYN_ROUTER_TRACK_ACTIVE_BLOCKS",
        heading="router, mode kv: what runs where",
        help="count the blocks of running requests as load",
    )
    track_output_blocks: bool = option(
        False,
        "--router-track-output-blocks",
        "--track-output-blocks",
        env="DYN_ROUTER_TRACK_OUTPUT_BLOCKS",
        help="count generated blocks too, fading towards the expected output length",
    )
    assume_kv_reuse: bool = option(
        True,
        "--router-assume-kv-reuse",
        "--assume-kv-reuse",
        env="DYN_ROUTER_ASSUME_KV_REUSE",
        help="count a block that several requests of one worker share once",
    )
    track_prefill_tokens: bool = option(
        True,
        "--router-track-prefill-tokens",
        env="DYN_ROUTER_TRACK_PREFILL_TOKENS",
        help="count prompt tokens to compute as load; without, only active blocks weigh",
    )
    prefill_load_model: str = option(
        "none",
        "--router-prefill-load-model",
        env="DYN_ROUTER_PREFILL_LOAD_MODEL",
        choices=("none", "fitted", "aic", "ais"),
        help="let prompt load fade while it is computed, by times learnt (fitted) or estimated by "
        "AIConfigurator (aic, ais)",
    )
    prefill_load_predictor: Callable[[int, int], float | None] | None = None
    """For programs: (tokens, cached tokens) to seconds or None; wins over the model."""
    ais_backend: str | None = option(
        None,
        "--ais-backend",
        "--aic-backend",
        env="DYN_AIS_BACKEND",
        help="AIConfigurator: the workers' engine (vllm, sglang, trtllm)",
    )
    ais_system: str | None = option(
        None,
        "--ais-system",
        "--aic-system",
        env="DYN_AIS_SYSTEM",
        help="AIConfigurator: the workers' GPU, like h200_sxm",
    )
    ais_model_path: str | None = option(
        None,
        "--ais-model-path",
        "--aic-model-path",
        env="DYN_AIS_MODEL_PATH",
        help="AIConfigurator: the model, by name or directory",
    )
    ais_backend_version: str | None = option(
        None,
        "--ais-backend-version",
        "--aic-backend-version",
        env="DYN_AIS_BACKEND_VERSION",
        help="AIConfigurator: the engine's version; default: the newest it knows",
    )
    ais_tp_size: int = option(
        1,
        "--ais-tp-size",
        "--aic-tp-size",
        env="DYN_AIS_TP_SIZE",
        minimum=1,
        help="AIConfigurator: GPUs of a worker",
    )
    replica_sync: bool = option(
        False,
        "--router-replica-sync",
        env="DYN_ROUTER_REPLICA_SYNC",
        heading="router, mode kv: other routers of the same workers",
        help="kv mode: count as load what other routers of the same workers have sent there",
    )
    max_index_blocks: int = option(
        8_388_608,
        env="DYN_ROUTER_MAX_INDEX_BLOCKS",
        minimum=1,
        help="cap on blocks in the prefix index (about 64 bytes each); what it refuses is counted",
    )
    active_request_expiry_s: float = option(
        3600.0,
        env="DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",
        minimum=1,
        help="age at which the load of a request that never ended is dropped",
    )

    encoder_cuda_to_cpu_ratio: float = option(
        8.0,
        env="DYN_ENCODER_CUDA_TO_CPU_RATIO",
        minimum=0,
        exclusive_minimum=True,
        help="device-aware-weighted: requests that a GPU worker takes for one of a CPU worker",
    )
    queue_threshold: float | None = option(
        None,
        "--router-queue-threshold",
        env="DYN_ROUTER_QUEUE_THRESHOLD",
        minimum=0,
        exclusive_minimum=True,
        heading="router, mode kv: queue",
        help="requests wait while every worker has more active prefill tokens than this fraction "
        "of its max_num_batched_tokens",
    )
    queue_policy: str = option(
        "fcfs",
        "--router-queue-policy",
        env="DYN_ROUTER_QUEUE_POLICY",
        choices=("fcfs", "lcfs", "wspt"),
        help="who of equal strict priority is next: first come, last come, or least work by weight",
    )
    queue_limit: int = option(
        4096,
        env="DYN_ROUTER_QUEUE_LIMIT",
        minimum=1,
        help="requests that may wait; beyond, they are refused as overload",
    )
    overlap_refresh_after_s: float = option(
        10.0,
        env="DYN_ROUTER_OVERLAP_REFRESH_AFTER_SECS",
        minimum=0,
        help="look anew at what is cached for requests that wait longer; 0: not before their turn",
    )
    session_affinity_ttl_s: float | None = option(
        None,
        "--router-session-affinity-ttl-secs",
        env="DYN_ROUTER_SESSION_AFFINITY_TTL_SECS",
        minimum=1,
        maximum=31_536_000,
        heading="router: sessions",
        help="keep a session (X-Dynamo-Session-ID) on its worker until idle for this long",
    )
    session_affinity_mode: str = option(
        "hard",
        "--router-session-affinity-mode",
        env="DYN_ROUTER_SESSION_AFFINITY_MODE",
        choices=("hard", "soft"),
        help="a session whose worker is overloaded is refused (hard) or moves (soft)",
    )
    session_limit: int = option(
        262_144,
        env="DYN_ROUTER_SESSION_AFFINITY_MAX_SESSIONS",
        minimum=1,
        help="sessions remembered; beyond, the longest idle one is forgotten",
    )
    admission_control: str = option(
        "none",
        "--admission-control",
        env="DYN_ADMISSION_CONTROL",
        choices=("token-capacity", "none"),
        heading="router: busy workers",
        help="token-capacity: workers over a busy threshold get no requests; none: ignore them",
    )
    active_decode_blocks_threshold: float | None = option(
        None,
        "--active-decode-blocks-threshold",
        env="DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
        minimum=0.0,
        maximum=1.0,
        help="share of a worker's KV blocks in use above which it is busy",
    )
    active_prefill_tokens_threshold: int | None = option(
        None,
        "--active-prefill-tokens-threshold",
        env="DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",
        minimum=0,
        help="tokens being prefilled above which a worker is busy",
    )
    active_prefill_tokens_threshold_frac: float | None = option(
        None,
        "--active-prefill-tokens-threshold-frac",
        env="DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",
        minimum=0,
        help="the same as a fraction of the worker's max_num_batched_tokens",
    )
    durable_kv_events: bool = option(
        False,
        "--router-durable-kv-events",
        env="DYN_ROUTER_DURABLE_KV_EVENTS",
        deprecated=_JETSTREAM,
        heading="accepted, but without effect",
        help="accepted, no effect",
    )
    reset_states: bool = option(
        False,
        "--router-reset-states",
        env="DYN_ROUTER_RESET_STATES",
        deprecated=_JETSTREAM,
        help="accepted, no effect",
    )
    snapshot_threshold: int = option(
        1_000_000,
        "--router-snapshot-threshold",
        env="DYN_ROUTER_SNAPSHOT_THRESHOLD",
        minimum=1,
        deprecated=_JETSTREAM,
        help="accepted, no effect",
    )

    @property
    def prefill_weight(self) -> float:
        """The weight of prefill in the cost; the older name wins when it is given."""
        weight = self.overlap_score_weight
        return self.prefill_load_scale if weight is None else weight

    @property
    def uses_index(self) -> bool:
        """Whether prefix overlap matters at all: kv mode, weight not zero."""
        return self.mode == "kv" and self.overlap_score_weight != 0

    def block_size_for(self, worker_tokens: int) -> int:
        """The block size to route with, for workers with blocks of so many tokens. Another one than
        theirs is of no use where KV events are followed: their hashes would never match."""
        if self.uses_index and self.kv_events:
            return self.kv_cache_block_size or worker_tokens
        return worker_tokens

    @property
    def predicts(self) -> bool:
        """Whether the index is fed by own decisions instead of the workers' events."""
        return self.uses_index and not self.kv_events
