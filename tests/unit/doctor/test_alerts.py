"""When alerts begin and end; their names and limits are those of deploy/grafana/alerts.yml."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import yaml

from dynamo.doctor.alert_watch import parse_counts
from dynamo.doctor.alerts import (
    CLEAR_S,
    FAILING_SHARE,
    RULES,
    AlertBook,
    AlertChange,
    AlertConditions,
    AlertFacts,
    AlertKey,
    Condition,
    FrontendCounts,
)
from dynamo.doctor.deployment import MOST_ERROR
from dynamo.doctor.facts import FileSystemFacts
from dynamo.protocols.status import (
    BoxStatus,
    ModelFigures,
    ModelStatus,
    PlannerSummary,
    WorkerStatus,
)

ROOT = Path(__file__).resolve().parents[3]
KEY = AlertKey("DynamoFrontendDown", "ns_Frontend")
TRUE = {KEY: Condition("it does not answer")}
DOWN_S = 60.0


def status(
    *models: ModelStatus, workers: Iterable[WorkerStatus] = (), planner: str = ""
) -> BoxStatus:
    return BoxStatus(
        namespace="ns",
        state="running",
        at_s=0.0,
        frontend="ready",
        models=models,
        workers=tuple(workers),
        planner=PlannerSummary(state=planner) if planner else None,
    )


def names(facts: AlertFacts, conditions: AlertConditions | None = None) -> set[tuple[str, str]]:
    found = (conditions or AlertConditions()).find(facts)
    return {(key.alert.removeprefix("Dynamo"), key.subject) for key in found}


def test_rules_are_those_of_prometheus() -> None:
    text = (ROOT / "deploy/grafana/alerts.yml").read_text()
    exported = {one["alert"]: one for one in yaml.safe_load(text)["groups"][0]["rules"]}
    here = {one.name: one.for_s for one in RULES}
    assert set(here) - set(exported) == {"DynamoDiskFull"}  # no process exports it
    # The page shows these, and events that a worker died; Prometheus sees neither.
    others = {"DynamoKvCacheFull", "DynamoWorkerDown", "DynamoEventLoopBlocked"}
    assert set(exported) - set(here) == others
    for name in set(here) & set(exported):
        assert exported[name]["for"] == f"{here[name] / 60:g}m", name
    limits = {"DynamoRequestsFail": FAILING_SHARE, "DynamoEstimatesOff": MOST_ERROR}
    for name, limit in limits.items():
        assert exported[name]["expr"].strip().endswith(f"> {limit}")
    documented = re.findall(r"^\| `(Dynamo\w+)` \|", (ROOT / "docs/operate.md").read_text(), re.M)
    assert documented == list(here)


def test_an_alert_begins_once_and_ends_once() -> None:
    book = AlertBook()
    changes: list[AlertChange] = []
    for now in range(0, 300, 15):
        changes += book.update(TRUE if now < 150 else {}, float(now))
    assert [(one.key, one.ends, one.text) for one in changes] == [
        (KEY, False, "it does not answer"),
        (KEY, True, "after 2.2 min"),
    ]
    assert not list(book.end("stopped"))


def test_what_comes_and_goes_is_one_alert_or_none() -> None:
    book = AlertBook()
    for now in range(0, 600, 15):  # true for less than a minute each time
        assert not list(book.update(TRUE if now % 60 else {}, float(now)))
    begun = [one for now in (0.0, DOWN_S) for one in book.update(TRUE, 1000 + now)]
    assert len(begun) == 1
    for now in range(0, 600, 15):  # false for less than the time after which it ends
        assert not list(book.update({} if now % CLEAR_S else TRUE, 1060.0 + now))
    (end,) = book.end("the deployment stops")
    assert end.ends and end.text == "the deployment stops"


def test_one_of_a_killed_process_goes_on_or_ends() -> None:
    began = {KEY: (600.0, "m")}
    assert not list(AlertBook(began, 5.0).update(TRUE, 1000.0))
    book = AlertBook(began, 5.0)
    assert not list(book.update({}, 5.0 + CLEAR_S - 1))
    (end,) = book.update({}, 5.0 + CLEAR_S)
    assert (end.ends, end.model, end.text) == (True, "m", "after 10 min")


def test_a_model_without_a_worker() -> None:
    waiting = ModelFigures(model="waits", queued=2)
    facts = AlertFacts(
        now_s=0.0,
        box=status(
            ModelStatus(model="waits", state="zero", figures=waiting),
            ModelStatus(model="unloaded", state="zero", wanted=1, cause="no worker runs"),
            ModelStatus(model="failed", state="failed", wanted=1, cause="out of memory"),
            ModelStatus(model="loading", state="loading", wanted=1, workers=("ns_L",)),
            ModelStatus(model="crashing", state="loading", wanted=1, workers=("ns_C",)),
            ModelStatus(model="ready", state="ready", ready=1, wanted=2, figures=waiting),
            workers=[
                WorkerStatus(name="ns_L", service="L", state="loading"),
                WorkerStatus(name="ns_C", service="C", state="loading", restarts=3),
            ],
        ),
    )
    expected = {("ModelNotReady", one) for one in ("waits", "failed", "crashing")}
    assert names(facts) == expected
    (text,) = {one.text for key, one in AlertConditions().find(facts).items() if key[1] == "failed"}
    assert text == "no worker serves failed (out of memory); see: dynamo ps"


def test_fewer_workers_than_the_planner_wants() -> None:
    model = ModelStatus(model="m", state="ready", ready=1, wanted=2)
    for planner, expected in (
        ("running", {("WorkersMissing", "m")}),
        ("", set()),
        ("paused", set()),
    ):
        assert names(AlertFacts(now_s=0.0, box=status(model, planner=planner))) == expected


def test_rates_over_frontends_and_restarts() -> None:
    conditions = AlertConditions()

    def at(now_s: float, **frontends: FrontendCounts | None) -> set[tuple[str, str]]:
        return names(AlertFacts(now_s=now_s, box=status(), frontends=frontends), conditions)

    def counts(pid: int, requests: float, failed: float = 0, rejected: float = 0) -> FrontendCounts:
        return FrontendCounts(
            pid=pid,
            requests={"m": requests},
            failed={"m": failed},
            rejected={"m": rejected} if rejected else {},
        )

    old = counts(1, 1000, 500, 7)
    assert at(0, a=old, b=counts(2, 0)) == set()  # failures before the first look
    assert at(15, a=old, b=counts(2, 200, 1)) == set()
    assert at(30, a=old, b=counts(2, 300, 4)) == {("RequestsFail", "m")}
    assert at(45, a=None, b=counts(2, 300, 4)) >= {("FrontendDown", "a"), ("RequestsFail", "m")}
    assert at(60, a=counts(3, 10, 0, 1), b=counts(2, 300, 4)) == {
        ("RequestsFail", "m"),
        ("RequestsRejected", "m"),
    }
    assert at(345, a=counts(3, 20, 0, 1), b=counts(2, 800, 4)) == {("RequestsRejected", "m")}
    assert at(360, a=counts(3, 20, 0, 1), b=counts(2, 800, 4)) == set()


def test_routing_and_disks() -> None:
    conditions = AlertConditions()
    disks = [
        FileSystemFacts(path="/full", kind="ext4", free_bytes=1 << 20),
        FileSystemFacts(path="/inodes", kind="ext4", free_bytes=1 << 40, free_files=0),
        FileSystemFacts(path="/fine", kind="ext4", free_bytes=1 << 40, free_files=9),
    ]
    found = set()
    for now, number in ((0.0, 0.0), (15.0, 100.0)):
        counts = FrontendCounts(
            pid=1,
            silent={"m": 1, "fine": 0},
            unavailable={"ns/backend/generate": 1, "ns/other/generate": 0},
            estimates=number,
            estimate_error_s=number * 0.6,
            first_tokens_s=number,
        )
        facts = AlertFacts(now_s=now, box=status(), frontends={"ns_F": counts}, disks=disks)
        found = names(facts, conditions)
    assert found == {
        ("DiskFull", "/full"),
        ("DiskFull", "/inodes"),
        ("KvEventsMissing", "m"),
        ("WorkerOutOfReach", "ns/backend/generate"),
        ("EstimatesOff", "ns_F"),
    }


def test_a_page_of_metrics() -> None:
    page = """
# HELP other_requests_total x
dynamo_frontend_requests_total{model="other prefix",error_type=""} 1
own_requests_total{endpoint="chat",error_type="",model="a \\"b\\"",status="success"} 5
own_requests_total{endpoint="chat",error_type="internal",model="a \\"b\\"",status="error"} 2
own_requests_total{endpoint="chat",error_type="validation",model="a \\"b\\"",status="error"} 3
own_model_rejection_total{endpoint="chat",model="m"} 4
dynamo_request_plane_unavailable_workers{endpoint="ns/backend/generate"} 1
dynamo_request_plane_unavailable_workers{endpoint="ns/backend/kv_query"} 1
dynamo_component_router_kv_event_source_mismatch_workers{model="m",worker_type="decode"} 1
dynamo_component_router_kv_event_source_mismatch_workers{model="m",worker_type="prefill"} 1
dynamo_router_ttft_error_seconds_sum{worker_id="1"} 0.5
dynamo_router_ttft_error_seconds_count{worker_id="1"} 3
dynamo_component_router_time_to_first_token_seconds_sum{worker_id="1"} 2.5
dynamo_component_router_time_to_first_token_seconds_count{worker_id="1"} 3
"""
    assert parse_counts(page.encode(), "own", 7) == FrontendCounts(
        pid=7,
        requests={'a "b"': 10},
        failed={'a "b"': 2},
        rejected={"m": 4},
        silent={"m": 2},
        unavailable={"ns/backend/generate": 1},
        estimates=3,
        estimate_error_s=0.5,
        first_tokens_s=2.5,
    )
