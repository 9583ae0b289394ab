"""The rings of the charts: totals, gaps, clocks that go back, bounds, the file."""

from __future__ import annotations

import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.errors import InvalidArgument
from dynamo.frontend.ui.history import HELD_S, SERIES, TIERS, History, figures_of
from dynamo.protocols.status import (
    BoxStatus,
    GpuStatus,
    ModelFigures,
    ModelStatus,
    WorkerStatus,
)

START = 1_800_000_000
KEY = ("", "in_flight")
MOST_BYTES = 8 << 20


def filled(values: list[float | None], start: int = START) -> History:
    history = History()
    for second, value in enumerate(values):
        history.add(start + second, {KEY: value})
    return history


def known(history: History, period: str, subject: str = "", name: str = "in_flight") -> list[float]:
    values = history.read(subject, period).series.get(name, [])
    return [one for one in values if one is not None]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 100), min_size=61, max_size=500), st.integers(0, 59))
def test_totals_are_preserved_in_every_tier(values: list[int], offset: int) -> None:
    history = filled([float(one) for one in values], START + offset)
    for period, tier in TIERS.items():
        found = history.read("", period)
        for index, value in enumerate(found.series["in_flight"]):
            begin = found.start_s + index * tier.step_s - START - offset
            part = values[max(0, begin) : begin + tier.step_s]
            assert value == pytest.approx(sum(part) / len(part), rel=1e-3)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([-90_000, -30, -1, 0, 1, 2, 10, 16, 59, 700, 8000, 90_000]),
            st.one_of(st.none(), st.floats(width=32)),
        ),
        max_size=60,
    )
)
def test_any_course_of_the_clock_keeps_bounds_and_order(
    steps: list[tuple[int, float | None]],
) -> None:
    history = History()
    now = START
    for step, value in steps:
        now += step
        history.add(now, {KEY: value, ("gpu 0", "watts"): 1.0})
        for period, tier in TIERS.items():
            found = history.read("", period)
            length = len(found.series.get("in_flight", ()))
            assert length <= tier.slots
            assert not length or found.start_s + (length - 1) * tier.step_s <= now
        assert history.read("gpu 0", "10m").series["watts"][-1] == 1.0
        assert History.unpack(history.pack()).pack() == history.pack()


def test_peaks_are_kept_and_means_are_means() -> None:
    history = History()
    for second in range(61):
        value = 100.0 if second == 5 else 0.0
        history.add(START + second, {("", "ttft_p99_s"): value, ("", "ttft_p50_s"): value})
    assert known(history, "24h", name="ttft_p99_s") == [100.0]
    assert known(history, "2h", name="ttft_p99_s") == [100.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert known(history, "2h", name="ttft_p50_s")[0] == 10.0


def test_a_figure_holds_until_the_next_sample_and_no_longer() -> None:
    history = filled([3.0])
    history.add(START + 10, {KEY: 4.0})
    assert known(history, "10m") == [3.0] * 10 + [4.0]
    history.add(START + 10 + HELD_S + 1, {KEY: 5.0})
    values = history.read("", "10m").series["in_flight"]
    assert values == [3.0] * 10 + [4.0] + [None] * HELD_S + [5.0]
    assert known(history, "2h") == [3.0, 4.0]


def test_a_gap_of_days_leaves_nothing_old() -> None:
    history = filled([1.0] * 100)
    history.add(START + 3 * 86_400, {KEY: 2.0})
    assert known(history, "10m") == [2.0] and known(history, "24h") == []


def test_a_clock_that_goes_back_forgets_the_future() -> None:
    history = filled([1.0] * 300)
    history.add(START + 100, {KEY: 7.0})
    found = history.read("", "10m")
    assert (found.start_s, len(found.series["in_flight"])) == (START, 101)
    assert found.series["in_flight"][-2:] == [1.0, 7.0]
    history.add(START - 10**6, {KEY: 8.0})
    assert [known(history, period) for period in TIERS] == [[8.0], [], []]


def test_only_what_is_new_is_read_again() -> None:
    history = filled([float(one) for one in range(100)])
    found = history.read("", "10m", START + 96)
    assert (found.start_s, found.series["in_flight"]) == (START + 97, [97.0, 98.0, 99.0])
    assert history.read("", "2h", START + 80).series["in_flight"] == []
    with pytest.raises(InvalidArgument, match="`range` must be one of 10m, 2h, 24h"):
        history.read("", "1y")


def test_its_size_has_a_bound_and_new_series_replace_ended_ones() -> None:
    history = History()
    history.add(START, {(f"model {one}", "in_flight"): 1.0 for one in range(2 * SERIES)})
    assert len(history) == SERIES and history.size_bytes < MOST_BYTES
    assert len(history.pack()) < MOST_BYTES
    history.add(START + 1, {("model new", "in_flight"): 1.0, ("x" * 300, "in_flight"): 1.0})
    assert known(history, "10m", "model new") == []  # all others are in use
    history.add(START + HELD_S + 2, {("model new", "in_flight"): 1.0})
    assert known(history, "10m", "model new") == [1.0] and len(history) == SERIES
    history.add(START + 10**6, {KEY: 1.0})
    started_s = time.perf_counter()
    history.add(START + 10**6 + 60, {KEY: 1.0})
    assert time.perf_counter() - started_s < 5


def test_the_file_is_read_back_and_damage_is_found() -> None:
    history = filled([float(one) for one in range(200)])
    data = history.pack()
    again = History.unpack(data)
    for period in TIERS:
        assert again.read("", period) == history.read("", period)
    again.add(START + 1000, {KEY: 1.0})  # a gap while it was down
    assert known(again, "10m") == [1.0]
    assert known(again, "2h")[-1] == pytest.approx(194.5)
    again = History.unpack(data)
    again.add(START + 202, {KEY: 1.0})  # a short one, too
    assert again.read("", "10m").series["in_flight"][-4:] == [199.0, None, None, 1.0]
    for cut in (0, 1, 4, 5, len(data) // 2, len(data) - 1):
        with pytest.raises(InvalidArgument, match="damaged"):
            History.unpack(data[:cut])
    for _ in range(50):
        place = random.randrange(len(data))
        flipped = data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]
        with pytest.raises(InvalidArgument, match="damaged"):
            History.unpack(flipped)


def test_a_file_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = filled([1.0]).pack()
    monkeypatch.setattr("dynamo.frontend.ui.history.VERSION", 2)
    with pytest.raises(InvalidArgument, match="it has version 1, not 2"):
        History.unpack(data)


def test_the_figures_of_a_sample() -> None:
    figures = ModelFigures(model="a/b", in_flight=2, queued=1, output_tokens_per_s=9.5)
    status = BoxStatus(
        namespace="x",
        state="running",
        at_s=START,
        frontend="ready",
        ttft_p50_s=0.1,
        models=(
            ModelStatus(model="a/b", state="ready", figures=figures),
            ModelStatus(model="c", state="ready"),
        ),
        workers=tuple(
            WorkerStatus(name=name, service="", state="ready", model="a/b", kv_use=use)
            for name, use in (("x", 0.2), ("y", 0.6))
        ),
        gpus=(GpuStatus(gpu="0", used_bytes=1, total_bytes=2, utilization=0.5, watts=70.0),),
    )
    found = figures_of(status)
    assert found["model a/b", "in_flight"] == 2 and found["", "queued"] == 1
    assert found["", "kv_mean"] == pytest.approx(0.4) and found["model a/b", "kv_max"] == 0.6
    assert found["gpu 0", "watts"] == 70.0 and found["", "ttft_p50_s"] == 0.1
    assert ("model c", "in_flight") not in found
    history = History()
    history.add(START, found)
    assert not math.isnan(known(history, "10m", "model a/b", "output_tokens_per_s")[0])
