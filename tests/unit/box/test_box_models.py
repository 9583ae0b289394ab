"""The state of each model, from its workers and the frontends."""

from __future__ import annotations

from typing import Any

import pytest
from box_documents import MOCKER, document, entry, seen

from dynamo.box.models import model_statuses
from dynamo.box.sighting import BoxSighting, FrontendSighting
from dynamo.box.workers import worker_statuses
from dynamo.protocols.status import FrontendStatus, ModelFigures, ModelStatus

FAILED = {"status": "given up", "reason": "5 deaths within 60 s"}


def model(found: BoxSighting) -> ModelStatus:
    (status,) = model_statuses(found, worker_statuses(found))
    return status


def frontend(**figures: Any) -> FrontendSighting:
    status = FrontendStatus(models=(ModelFigures(model="tiny", **figures),))
    return FrontendSighting(name="d_F", url="", state="ready", status=status)


def test_ready_and_wanted() -> None:
    entries = (entry("d_W", MOCKER, 11), entry("d_W_1", MOCKER, 12))
    found = model(seen(document(*entries, W=3), 11))
    assert (found.state, found.ready, found.wanted) == ("ready", 1, 3)
    assert found.workers == ("d_W", "d_W_1") and not found.cause


def test_workers_that_were_added_are_wanted() -> None:
    entries = (entry("d_W", MOCKER, 11), entry("d_W_1", MOCKER, 12))
    assert model(seen(document(*entries, W=1), 11, 12)).wanted == 2


def test_the_planner_says_what_is_wanted() -> None:
    found = document(entry("d_W", MOCKER, 11), W=1)
    assert model(seen(found, 11, wanted={("tiny", "decode"): 4})).wanted == 4


@pytest.mark.parametrize(
    ("entries", "state"),
    [
        ([("d_W", 11, {}), ("d_W_1", 0, {"watcher": FAILED})], "ready"),
        ([("d_W", 12, {}), ("d_W_1", 0, {"watcher": FAILED})], "loading"),
        ([("d_W", 0, {"watcher": FAILED})], "failed"),
        ([("d_W", 11, {"state": "asleep"})], "asleep"),
        ([("d_W", 11, {"state": "draining"})], "draining"),
        ([("d_W", 0, {"watcher": {"status": "absent"}})], "zero"),
    ],
)
def test_the_state_that_says_most(entries: list[tuple[str, int, Any]], state: str) -> None:
    made = [entry(name, MOCKER, pid, **more) for name, pid, more in entries]
    assert model(seen(document(*made, W=0), 11)).state == state


def test_a_failed_worker_shows_although_another_serves() -> None:
    entries = (entry("d_W", MOCKER, 11), entry("d_W_1", MOCKER, watcher=FAILED))
    found = model(seen(document(*entries, W=2), 11))
    assert found.state == "ready" and found.cause == "5 deaths within 60 s"
    assert found.remedy == "dynamo restart d_W_1"


def test_progress_is_that_of_the_slowest() -> None:
    entries = (entry("d_W", MOCKER, 11), entry("d_W_1", MOCKER, 12))
    lines = {"d_W": "loading 40 %", "d_W_1": "loading 20 %"}
    assert model(seen(document(*entries), last_output=lines.__getitem__)).progress == 0.2


def test_figures_are_summed_over_the_frontends() -> None:
    found = document(entry("d_W", MOCKER, 11))
    slow = frontend(in_flight=2, queued=1, output_tokens_per_s=10, ttft_p99_s=0.5, idle_s=9.0)
    fast = frontend(in_flight=1, output_tokens_per_s=5, requests_per_s=2, hit_rate=0.4, idle_s=3.0)
    figures = model(seen(found, 11, frontends=(slow, fast))).figures
    assert figures is not None
    assert (figures.in_flight, figures.queued, figures.output_tokens_per_s) == (3, 1, 15)
    assert (figures.ttft_p99_s, figures.hit_rate, figures.idle_s) == (0.5, 0.4, 3.0)


def test_figures_are_missing_while_no_frontend_answers() -> None:
    down = FrontendSighting(name="d_F", url="", state="down", problem="x")
    assert model(seen(document(entry("d_W", MOCKER, 11)), 11, frontends=(down,))).figures is None


def test_idle_until() -> None:
    found, timeouts = document(entry("d_W", MOCKER, 11)), {"tiny": 300.0}
    idle = frontend(idle_s=100.0)
    assert model(seen(found, 11, frontends=(idle,), idle_timeouts=timeouts)).idle_until_s == 200
    assert model(seen(found, 11, frontends=(idle,))).idle_until_s is None
    busy = frontend(idle_s=0.0, in_flight=1)
    assert model(seen(found, 11, frontends=(busy,), idle_timeouts=timeouts)).idle_until_s is None
