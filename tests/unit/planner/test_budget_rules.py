"""Limits of pools and budget, whatever a policy wants."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.planner.capacity.observation import Observation, Pool, Traffic
from dynamo.planner.policies.budget import Workers, affordable, clamp, free_gpus
from dynamo.planner.sharing import SharedModel, SharedService, SharingLimits, share


def seen(prefill: Pool | None, decode: Pool, max_gpus: float = 8) -> Observation:
    traffic = Traffic(duration_s=30.0)
    return Observation(
        now_s=0.0,
        interval_s=30.0,
        decode=decode,
        prefill=prefill,
        traffic=traffic,
        max_gpus=max_gpus,
    )


@pytest.mark.parametrize(
    ("wanted", "gpus", "max_gpus", "expected"),
    [
        ((3, 5), (1, 1), 8, (3, 5)),
        # Scale 8 / 16: both pools shrink in proportion.
        ((6, 10), (1, 1), 8, (3, 5)),
        # Scale 8 / 11 makes 6.5 prefill workers, floor; the rest is decode's.
        ((9, 2), (1, 1), 8, (6, 2)),
        # Two GPUs per decode worker: floor(4 * 8 / 12) = 2, then floor(6 / 2) = 3.
        ((4, 4), (1, 2), 8, (2, 3)),
        # The minimum of decode is kept: floor((8 - 1) / 1) = 7 prefill workers.
        ((100, 1), (1, 1), 8, (7, 1)),
        # 1.x would raise decode to 4 here, because 4 GPUs are left; 1 was wanted.
        ((3, 1), (4, 1), 12, (2, 1)),
        ((0, 0), (1, 1), 8, (1, 1)),
        # Minima that do not fit: 1.x stops everything, ours keeps decode.
        ((4, 4), (1, 1), 1, (0, 1)),
        ((4, 4), (1, 2), 1, (1, 0)),
    ],
)
def test_the_pair_is_scaled_to_the_budget(
    wanted: tuple[int, int], gpus: tuple[int, int], max_gpus: int, expected: tuple[int, int]
) -> None:
    observed = seen(
        Pool(ready=1, gpus_per_worker=gpus[0]), Pool(ready=1, gpus_per_worker=gpus[1]), max_gpus
    )
    assert clamp(Workers(*wanted), observed) == expected


def test_aggregated_serving_has_no_prefill_workers() -> None:
    assert clamp(Workers(0, 12), seen(None, Pool(ready=1))) == (0, 8)
    assert clamp(Workers(0, 12), seen(None, Pool(ready=1, maximum=5))) == (0, 5)


def test_only_free_gpus_are_given_out_now() -> None:
    decode = Pool(ready=2, draining=1, gpus_per_worker=2)
    observed = seen(Pool(ready=1), decode)
    assert free_gpus(observed) == 1
    assert affordable(Workers(4, 3), observed) == (2, 2)
    assert affordable(Workers(0, 1), observed) == (0, 1)


def test_the_gpus_of_an_added_prefill_worker_are_not_free_for_decode() -> None:
    observed = seen(Pool(ready=1), Pool(ready=1), max_gpus=4)
    assert affordable(Workers(2, 3), observed) == (2, 2)
    assert affordable(Workers(3, 3), observed) == (3, 1)


@pytest.mark.parametrize(("gpus", "most"), [(0.2, 15), (0.1, 30), (0.3, 10), (0.7, 4)])
def test_fractions_fill_the_budget(gpus: float, most: int) -> None:
    """14 times 0.2 and 0.2 more is above 3 in binary: every rule allows the last one."""
    for workers in range(most + 1):
        observed = seen(None, Pool(ready=workers, gpus_per_worker=gpus), 3)
        assert affordable(Workers(0, 99), observed) == (0, most)
        assert clamp(Workers(0, workers), observed) == (0, max(workers, 1))
        held = SharedService(name="s", gpus_per_worker=gpus, ready=workers, wanted=workers + 1)
        found = share(
            [SharedModel(name="m", services=(held,))], SharingLimits(gpus=3, idle_timeout_s=9)
        )
        expected = [workers + 1] if 0 < workers < most else []
        assert [one.workers for one in found.changes] == expected


POOLS = st.builds(
    Pool,
    ready=st.integers(0, 4),
    starting=st.integers(0, 2),
    draining=st.integers(0, 2),
    gpus_per_worker=st.sampled_from([0.1, 0.5, 1.0, 2.0, 4.0]),
    minimum=st.integers(0, 3),
    maximum=st.none() | st.integers(3, 9),
)
SEEN = st.builds(seen, st.none() | POOLS, POOLS, st.integers(0, 16))


@settings(deadline=None)
@given(st.builds(Workers, st.integers(0, 40), st.integers(0, 40)), SEEN)
def test_no_pair_leaves_the_limits(wanted: Workers, observed: Observation) -> None:
    prefill = observed.prefill or Pool(ready=0, minimum=0, maximum=0)
    decode = observed.decode
    if observed.prefill is None:
        wanted = Workers(0, wanted.decode)
    result = clamp(wanted, observed)
    cost = result.prefill * prefill.gpus_per_worker + result.decode * decode.gpus_per_worker
    assert cost <= observed.max_gpus + 1e-6
    least = prefill.minimum * prefill.gpus_per_worker + decode.minimum * decode.gpus_per_worker
    for have, want, pool in zip(result, wanted, (prefill, decode), strict=True):
        assert 0 <= have <= max(want, pool.minimum)
        assert pool.maximum is None or have <= pool.maximum
        assert have >= pool.minimum or least > observed.max_gpus
    assert clamp(result, observed) == result or least > observed.max_gpus


@settings(deadline=None)
@given(st.builds(Workers, st.integers(0, 40), st.integers(0, 40)), SEEN)
def test_additions_never_exceed_what_is_free(wanted: Workers, observed: Observation) -> None:
    result = affordable(wanted, observed)
    added = max(0, result.decode - observed.decode.workers) * observed.decode.gpus_per_worker
    if observed.prefill is not None:
        more = max(0, result.prefill - observed.prefill.workers)
        added += more * observed.prefill.gpus_per_worker
    assert added <= max(0.0, free_gpus(observed)) + 1e-6
    assert all(have <= want for have, want in zip(result, wanted, strict=True))
