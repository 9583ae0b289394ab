"""Session affinity: a session's requests stay with one worker, in every mode."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from msgspec.structs import astuple

from dynamo.config.router import RouterSettings
from dynamo.errors import Overloaded
from dynamo.observability.metrics import Registry
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.router.eligibility.eligibility_filter import Sessions, export_eligibility
from dynamo.router.labels import RouterLabels
from dynamo.router.modes.factory import make_index, make_picker
from dynamo.router.modes.picker import Picker

TOKENS = array("I", range(40))
MODES = ["round-robin", "random", "power-of-two", "least-loaded", "device-aware-weighted", "kv"]


def picker(mode: str = "round-robin", **given: object) -> Picker:
    """A picker over workers 1, 2 and 3, where 3 has ranks 0 and 1."""
    chosen = {"session_affinity_ttl_s": 60.0, **given}
    settings = RouterSettings(mode=mode, **chosen)  # type: ignore[arg-type]
    made = make_picker(settings, 4, index=make_index(settings), random=Random(1))
    for worker_id in (1, 2):
        made.add_worker(worker_id, RuntimeConfig(taints=["a"] if worker_id == 1 else []))
    made.add_worker(3, RuntimeConfig(data_parallel_size=2))
    return made


def where(made: Picker, session: str = "s", request: str | None = "", **routing: object) -> int:
    """The worker that a request of the session gets."""
    asked = Routing(session_id=session, **routing)  # type: ignore[arg-type]
    request_id = f"{session}-{len(seen)}" if request == "" else request
    seen.append(request_id)
    return made.pick(request_id, TOKENS, routing=asked).worker_id


seen: list[str | None] = []


@pytest.mark.parametrize("mode", MODES)
def test_a_session_stays(mode: str) -> None:
    made = picker(mode)
    homes = {name: where(made, name) for name in "abcdefgh"}
    assert len(set(homes.values())) > 1
    for name, home in homes.items():
        assert {where(made, name) for _ in range(5)} == {home}


def test_a_session_keeps_its_rank() -> None:
    made = picker()
    asked = Routing(session_id="s", backend_instance_id=3, dp_rank=1)
    made.pick("first", TOKENS, routing=asked)
    session = Routing(session_id="s")
    again = [astuple(made.pick(str(i), TOKENS, routing=session))[:2] for i in range(4)]
    assert set(again) == {(3, 1)}


def test_without_a_session_nothing_is_bound() -> None:
    made = picker()
    assert {made.pick(str(i), TOKENS).worker_id for i in range(4)} == {1, 2, 3}
    assert made.eligibility.sessions is not None and len(made.eligibility.sessions) == 0
    made.pick(None, TOKENS, routing=Routing(session_id="only asked"))
    assert len(made.eligibility.sessions) == 0


def test_without_the_flag_sessions_are_not_bound() -> None:
    made = picker(session_affinity_ttl_s=None)
    assert made.eligibility.sessions is None
    assert {where(made) for _ in range(4)} == {1, 2, 3}


def test_a_session_moves_when_its_worker_is_removed() -> None:
    made = picker()
    home = where(made)
    made.remove_worker(home)
    moved = where(made)
    assert moved != home
    assert where(made) == moved
    assert made.eligibility.sessions is not None and made.eligibility.sessions.moved.value == 1


def test_the_constraints_of_a_request_take_precedence() -> None:
    made = picker()
    assert where(made, backend_instance_id=2) == 2
    assert where(made) == 2
    assert where(made, allowed_worker_ids=[1]) == 1
    assert where(made, backend_instance_id=3) == 3
    assert where(made, required_taints=["a"]) == 1


def test_hard_refuses_and_soft_moves() -> None:
    hard, soft = picker(), picker(session_affinity_mode="soft")
    for made in (hard, soft):
        home = where(made)
        made.worker_pool.set_busy(home, True)
    with pytest.raises(Overloaded):
        where(hard)
    moved = where(soft)
    assert moved not in soft.worker_pool.busy
    assert where(soft) == moved


def test_idle_sessions_are_forgotten() -> None:
    sessions = Sessions(10.0, 100)
    sessions.bind("a", 1, 0, 0.0)
    sessions.bind("b", 1, 0, 5.0)
    sessions.bind("a", 1, 0, 8.0)
    sessions.bind("c", 1, 0, 15.0)
    assert (len(sessions), sessions.kept.value) == (2, 1)
    for name in "abc":
        sessions.bind(name, 1, 0, 15.0)
    assert sessions.kept.value == 3, "a and c were bound, b was not"


def test_the_table_is_bounded() -> None:
    sessions = Sessions(10.0, 3)
    for number in range(10):
        sessions.bind(str(number), 1, 0, 0.0)
    assert (len(sessions), sessions.dropped.value) == (3, 7)


def test_sessions_are_counted() -> None:
    registry, made = Registry(), picker()
    export_eligibility(registry, RouterLabels("ns", "backend", "m", "7"), made.eligibility)
    where(made)
    where(made)
    page = registry.render().decode()
    here = 'dynamo_component="backend",dynamo_namespace="ns"'
    assert f'router_sessions{{{here},worker_id="7"}} 1' in page
    assert f'router_session_requests_total{{{here},outcome="kept",worker_id="7"}} 1' in page


def test_a_session_leaves_a_worker_that_does_not_answer() -> None:
    made = picker()
    home = where(made)
    made.worker_pool.avoid(home, True)
    moved = where(made)
    assert moved != home
    made.worker_pool.avoid(home, False)
    assert where(made) == moved
