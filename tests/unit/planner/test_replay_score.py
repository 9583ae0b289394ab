"""The score of a policy against fixed deployments and the oracle."""

from __future__ import annotations

import pytest

from dynamo_lab.simulation.result import Point, frontier, hours_at, score

FIXED = [Point(4.0, 0.80), Point(5.0, 0.90), Point(6.0, 0.95), Point(7.0, 0.95), Point(8.0, 0.96)]
ORACLE = [Point(3.0, 0.85), Point(3.5, 0.92), Point(4.5, 0.96)]


def test_frontier_leaves_out_what_is_beaten() -> None:
    assert frontier(reversed(FIXED)) == [*FIXED[:3], FIXED[4]]
    assert frontier([]) == []


@pytest.mark.parametrize(
    ("attainment", "hours"),
    [(0.5, 4.0), (0.8, 4.0), (0.85, 4.5), (0.9, 5.0), (0.96, 8.0), (0.97, None)],
)
def test_hours_are_interpolated(attainment: float, hours: float | None) -> None:
    found = hours_at(frontier(FIXED), attainment)
    assert found == (None if hours is None else pytest.approx(hours))


@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        (Point(5.0, 0.90), 0.0),  # a fixed deployment
        (Point(3.5, 0.92), 1.0),  # the oracle: 5.4 against 3.5
        (Point(4.45, 0.92), 0.5),
        (Point(6.35, 0.92), -0.5),  # worse than fixed deployments
        (Point(4.5, 0.97), 1.0),  # above both curves: against their ends
        (Point(3.0, 0.89), None),
    ],
)
def test_score(reached: Point, expected: float | None) -> None:
    found = score(reached, FIXED, ORACLE)
    assert found == (None if expected is None else pytest.approx(expected))


def test_no_score_where_the_oracle_saves_nothing() -> None:
    """Fixed schedules are open to the oracle, so it never needs more."""
    assert score(Point(5.0, 0.95), [Point(4.0, 0.99)], [Point(6.0, 0.99)]) is None


def test_published_figures() -> None:
    """HPA in the arena of the public planners: 90.4 % for 4.55 GPU-hours."""
    fixed = [Point(4.13, 0.60), Point(4.98, 0.922)]
    value = score(Point(4.55, 0.904), fixed, [Point(3.68, 0.913)])
    assert value == pytest.approx(0.3, abs=0.03)
