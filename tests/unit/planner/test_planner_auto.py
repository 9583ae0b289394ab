"""auto: thresholds until costs are learned, and never more than twice the workers."""

import pytest

from dynamo.config.planner import PlannerSettings
from dynamo.planner.capacity.observation import Observation, Pool, Pull, Traffic, WorkerLoad
from dynamo.planner.policies.factory import make_policy

SETTINGS = PlannerSettings(mode="auto", adjustment_interval_s=30.0)
STEP_S = 5.0


def seen(number: int, pool: Pool, kv_usage: float, rate: float = 0.0) -> Observation:
    """What one decision in ``number`` intervals of 5 s sees; without ``rate`` nothing finishes."""
    finished = int(rate * STEP_S)
    loads = tuple(
        WorkerLoad(
            worker_id=worker,
            kv_used_blocks=int(kv_usage * 1000),
            kv_total_blocks=1000,
            running=10 if kv_usage else 0,
        )
        for worker in range(pool.ready)
    )
    traffic = Traffic(
        duration_s=STEP_S,
        arrived=finished,
        finished=finished,
        isl=3000.0 if finished else None,
        osl=150.0 if finished else None,
        ttft_ms=900.0 if finished else None,
        itl_ms=40.0 if finished else None,
        request_s=20.0 if finished else None,
        queued=4 * finished,
        inflight=10 * pool.ready,
    )
    return Observation(
        now_s=number * STEP_S,
        interval_s=STEP_S,
        decode=pool,
        traffic=traffic,
        pulls=[Pull(at_s=number * STEP_S, decode=loads)],
    )


def counts(kv_usage: float, rate: float, workers: int, decisions: int) -> list[int]:
    """The workers after each decision; all of them serve at once."""
    policy, found = make_policy(SETTINGS, False), []
    for number in range(1, decisions + 1):
        made = policy.decide(seen(number, Pool(ready=workers), kv_usage, rate))
        policy.applied(made, ())
        workers = made.pools[0].wanted
        found.append(workers)
    return found


def test_unlearned_it_adds_one_worker_an_adjustment_interval() -> None:
    # 30 s are six decisions: one worker more after each of them, as mode load does.
    assert counts(1.28, 0.0, workers=1, decisions=18) == [1] * 5 + [2] * 6 + [3] * 6 + [4]


def test_unlearned_it_removes_one_worker_an_adjustment_interval() -> None:
    assert counts(0.1, 0.0, workers=3, decisions=18) == [3] * 5 + [2] * 6 + [1] * 7


def test_unlearned_it_waits_for_a_worker_that_starts() -> None:
    policy = make_policy(SETTINGS, False)
    for number in range(1, 30):
        made = policy.decide(seen(number, Pool(ready=1, starting=1), 1.28))
        assert made.pools[0].wanted == 2
    # A whole interval of the load of both begins when it serves.
    wanted = [
        policy.decide(seen(number, Pool(ready=2), 1.28)).pools[0].wanted for number in range(30, 37)
    ]
    assert wanted[:5] == [2] * 5 and 3 in wanted


@pytest.mark.parametrize("rate", [5.0, 50.0])
def test_learned_it_never_more_than_doubles_a_pool_in_an_interval(rate: float) -> None:
    found = counts(1.0, rate, workers=1, decisions=40)
    assert found[-1] == 8, "the load needs all workers"
    assert found.index(8) >= 12, "two intervals at least"
    for later, before in zip(found[6:], found, strict=False):
        assert later <= 2 * before


def test_workers_of_an_operator_are_not_removed_by_the_bound() -> None:
    policy = make_policy(SETTINGS, False)
    policy.decide(seen(1, Pool(ready=1), 0.7))
    made = policy.decide(seen(2, Pool(ready=5), 0.7))
    assert made.pools[0].wanted == 5


def test_a_pool_below_its_minimum_gets_all_of_it() -> None:
    policy = make_policy(SETTINGS, False)
    assert policy.decide(seen(1, Pool(ready=0, minimum=4), 0.0)).pools[0].wanted == 4
