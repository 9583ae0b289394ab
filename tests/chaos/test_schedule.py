"""The schedule of faults depends on the seed alone, and a long run has every fault."""

from __future__ import annotations

from collections import Counter

import pytest
from chaos_load import make_pool
from fault_schedule import FAULTS, make_schedule, read_weights


def test_a_seed_gives_the_same_faults() -> None:
    one, same, other = (make_schedule(seed, 120, 1.0) for seed in (7, 7, 8))
    assert one == same
    assert [fault.kind for fault in one] != [fault.kind for fault in other]


def test_the_faults_are_in_order_and_as_many_as_asked_for() -> None:
    schedule = make_schedule(1, 120, 1.5)
    assert len(schedule) == 180
    times = [fault.at_s for fault in schedule]
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= 120


def test_a_hundred_seconds_have_every_fault() -> None:
    assert set(FAULTS) == {fault.kind for fault in make_schedule(3, sum(FAULTS.values()), 1.0)}


def test_faults_come_as_often_as_their_weights_say() -> None:
    decks = 20
    found = Counter(fault.kind for fault in make_schedule(5, decks * sum(FAULTS.values()), 1.0))
    assert found == {kind: decks * weight for kind, weight in FAULTS.items()}


def test_shares_are_read_from_text() -> None:
    found = read_weights("requests cut:40, worker killed")
    assert found == {"requests cut": 40, "worker killed": FAULTS["worker killed"]}
    with pytest.raises(ValueError, match="'worker' is not one of: worker killed, "):
        read_weights("worker:3")
    with pytest.raises(ValueError, match="share '0' of 'disk full'"):
        read_weights("disk full:0")


def test_a_seed_gives_the_same_requests() -> None:
    assert make_pool(7) == make_pool(7) != make_pool(8)
    prompts = [str(body.get("prompt") or body["messages"]) for _, body in make_pool(7)]
    assert len(set(prompts)) == len(prompts)
