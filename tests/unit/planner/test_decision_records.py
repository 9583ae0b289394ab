"""Records of decisions: their text, their JSON, and the bounded file that keeps them."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.planner.capacity.observation import Observation, Pool, Traffic
from dynamo.planner.live.decisions import DecisionLog, DecisionRecord, PoolChange
from dynamo.planner.policies.base import PoolDecision, ScalingDecision

SEEN = Observation(
    now_s=0.0,
    interval_s=30.0,
    decode=Pool(ready=1),
    prefill=Pool(ready=2),
    traffic=Traffic(duration_s=30.0),
)
KEPT = PoolDecision(
    pool="prefill", wanted=2, rule="prefill queue 0.3 is between 0.2 and 0.5", inputs={}
)
ADDED = PoolDecision(
    pool="decode", wanted=2, rule="KV load 0.95 > 0.9", inputs={"kv_load": 0.95, "x": math.nan}
)


def record(*pools: PoolDecision) -> DecisionRecord:
    decision = ScalingDecision(pools=pools)
    return DecisionRecord.of(decision, SEEN, at_s=1000.0, model="llama", mode="load")


def numbered(number: int) -> DecisionRecord:
    return msgspec.structs.replace(record(KEPT), at_s=float(number))


def test_the_text_has_each_pool_with_its_rule_and_figures() -> None:
    done = record(ADDED, KEPT).finished({"decode": 2, "prefill": 2}, 2.14, {})
    assert done.text() == (
        "model llama, policy load: decode 1 -> 2: KV load 0.95 > 0.9 [kv_load=0.95]; "
        "prefill 2: prefill queue 0.3 is between 0.2 and 0.5; done in 2.1 s"
    )
    assert record(KEPT).text().endswith("; unchanged")
    assert record().text() == "model llama, policy load: no pool to change; unchanged"


def test_a_failure_and_a_dry_decision_say_so() -> None:
    failed = record(ADDED).finished({"decode": 1}, 30.0, {"decode": "no free GPUs\n" + "x" * 999})
    assert failed.outcome == "failed"
    assert "(failed: no free GPUs xxx" in failed.text()
    assert len(failed.text()) < 500 and "\n" not in failed.text()
    assert record(ADDED).observed().text().endswith("; no-operation")
    assert record(KEPT).observed().outcome == "unchanged"
    assert "(now 3)" in record(ADDED).finished({"decode": 3}, 1.0, {}).text()


@settings(deadline=None)
@given(
    st.builds(
        DecisionRecord,
        at_s=st.floats(0, 1e10),
        model=st.text(max_size=5),
        mode=st.text(max_size=5),
        duration_s=st.floats(0, 1e5),
        outcome=st.sampled_from(["decided", "done", "failed"]),
        pools=st.lists(
            st.builds(
                PoolChange,
                pool=st.text(max_size=5),
                before=st.integers(0, 99),
                wanted=st.integers(0, 99),
                after=st.none() | st.integers(0, 99),
                rule=st.text(max_size=9),
                inputs=st.dictionaries(st.text(max_size=3), st.floats(-1e9, 1e9), max_size=3),
                error=st.text(max_size=5),
            ),
            max_size=2,
        ).map(tuple),
    )
)
def test_json_keeps_the_record(made: DecisionRecord) -> None:
    line = msgspec.json.encode(made)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=DecisionRecord) == made


def test_the_log_keeps_the_newest_and_its_file_stays_bounded(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "decisions.jsonl", limit=5)
    assert log.read() == []
    for number in range(23):
        log.append(numbered(number))
        assert len(log.path.read_bytes().splitlines()) < 10
    assert [kept.at_s for kept in log.read()] == [18.0, 19.0, 20.0, 21.0, 22.0]
    assert [path.name for path in tmp_path.iterdir()] == ["decisions.jsonl"]


def test_a_line_that_a_crash_cut_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    DecisionLog(path, limit=5).append(numbered(1))
    path.write_bytes(path.read_bytes() + b'{"at_s": 2, "model": "ll')
    log = DecisionLog(path, limit=5)
    assert [kept.at_s for kept in log.read()] == [1.0]
    log.append(numbered(3))
    assert [kept.at_s for kept in log.read()] == [1.0, 3.0]
