"""Knobs of the router. Spec 4; seeds: router guide, routing concepts."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.knob import knob

__all__ = ["ROUTER_MODES", "RouterSettings"]

ROUTER_MODES = ("round-robin", "random", "power-of-two", "least-loaded", "direct", "kv")


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """router: mode, cost, load tracking, KV events"""

    mode: str = knob(
        "round-robin",
        "--router-mode",
        env="DYN_ROUTER_MODE",
        choices=ROUTER_MODES,
        aliases={name.replace("-", "_"): name for name in ROUTER_MODES},
        help="how a worker is chosen for a request",
    )
    kv_cache_block_size: int | None = knob(
        None,
        "--kv-cache-block-size",
        env="DYN_KV_CACHE_BLOCK_SIZE",
        minimum=1,
        help="tokens in a KV block; default: what the worker's model card says",
    )
    temperature: float = knob(
        0.0,
        "--router-temperature",
        env="DYN_ROUTER_TEMPERATURE",
        minimum=0,
        help="randomness of the choice; 0 takes the cheapest worker",
    )
    overlap_score_weight: float | None = knob(
        None,
        "--router-kv-overlap-score-weight",
        "--kv-overlap-score-weight",
        env=("DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT", "DYN_OVERLAP_SCORE_WEIGHT"),
        minimum=0,
        help="weight of prefill against decode, over --router-prefill-load-scale; "
        "0 ignores prefix caches altogether",
    )
    prefill_load_scale: float = knob(
        1.0,
        "--router-prefill-load-scale",
        env="DYN_ROUTER_PREFILL_LOAD_SCALE",
        minimum=0,
        help="weight of a block to prefill against an active block",
    )
    overlap_score_credit: float = knob(
        1.0,
        "--router-kv-overlap-score-credit",
        env="DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
        minimum=0,
        help="share of a block of prefill that a cached block saves",
    )
    overlap_score_credit_decay: float = knob(
        0.0,
        "--router-kv-overlap-score-credit-decay",
        env="DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
        minimum=0,
        help="how fast the credit falls on a worker with excess active prefill",
    )
    kv_events: bool = knob(
        True,
        "--router-kv-events",
        "--kv-events",
        env="DYN_ROUTER_USE_KV_EVENTS",
        help="follow the workers' KV events; without, kv mode routes by active load alone",
    )
    track_active_blocks: bool = knob(
        True,
        "--router-track-active-blocks",
        "--track-active-blocks",
        env="DYN_ROUTER_TRACK_ACTIVE_BLOCKS",
        help="count the blocks of running requests as load",
    )
    track_output_blocks: bool = knob(
        False,
        "--router-track-output-blocks",
        "--track-output-blocks",
        env="DYN_ROUTER_TRACK_OUTPUT_BLOCKS",
        help="count generated blocks too, fading towards the expected output length",
    )
    assume_kv_reuse: bool = knob(
        True,
        "--router-assume-kv-reuse",
        "--assume-kv-reuse",
        env="DYN_ROUTER_ASSUME_KV_REUSE",
        help="count a block that several requests of one worker share once",
    )
    max_index_blocks: int = knob(
        8_388_608,
        env="DYN_ROUTER_MAX_INDEX_BLOCKS",
        minimum=1,
        help="cap on blocks in the prefix index (about 64 bytes each); what it refuses is counted",
    )
    active_request_expiry_s: float = knob(
        3600.0,
        env="DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",
        minimum=1,
        help="age at which the load of a request that never ended is dropped",
    )

    @property
    def prefill_weight(self) -> float:
        """The weight of prefill in the cost; the older name wins when it is given."""
        weight = self.overlap_score_weight
        return self.prefill_load_scale if weight is None else weight

    @property
    def uses_index(self) -> bool:
        """Whether prefix overlap matters at all: kv mode, events on, weight not zero."""
        return self.mode == "kv" and self.kv_events and self.overlap_score_weight != 0
