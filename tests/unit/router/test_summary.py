"""The summary of the router in the log, and the warnings about settings without effect."""

from __future__ import annotations

import pytest

from dynamo.config.router import RouterSettings
from dynamo.router.modes.factory import ineffective_settings, summarize


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "mode round-robin"),
        ({"mode": "kv"}, "mode kv, caches known from KV events"),
        (
            {"mode": "kv", "event_threads": 2, "predicted_ttl_s": 5.0, "replica_sync": True},
            "mode kv, caches known from KV events on 2 threads and predicted for 5 s, "
            "synchronized with other routers",
        ),
        (
            {"mode": "kv", "cost": "seconds"},
            "mode kv, cost in seconds, caches known from KV events",
        ),
        (
            {"mode": "kv", "kv_events": False},
            "mode kv, caches predicted from decisions (ttl 120 s)",
        ),
        (
            {"mode": "kv", "kv_events": False, "approximate_cache_policy": "lru"},
            "mode kv, caches predicted from decisions (lru)",
        ),
        (
            {"mode": "kv", "overlap_score_weight": 0.0, "queue_threshold": 2.0},
            "mode kv, caches ignored (overlap weight 0), queue above 2 batches (fcfs)",
        ),
        (
            {"mode": "kv", "shared_cache_type": "hicache", "prefill_load_model": "fitted"},
            "mode kv, caches known from KV events, shared cache hicache, prefill load fitted",
        ),
        (
            {"session_affinity_ttl_s": 60.0, "admission_control": "token-capacity"},
            "mode round-robin, sessions kept 60 s (hard), admission control token-capacity",
        ),
        (
            {"enforce_disagg": True, "conditional_disagg": True},
            "mode round-robin, prefill workers enforced, prefill workers where they pay off",
        ),
    ],
)
def test_every_feature_that_is_on_is_named(given: dict[str, object], words: str) -> None:
    settings = RouterSettings(**given)  # type: ignore[arg-type]
    assert summarize(settings) == words
    assert ineffective_settings(settings) == []


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"replica_sync": True}, "--router-replica-sync"),
        ({"mode": "kv", "kv_events": False, "predicted_ttl_s": 5.0}, "--router-predicted-ttl-secs"),
        ({"shared_cache_multiplier": 0.5}, "--shared-cache-multiplier"),
        (
            {"mode": "kv", "cost": "seconds", "prefill_load_scale": 4.0},
            "--router-prefill-load-scale",
        ),
        ({"active_decode_blocks_threshold": 0.5}, "--admission-control"),
        ({"conditional_disagg_config": "{}"}, "--router-conditional-disagg-config"),
    ],
)
def test_settings_without_effect_are_named(given: dict[str, object], flag: str) -> None:
    (line,) = ineffective_settings(RouterSettings(**given))  # type: ignore[arg-type]
    assert flag in line and "no effect" in line
