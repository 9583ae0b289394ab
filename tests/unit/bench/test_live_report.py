"""Live runs as a table and a chart: medians, spreads, every run."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("live_report")


@pytest.fixture
def runs(report: ModuleType) -> list[Any]:
    """Two modes, two rates, three rounds; one run has no answer."""
    found = []
    for round_number, ttft in enumerate((100.0, 300.0, 200.0)):
        for rate in (20.0, 10.0):
            for mode, factor in (("kv", 1.0), ("random", 2.0)):
                summary = {
                    "requests": 40,
                    "completed": 30,
                    "good_requests": 20,
                    "hit_rate": 0.5,
                    "ttft_ms": {"p50": ttft * factor, "p99": 1234.0},
                }
                found.append(report.Run(mode, rate, round_number, summary, 0.25))
    dead = {"requests": 40, "completed": 0, "ttft_ms": None}
    return [*found, *(report.Run("dead", 10.0, number, dead) for number in range(3))]


def test_the_table_has_every_mode_at_every_rate(report: ModuleType, runs: list[Any]) -> None:
    lines = report.markdown(runs, "A note.").splitlines()
    assert [line[:17] for line in lines[2:7]] == [
        "| 10 | kv | 50.0%",
        "| 10 | random | 5",
        "| 10 | dead | 0.0",
        "| 20 | kv | 50.0%",
        "| 20 | random | 5",
    ]
    assert "| 400 (200–600) | 1,234 |" in lines[3]
    assert "| 5.0 | 50.0% | 0 | 25.00% |" in lines[2]
    assert "| 10.0 | 50.0% |" in lines[5]
    assert "100.00%" in lines[4]
    assert lines[-1] == "A note."


def test_the_chart_has_a_point_for_each(
    report: ModuleType, runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    chart = importlib.import_module("live_chart").chart
    for some in (runs, runs[:1], runs[-3:]):
        root = ElementTree.fromstring(chart(some))
        circles = root.findall("{http://www.w3.org/2000/svg}circle")
        shown = [mode for _, mode, _ in report.groups(some)]
        assert len(circles) == 2 * len(shown) - shown.count("dead")  # it has no TTFT
        assert {circle.get("fill") for circle in circles} <= {"#0072b2", "#56b4e9", "#d55e00"}
