"""Eligibility: allow-lists, pins, dp_rank bounds, taints, busy workers."""

from __future__ import annotations

import pytest

from dynamo.errors import InvalidArgument, NoInstances, Overloaded
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.router.eligibility.filters import constraints_of, eligible
from dynamo.router.worker_pool import DenseSlots, WorkerPool


@pytest.fixture
def worker_pool() -> WorkerPool:
    """Worker 1 with one rank, worker 2 with ranks 0 and 1, worker 3 with ranks 4 and 5."""
    worker_pool = WorkerPool(DenseSlots())
    worker_pool.add(1, RuntimeConfig(taints=["h100"]))
    worker_pool.add(2, RuntimeConfig(data_parallel_size=2))
    worker_pool.add(3, RuntimeConfig(data_parallel_size=2, data_parallel_start_rank=4))
    return worker_pool


def owners(worker_pool: WorkerPool, routing: Routing | None) -> list[tuple[int, int]]:
    """The (worker, rank) of each eligible slot."""
    found = [worker_pool.owners[slot] for slot in eligible(worker_pool, routing)]
    return sorted(owner for owner in found if owner is not None)


EVERYONE = [(1, 0), (2, 0), (2, 1), (3, 4), (3, 5)]


def test_without_constraints_the_column_of_the_pool_is_returned(worker_pool: WorkerPool) -> None:
    assert eligible(worker_pool, None) is worker_pool.candidates
    assert eligible(worker_pool, Routing(priority=3)) is worker_pool.candidates
    assert owners(worker_pool, None) == EVERYONE


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
def test_constraints(
    worker_pool: WorkerPool, routing: Routing, expected: list[tuple[int, int]]
) -> None:
    assert owners(worker_pool, routing) == expected


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
def test_errors_of_the_request(worker_pool: WorkerPool, routing: Routing, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        eligible(worker_pool, routing)
    assert caught.value.message == message


def test_busy_workers_are_excluded_until_none_remains(worker_pool: WorkerPool) -> None:
    worker_pool.set_busy(2, True)
    worker_pool.set_busy(99, True)
    assert owners(worker_pool, None) == [(1, 0), (3, 4), (3, 5)]
    with pytest.raises(Overloaded, match="pinned worker 2 is overloaded"):
        eligible(worker_pool, Routing(backend_instance_id=2))
    worker_pool.set_busy(1, True)
    worker_pool.set_busy(3, True)
    with pytest.raises(Overloaded, match=r"^all eligible workers are overloaded$"):
        eligible(worker_pool, None)
    worker_pool.set_busy(3, False)
    assert owners(worker_pool, None) == [(3, 4), (3, 5)]


def test_no_worker_at_all() -> None:
    with pytest.raises(NoInstances):
        eligible(WorkerPool(DenseSlots()), Routing(backend_instance_id=1))


def test_an_allow_list_of_unknown_workers(worker_pool: WorkerPool) -> None:
    with pytest.raises(NoInstances, match="allowed"):
        eligible(worker_pool, Routing(allowed_worker_ids=[8, 9]))


def test_slots_are_dense_and_reused(worker_pool: WorkerPool) -> None:
    assert sorted(worker_pool.candidates) == list(range(5))
    freed = worker_pool.slots_of(2)
    worker_pool.remove(2)
    worker_pool.remove(2)
    assert worker_pool.slots_of(2) == []
    assert len(worker_pool.candidates) == 3
    worker_pool.set_busy(2, True)
    assert worker_pool.busy == set()
    worker_pool.add(7, RuntimeConfig(data_parallel_size=2))
    assert sorted(worker_pool.members[7].slots.values()) == sorted(freed)
    assert worker_pool.width == 5
    before = worker_pool.members[7].slots[0]
    worker_pool.add(7, RuntimeConfig(data_parallel_size=3))
    assert worker_pool.members[7].slots[0] == before
    assert worker_pool.width == 6


def test_an_avoided_worker_is_the_last_resort(worker_pool: WorkerPool) -> None:
    worker_pool.avoid(99, True)
    assert eligible(worker_pool, None) is worker_pool.candidates
    worker_pool.avoid(2, True)
    assert owners(worker_pool, None) == [(1, 0), (3, 4), (3, 5)]
    assert owners(worker_pool, Routing(backend_instance_id=2)) == [(2, 0), (2, 1)]
    assert owners(worker_pool, Routing(allowed_worker_ids=[2])) == [(2, 0), (2, 1)]
    assert constraints_of(None, worker_pool).excluded(2, 0) == "does not answer"
    worker_pool.set_busy(1, True)
    worker_pool.avoid(3, True)
    assert owners(worker_pool, None) == [(2, 0), (2, 1), (3, 4), (3, 5)]
    worker_pool.avoid(3, False)
    assert owners(worker_pool, None) == [(3, 4), (3, 5)]
    worker_pool.avoid(3, True)
    worker_pool.is_silent = lambda worker_id: worker_id == 2
    assert owners(worker_pool, None) == [(3, 4), (3, 5)]  # 2 would cost seconds
    worker_pool.is_silent = lambda worker_id: worker_id in (2, 3)
    with pytest.raises(Overloaded, match="that answer"):
        eligible(worker_pool, None)  # 1 is busy: better to come back than to wait for a hung one
    worker_pool.avoid(1, True)
    assert owners(worker_pool, None) == [(2, 0), (2, 1), (3, 4), (3, 5)]
    worker_pool.avoid(1, False)
    worker_pool.avoid(3, False)
    worker_pool.remove(2)  # the end of the outage is reported after the removal
    worker_pool.avoid(2, False)
    worker_pool.avoid(99, False)
    assert worker_pool.avoided == set()
