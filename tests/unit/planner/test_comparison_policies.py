"""fixed:N and hpa:N, the policies that others are compared with, and policies by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynamo.config.option import fields_of, load
from dynamo.config.parser import option_of
from dynamo.config.planner import PlannerSettings
from dynamo.errors import ConfigError
from dynamo.planner.capacity.interpolation import (
    DecodePoints,
    PrefillPoints,
    WorkerProfile,
    write_profile,
)
from dynamo.planner.capacity.observation import Observation, Pool, Pull, Traffic, WorkerLoad
from dynamo.planner.policies.base import Policy
from dynamo.planner.policies.combined import CombinedPolicy
from dynamo.planner.policies.factory import (
    FixedPolicy,
    make_policy,
    named_policy,
    resolve_targets,
)
from dynamo.planner.policies.load import LoadPolicy

SETTINGS = PlannerSettings()
NOT_CALLABLE = 4


def own_policy(settings: PlannerSettings, prefill: bool) -> Policy:
    return FixedPolicy(settings, prefill, "3x3" if prefill else "3")


def seen(
    requests: int, decode: Pool, now_s: float = 0.0, prefill: Pool | None = None, reports: int = -1
) -> Observation:
    """``requests`` run on the first of the workers that report, by default all ready ones."""
    count = decode.ready if reports < 0 else reports
    loads = tuple(
        WorkerLoad(worker_id=index, running=0 if index else requests) for index in range(count)
    )
    return Observation(
        now_s=now_s,
        interval_s=15.0,
        decode=decode,
        prefill=prefill,
        traffic=Traffic(duration_s=15.0, queued=requests),
        pulls=[Pull(at_s=now_s, decode=loads)],
    )


def wanted(policy: Policy, observed: Observation) -> tuple[int, ...]:
    return tuple(made.wanted for made in policy.decide(observed).pools)


def test_a_fixed_policy_keeps_its_workers_within_the_limits() -> None:
    assert wanted(named_policy("fixed:4", SETTINGS, False), seen(0, Pool(ready=1))) == (4,)
    decision = named_policy("fixed:12", SETTINGS, False).decide(seen(0, Pool(ready=1)))
    assert decision.pools[0].wanted == 8
    assert decision.pools[0].rule == "fixed at 12 workers, but the limits allow 8"
    both = seen(0, Pool(ready=1), prefill=Pool(ready=1))
    assert wanted(named_policy("fixed:3x2", SETTINGS, True), both) == (3, 2)
    assert wanted(named_policy("fixed:2", SETTINGS, True), both) == (2, 2)


@pytest.mark.parametrize(
    ("name", "prefill", "text"),
    [
        ("fixed:two", False, "policy fixed:two: write fixed:N, such as fixed:4"),
        ("fixed:2x2", False, "policy fixed:2x2: write fixed:N, such as fixed:4"),
        ("fixed:-1", True, "policy fixed:-1: write fixed:PxD, such as fixed:2x2"),
        ("hpa:0", False, "policy hpa:0: write the requests per worker"),
        ("hpa:many", False, "policy hpa:many: write the requests per worker"),
        ("magic", False, "policy 'magic': unknown; there are auto, load,"),
        ("no_such_module:policy", False, "policy 'no_such_module:policy': No module named"),
        (f"{__name__}:missing", False, "has no attribute 'missing'"),
        (f"{__name__}:NOT_CALLABLE", False, "it is no class or function that makes a policy"),
    ],
)
def test_a_wrong_name_says_what_is_right(name: str, prefill: bool, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        named_policy(name, SETTINGS, prefill)
    assert text in raised.value.message


def test_policies_are_made_by_name_or_imported() -> None:
    assert isinstance(make_policy(SETTINGS, prefill=False), LoadPolicy)
    assert isinstance(make_policy(replace(SETTINGS, mode="auto"), prefill=False), CombinedPolicy)
    own = named_policy(f"{__name__}:own_policy", SETTINGS, False)
    assert wanted(own, seen(0, Pool(ready=1))) == (3,)


# desired = ceil(replicas * (requests / replicas) / target), unless within 10 % of the target.
@pytest.mark.parametrize(
    ("requests", "ready", "expected"),
    [
        (36, 2, 3),  # 18 per replica: ratio 1.5
        (26, 2, 2),  # 13 per replica: ratio 1.08, tolerated
        (27, 2, 3),  # 13.5 per replica: ratio 1.125
        (200, 1, 5),  # 17 recommended; four are added at most
        (200, 5, 8),  # ten at most, and eight GPUs
    ],
)
def test_hpa_scales_up_by_the_documented_formula(requests: int, ready: int, expected: int) -> None:
    assert wanted(named_policy("hpa:12", SETTINGS, False), seen(requests, Pool(ready=ready))) == (
        expected,
    )


def test_hpa_scales_down_to_the_highest_recommendation_of_300_s() -> None:
    """Recommendations: 4 at first, 1 from 0 s on but 3 at 60 s."""
    policy = named_policy("hpa:12", SETTINGS, False)
    requests = {0.0: 10, 60.0: 36}
    replicas, changes = 4, {}
    for sync in range(30):
        now_s = 15.0 * sync
        observed = seen(requests.get(now_s, 10), Pool(ready=replicas), now_s)
        (now,) = wanted(policy, observed)
        if now != replicas:
            changes[now_s] = now
        replicas = now
    assert changes == {300.0: 3, 360.0: 1}


def test_hpa_counts_pods_that_are_not_ready_as_idle_when_scaling_up() -> None:
    """Two ready workers with 24 requests each ask for four: two of them are already starting."""
    policy = named_policy("hpa:12", SETTINGS, False)
    assert wanted(policy, seen(48, Pool(ready=2, starting=2))) == (4,)
    # 30 requests on five replicas is 6 each: the ratio has reversed, so nothing changes.
    assert wanted(policy, seen(30, Pool(ready=2, starting=3))) == (5,)
    assert wanted(policy, seen(72, Pool(ready=2, starting=2))) == (6,)


def test_hpa_assumes_the_target_for_missing_metrics_when_scaling_down() -> None:
    """Three of four workers report 6 requests in total: with 12 for the fourth, 2 are enough."""
    policy = named_policy("hpa:12", SETTINGS, False)
    decision = policy.decide(seen(6, Pool(ready=4), reports=3))
    assert decision.pools[0].inputs["recommended"] == 2.0
    assert decision.pools[0].wanted == 4
    assert decision.pools[0].rule == (
        "6 requests on 3 ready workers, target 12, but 4 were recommended within 300 s"
    )


def test_hpa_does_nothing_without_metrics() -> None:
    policy = named_policy("hpa:12", SETTINGS, False)
    assert wanted(policy, seen(0, Pool(ready=0, starting=2))) == (2,)
    assert wanted(policy, seen(90, Pool(ready=3), reports=0)) == (3,)


def test_hpa_scales_prefill_workers_by_requests_without_a_first_token() -> None:
    policy = named_policy("hpa:12", SETTINGS, True)
    observed = seen(36, Pool(ready=3), prefill=Pool(ready=1))
    assert wanted(policy, observed) == (3, 3)


def test_hpa_does_not_remove_the_last_worker() -> None:
    policy = named_policy("hpa:12", SETTINGS, False)
    for sync in range(40):
        (replicas,) = wanted(policy, seen(0, Pool(ready=1, minimum=0), 15.0 * sync))
    assert replicas == 1


def resolved(*words: str) -> tuple[str, float, float, str]:
    (settings,) = load("planner", "", [PlannerSettings], words, env={})
    chosen, reason = resolve_targets(settings)
    return chosen.mode, chosen.ttft_ms, chosen.itl_ms, reason


def test_the_mode_is_load_and_says_that_it_has_no_targets() -> None:
    assert resolved()[0] == "load"
    mode, *_, reason = resolved("--ttft", "300")
    assert mode == "load" and "no effect: --mode auto" in reason


def test_a_default_that_is_given_changes_nothing_in_any_mode() -> None:
    for mode in ("auto", "load", "sla", "load+sla"):
        words = ["--mode", mode]
        plain = resolved(*words)
        for field in fields_of(PlannerSettings):
            spec = option_of(field)
            shown = field.default not in (None, "") and spec.shows_default
            if shown and not isinstance(field.default, bool) and field.name != "mode":
                assert resolved(*words, f"{spec.flags[0]}={field.default}") == plain, field.name


def test_the_help_shows_no_default_that_is_not_in_force(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        load("planner", "", [PlannerSettings], ["--help"], env={})
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "default: load" in text
    for flag in ("--ttft MS", "--itl MS"):
        assert "default" not in text.split(flag)[1].split(" --")[0]


def test_auto_takes_given_targets_and_conservative_ones_for_the_rest() -> None:
    mode, ttft_ms, itl_ms, reason = resolved("--mode", "auto")
    assert (mode, ttft_ms, itl_ms) == ("auto", 2000.0, 50.0)
    assert reason.count("(conservative; ") == 2
    mode, ttft_ms, itl_ms, reason = resolved("--mode", "auto", "--ttft", "500")
    assert (mode, ttft_ms, itl_ms) == ("auto", 500.0, 50.0)
    assert "TTFT 500 ms as given" in reason and "ITL 50 ms (conservative" in reason


@pytest.mark.parametrize(("factor", "targets"), [(1.0, (500.0, 50.0)), (20.0, (4000.0, 800.0))])
def test_auto_has_targets_that_a_profiled_worker_can_keep(
    factor: float, targets: tuple[float, float], tmp_path: Path
) -> None:
    isl, usage = np.array([100.0, 400.0, 1600.0]), np.array([0.1, 0.5, 0.9, 0.1, 0.5, 0.9])
    rate = np.ones(3)
    decode = DecodePoints(
        kv_usage=usage,
        context=np.repeat([100.0, 1600.0], 3),
        itl_ms=factor * np.full(6, 10.0),
        tokens_per_s=np.ones(6),
        max_kv_tokens=10_000,
    )
    prefill = PrefillPoints(isl=isl, ttft_ms=factor * isl / 10, tokens_per_s=rate)
    write_profile(tmp_path, WorkerProfile(prefill=prefill, decode=decode))
    mode, ttft_ms, itl_ms, reason = resolved(
        "--mode", "auto", "--profile-results-dir", str(tmp_path)
    )
    assert (mode, ttft_ms, itl_ms) == ("auto", *targets)
    assert reason.count("(of the profile; ") == 2


@pytest.mark.parametrize("mode", ["load", "sla", "load+sla"])
def test_a_given_mode_and_its_targets_stay(mode: str) -> None:
    assert resolved("--mode", mode) == (mode, 500.0, 50.0, "")
