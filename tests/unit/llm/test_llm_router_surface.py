"""Compatibility with programs for NVIDIA Dynamo's router classes: each name and its effect."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest

from dynamo.errors import ConfigError
from dynamo.llm import KvRouter, KvRouterConfig, RouterConfig, RouterMode, RoutingConstraints
from dynamo.llm.router_config import WITHOUT_EFFECT

GIVEN: dict[str, Any] = {
    "overlap_score_weight": 2.0,
    "host_cache_hit_weight": 0.5,
    "disk_cache_hit_weight": 0.1,
    "router_temperature": 0.5,
    "use_kv_events": False,
    "router_replica_sync": True,
    "router_track_active_blocks": False,
    "router_track_output_blocks": True,
    "router_assume_kv_reuse": False,
    "router_track_prefill_tokens": False,
    "router_prefill_load_model": "fitted",
    "router_ttl_secs": 60.0,
    "router_approximate_cache_policy": "lru",
    "router_queue_threshold": 0.5,
    "router_event_threads": 2,
    "router_queue_policy": "wspt",
    "use_remote_indexer": False,
    "serve_indexer": False,
    "shared_cache_multiplier": 0.5,
    "shared_cache_type": "hicache",
    "router_predicted_ttl_secs": 5.0,
    "conditional_disagg_enabled": False,
    "overlap_score_credit": 0.9,
    "overlap_score_credit_decay": 0.1,
    "prefill_load_scale": 3.0,
    "decode_active_request_weight": 1.0,
    "router_policy_config": None,
    "router_tracking_hash": "public-xxh3-v1",
    "durable_kv_events": False,
    "router_reset_states": False,
    "router_snapshot_threshold": 1_000_000,
    "router_max_tree_size": 1024,
    "router_prune_target_ratio": 0.5,
    "min_initial_workers": 0,
}


def test_every_parameter_is_accepted() -> None:
    made = KvRouterConfig(**GIVEN)
    assert {name: getattr(made, name) for name in GIVEN} == GIVEN
    settings = made.settings()
    assert (settings.mode, settings.prefill_weight, settings.temperature) == ("kv", 2.0, 0.5)
    assert (settings.kv_events, settings.replica_sync, settings.ttl_s) == (False, True, 60.0)
    assert settings.prefill_load_model == "fitted"


@pytest.mark.parametrize("name", [name for name in GIVEN if name not in WITHOUT_EFFECT])
def test_each_other_parameter_has_an_effect(name: str) -> None:
    default = KvRouterConfig()
    value = GIVEN[name]
    if value == getattr(default, name):
        value = True
    assert KvRouterConfig(**{name: value}).settings() != default.settings()


def test_a_custom_predictor() -> None:
    def predict(tokens: int, cached_tokens: int) -> float:
        return (tokens + cached_tokens) * 1e-4

    settings = KvRouterConfig(router_prefill_load_model=predict).settings()
    assert settings.prefill_load_predictor is predict
    with pytest.raises(ConfigError, match="--router-prefill-load-model must be one of none"):
        KvRouterConfig(router_prefill_load_model="gpt").settings()


def test_settings_of_aiconfigurator_are_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_AIS_SYSTEM", "h200_sxm")
    monkeypatch.setenv("DYN_ROUTER_TEMPERATURE", "0.7")
    settings = KvRouterConfig(router_prefill_load_model="ais").settings()
    assert (settings.ais_system, settings.temperature) == ("h200_sxm", 0.0)


def test_jetstream_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        KvRouterConfig(durable_kv_events=True).settings()
    assert "--router-durable-kv-events is deprecated: there is no JetStream mode" in caplog.text


def test_modes() -> None:
    names = {"RoundRobin", "Random", "PowerOfTwoChoices", "KV", "Direct", "LeastLoaded"}
    assert {mode.name for mode in RouterMode} == names | {"DeviceAwareWeighted"}
    for mode in RouterMode:
        assert RouterConfig(mode).settings().mode == str(mode)


def test_a_router_config() -> None:
    made = RouterConfig(
        RouterMode.KV,
        KvRouterConfig(),
        active_decode_blocks_threshold=0.9,
        active_prefill_tokens_threshold=100,
        active_prefill_tokens_threshold_frac=0.5,
        enforce_disagg=True,
        session_affinity_ttl_secs=60,
        session_affinity_mode="soft",
    ).settings()
    assert made.enforce_disagg and made.session_affinity_mode == "soft"
    with pytest.raises(ConfigError, match="must be between"):
        RouterConfig(active_decode_blocks_threshold=1.5).settings()


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        (
            "generate",
            "token_ids model stop_conditions sampling_options output_options "
            "router_config_override worker_id dp_rank extra_args",
        ),
        ("generate_from_request", "request"),
        ("best_worker", "token_ids router_config_override request_id update_indexer"),
        ("get_potential_loads", "token_ids"),
        ("get_overlap_scores", "token_ids"),
        ("dump_events", ""),
        ("mark_prefill_complete", "request_id"),
        ("free", "request_id"),
    ],
)
def test_methods(method: str, parameters: str) -> None:
    names = list(inspect.signature(getattr(KvRouter, method)).parameters)[1:]
    assert names[: len(parameters.split())] == parameters.split()
    assert inspect.iscoroutinefunction(getattr(KvRouter, method))


def test_constraints() -> None:
    made = RoutingConstraints(required_taints=["a"], preferred_taints={"b": 0.5})
    assert (made.required_taints, made.preferred_taints) == (["a"], {"b": 0.5})
