"""The table of candidates agrees with the pick, with the reason of each exclusion."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo._fast.hashing import block_hashes, sequence_hashes
from dynamo.cli.route import table
from dynamo.config.router import RouterSettings
from dynamo.errors import InvalidArgument
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.router.modes.factory import make_index, make_picker
from dynamo.router.modes.kv import KvPicker

BLOCK = 4
PROMPT = array("I", range(100, 114))


def make(workers: int = 3, **given: object) -> KvPicker:
    """A picker over workers 1..workers; the last has the prompt cached."""
    settings = RouterSettings(mode="kv", **given)  # type: ignore[arg-type]
    picker = make_picker(settings, BLOCK, index=make_index(settings), random=Random(1))
    assert isinstance(picker, KvPicker)
    for worker_id in range(1, workers + 1):
        picker.add_worker(worker_id, RuntimeConfig(taints=["a"] if worker_id < 3 else []))
    if picker.index is not None:
        hashes = block_hashes(PROMPT, BLOCK)
        slot = picker.worker_pool.members[workers].slots[0]
        picker.index.store(slot, None, sequence_hashes(hashes), hashes)
    return picker


def test_the_table_of_a_decision() -> None:
    picker = make()
    picker.pick("running", array("I", range(8)), routing=Routing(backend_instance_id=1))
    found = picker.explain(PROMPT)
    assert [(row.worker_id, row.cost, row.chosen) for row in found.candidates] == [
        (3, 3.5, True),
        (2, 6.5, False),
        (1, 10.5, False),
    ]
    best, _, loaded = found.candidates
    assert (best.overlap_blocks, best.credit_blocks, best.prefill_blocks) == (3, 3.0, 0.5)
    assert (loaded.active_prefill_tokens, loaded.active_decode_blocks) == (8, 2)
    assert (loaded.active_requests, loaded.prefill_blocks, loaded.decode_blocks) == (1, 5.5, 5)
    assert len(picker.active) == 1
    assert "queue" not in table(found)
    found = picker.explain(PROMPT, queued=["one", "another"])
    assert found.queued_requests == 2 and "2 requests are queued" in table(found)


def test_workers_have_their_names() -> None:
    text = table(make().explain(PROMPT), {"3": "app_Worker_1"})
    rows = [line.removeprefix("->").split()[0] for line in text.splitlines()[2:]]
    assert rows[0] == "app_Worker_1" and sorted(rows[1:]) == ["1", "2"]  # and those without, ids
    assert text.splitlines()[2].endswith("  chosen")


def test_the_price_of_copies_is_shown_where_it_is_set() -> None:
    found = make(duplicate_cost=2.0).explain(PROMPT)
    assert found.duplicate_cost == 2.0
    assert "another worker has cached counts as 2 more" in table(found)
    assert "another worker" not in table(make().explain(PROMPT))
    assert [row.cost for row in found.candidates] == [
        pytest.approx(row.prefill_blocks + row.decode_blocks) for row in found.candidates
    ]


def test_reasons_of_exclusion() -> None:
    picker = make(5)
    picker.add_worker(5, RuntimeConfig(data_parallel_size=2, taints=["a"]))
    picker.worker_pool.set_busy(1, True)
    asked = Routing(allowed_worker_ids=[1, 2, 3, 5], required_taints=["a"], dp_rank=1)
    found = picker.explain(PROMPT, asked)
    reasons = {(row.worker_id, row.dp_rank): row.excluded for row in found.candidates}
    assert reasons == {
        (1, 0): "busy",
        (2, 0): "",
        (3, 0): "lacks the taints: a",
        (4, 0): "not in the request's allow-list",
        (5, 0): "dp_rank 1 was asked for",
        (5, 1): "",
    }
    text = table(found)
    assert text.count("chosen") == 1 and "lacks the taints: a" in text


def test_an_avoided_worker_is_excluded_while_others_remain() -> None:
    picker = make(2)
    picker.worker_pool.avoid(2, True)
    found = picker.explain(PROMPT)
    assert [(row.worker_id, row.excluded) for row in found.candidates] == [
        (1, ""),
        (2, "does not answer"),
    ]
    picker.worker_pool.avoid(1, True)
    assert all(row.cost is not None for row in picker.explain(PROMPT).candidates)


def test_a_pin_excludes_the_others() -> None:
    found = make().explain(PROMPT, Routing(backend_instance_id=2))
    assert [row.excluded for row in found.candidates] == ["", "pinned to worker 2"] * 1 + [
        "pinned to worker 2"
    ]


def test_sessions_show() -> None:
    picker = make(session_affinity_ttl_s=60.0)
    picker.pick("a", PROMPT, routing=Routing(session_id="s", backend_instance_id=2))
    found = picker.explain(PROMPT, Routing(session_id="s"))
    assert found.candidates[0].worker_id == 2
    assert {row.excluded for row in found.candidates} == {"", "bound to another worker"}


def test_no_candidate_at_all() -> None:
    picker = make()
    for worker_id in (1, 2, 3):
        picker.worker_pool.set_busy(worker_id, True)
    found = picker.explain(PROMPT)
    assert found.error == "all eligible workers are overloaded"
    assert [row.excluded for row in found.candidates] == ["busy"] * 3
    assert "no worker: all eligible" in table(found)
    with pytest.raises(InvalidArgument):
        picker.explain(PROMPT, override={"router_temperature": -1})


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 60)), max_size=8),
    st.floats(0, 4),
    st.floats(0, 3),
    st.floats(0, 2),
)
def test_the_parts_add_up_to_the_cost(
    running: list[tuple[int, int]], scale: float, credit: float, decay: float
) -> None:
    picker = make(
        prefill_load_scale=scale, overlap_score_credit=credit, overlap_score_credit_decay=decay
    )
    for number, (worker_id, length) in enumerate(running):
        tokens = array("I", range(number * 100, number * 100 + length))
        picker.pick(str(number), tokens, routing=Routing(backend_instance_id=worker_id))
    for row in picker.explain(PROMPT).candidates:
        assert row.cost == pytest.approx(scale * row.prefill_blocks + row.decode_blocks)
    decision = picker.pick(None, PROMPT)
    cheapest = picker.explain(PROMPT).candidates[0].cost
    costs = {row.worker_id: row.cost for row in picker.explain(PROMPT).candidates}
    assert costs[decision.worker_id] == cheapest
