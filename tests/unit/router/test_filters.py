"""Eligibility: allow-lists, pins, dp_rank bounds, taints, busy workers. Spec 3.10."""

from __future__ import annotations

import pytest

from dynamo.errors import InvalidArgument, NoInstances, Overloaded
from dynamo.protocols.card import RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.router.eligibility.filters import eligible, exclusion
from dynamo.router.worker_pool import DenseSlots, WorkerPool


@pytest.fixture
def fleet() -> WorkerPool:
    """Worker 1 with one rank, worker 2 with ranks 0 and 1, worker 3 with ranks 4 and 5."""
    fleet = WorkerPool(DenseSlots())
    fleet.add(1, RuntimeConfig(taints=["h100"]))
    fleet.add(2, RuntimeConfig(data_parallel_size=2))
    fleet.add(3, RuntimeConfig(data_parallel_size=2, data_parallel_start_rank=4))
    return fleet


def owners(fleet: WorkerPool, routing: Routing | None) -> list[tuple[int, int]]:
    """Who the candidates are."""
    found = [fleet.owners[slot] for slot in eligible(fleet, routing)]
    return sorted(owner for owner in found if owner is not None)


EVERYONE = [(1, 0), (2, 0), (2, 1), (3, 4), (3, 5)]


def test_nothing_asked_for_gives_the_fleets_own_column(fleet: WorkerPool) -> None:
    assert eligible(fleet, None) is fleet.candidates
    assert eligible(fleet, Routing(priority=3)) is fleet.candidates
    assert owners(fleet, None) == EVERYONE


@pytest.mark.parametrize(
    ("routing", "expected"),
    [
        (Routing(backend_instance_id=2), [(2, 0), (2, 1)]),
        (Routing(decode_worker_id=1), [(1, 0)]),
        (Routing(backend_instance_id=3, dp_rank=5), [(3, 5)]),
        (Routing(allowed_worker_ids=[1, 3, 99, 1]), [(1, 0), (3, 4), (3, 5)]),
        (Routing(backend_instance_id=1, allowed_worker_ids=[1, 2]), [(1, 0)]),
        (Routing(dp_rank=1), [(1, 0), (2, 1)]),
        (Routing(dp_rank=4), [(1, 0), (3, 4)]),
        (Routing(required_taints=["h100"]), [(1, 0)]),
    ],
)
def test_constraints(fleet: WorkerPool, routing: Routing, expected: list[tuple[int, int]]) -> None:
    assert owners(fleet, routing) == expected


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (
            Routing(backend_instance_id=12345),
            "InvalidRequest: nvext.backend_instance_id=12345 does not identify a known worker",
        ),
        (
            Routing(decode_worker_id=7),
            "InvalidRequest: nvext.decode_worker_id=7 does not identify a known worker",
        ),
        (
            Routing(backend_instance_id=3, allowed_worker_ids=[1]),
            "pinned worker 3 is not in the request's allow-list",
        ),
        (
            Routing(backend_instance_id=3, dp_rank=1),
            "dp_rank 1 is out of bounds for worker 3: [4, 6)",
        ),
        (
            Routing(allowed_worker_ids=[2, 3], dp_rank=9),
            "dp_rank 9 is out of bounds for every worker",
        ),
        (Routing(required_taints=["b200"]), "no worker has the required taints: b200"),
        (
            Routing(backend_instance_id=2, required_taints=["h100"]),
            "no worker has the required taints: h100",
        ),
    ],
)
def test_the_callers_faults(fleet: WorkerPool, routing: Routing, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        eligible(fleet, routing)
    assert caught.value.message == message


def test_busy_workers_are_left_out_until_none_is_left(fleet: WorkerPool) -> None:
    fleet.set_busy(2, True)
    fleet.set_busy(99, True)
    assert owners(fleet, None) == [(1, 0), (3, 4), (3, 5)]
    with pytest.raises(Overloaded, match="pinned worker 2 is overloaded"):
        eligible(fleet, Routing(backend_instance_id=2))
    fleet.set_busy(1, True)
    fleet.set_busy(3, True)
    with pytest.raises(Overloaded, match=r"^all eligible workers are overloaded$"):
        eligible(fleet, None)
    fleet.set_busy(3, False)
    assert owners(fleet, None) == [(3, 4), (3, 5)]


def test_no_worker_at_all() -> None:
    with pytest.raises(NoInstances):
        eligible(WorkerPool(DenseSlots()), Routing(backend_instance_id=1))


def test_an_allow_list_of_strangers(fleet: WorkerPool) -> None:
    with pytest.raises(NoInstances, match="allowed"):
        eligible(fleet, Routing(allowed_worker_ids=[8, 9]))


def test_slots_are_dense_and_used_again(fleet: WorkerPool) -> None:
    assert sorted(fleet.candidates) == list(range(5))
    freed = fleet.remove(2)
    assert fleet.remove(2) == []
    assert len(fleet.candidates) == 3
    fleet.set_busy(2, True)
    assert fleet.busy == set()
    fleet.add(7, RuntimeConfig(data_parallel_size=2))
    assert sorted(fleet.members[7].slots.values()) == sorted(freed)
    assert fleet.width == 5
    before = fleet.members[7].slots[0]
    fleet.add(7, RuntimeConfig(data_parallel_size=3))
    assert fleet.members[7].slots[0] == before
    assert fleet.width == 6


def test_a_shunned_worker_is_the_last_resort(fleet: WorkerPool) -> None:
    fleet.avoid(99, True)
    assert eligible(fleet, None) is fleet.candidates
    fleet.avoid(2, True)
    assert owners(fleet, None) == [(1, 0), (3, 4), (3, 5)]
    assert owners(fleet, Routing(backend_instance_id=2)) == [(2, 0), (2, 1)]
    assert owners(fleet, Routing(allowed_worker_ids=[2])) == [(2, 0), (2, 1)]
    assert exclusion(fleet, None, fleet.members[2], 0) == "has just failed to answer"
    fleet.set_busy(1, True)
    fleet.avoid(3, True)
    assert owners(fleet, None) == [(2, 0), (2, 1), (3, 4), (3, 5)]
    fleet.avoid(3, False)
    assert owners(fleet, None) == [(3, 4), (3, 5)]
    fleet.remove(2)
    assert fleet.avoided == set()
