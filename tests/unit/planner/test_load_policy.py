"""The load policy: worked vectors, the grace period, and what must always hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_histories import observation, pools_of, step

from dynamo.config.planner import PlannerSettings
from dynamo.errors import ConfigError
from dynamo.planner.capacity.observation import Observation, Pool, Pull, Traffic, WorkerLoad
from dynamo.planner.policies.base import PoolDecision, ScalingDecision
from dynamo.planner.policies.load import LoadPolicy, kv_load

# Thresholds of VECTORS.
SETTINGS = PlannerSettings(
    prefill_queue_scale_up_threshold=5.0, prefill_queue_scale_down_threshold=0.2
)
KV_BLOCKS = 10_000


def worker(kv: float, running: int = 1, waiting: int = 0) -> WorkerLoad:
    return WorkerLoad(
        worker_id=1,
        kv_used_blocks=round(kv * KV_BLOCKS),
        kv_total_blocks=KV_BLOCKS,
        running=running,
        waiting=waiting,
    )


def pulls(queue: Sequence[float] = (), kv: Sequence[float] = ()) -> list[Pull]:
    """One pull for each sample of the queue; every pull has all workers of ``kv``."""
    loads = tuple(worker(usage) for usage in kv)
    if not queue:
        return [Pull(at_s=0.0, decode=loads)]
    return [Pull(at_s=float(i), decode=loads, prefill_queue=q) for i, q in enumerate(queue)]


def seen(
    prefill: int | Pool | None,
    decode: int | Pool,
    samples: Sequence[Pull] = (),
    max_gpus: float = 8,
    changed: bool = False,
) -> Observation:
    return Observation(
        now_s=30.0,
        interval_s=30.0,
        decode=Pool(ready=decode) if isinstance(decode, int) else decode,
        prefill=Pool(ready=prefill) if isinstance(prefill, int) else prefill,
        traffic=Traffic(duration_s=30.0),
        pulls=samples,
        max_gpus=max_gpus,
        changed=changed,
    )


def actions(decision: ScalingDecision, observed: Observation) -> str:
    """Return what is changed in the order of the decision, such as ``P- D+``."""
    signs = {0: "", 1: "+", -1: "-"}
    steps = [(made.pool, step(decision, observed, made.pool)) for made in decision.pools]
    return " ".join(name[0].upper() + signs[change] for name, change in steps if change)


def pool(decision: ScalingDecision, name: str) -> PoolDecision:
    return next(made for made in decision.pools if made.pool == name)


def with_grace(intervals: int) -> LoadPolicy:
    """A policy that has added a decode worker, and decided since, so ``intervals`` are left."""
    policy = LoadPolicy(SETTINGS)
    added = seen(1, 1, pulls(kv=[0.95]))
    policy.applied(policy.decide(added), failed=())
    while policy.grace > intervals:
        policy.decide(seen(1, 2, pulls(kv=[0.7])))
    return policy


# What Dynamo 0.2 decides, except for the grace: its code sets 3 and decrements it in the same
# adjustment, which protects two intervals. Its documentation promises three, so it is 3 here
# after D+.
VECTORS = [
    # P, D, queue, kv, grace, actions, GPUs after, grace after
    (1, 1, [0, 0], [0.1], 0, "", 2, 0),
    (2, 2, [0, 0], [0.1], 0, "P- D-", 2, 0),
    (2, 2, [0, 0], [0.1], 2, "P-", 3, 1),
    (1, 1, [4, 6, 8, 10], [0.6], 0, "P+", 3, 0),
    (1, 1, [12, 9, 6, 2], [0.6], 0, "", 2, 0),
    (1, 1, [6, 6, 6], [0.6], 0, "P+", 3, 0),
    (1, 1, [0, 1, 0], [0.95], 0, "D+", 3, 3),
    (3, 4, [6, 7, 8], [0.95], 0, "P+", 8, 0),
    (4, 4, [6, 7, 8], [0.95], 0, "", 8, 0),
    (4, 4, [0, 0, 0], [0.95], 0, "P- D+", 8, 3),
    (2, 2, [], [], 0, "", 4, 0),
    (2, 2, [0.2], [0.5], 0, "", 4, 0),
]


@pytest.mark.parametrize(
    ("prefill", "decode", "queue", "kv", "grace", "expected", "gpus_after", "grace_after"), VECTORS
)
def test_the_worked_vectors(
    prefill: int,
    decode: int,
    queue: list[float],
    kv: list[float],
    grace: int,
    expected: str,
    gpus_after: int,
    grace_after: int,
) -> None:
    policy = with_grace(grace) if grace else LoadPolicy(SETTINGS)
    observed = seen(prefill, decode, pulls(queue, kv))
    decision = policy.decide(observed)
    policy.applied(decision, failed=())
    assert actions(decision, observed) == expected
    assert sum(made.wanted for made in decision.pools) == gpus_after
    assert policy.grace == grace_after


@pytest.mark.parametrize(
    ("queue", "kv", "expected", "prefill_rule", "decode_rule"),
    [
        (
            [4, 6, 8, 10],
            0.6,
            "P+",
            "prefill queue 7 > 5, predicted 28 in 3 intervals",
            "KV load 0.6 is between 0.5 and 0.9",
        ),
        (
            [12, 9, 6, 2],
            0.95,
            "D+",
            "prefill queue 7.25 > 5, but -28 is predicted in 3 intervals",
            "KV load 0.95 > 0.9",
        ),
        (
            [0, 0],
            0.1,
            "",
            "prefill queue 0 < 0.2, but 1 is the minimum",
            "KV load 0.1 < 0.5, but 1 is the minimum",
        ),
    ],
)
def test_every_rule_is_a_sentence_with_its_figures(
    queue: list[float], kv: float, expected: str, prefill_rule: str, decode_rule: str
) -> None:
    observed = seen(1, 1, pulls(queue, [kv]))
    decision = LoadPolicy(SETTINGS).decide(observed)
    assert actions(decision, observed) == expected
    assert pool(decision, "prefill").rule == prefill_rule
    assert pool(decision, "decode").rule == decode_rule
    assert pool(decision, "decode").inputs["kv_load"] == pytest.approx(kv)


def test_the_kv_load_counts_waiting_requests_of_busy_workers_only() -> None:
    assert kv_load(worker(0.8, running=4, waiting=10)) == pytest.approx(1.0)
    assert kv_load(worker(0.8, running=0, waiting=10)) == pytest.approx(0.8)
    assert kv_load(worker(0.8, running=4, waiting=0)) == pytest.approx(0.8)


def test_the_kv_load_is_the_mean_over_all_reports_of_all_pulls() -> None:
    """Three reports of 0.9, 0.9 and 0.3: their mean is 0.7, that of the pulls' means 0.75."""
    samples = [
        Pull(at_s=0.0, decode=(worker(0.9), worker(0.9))),
        Pull(at_s=1.0, decode=(worker(0.3),)),
        Pull(at_s=2.0, decode=(WorkerLoad(worker_id=2, running=3),)),  # size of the cache unknown
    ]
    decision = LoadPolicy(SETTINGS).decide(seen(None, 2, samples))
    assert pool(decision, "decode").inputs["kv_load"] == pytest.approx(0.7)


def test_three_full_intervals_are_protected() -> None:
    """Dynamo's planner page: no decode worker is removed in the next three adjustment intervals."""
    policy = LoadPolicy(PlannerSettings())
    added = policy.decide(seen(None, 1, pulls(kv=[0.95])))
    policy.applied(added, failed=())
    idle = seen(None, 2, pulls(kv=[0.1]))
    decided = [policy.decide(idle) for _ in range(4)]
    assert [pool(decision, "decode").wanted for decision in decided] == [2, 2, 2, 1]
    assert pool(decided[0], "decode").rule == (
        "KV load 0.1 < 0.5, but a new worker has 3 of 3 intervals of grace left"
    )


def test_intervals_in_which_workers_changed_do_not_count_as_grace() -> None:
    policy = with_grace(3)
    decision = policy.decide(seen(2, 2, pulls([9, 9], [0.95]), changed=True))
    assert {made.wanted for made in decision.pools} == {2}
    assert {made.rule for made in decision.pools} == {
        "the set of workers changed during the interval"
    }
    assert policy.grace == 3


def test_a_failed_addition_starts_no_grace() -> None:
    policy = LoadPolicy(SETTINGS)
    policy.applied(policy.decide(seen(None, 1, pulls(kv=[0.95]))), failed={"decode"})
    assert policy.grace == 0


def test_an_added_prefill_worker_starts_no_grace() -> None:
    policy = LoadPolicy(SETTINGS)
    policy.applied(policy.decide(seen(1, 1, pulls([9, 9], [0.6]))), failed=())
    assert policy.grace == 0


def test_one_pool_without_data_does_not_stop_the_other() -> None:
    observed = seen(1, 1, pulls([9, 9]))
    decision = LoadPolicy(SETTINGS).decide(observed)
    assert actions(decision, observed) == "P+"
    assert pool(decision, "decode").rule == "no KV load was reported"


def test_the_budget_counts_starting_and_draining_workers() -> None:
    busy = Pool(ready=1, starting=1, draining=1, gpus_per_worker=2)
    observed = seen(None, busy, pulls(kv=[0.95]), max_gpus=7)
    decision = LoadPolicy(SETTINGS).decide(observed)
    assert actions(decision, observed) == ""
    assert pool(decision, "decode").rule == (
        "KV load 0.95 > 0.9, but 1 of 7 GPUs are free and a worker needs 2"
    )
    observed = seen(None, busy, pulls(kv=[0.95]), max_gpus=8)
    assert actions(LoadPolicy(SETTINGS).decide(observed), observed) == "D+"


def test_a_pool_has_its_own_maximum_and_minimum() -> None:
    full = Pool(ready=2, minimum=1, maximum=2)
    decision = LoadPolicy(SETTINGS).decide(seen(None, full, pulls(kv=[0.95])))
    assert pool(decision, "decode").rule == "KV load 0.95 > 0.9, but 2 is the maximum"
    decision = LoadPolicy(SETTINGS).decide(seen(None, Pool(ready=2, minimum=3), pulls(kv=[0.1])))
    assert pool(decision, "decode").rule == "2 workers, the minimum is 3"
    assert pool(decision, "decode").wanted == 3


def test_the_last_worker_is_left_to_the_idle_timeout() -> None:
    idle = Pool(ready=1, minimum=0)
    decision = LoadPolicy(SETTINGS).decide(seen(None, idle, pulls(kv=[0.0])))
    assert pool(decision, "decode").wanted == 1
    asleep = Pool(ready=0, minimum=0, asleep=1)
    assert pool(LoadPolicy(SETTINGS).decide(seen(None, asleep)), "decode").wanted == 0


def test_the_worked_example_of_the_manual() -> None:
    page = Path(__file__).parents[3] / "docs" / "planner/policies.md"
    lines = [
        line for line in page.read_text().splitlines() if re.match(r"\| [1-5] \| [\d., ]+ \|", line)
    ]
    policy, prefill, decode = LoadPolicy(PlannerSettings()), 1, 2
    for line in lines:
        _, queue, kv, *texts = (cell.strip() for cell in line.strip("|").split(" | "))
        samples = pulls([float(depth) for depth in queue.split(",")], [float(kv)])
        decision = policy.decide(seen(prefill, decode, samples))
        policy.applied(decision, failed=())
        assert texts == [
            f"{count} -> {made.wanted}: {made.rule}" if made.wanted != count else made.rule
            for count, made in (
                (prefill, pool(decision, "prefill")),
                (decode, pool(decision, "decode")),
            )
        ]
        prefill, decode = (pool(decision, name).wanted for name in ("prefill", "decode"))
    assert len(lines) == 5


def test_thresholds_that_contradict_each_other_are_rejected() -> None:
    with pytest.raises(ConfigError, match="--decode-kv-scale-down-threshold"):
        PlannerSettings(decode_kv_scale_up_threshold=0.4)
    with pytest.raises(ConfigError, match="--prefill-queue-scale-up-threshold"):
        PlannerSettings(prefill_queue_scale_down_threshold=0.6)


@settings(deadline=None)
@given(st.randoms(use_true_random=True), st.booleans())
def test_each_pool_changes_by_one_in_the_documented_order(random: Random, prefill: bool) -> None:
    policy = LoadPolicy(PlannerSettings())
    protected = 0
    for _ in range(20):
        observed = observation(random, prefill=prefill, now_s=0.0, interval_s=30.0)
        decision = policy.decide(observed)
        assert {made.pool for made in decision.pools} == set(pools_of(observed))
        steps = [step(decision, observed, made.pool) for made in decision.pools]
        assert all(abs(change) <= 1 for change in steps)
        assert steps == sorted(steps, key=(-1, 1, 0).index)
        assert not observed.changed or not any(steps)
        decode_step = step(decision, observed, "decode")
        assert not protected or decode_step >= 0
        failed = random.sample(["decode", "prefill"], random.randint(0, 2))
        policy.applied(decision, failed)
        if decode_step > 0 and "decode" not in failed:
            protected = 3
        elif not observed.changed:
            protected = max(0, protected - 1)
