"""Settings and overrides to terms; the explanation in the log."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.config.option import load
from dynamo.config.router import RouterSettings
from dynamo.errors import InvalidArgument
from dynamo.router.caches.prompt import TierCounts, effective_blocks
from dynamo.router.decision.cost import (
    CostBreakdown,
    Load,
    breakdown,
    cached_tokens,
    cost_params,
    formula,
    overridden,
)


def test_defaults() -> None:
    params = cost_params(RouterSettings(), 16)
    weights = params.weights
    assert (weights.prefill_scale, weights.credit, weights.decay) == (1.0, 1.0, 0.0)
    assert (weights.host, weights.disk, weights.block_size) == (0.75, 0.25, 16)
    assert params.temperature == 0.0


def test_every_coefficient_has_a_setting() -> None:
    settings = RouterSettings(
        host_cache_hit_weight=0.5,
        disk_cache_hit_weight=0.125,
        shared_cache_multiplier=0.375,
        decode_active_request_weight=2.0,
    )
    params = cost_params(settings, 16)
    weights = params.weights
    assert (weights.host, weights.disk, weights.shared) == (0.5, 0.125, 0.375)
    assert params.request_weight == 2.0


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--router-host-cache-hit-weight", "1.5"),
        ("--router-disk-cache-hit-weight", "-0.1"),
        ("--shared-cache-multiplier", "-1"),
        ("--shared-cache-type", "redis"),
        ("--router-decode-active-request-weight", "-1"),
    ],
)
def test_out_of_range_flags_end_the_start(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load("x", "", [RouterSettings], [flag, value], env={})
    assert flag in capsys.readouterr().err


def test_the_legacy_weight_is_the_prefill_scale() -> None:
    params = cost_params(RouterSettings(overlap_score_weight=2.5, prefill_load_scale=9.0), 16)
    assert (params.weights.prefill_scale, params.weights.credit) == (2.5, 1.0)


def test_weight_zero_takes_the_credit_and_the_index_away() -> None:
    settings = RouterSettings(mode="kv", overlap_score_weight=0.0)
    assert not settings.uses_index
    params = cost_params(settings, 16)
    assert (params.weights.prefill_scale, params.weights.credit) == (0.0, 0.0)


@pytest.mark.parametrize("argv", [["--router-mode", "kv"], ["--router-mode", "round_robin"]])
def test_both_spellings_of_modes(argv: list[str]) -> None:
    (settings,) = load("x", "", [RouterSettings], argv, env={})
    assert settings.mode in ("kv", "round-robin")
    assert settings.uses_index == (settings.mode == "kv")


def test_flags_and_variables() -> None:
    env = {"DYN_ROUTER_USE_KV_EVENTS": "false", "DYN_OVERLAP_SCORE_WEIGHT": "3"}
    (settings,) = load("x", "", [RouterSettings], ["--router-temperature", "0.5"], env=env)
    assert (settings.kv_events, settings.overlap_score_weight) == (False, 3.0)
    assert settings.temperature == 0.5
    assert settings.prefill_weight == 3.0


def test_override_wins_and_unknown_keys_are_ignored() -> None:
    base = cost_params(RouterSettings(), 16)
    params = overridden(
        base,
        {
            "overlap_score_credit": 1.5,
            "prefill_load_scale": 2,
            "router_temperature": 0.7,
            "assume_kv_reuse": False,
            "shared_cache_multiplier": 0.5,
            "decode_active_request_weight": 3,
            "colour": "blue",
        },
    )
    assert (params.weights.credit, params.weights.prefill_scale) == (1.5, 2.0)
    assert (params.temperature, params.assume_kv_reuse) == (0.7, False)
    assert (params.weights.shared, params.request_weight) == (0.5, 3.0)
    assert overridden(base, {"router_temperature": None}).temperature == 0.0


def test_legacy_override() -> None:
    base = cost_params(RouterSettings(), 16)
    params = overridden(base, {"overlap_score_weight": 0})
    assert (params.weights.prefill_scale, params.weights.credit) == (0.0, 0.0)
    assert overridden(base, {"overlap_score_weight": 4}).weights.prefill_scale == 4.0


def test_untracked_prefill_weighs_nothing() -> None:
    params = overridden(cost_params(RouterSettings(), 16), {"track_prefill_tokens": False})
    assert params.weights.prefill_scale == 0.0
    assert not params.track_prefill_tokens


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"router_temperature": -1}, "router_temperature must be finite and non-negative"),
        (
            {"router_temperature": float("inf")},
            "router_temperature must be finite and non-negative",
        ),
        ({"router_temperature": "hot"}, "router_temperature must be a number, got 'hot'"),
        ({"overlap_score_credit": True}, "overlap_score_credit must be a number, got True"),
        ({"overlap_score_credit": float("nan")}, "overlap_score_credit must be finite"),
        ({"prefill_load_scale": -2}, "prefill_load_scale must be finite and non-negative"),
        (
            {"decode_active_request_weight": -1},
            "decode_active_request_weight must be finite and non-negative",
        ),
        ({"shared_cache_multiplier": "much"}, "shared_cache_multiplier must be a number"),
        ({"prefill_load_scale": 1e300}, "prefill_load_scale must be finite"),
        ({"assume_kv_reuse": 1}, "assume_kv_reuse must be true or false, got 1"),
    ],
)
def test_bad_overrides(override: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        overridden(cost_params(RouterSettings(), 16), override)
    assert caught.value.message.startswith(message)


def test_formula_reads_as_in_the_router_guide() -> None:
    found = CostBreakdown(115.5, 1.0, 15.0, 100.5, 25, 0.0)
    assert formula(1, 1.0, 125.5, found, 15) == (
        "Formula for worker_1: 125.500 = 1.0 * 100.500 + 25.0 (cached_blocks: 15)"
    )
    off = formula(1, 0.0, 25.0, found, 0)
    assert off.endswith("= 0.0 * 100.500 + 25.0 (cached_blocks: 0)")
    busy = formula(1, 1.0, 129.5, found._replace(request_blocks=4.0), 2.25)
    assert busy.endswith("= 1.0 * 100.500 + 25.0 + 4.0 (cached_blocks: 2.25)")
    liked = formula(1, 1.0, 62.75, found, 15)
    assert liked.endswith("62.750 = (1.0 * 100.500 + 25.0) * 0.500 (cached_blocks: 15)")


def test_parts_of_a_cost() -> None:
    """40 tokens in blocks of 4 on a worker with 16 more to compute than the least loaded."""
    settings = RouterSettings(
        overlap_score_credit_decay=2.0,
        shared_cache_multiplier=0.5,
        decode_active_request_weight=3.0,
    )
    params = cost_params(settings, 4)
    found = breakdown(params, 40, TierCounts(4, 2, 1, 3), Load(20, 16, 12, 2))
    assert found.raw_prefill_blocks == 15.0
    assert found.credit_decay == 1 / (1 + 2.0 * 4 / 10)
    assert found.credit_blocks == pytest.approx(4 * found.credit_decay + 1.5 + 0.25 + 1.5)
    assert found.prefill_blocks == 15.0 - found.credit_blocks
    assert (found.decode_blocks, found.request_blocks) == (12, 6.0)


def test_effective_blocks_become_cached_tokens() -> None:
    weights = cost_params(RouterSettings(), 2).weights
    assert effective_blocks(weights, TierCounts(3, 2, 1, 9)) == 4.75
    assert cached_tokens(weights, 4.75) == 10  # 9.5 rounds up
    assert cached_tokens(weights, effective_blocks(weights, TierCounts(3))) == 6
