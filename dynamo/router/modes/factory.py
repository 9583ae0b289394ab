"""Make the picker of the mode in the settings, and the summary of both for the log."""

from __future__ import annotations

from random import Random

from dynamo._fast.radix import RadixTree
from dynamo.config.router import RouterSettings
from dynamo.router.modes.kv import KvPicker
from dynamo.router.modes.picker import InflightPicker, Picker

_KV_ONLY = (
    ("--router-replica-sync", "replica_sync"),
    ("--router-predicted-ttl-secs", "predicted_ttl_s"),
    ("--router-duplicate-cost", "duplicate_cost"),
    ("--router-temperature", "temperature"),
    ("--router-policy-config", "policy_config"),
)
_WEIGHTS = (
    ("--router-prefill-load-scale", "prefill_load_scale"),
    ("--router-kv-overlap-score-weight", "overlap_score_weight"),
    ("--router-kv-overlap-score-credit", "overlap_score_credit"),
    ("--router-kv-overlap-score-credit-decay", "overlap_score_credit_decay"),
    ("--router-decode-active-request-weight", "decode_active_request_weight"),
    ("--router-duplicate-cost", "duplicate_cost"),
)


def summarize(settings: RouterSettings) -> str:
    """Return the mode and the enabled features in one line."""
    parts = [f"mode {settings.mode}"]
    if settings.mode == "kv":
        parts += ["cost in seconds"] if settings.in_seconds else []
        parts += [_caches(settings), *_kv_features(settings)]
    if settings.session_affinity_ttl_s is not None:
        ttl_s, mode = settings.session_affinity_ttl_s, settings.session_affinity_mode
        parts.append(f"sessions kept {ttl_s:g} s ({mode})")
    if settings.admission_control != "none":
        parts.append(f"admission control {settings.admission_control}")
    if settings.enforce_disagg:
        parts.append("prefill workers enforced")
    if settings.conditional_disagg:
        parts.append("prefill workers where they pay off")
    return ", ".join(parts)


def ineffective_settings(settings: RouterSettings) -> list[str]:
    """Return a warning for each given setting that has no effect with the others."""
    lines = []
    if settings.mode != "kv":
        flags = [flag for flag, name in _KV_ONLY if getattr(settings, name)]
        lines += [f"{flag} has no effect without --router-mode kv" for flag in flags]
    elif settings.predicts and settings.predicted_ttl_s is not None:
        lines.append("--router-predicted-ttl-secs has no effect without KV events")
    if settings.in_seconds:
        default = RouterSettings()
        lines += [
            f"{flag} has no effect with --router-cost seconds"
            for flag, name in _WEIGHTS
            if getattr(settings, name) != getattr(default, name)
        ]
    if settings.shared_cache_multiplier and settings.shared_cache_type == "none":
        lines.append("--shared-cache-multiplier has no effect without --shared-cache-type")
    if settings.admission_control == "none" and any(
        limit is not None
        for limit in (
            settings.active_decode_blocks_threshold,
            settings.active_prefill_tokens_threshold,
            settings.active_prefill_tokens_threshold_frac,
        )
    ):
        lines.append("busy thresholds have no effect without --admission-control token-capacity")
    if settings.conditional_disagg_config is not None and not settings.conditional_disagg:
        lines.append(
            "--router-conditional-disagg-config has no effect without --router-conditional-disagg"
        )
    return lines


def _caches(settings: RouterSettings) -> str:
    if not settings.uses_index:
        return "caches ignored (overlap weight 0)"
    if settings.predicts:
        policy = settings.approximate_cache_policy
        age = f" {settings.ttl_s:g} s" if policy == "ttl" else ""
        return f"caches predicted from decisions ({policy}{age})"
    more = f" on {settings.event_threads} threads" if settings.event_threads > 1 else ""
    if settings.predicted_ttl_s is not None:
        more += f" and predicted for {settings.predicted_ttl_s:g} s"
    return f"caches known from KV events{more}"


def _kv_features(settings: RouterSettings) -> list[str]:
    parts = []
    if settings.queue_threshold is not None:
        parts.append(f"queue above {settings.queue_threshold:g} batches ({settings.queue_policy})")
    if settings.selection is not None:
        parts.append(f"policy {settings.selection.name}")
    if settings.policies is not None and (settings.policies.profile or settings.policies.models):
        parts.append("queue by policy classes")
    if settings.replica_sync:
        parts.append("synchronized with other routers")
    if settings.shared_cache_type != "none":
        parts.append(f"shared cache {settings.shared_cache_type}")
    if settings.prefill_load_predictor is not None:
        parts.append("prefill load by a callable")
    elif settings.prefill_load_model != "none":
        parts.append(f"prefill load {settings.prefill_load_model}")
    return parts


def make_index(settings: RouterSettings) -> RadixTree | None:
    """Return the prefix index, or None where overlap must not matter (weight 0).

    An index of predictions needs no cap: the predictions are bounded.
    """
    if not settings.uses_index:
        return None
    return RadixTree(0 if settings.predicts else settings.max_index_blocks)


def make_picker(
    settings: RouterSettings,
    block_size: int,
    *,
    index: RadixTree | None = None,
    random: Random | None = None,
) -> Picker:
    """Return the picker of ``settings.mode``; ``index`` is for the kv mode."""
    if settings.mode == "kv":
        return KvPicker(settings, block_size, index, random=random)
    return InflightPicker(settings.mode, random, settings)
