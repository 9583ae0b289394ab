"""What is usual at this time of the day and the week: learned, bounded, kept, and used."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
from planner_kit import FakeConnector, FakeSources, Recorder, Wanted, service
from test_planner_loop import FAST
from until import until

from dynamo.planner.capacity.observation import Traffic
from dynamo.planner.capacity.season import (
    DAY_S,
    SLOTS,
    Season,
    SeasonStore,
    Usual,
    blended,
    is_sound,
)
from dynamo.planner.live.loop import ScalingLoop
from dynamo.planner.policies.kalman import RateForecast
from dynamo.runtime.process.tasks import Tasks

SLOT_S = DAY_S / SLOTS
MONDAY_S = 4 * DAY_S  # 1970 began on a Thursday


def week(season: Season, first_day: int, rates: dict[int, float]) -> None:
    """Seven days: ``rates`` requests/s between 9:00 and 10:00 by the day, else 1."""
    for slot in range(7 * SLOTS):
        day, hour = slot // SLOTS, slot % SLOTS // 6
        rate = rates.get(day, 1.0) if hour == 9 else 1.0
        at_s = (first_day * SLOTS + slot + 1) * SLOT_S - 1.0
        season.add(at_s, round(rate * SLOT_S), SLOT_S)


def test_a_day_of_the_week_counts_more_than_other_days() -> None:
    season = Season()
    for number in range(3):
        week(season, 4 + 7 * number, {0: 20.0})  # Mondays
    season.add((4 + 21) * DAY_S, 0, SLOT_S)
    monday = season.usual((4 + 21) * DAY_S + 8.9 * 3600, 3600.0)
    tuesday = season.usual((5 + 21) * DAY_S + 8.9 * 3600, 3600.0)
    assert monday is not None and tuesday is not None
    assert monday.at(0.0) == pytest.approx(1.0)
    assert monday.at(600.0) > 10.0  # in ten minutes it is nine
    assert tuesday.at(600.0) < 6.0


def test_a_slot_that_was_hardly_observed_is_not_known() -> None:
    season = Season()
    season.add(100.0, 500, 100.0)
    season.add(SLOT_S + 1.0, 1, 1.0)
    assert season.usual(0.0, 3600.0) is None
    assert is_sound(season.record)


def test_old_habits_fade() -> None:
    season = Season()
    for day in range(50):
        for slot in range(SLOTS):
            season.add(
                (day * SLOTS + slot + 0.9) * SLOT_S, round((8 if day < 15 else 2) * SLOT_S), SLOT_S
            )
    usual = season.usual(50 * DAY_S + 9 * 3600, 600.0)
    assert usual is not None and 2.0 <= usual.at(0.0) < 2.6


def test_what_is_usual_raises_a_forecast_before_the_trend_does() -> None:
    forecast = RateForecast(15.0)
    for _ in range(200):
        forecast.add(30, 15.0)
    usual = Usual(slot_s=600.0, into_s=480.0, rates=(2.0, 10.0, math.nan))
    path = forecast.path(900.0, usual)
    assert path[2] == pytest.approx(2.0, rel=0.2)  # in 45 s
    assert path[10] == pytest.approx(6.0, rel=0.2)  # in 165 s: half of 10, half of the trend
    assert path[-1] == pytest.approx(2.0, rel=0.2)  # nothing is known of it
    assert forecast.path(900.0)[10] == pytest.approx(2.0, rel=0.2)


@pytest.mark.parametrize(("rate", "scale"), [(0.0, 0.7), (5.0, 1.0), (6.0, 1.2), (50.0, 1.4)])
def test_a_busier_day_than_usual_stays_busier_within_bounds(rate: float, scale: float) -> None:
    usual = Usual(slot_s=600.0, into_s=0.0, rates=(5.0, 10.0))
    (ahead,) = blended([0.0], 700.0, usual, rate)
    assert ahead == pytest.approx(0.5 * 10.0 * scale)


def full(store: SeasonStore, model: str, day: int, rate: float = 3.0) -> float:
    """Count two slots of a day; return the time after them."""
    begin_s = day * DAY_S
    for slot in (0, 1, 2):
        traffic = Traffic(duration_s=SLOT_S, arrived=round(rate * SLOT_S))
        store.add(model, traffic, begin_s + (slot + 0.5) * SLOT_S)
    return begin_s


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def test_the_file_outlives_a_planner_and_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "planner-traffic.json"
    store = SeasonStore(path)
    for number in range(40):
        begin_s = full(store, f"m{number}", 10)
    again = SeasonStore(path)
    usual = again.usual("m39", begin_s + DAY_S)
    assert usual is not None and usual.at(0.0) == pytest.approx(3.0, rel=0.01)
    assert again.usual("m0", begin_s + DAY_S) is None  # 32 models are kept
    assert path.stat().st_size < 32 * 41_000
    before = path.read_bytes()
    full(SeasonStore(path, writes=False), "other", 11)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"{", b'{"m": 1}', b'{"m": {"day": [1]}}', b"\xff"])
def test_a_damaged_file_is_named_and_replaced(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "planner-traffic.json"
    path.write_bytes(content)
    store = SeasonStore(path)
    assert f"{path} is not used" in caplog.text
    begin_s = full(store, "m", 10)
    assert SeasonStore(path).usual("m", begin_s + DAY_S) is not None


def test_unknown_traffic_is_not_counted_as_none(tmp_path: Path) -> None:
    store = SeasonStore(tmp_path / "planner-traffic.json")
    for slot in range(3):
        store.add("m", Traffic(duration_s=SLOT_S, known=False), (slot + 0.5) * SLOT_S)
    assert store.usual("m", DAY_S) is None


async def test_the_loop_counts_intervals_and_shows_what_is_usual(tmp_path: Path) -> None:
    store = SeasonStore(tmp_path / "planner-traffic.json")
    now_s = time.time()
    for slot in range(-1, 3):  # yesterday, around this time
        traffic = Traffic(duration_s=SLOT_S, arrived=round(4 * SLOT_S))
        store.add("m", traffic, now_s - DAY_S + slot * SLOT_S)
    connector, policy = FakeConnector(service("Worker", model="m")), Wanted(1)
    loop = ScalingLoop(
        connector, FakeSources(), FAST, lambda prefill: policy, [Recorder()], seasons=store
    )
    tasks = Tasks("test")
    running = tasks.spawn(loop.run())
    await until(lambda: policy.seen)
    await loop.stop(1.0)
    await running
    usual = policy.seen[0].usual
    assert usual is not None and usual.at(0.0) == pytest.approx(4.0, rel=0.01)
