"""A receipt has the candidates, terms and reasons of the decision, whatever happened since."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_explain import BLOCK, PROMPT, make

from dynamo._fast.hashing import block_hashes, sequence_hashes
from dynamo.config.router import RouterSettings
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.protocols.status import RouteReceipt
from dynamo.router.decision.decision import Attempt
from dynamo.router.modes.factory import make_picker
from dynamo.router.modes.kv import KvPicker
from dynamo.router.modes.picker import MODES, Picker


def decide(
    picker: Picker, routing: Routing | None = None, wanted: bool = False, name: str = "r"
) -> RouteReceipt:
    attempt = Attempt(wanted=True) if wanted else None
    inputs = picker.pick(name, PROMPT, routing=routing, attempt=attempt).inputs
    assert inputs is not None
    return inputs.receipt()


def load(picker: KvPicker, worker_id: int, tokens: int, name: str = "running") -> None:
    routing = Routing(backend_instance_id=worker_id)
    picker.pick(name, array("I", range(tokens)), routing=routing)


def test_the_terms_of_a_decision() -> None:
    picker = make()
    assert picker.pick(None, PROMPT).inputs is None
    load(picker, 1, 8)
    found = decide(picker)
    assert (found.mode, found.index, found.reason) == ("kv", "exact", "the cheapest of 3")
    rows = [(row.worker, row.cost, row.chosen, row.overlap_blocks) for row in found.candidates]
    assert rows == [("3", 3.5, True, 3), ("2", 6.5, False, 0), ("1", 10.5, False, 0)]
    assert [row.terms for row in found.candidates] == [
        {"prompt": 3.5, "queued_prefill": 0.0, "cached": -3.0, "decode": 3.0},
        {"prompt": 3.5, "queued_prefill": 0.0, "cached": 0.0, "decode": 3.0},
        {"prompt": 3.5, "queued_prefill": 2.0, "cached": 0.0, "decode": 5.0},
    ]


def test_it_does_not_change_with_the_load() -> None:
    picker = make()
    inputs = picker.pick("r", PROMPT).inputs
    assert inputs is not None
    before = inputs.receipt()
    load(picker, 3, 400)
    picker.remove_worker(3)
    picker.add_worker(4, RuntimeConfig())
    picker.pick("another", PROMPT)
    assert inputs.receipt() == before and before.candidates[0].worker == "3"


@given(
    loads=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 60)), max_size=6),
    decay=st.sampled_from([0.0, 1.5]),
    weight=st.sampled_from([0.0, 0.7]),
    duplicates=st.sampled_from([0.0, 2.0]),
    taints=st.sampled_from([None, {"a": 0.5}]),
    temperature=st.sampled_from([0.0, 0.8]),
)
def test_the_terms_add_up_to_the_cost_that_was_computed(
    loads: list[tuple[int, int]],
    decay: float,
    weight: float,
    duplicates: float,
    taints: dict[str, float] | None,
    temperature: float,
) -> None:
    picker = make(
        overlap_score_credit_decay=decay,
        decode_active_request_weight=weight,
        duplicate_cost=duplicates,
        temperature=temperature,
    )
    for number, (worker_id, tokens) in enumerate(loads):
        load(picker, worker_id, tokens, f"running {number}")
    routing = None if taints is None else Routing(preferred_taints=taints)
    expected = {
        f"{row.worker_id:x}": row.cost for row in picker.explain(PROMPT, routing).candidates
    }
    decision = picker.pick("r", PROMPT, routing=routing)
    assert decision.inputs is not None
    found = decision.inputs.receipt()
    assert {row.worker: row.cost for row in found.candidates} == expected
    for row in found.candidates:
        assert sum(row.terms.values()) == pytest.approx(row.cost)
    assert found.candidates[0].chosen
    assert found.candidates[0].worker == f"{decision.worker_id:x}"


def _first_session(picker: KvPicker) -> Routing:
    routing = Routing(session_id="s")
    picker.pick("first", PROMPT, routing=routing)
    return routing


def _busy(picker: KvPicker) -> Routing | None:
    for worker_id in (1, 2):
        picker.worker_pool.set_busy(worker_id, True)
    return None


@pytest.mark.parametrize(
    ("prepare", "reason", "excluded"),
    [
        (
            lambda _: Routing(backend_instance_id=2),
            "the request names this worker",
            "pinned to worker 2",
        ),
        (
            _first_session,
            "the session of the request is bound to this worker",
            "bound to another worker",
        ),
        (_busy, "the only eligible one of 3", "busy"),
        (
            lambda _: Routing(allowed_worker_ids=[2]),
            "the only eligible one of 3",
            "not in the request's allow-list",
        ),
    ],
)
def test_a_decision_without_an_alternative(
    prepare: Callable[[KvPicker], Routing | None], reason: str, excluded: str
) -> None:
    picker = make(session_affinity_ttl_s=60.0)
    found = decide(picker, prepare(picker))
    assert found.reason == reason
    assert [row.excluded for row in found.candidates] == ["", excluded, excluded]


def test_other_reasons() -> None:
    found = decide(make(overlap_score_credit=0.0))
    assert found.reason == "one of 3 with the least cost of 3, chosen at random"
    assert decide(make(1)).reason == "the only worker"
    picker = make()
    found = decide(picker, Routing(required_taints=["a"], preferred_taints={"a": 0.3}))
    assert found.candidates[-1].excluded == "lacks the taints: a"
    assert "taints" in found.candidates[0].terms
    again = picker.pick("again", PROMPT, attempt=Attempt(lambda: [1, 2], failed={3}))
    assert again.inputs is not None
    assert again.inputs.receipt().candidates[-1].excluded == "failed with this request before"


def test_a_removed_worker_is_no_candidate() -> None:
    picker = make()
    picker.remove_worker(2)
    found = decide(picker, Routing(allowed_worker_ids=[1, 3]))
    assert {row.worker for row in found.candidates} == {"1", "3"}


def test_how_far_the_index_can_be_trusted() -> None:
    picker = make()
    picker.recovering = {picker.worker_pool.members[2].slots[0]}
    assert decide(picker).index == "recovering"
    found = decide(picker, Routing(allowed_worker_ids=[1, 3]), name="other")
    assert found.index == "exact"
    assert decide(make(kv_events=False)).index == "predicted"
    assert decide(make(overlap_score_weight=0.0)).index == "none"


def test_cached_blocks_of_lower_tiers() -> None:
    picker = make()
    assert picker.index is not None
    hashes = block_hashes(PROMPT, BLOCK)
    slot = picker.index.slot(2, 0, 1)
    picker.index.store(slot, None, sequence_hashes(hashes), hashes)
    found = {row.worker: row for row in decide(picker).candidates}
    assert found["2"].overlap_blocks == pytest.approx(3 * 0.75)
    assert found["2"].terms["cached"] == pytest.approx(-3 * 0.75)


def test_a_large_pool_is_narrowed() -> None:
    picker = make(100, overlap_score_credit_decay=1.0)
    load(picker, 100, 12)
    found = decide(picker)
    assert found.reason == "the cheapest of 100"
    assert len(found.candidates) == 1 and found.omitted == 99
    whole = decide(make(100), wanted=True)
    assert len(whole.candidates) == 64 and whole.omitted == 36
    for receipt in (found, whole):
        for row in receipt.candidates:
            assert sum(row.terms.values()) == pytest.approx(row.cost)
    inflight = make_picker(RouterSettings(mode="round-robin"), BLOCK)
    for worker_id in range(100):
        inflight.add_worker(worker_id, RuntimeConfig())
    assert decide(inflight).omitted == 99
    assert len(decide(inflight, wanted=True, name="s").candidates) == 64


@pytest.mark.parametrize("mode", MODES)
def test_the_modes_that_weigh_nothing(mode: str) -> None:
    picker: Any = make_picker(RouterSettings(mode=mode), BLOCK)
    for worker_id in (1, 2, 3):
        picker.add_worker(worker_id, RuntimeConfig())
    routing = Routing(backend_instance_id=1)
    for name in "ab":
        picker.pick(name, PROMPT, routing=routing)
    found = decide(picker, routing if mode == "direct" else None)
    assert found.mode == mode and found.index == "none" and found.reason
    assert sum(row.terms.get("in_flight", 0) for row in found.candidates) == 2
    assert [row.chosen for row in found.candidates] == [True, False, False]


def test_the_inputs_of_at_most_a_hundred_decisions_a_second_are_kept() -> None:
    picker = make()
    picker._clock = lambda: 7.0
    picker._captures.renew(6.5)
    for number in range(100):
        assert len(decide(picker, name=str(number)).candidates) == 3
    expected = picker.explain(PROMPT).candidates[0]
    found = decide(picker, name="next")
    (chosen,) = found.candidates
    assert (chosen.cost, chosen.chosen, chosen.terms) == (expected.cost, True, {})
    assert found.omitted == 2 and found.reason.startswith("chosen of 3;")
    assert len(decide(picker, name="wanted", wanted=True).candidates) == 3
    assert len(decide(picker, name="another").candidates) == 1
    picker._clock = lambda: 8.0
    assert len(decide(picker, name="a second later").candidates) == 3


_LIST = st.none() | st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(
    st.builds(
        Routing,
        backend_instance_id=st.none() | st.integers(1, 4),
        dp_rank=st.none() | st.integers(0, 2),
        allowed_worker_ids=_LIST,
        required_taints=st.none() | st.lists(st.sampled_from("abc"), max_size=2),
    ),
    st.sets(st.integers(1, 4), max_size=2),
    st.sets(st.integers(1, 4), max_size=2),
)
def test_it_gives_the_reasons_that_are_explained_before(
    routing: Routing, busy: set[int], avoided: set[int]
) -> None:
    picker = make(4)
    for worker_id, (taints, ranks) in enumerate([("ac", 1), ("a", 2), ("", 3), ("bc", 1)], 1):
        picker.add_worker(worker_id, RuntimeConfig(taints=[*taints], data_parallel_size=ranks))
        picker.worker_pool.set_busy(worker_id, worker_id in busy)
        picker.worker_pool.avoid(worker_id, worker_id in avoided)
    explained = picker.explain(PROMPT, routing)
    before = {(f"{row.worker_id:x}", row.dp_rank): row.excluded for row in explained.candidates}
    members = picker.worker_pool.members
    for row in explained.candidates:
        if row.excluded.startswith("lacks the taints: "):
            missing = set(row.excluded.removeprefix("lacks the taints: ").split(", "))
            assert missing.isdisjoint(members[row.worker_id].config.taints)
    if explained.error:
        return
    found = decide(picker, routing)
    assert {(row.worker, row.dp_rank): row.excluded for row in found.candidates} == before
