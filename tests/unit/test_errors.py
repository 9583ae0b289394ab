"""Errors keep their class, status and text across a process border."""

from __future__ import annotations

import pytest

from dynamo import errors

CLASSES = [
    getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_round_trip(kind: type[errors.DynamoError]) -> None:
    again = errors.from_code(kind.code, "text")
    assert type(again) is kind
    assert (again.message, str(again), again.status) == ("text", "text", kind.status)


def test_codes_are_unique_and_unknown_ones_survive() -> None:
    assert len({kind.code for kind in CLASSES}) == len(CLASSES)
    assert type(errors.from_code("of a later version", "x")) is errors.DynamoError


def test_only_other_workers_failures_are_worth_a_retry() -> None:
    assert errors.Disconnected("").retryable and errors.EngineShutdown("").retryable
    assert not errors.InvalidArgument("").retryable and not errors.Cancelled("").retryable
