"""How models share GPUs: who starts, who gives up, and that none starves. Virtual rounds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.operations.steps.limits import ActionLimits
from dynamo.planner.capacity.observation import Pool
from dynamo.planner.live.gpu_sharing import cold_decision
from dynamo.planner.live.local_connector import capacity_of
from dynamo.planner.sharing import (
    GpuRoom,
    ServiceChange,
    SharedModel,
    SharedService,
    Sharing,
    SharingLimits,
    share,
)
from dynamo.serve.state.document import Document
from dynamo.serve.state.process_table import ledger_of

LIMITS = SharingLimits(gpus=1, idle_timeout_s=300, yield_idle_s=2, residency_s=30, patience_s=120)


def model(
    name: str,
    ready: int = 0,
    *,
    idle_s: float | None = 0.0,
    waiting: int = 0,
    oldest_s: float = 0.0,
    priority: int = 0,
    serving_s: float = 100.0,
    gpus: float = 1,
    minimum: int = 0,
    starting: int = 0,
    draining: int = 0,
    wanted: int | None = None,
) -> SharedModel:
    service = SharedService(
        name=f"{name}-decode",
        gpus_per_worker=gpus,
        ready=ready,
        starting=starting,
        draining=draining,
        minimum=minimum,
        wanted=wanted,
    )
    return SharedModel(
        name=name,
        services=(service,),
        priority=priority,
        waiting=waiting,
        oldest_s=oldest_s,
        idle_s=idle_s,
        serving_s=serving_s,
    )


def changes(found: Sharing) -> dict[str, int]:
    return {one.model: one.workers for one in found.changes}


def shared(*models: SharedModel, gpus: float = 1, room: GpuRoom | None = None) -> dict[str, int]:
    return changes(share(models, replace(LIMITS, gpus=gpus, room=room)))


def test_nothing_changes_without_a_reason() -> None:
    assert shared(model("a", 1), model("b")) == {}
    assert shared(model("a", 1, idle_s=None)) == {}


def test_a_load_that_nothing_waits_for_gives_way_to_requests() -> None:
    """Of its group, or of any model that needs its GPU; a load of an operator does not."""
    begun = replace(model("a", starting=1, idle_s=0.1), groups=("g",))
    waits = model("b", waiting=1, oldest_s=0.1, idle_s=0.0)
    in_group = replace(waits, groups=("g",))
    abandoned = replace(begun, abandoned=True)
    assert shared(begun, in_group, gpus=2) == {} == shared(begun, waits)
    assert shared(abandoned, in_group, gpus=2) == {"a": 0} == shared(abandoned, waits)
    assert shared(abandoned, waits, gpus=2) == {"b": 1}
    # First, before a model that is idle; not for the growth of a busy model.
    idle = model("c", 1, idle_s=9.0)
    assert shared(abandoned, idle, waits, gpus=2) == {"a": 0}
    assert shared(replace(abandoned, idle_s=9.0), model("d", 1, wanted=2), gpus=2) == {}
    assert shared(abandoned, gpus=1) == {}


def test_a_model_that_was_loaded_is_idle_when_its_worker_serves_and_not_before() -> None:
    loaded = replace(model("a", 1, idle_s=9000), newest_s=1.0)
    assert shared(loaded) == {}
    assert shared(replace(loaded, newest_s=299.0)) == {}
    assert shared(replace(loaded, newest_s=300.0)) == {"a": 0}


def test_an_idle_model_drops_to_its_minimum() -> None:
    assert shared(model("a", 1, idle_s=299)) == {}
    assert shared(model("a", 1, idle_s=300)) == {"a": 0}
    assert shared(model("a", 3, idle_s=300, minimum=1), gpus=3) == {"a": 1}
    assert shared(model("a", 1, idle_s=300, starting=1), gpus=2) == {}


def test_waiting_requests_start_a_worker_on_a_free_gpu() -> None:
    found = share([model("a", waiting=3)], LIMITS)
    assert list(found.changes) == [
        ServiceChange(model="a", service="a-decode", workers=1, rule="3 requests wait for a worker")
    ]
    assert shared(model("a", waiting=1, starting=1)) == {}
    assert shared(model("a", waiting=1, draining=1)) == {}


def test_an_idle_model_gives_up_its_gpu_to_waiting_requests() -> None:
    assert shared(model("a", 1, idle_s=2), model("b", waiting=1)) == {"a": 0}
    assert shared(model("a", 1, idle_s=2, priority=9), model("b", waiting=1)) == {"a": 0}
    assert shared(model("a", 1, idle_s=2, minimum=1), model("b", waiting=1)) == {}
    longest = shared(
        model("a", 1, idle_s=5), model("b", 1, idle_s=9), model("c", waiting=1), gpus=2
    )
    assert longest == {"b": 0}


def test_gpus_that_are_about_to_be_free_are_not_taken_twice() -> None:
    busy = model("a", 1)
    assert shared(model("x", draining=1), busy, model("b", waiting=1), gpus=2) == {}
    two = (model("b", waiting=1), model("c", waiting=1))
    assert shared(model("x", draining=1), model("a", 1, idle_s=9), *two, gpus=2) == {"a": 0}


def test_a_busy_model_gives_up_its_second_worker_first() -> None:
    assert shared(model("a", 2, serving_s=1), model("b", waiting=1), gpus=2) == {"a": 1}
    higher = model("a", 2, priority=1)
    assert shared(higher, model("b", waiting=1), gpus=2) == {}
    assert shared(higher, model("b", waiting=1, oldest_s=120), gpus=2) == {"a": 1}


def test_a_busy_model_gives_up_its_last_worker_after_its_turn() -> None:
    assert shared(model("a", 1, serving_s=29), model("b", waiting=1)) == {}
    assert shared(model("a", 1, serving_s=30), model("b", waiting=1)) == {"a": 0}
    assert shared(model("a", 1, serving_s=30, minimum=1), model("b", waiting=1)) == {}
    higher = model("a", 1, serving_s=30, priority=1)
    assert shared(higher, model("b", waiting=1, oldest_s=119)) == {}
    assert shared(higher, model("b", waiting=1, oldest_s=120)) == {"a": 0}


def test_the_order_of_claims() -> None:
    old, high = model("old", waiting=1, oldest_s=9), model("high", waiting=1, priority=1)
    late = model("late", waiting=1, oldest_s=121, priority=-1)
    assert shared(old, model("young", waiting=1)) == {"old": 1}
    assert shared(old, high) == {"high": 1}
    assert shared(old, high, late) == {"late": 1}


def test_a_large_worker_takes_what_it_needs_or_nothing() -> None:
    large = model("large", waiting=1, gpus=2)
    idle, busy = model("a", 1, idle_s=9), model("b", 1, serving_s=1)
    assert shared(idle, busy, large, gpus=2) == {}
    assert shared(idle, model("b", 1), large, gpus=2) == {"a": 0, "b": 0}
    late = model("large", waiting=1, gpus=2, oldest_s=200)
    assert shared(busy, late, model("c", waiting=1), gpus=2) == {}  # the free one is reserved
    assert shared(busy, large, model("c", waiting=1), gpus=2) == {"c": 1}


def test_a_policy_gets_the_gpus_of_lower_priorities_and_idle_models() -> None:
    wants = model("a", 1, wanted=2, priority=1)
    assert shared(wants, gpus=2) == {"a": 2}
    assert shared(wants, model("b", 2), gpus=3) == {"b": 1}
    assert shared(wants, model("b", 2, minimum=2), gpus=3) == {}
    assert shared(wants, model("b", 2, priority=1), gpus=3) == {}
    assert shared(wants, model("b", 1, idle_s=9, priority=1), gpus=2) == {"b": 0}
    assert shared(wants, model("b", 1), gpus=2) == {}
    assert shared(model("a", 0, wanted=2), gpus=2) == {}
    assert shared(model("a", 1, wanted=2, idle_s=9), gpus=2) == {}


def test_the_limits_of_the_policies() -> None:
    found = share(
        [model("a", 1, priority=1), model("b", 2), model("c")],
        SharingLimits(gpus=4, idle_timeout_s=300),
    )
    assert found.limits == {"a": 3, "b": 3, "c": 1}
    found = share(
        [model("a", 1), model("b", waiting=1, gpus=2)], SharingLimits(gpus=3, idle_timeout_s=9)
    )
    assert found.limits["a"] == 1


def disaggregated(ready: int, prefill: int, **more: object) -> SharedModel:
    services = (
        SharedService(name="d", gpus_per_worker=1, ready=ready),
        SharedService(name="p", gpus_per_worker=1, ready=prefill),
    )
    return SharedModel(name="m", services=services, **more)  # type: ignore[arg-type]


def test_a_disaggregated_model_starts_and_stops_both_services() -> None:
    limits = SharingLimits(gpus=2, idle_timeout_s=9)

    def found(one: SharedModel, *others: SharedModel) -> dict[str, int]:
        return {x.service: x.workers for x in share([one, *others], limits).changes}

    assert found(disaggregated(0, 0, waiting=1)) == {"d": 1}
    assert found(disaggregated(1, 0, idle_s=0.0)) == {"p": 1}
    assert found(disaggregated(1, 1, idle_s=9.0)) == {"d": 0, "p": 0}
    taken = found(disaggregated(1, 1, idle_s=0.0, serving_s=99), model("b", waiting=1))
    assert taken["d"] == 0 and taken["p"] == 0


def test_a_model_whose_start_failed_starts_nothing_for_a_while() -> None:
    limits = SharingLimits(gpus=3, idle_timeout_s=9)
    wants = replace(model("a", 1, wanted=2), pauses=True)
    cold = replace(model("b", waiting=1, oldest_s=500), pauses=True)
    assert not share([wants, cold], limits).changes
    assert not share([replace(disaggregated(1, 0, idle_s=0.0), pauses=True)], limits).changes


# -- the GPUs one by one


def deployment(*held: tuple[str, float, str], gpus: int = 2, **more: Any) -> Document:
    """Return a statefile in which each (worker, GPUs, their ids) is held."""
    components = {
        name: {
            "cmd": "",
            "service": name,
            "resources": {"allocated_gpus": ids.split(",")},
            "gpus_per_worker": each,
            "processes": [{"pid": 1, "start_ticks": 1}],
            **more.get(name, {}),
        }
        for name, each, ids in held
    }
    ids = [str(number) for number in range(gpus)]
    environment = {"SYSTEM_RESOURCES": {"gpu_info": ids}}
    written = {"namespace": "ns", "components": components, "environment": environment}
    return Document.of(written)


def placed(document: Document) -> GpuRoom:
    return GpuRoom(ledger_of(document))


def worker(name: str, gpus: float, **more: Any) -> SharedModel:
    """Return a model whose worker has its name and holds GPUs."""
    found = model(name, gpus=gpus, **more)
    serving = (name,) if found.decode.ready else ()
    return replace(found, services=(replace(found.decode, assigned=gpus, serving=serving),))


def test_free_halves_are_not_a_whole_gpu() -> None:
    """One idle model moves out; the other, whose GPU would not be enough alone, stays."""
    room = placed(deployment(("a", 0.5, "0"), ("c", 0.4, "1")))
    waits = worker("b", 1, waiting=1)
    busy = {"ready": 1, "serving_s": 1.0}
    assert shared(worker("a", 0.5, **busy), waits, gpus=2, room=room) == {}
    both = (worker("a", 0.5, ready=1, idle_s=9.0), worker("c", 0.4, **busy))
    assert shared(*both, waits, gpus=2, room=room) == {"a": 0}
    both = (worker("a", 0.5, **busy), worker("c", 0.4, ready=1, idle_s=9.0))
    assert shared(*both, waits, gpus=2, room=room) == {"c": 0}
    leaving = replace(both[0].decode, ready=0, draining=1, serving=(), leaving=("a",))
    both = (replace(both[0], services=(leaving,)), both[1])
    assert shared(*both, waits, gpus=2, room=room) == {}  # it is enough to wait


def test_shares_of_a_gpu_are_not_mixed() -> None:
    """0.6 of a GPU is free, split in shares of 0.4: no worker of 0.5 fits beside it."""
    room = placed(deployment(("c", 0.4, "0"), gpus=1))
    waits = worker("a", 0.5, waiting=1)
    assert shared(worker("c", 0.4, ready=1, serving_s=1.0), waits, room=room) == {}
    assert shared(worker("c", 0.4, ready=1, idle_s=9.0), waits, room=room) == {"c": 0}
    assert shared(worker("c", 0.4, ready=1), worker("d", 0.4, waiting=1), room=room) == {"d": 1}


def test_what_is_not_needed_stays() -> None:
    room = placed(deployment(("a", 1, "0"), ("c", 2, "1,2"), gpus=3))
    idle = worker("a", 1, ready=1, idle_s=99.0), worker("c", 2, ready=1, idle_s=9.0)
    assert shared(*idle, worker("b", 2, waiting=1), gpus=3, room=room) == {"c": 0}


@pytest.mark.parametrize(("status", "expected"), [("stopped", {"a": 0}), ("given up", {"b": 1})])
def test_the_gpu_of_a_stopped_worker_is_its_own_that_of_one_given_up_is_free(
    status: str, expected: dict[str, int]
) -> None:
    stopped = {"processes": [], "watcher": {"status": status}}
    document = deployment(("a", 1, "0"), ("x", 1, "1"), x=stopped)
    room = placed(document)
    models = (worker("a", 1, ready=1, idle_s=9.0), worker("x", 1), worker("b", 1, waiting=1))
    assert shared(*models, gpus=2, room=room) == expected
    found = share(models, replace(LIMITS, gpus=2, room=room))
    assert found.limits["a"] == 1  # the policy gets no GPU that is not free


def test_the_capacity_of_a_statefile() -> None:
    document = deployment(("a", 0.5, "0"), ("b", 1, "1"))
    found = capacity_of(document, ActionLimits())
    assert found.gpus == 0.5 and found.room is not None
    assert [found.room.count(size, (), ()) for size in (1, 0.5)] == [0, 1]
    assert found.room.count(1, (), ["a", "b"]) == 2
    assert found.room.count(1, [0.5, 1], ["a", "b"]) == 0
    assert capacity_of(deployment(gpus=0), ActionLimits()).room is None


# -- no starvation, in virtual time


@dataclass
class VirtualModel:
    """A model whose clients never stop: what does not fit waits."""

    name: str
    gpus: float
    priority: int
    busy: bool
    ready: int = 0
    starting: list[int] = field(default_factory=list)
    draining: list[int] = field(default_factory=list)
    waits_since: int | None = None
    serves_since: int = 0
    longest_wait: int = 0

    def held(self) -> float:
        return (self.ready + len(self.starting) + len(self.draining)) * self.gpus

    def step(self, now: int) -> None:
        started = sum(due <= now for due in self.starting)
        self.starting = [due for due in self.starting if due > now]
        self.draining = [due for due in self.draining if due > now]
        if started and not self.ready:
            self.serves_since = now
        self.ready += started
        if self.busy and not self.ready:
            self.waits_since = now if self.waits_since is None else self.waits_since
            self.longest_wait = max(self.longest_wait, now - self.waits_since)
        else:
            self.waits_since = None

    def seen(self, now: int) -> SharedModel:
        waits = self.waits_since is not None
        return SharedModel(
            name=self.name,
            services=(
                SharedService(
                    name=self.name,
                    gpus_per_worker=self.gpus,
                    ready=self.ready,
                    starting=len(self.starting),
                    draining=len(self.draining),
                    wanted=self.ready + 1 if self.busy and self.ready else None,
                ),
            ),
            priority=self.priority,
            waiting=5 if waits else 0,
            oldest_s=float(now - self.waits_since) if self.waits_since is not None else 0.0,
            idle_s=0.0 if self.busy else 60.0,
            serving_s=float(now - self.serves_since) if self.ready else 0.0,
        )

    def change(self, workers: int, now: int, start_s: int, drain_s: int) -> None:
        for _ in range(workers - self.ready - len(self.starting)):
            self.starting.append(now + start_s)
        for _ in range(self.ready + len(self.starting) - workers):
            assert self.ready, "only ready workers are removed"
            self.ready -= 1
            self.draining.append(now + drain_s)


virtual_models = st.lists(
    st.builds(
        VirtualModel,
        name=st.just(""),
        gpus=st.sampled_from([0.5, 1.0, 2.0]),
        priority=st.integers(-1, 1),
        busy=st.booleans(),
    ),
    min_size=2,
    max_size=5,
)


@settings(max_examples=25, deadline=None)
@given(
    models=virtual_models,
    gpus=st.integers(2, 4),
    start_s=st.integers(1, 15),
    drain_s=st.integers(1, 10),
    flips=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 4)), max_size=8),
)
def test_no_model_starves_and_the_budget_holds(
    models: list[VirtualModel],
    gpus: int,
    start_s: int,
    drain_s: int,
    flips: list[tuple[int, int]],
) -> None:
    residency, patience = 20, 40
    limits = SharingLimits(
        gpus=gpus, idle_timeout_s=30, yield_idle_s=2, residency_s=residency, patience_s=patience
    )
    for number, one in enumerate(models):
        one.name = str(number)
    by_name = {one.name: one for one in models}
    for now in range(700):
        for at, which in flips:
            if at == now and which < len(models):
                models[which].busy = not models[which].busy
        for one in models:
            one.step(now)
        found = share([one.seen(now) for one in models], limits)
        for change in found.changes:
            by_name[change.model].change(change.workers, now, start_s, drain_s)
        assert sum(one.held() for one in models) <= gpus
    turn = residency + start_s + drain_s + 3
    assert max(one.longest_wait for one in models) <= patience + len(models) * turn


@pytest.mark.parametrize("count", [2, 5])
def test_busy_models_of_one_gpu_take_turns(count: int) -> None:
    models = [VirtualModel(str(number), 1.0, number % 3, True) for number in range(count)]
    limits = SharingLimits(
        gpus=1, idle_timeout_s=300, yield_idle_s=2, residency_s=20, patience_s=40
    )
    served = dict.fromkeys((one.name for one in models), 0)
    for now in range(1500):
        for one in models:
            one.step(now)
            served[one.name] += one.ready
        for change in share([one.seen(now) for one in models], limits).changes:
            models[int(change.model)].change(change.workers, now, 5, 2)
        assert sum(one.held() for one in models) <= 1
    assert min(served.values()) >= 1500 / count / 3


def test_a_cold_model_is_explained_by_its_first_request() -> None:
    """Its policy is not asked: without a worker it would only see its minimum."""
    pools = {"decode": Pool(ready=0, minimum=0), "prefill": Pool(ready=0, minimum=0)}
    made = cold_decision(pools, waits_for="")
    assert [(pool.pool, pool.wanted) for pool in made.pools] == [("decode", 0), ("prefill", 0)]
    assert "the first request starts one" in made.pools[0].rule


def test_an_idle_timeout_of_its_own() -> None:
    soon = replace(model("a", 1, idle_s=60), idle_timeout_s=60.0)
    assert shared(soon, model("b", 1, idle_s=60), gpus=2) == {"a": 0}
    assert shared(replace(soon, idle_timeout_s=61.0)) == {}


def grouped(name: str, *args: Any, **more: Any) -> SharedModel:
    return replace(model(name, *args, gpus=0, **more), groups=("g",))


def test_models_of_a_group_are_not_awake_together() -> None:
    waits = grouped("b", waiting=1)
    assert shared(waits, model("free", 1, gpus=0)) == {"b": 1}
    assert shared(grouped("a", 1, idle_s=2), waits) == {"a": 0}
    assert shared(grouped("a", 1, serving_s=29), waits) == {}
    assert shared(grouped("a", 1, serving_s=30), waits) == {"a": 0}
    assert shared(grouped("a", draining=1), waits) == {}
    assert shared(grouped("a", starting=1), waits) == {}
    assert shared(grouped("a", 1, idle_s=9, minimum=1), waits) == {}
    assert shared(waits, grouped("c", waiting=1, oldest_s=3)) == {"c": 1}
    # All of them, or none.
    busy, idle = grouped("a", 1, serving_s=1), grouped("c", 1, idle_s=9)
    assert shared(busy, idle, waits) == {}


def test_a_load_is_not_wasted() -> None:
    """The turn of a model lasts as long as its load, and comes after as long a wait."""

    def loaded(one: SharedModel, load_s: float) -> SharedModel:
        return replace(one, load_s=load_s)

    waits = loaded(model("b", waiting=1, oldest_s=10), 10)
    busy = model("a", 1, serving_s=8)
    assert shared(loaded(busy, 8), waits) == {"a": 0}
    assert shared(loaded(busy, 9), waits) == {}
    assert shared(loaded(busy, 8), replace(waits, oldest_s=9)) == {}
    assert shared(busy, waits) == {}  # its load time is not known
    assert shared(loaded(replace(busy, waiting=1), 8), waits) == {}  # it answers these first
    assert shared(loaded(model("a", 1, idle_s=0.8), 8), waits) == {"a": 0}
    assert shared(loaded(model("a", 1, idle_s=0.7, serving_s=1), 8), waits) == {}
