"""Growth is found and noise is not; windows are judged as a whole run; a short real soak."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from history import Answer, Event, Fault, Life, Request
from soak_judge import KEPT_S, SETTLED_S, Judge, recent
from soak_report import SoakOptions, as_markdown
from soak_run import run_soak
from soak_trend import trend
from validator import validate

HOUR_S = 3600.0


def series(value: Callable[[float, random.Random], float], seed: int) -> list[tuple[float, float]]:
    """An hour of samples, one every ten seconds."""
    dice = random.Random(seed)
    return [(at_s, value(at_s, dice)) for at_s in range(0, 3600, 10)]


@pytest.mark.parametrize("seed", range(10))
def test_a_leak_under_noise_is_found(seed: int) -> None:
    """4 MiB an hour, under noise of 2 MiB and a jump to the next arena now and then."""
    points = series(
        lambda at_s, dice: 90_000 + 4096 * at_s / HOUR_S + dice.gauss(0, 2048)
        + (8192 if dice.random() < 0.05 else 0),
        seed,
    )  # fmt: skip
    found = trend(points, 300, tolerance=1024)
    assert found.verdict == "grows"
    assert found.low <= 4096 <= found.high


def test_noise_is_flat_mostly() -> None:
    """The interval is of 99 %, and growth in both halves is asked for: 3 of 200 would be many."""
    grown = sum(
        trend(series(lambda _, dice: 90_000 + dice.gauss(0, 2048), seed), 300).verdict == "grows"
        for seed in range(200)
    )
    assert grown <= 3


def test_a_descriptor_every_ten_minutes_is_found() -> None:
    points = series(lambda at_s, dice: 40 + at_s // 600 + dice.randrange(3), 1)
    assert trend(points, 300).verdict == "grows"


def test_load_that_comes_and_goes_is_flat() -> None:
    points = series(lambda at_s, dice: 60 + 20 * (at_s // 300 % 2) + dice.randrange(5), 2)
    assert trend(points, 300).verdict == "flat"


def test_what_fills_up_during_the_warm_up_is_flat() -> None:
    points = series(lambda at_s, dice: min(at_s, 280) * 100 + dice.gauss(0, 50), 3)
    assert trend(points, 300).verdict == "flat"


def test_what_fills_up_later_settles() -> None:
    points = series(lambda at_s, dice: min(at_s, 1500) * 100 + dice.gauss(0, 50), 4)
    assert trend(points, 300).verdict == "settles"


def test_a_few_samples_say_nothing() -> None:
    assert trend([(float(at_s), float(at_s)) for at_s in range(7)], 0).verdict == "short"
    assert trend([], 0).verdict == "short"


def _request(number: int, started_s: float, **changes: object) -> Request:
    answer = Answer("abc", "length", 3, 3)
    events = [
        Event(started_s + 0.1, "text", "abc"),
        Event(started_s + 0.2, "finish", "length"),
        Event(started_s + 0.2, "usage", usage=(3, 3)),
        Event(started_s + 0.3, "done"),
    ]
    fields = {"status": 200, "ending": "complete", "events": events} | changes
    return Request(f"{number}", "chat", True, 1, answer, started_s, "", started_s + 0.3, **fields)  # type: ignore[arg-type]


def test_windows_are_judged_as_the_whole_run() -> None:
    dice = random.Random(5)
    lives = [Life("frontend", "1", 0.0), Life("worker", "0", 0.0)]
    lives += [Life("worker", f"{at}", at, at + 30.0) for at in range(1, 900, 7)]
    records: list[Request | Fault] = []
    lost = [Event(0.0, "error", "Migration limit exhausted"), Event(0.0, "done")]
    for number in range(3000):
        at_s = number * 0.3
        kind = dice.random()
        if kind < 0.02:
            records.append(_request(number, at_s, events=[]))
        elif kind < 0.04:
            records.append(_request(number, at_s, events=lost))
        elif kind < 0.05:
            records.append(Fault("requests cut", "a.sock", at_s))
        elif kind < 0.06:
            records.append(_request(number, at_s, ending="closed"))
        else:
            records.append(_request(number, at_s))
    whole = validate(records, lives)
    judge = Judge()
    held = 0
    broken = []
    for record in records:
        judge.add(record)
        now_s = record.at_s if isinstance(record, Fault) else record.ended_s
        held = max(held, len(judge))
        broken += judge.settle(now_s, recent(lives, now_s))
    broken += judge.finish(lives)
    found = judge.verdict
    for verdict in (whole, found):  # the losses of workers come last, in each window
        verdict.violations.sort()
    assert whole.violations and found == whole
    assert {one.id for one in broken} == {
        *whole.failed,
        *(one.request for one in whole.violations),
    }
    assert held < (SETTLED_S + KEPT_S) * 4


def test_losses_count_for_requests_that_are_judged_at_the_end() -> None:
    judge = Judge()
    for at_s in (10.1, 10.2):
        judge.add(Fault("requests cut", "a.sock", at_s))
    lost = [Event(10.5, "error", "Two workers died or stopped answering"), Event(10.5, "done")]
    judge.add(_request(1, 10.0, events=lost))
    judge.finish([Life("frontend", "1", 0.0), Life("worker", "0", 0.0)])
    assert judge.verdict.violations == [] and judge.verdict.workers_lost == 1


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_short_soak(tmp_path: Path) -> None:
    """Every process is measured, every answer is the computed one, and nothing is left."""
    options = SoakOptions(
        seed=3, hours=12 / 3600, faults_per_minute=60, sample_s=1.0, warm_up_s=2.0, speed=4
    )
    report = await run_soak(options, tmp_path)
    verdict = report.judge.verdict
    broken = [one for one in report.violations if one.rule != "grows"]
    assert broken == [], as_markdown(report)
    assert verdict.complete >= 20 and sum(report.judge.faults.values()) >= 3
    roles = [name.split()[0] for name in report.trends]
    assert sorted(set(roles)) == ["arbiter", "elder", "frontend", "guard", "planner", "soak"]
    for name in ("rss", "anonymous", "fds", "threads", "tasks", "blocks", "series"):
        frontend = next(one for role, one in report.trends.items() if role.startswith("frontend"))
        assert frontend[name].level > 0 and frontend[name].verdict != "short"
    json.dumps(report.as_json())
