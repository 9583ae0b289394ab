"""Options of the kv mode and of disaggregated serving."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.config.option import option, variable
from dynamo.errors import ConfigError

_FLAG = "--router-conditional-disagg-config"
_OLD_NAME = "max_local_prefill_length"


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """When a prompt goes to a prefill worker; all must hold, all comparisons are strict.

    The *effective* length is what the decode worker would have to compute: prompt tokens minus
    those that it has cached. ``eff_isl_ratio_threshold`` is its share of the prompt.
    """

    eff_isl_threshold: int = 1000
    eff_isl_ratio_threshold: float | None = None
    max_prefill_queue_size: int | None = 2

    def local_reason(self, prompt_tokens: int, cached_tokens: int, queue_size: int) -> str:
        """Return why the decode worker computes the prompt: ``short``, ``cached`` or ``queue``.

        Empty for a prompt that goes to a prefill worker.
        """
        effective = max(prompt_tokens - cached_tokens, 0)
        if effective <= self.eff_isl_threshold:
            return "short"
        ratio = self.eff_isl_ratio_threshold
        if ratio is not None and effective <= ratio * prompt_tokens:
            return "cached"
        limit = self.max_prefill_queue_size
        return "queue" if limit is not None and queue_size >= limit else ""


def conditions_of(text: str | None) -> Conditions:
    """Read JSON text (starts with ``{``) or the file that ``text`` names. Raises ConfigError.

    ``max_local_prefill_length`` is another name of ``eff_isl_threshold``.
    """
    if text is None:
        return Conditions()
    thresholds = _read(text)
    if _OLD_NAME in thresholds and "eff_isl_threshold" in thresholds:
        raise ConfigError(f"{_FLAG}: {_OLD_NAME} and eff_isl_threshold are the same; give one")
    unknown = sorted(thresholds.keys() - _CHECKS.keys())
    if unknown:
        raise ConfigError(f"{_FLAG}: unknown {', '.join(unknown)}; known are {', '.join(_CHECKS)}")
    for name, value in thresholds.items():
        _CHECKS[name](name, value)
    if _OLD_NAME in thresholds:
        thresholds["eff_isl_threshold"] = thresholds.pop(_OLD_NAME)
    return Conditions(**thresholds)


@dataclass(frozen=True, kw_only=True)
class DisaggSettings:
    """Part of the router's settings."""

    enforce_disagg: bool = option(
        False,
        heading="disaggregation: prefill workers",
        help="reject requests (503) without a prefill worker, instead of serving them decode-only",
    )
    conditional_disagg: bool = option(
        False,
        "--router-conditional-disagg",
        help="send only prompts with enough uncached tokens to prefill workers",
    )
    conditional_disagg_config: str | None = option(
        None,
        _FLAG,
        metavar="JSON|FILE",
        help="thresholds of --router-conditional-disagg: eff_isl_threshold 1000, "
        "eff_isl_ratio_threshold, max_prefill_queue_size 2",
    )
    prefill_slots: int | None = option(
        None,
        "--router-prefill-slots",
        minimum=1,
        help="requests that a rank of a prefill worker gets at once; default: until its prompt "
        "tokens fill max_num_batched_tokens",
    )
    prefill_queue_limit: int = option(
        4096,
        "--router-prefill-queue-limit",
        minimum=0,
        help="requests of a model that may wait for a prefill slot; further ones are rejected",
    )
    prefill_retries: int = variable(
        3,
        "DYN_ROUTER_PREFILL_RETRIES",
        minimum=0,
        help="prefill workers that may fail a request before it is served decode-only",
    )
    prefill_patience_s: float = variable(
        3.0,
        "DYN_ROUTER_PREFILL_PATIENCE_SECS",
        minimum=0,
        help="seconds a prompt waits for the prefill worker that is best for it (mode kv) while "
        "others have a free slot",
    )
    prefill_drain_timeout_s: float = variable(
        30.0,
        minimum=0,
        help="seconds that a deregistered prefill worker may take to finish its requests; then "
        "they go to another",
    )

    def __post_init__(self) -> None:
        """Reject invalid thresholds at start-up."""
        conditions_of(self.conditional_disagg_config)

    @property
    def conditions(self) -> Conditions | None:
        """The thresholds, or None when every prompt goes to a prefill worker."""
        return conditions_of(self.conditional_disagg_config) if self.conditional_disagg else None


def _read(text: str) -> dict[str, Any]:
    try:
        raw = text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8")
        thresholds = json.loads(raw)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_FLAG} {text!r}: can't be read as JSON: {error}") from None
    if not isinstance(thresholds, dict):
        raise ConfigError(f"{_FLAG}: must be a JSON object, got {text!r}")
    return thresholds


def _count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{_FLAG}: {name} must be an integer >= 0, got {value!r}")


def _nullable_count(name: str, value: Any) -> None:
    if value is not None:
        _count(name, value)


def _ratio(name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and math.isfinite(value) and 0 <= value <= 1):
        raise ConfigError(f"{_FLAG}: {name} must be between 0 and 1 or null, got {value!r}")


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "eff_isl_threshold": _count,
    _OLD_NAME: _count,
    "eff_isl_ratio_threshold": _ratio,
    "max_prefill_queue_size": _nullable_count,
}


@dataclass(frozen=True, kw_only=True)
class CostSettings:
    """The terms of a worker's cost."""

    cost: str = option(
        "blocks",
        "--router-cost",
        choices=("blocks", "seconds"),
        heading="router, mode kv: what a worker costs",
        help="blocks: Dynamo's formula, with the weights below; seconds: the time to the first "
        "token, by measured speed, and what the prompt adds to the wait of others; no weights",
    )
    overlap_score_weight: float | None = option(
        None,
        "--router-kv-overlap-score-weight",
        "--kv-overlap-score-weight",
        env=("DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT", "DYN_OVERLAP_SCORE_WEIGHT"),
        minimum=0,
        help="weight of prefill against decode, over --router-prefill-load-scale; "
        "0 ignores prefix caches altogether",
    )
    prefill_load_scale: float = option(
        1.0,
        "--router-prefill-load-scale",
        minimum=0,
        help="weight of a block to prefill against an active block",
    )
    overlap_score_credit: float = option(
        1.0,
        "--router-kv-overlap-score-credit",
        minimum=0,
        help="share of a block of prefill that a cached block saves",
    )
    overlap_score_credit_decay: float = option(
        0.0,
        "--router-kv-overlap-score-credit-decay",
        minimum=0,
        help="how fast the credit falls on a worker with excess active prefill",
    )
    host_cache_hit_weight: float = option(
        0.75,
        "--router-host-cache-hit-weight",
        minimum=0.0,
        maximum=1.0,
        help="share of a block of prefill that a block in host memory saves",
    )
    disk_cache_hit_weight: float = option(
        0.25,
        "--router-disk-cache-hit-weight",
        minimum=0.0,
        maximum=1.0,
        help="share of a block of prefill that a block on disk saves",
    )
    shared_cache_multiplier: float | None = option(
        None,
        minimum=0,
        help="share of a block of prefill that a block in the shared cache saves; default: none",
    )
    shared_cache_type: str = option(
        "none",
        choices=("none", "hicache"),
        help="hicache: blocks that any worker reports on an external tier count for all workers",
    )
    decode_active_request_weight: float = option(
        0.0,
        "--router-decode-active-request-weight",
        minimum=0,
        help="blocks that each running request of a worker adds to its cost",
    )
    duplicate_cost: float = option(
        0.0,
        "--router-duplicate-cost",
        minimum=0,
        help="blocks of prefill that a block costs where it would be computed although another "
        "worker holds it, times the cached share of the prompt; waived once queueing has cost more",
    )


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """The index of cached blocks: from the workers' events, or predicted."""

    kv_events: bool = option(
        True,
        "--router-kv-events",
        "--kv-events",
        env="DYN_ROUTER_USE_KV_EVENTS",
        heading="router, mode kv: what is cached where",
        help="follow the workers' KV events; without, caches are predicted from routing decisions",
    )
    event_threads: int = option(
        1,
        "--router-event-threads",
        minimum=1,
        maximum=64,
        help="with KV events: above 1, this many threads receive and apply them beside the "
        "event loop",
    )
    ttl_s: float = option(
        120.0,
        "--router-ttl-secs",
        minimum=0,
        exclusive_minimum=True,
        help="without KV events: how long a block is assumed to stay cached",
    )
    predicted_ttl_s: float | None = option(
        None,
        "--router-predicted-ttl-secs",
        minimum=0,
        exclusive_minimum=True,
        help="with KV events: how long a prompt is assumed cached on its worker, whatever the "
        "worker's events report; default: not at all",
    )
    max_tree_size: int = option(
        1_048_576,
        "--router-max-tree-size",
        minimum=1,
        help="without KV events: blocks assumed cached, on all workers, before pruning",
    )
    prune_target_ratio: float = option(
        0.8,
        "--router-prune-target-ratio",
        minimum=0.0,
        maximum=1.0,
        help="without KV events: share of --router-max-tree-size that pruning leaves",
    )
    approximate_cache_policy: str = option(
        "ttl",
        "--router-approximate-cache-policy",
        choices=("ttl", "lru"),
        help="without KV events: forget blocks by age, or as a worker of known capacity would",
    )


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """The load of requests in flight, and estimates of prefill time."""

    track_active_blocks: bool = option(
        True,
        "--router-track-active-blocks",
        "--track-active-blocks",
        heading="router, mode kv: what runs where",
        help="count the blocks of running requests as load",
    )
    track_output_blocks: bool = option(
        False,
        "--router-track-output-blocks",
        "--track-output-blocks",
        help="count generated blocks too, decreasing towards the expected output length",
    )
    assume_kv_reuse: bool = option(
        True,
        "--router-assume-kv-reuse",
        "--assume-kv-reuse",
        help="count a block that several requests of one worker share once",
    )
    track_prefill_tokens: bool = option(
        True,
        "--router-track-prefill-tokens",
        help="count prompt tokens to compute as load; without, only active blocks weigh",
    )
    prefill_load_model: str = option(
        "none",
        "--router-prefill-load-model",
        choices=("none", "fitted", "aic", "ais"),
        help="reduce the load of a prompt while it is computed, by times measured (fitted) or "
        "estimated by AIConfigurator (aic, ais)",
    )
    prefill_load_predictor: Callable[[int, int], float | None] | None = None
    """For programs: (tokens, cached tokens) to seconds or None; overrides the model."""
    ais_backend: str | None = option(
        None,
        "--ais-backend",
        "--aic-backend",
        help="AIConfigurator: the workers' engine (vllm, sglang, trtllm)",
    )
    ais_system: str | None = option(
        None, "--ais-system", "--aic-system", help="AIConfigurator: the workers' GPU, like h200_sxm"
    )
    ais_model_path: str | None = option(
        None,
        "--ais-model-path",
        "--aic-model-path",
        help="AIConfigurator: the model, by name or directory",
    )
    ais_backend_version: str | None = option(
        None,
        "--ais-backend-version",
        "--aic-backend-version",
        help="AIConfigurator: the engine's version; default: its newest",
    )
    ais_tp_size: int = option(
        1, "--ais-tp-size", "--aic-tp-size", minimum=1, help="AIConfigurator: GPUs of a worker"
    )
