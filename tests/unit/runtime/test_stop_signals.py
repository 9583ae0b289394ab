"""Which signals count as stop requests, and which are copies of one."""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, Signals

import pytest

from dynamo.runtime.process.os_process import StopSignals


def counts(*signals: tuple[Signals, float]) -> list[int]:
    received = StopSignals()
    return [received.received(number, 100.0 + at_s) for number, at_s in signals]


@pytest.mark.parametrize("number", [SIGTERM, SIGHUP])
def test_a_supervisors_signal_may_be_repeated(number: Signals) -> None:
    assert counts((number, 0), (number, 0.001), (SIGTERM, 9), (SIGHUP, 20)) == [1, 0, 0, 0]


@pytest.mark.parametrize("number", [SIGINT, SIGQUIT])
def test_a_persons_second_signal_counts(number: Signals) -> None:
    assert counts((number, 0), (number, 1), (number, 2)) == [1, 2, 3]
    assert counts((SIGTERM, 0), (number, 1)) == [1, 2]


def test_timeout_sends_one_signal_twice() -> None:
    assert counts((SIGINT, 0), (SIGINT, 0.0001), (SIGINT, 0.49), (SIGINT, 0.5)) == [1, 0, 0, 2]
