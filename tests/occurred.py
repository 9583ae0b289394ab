"""Random histories assert that the states they are meant for occurred."""

from __future__ import annotations

from collections import Counter
from unittest import TestCase

from hypothesis.stateful import RuleBasedStateMachine

__all__ = ["StateMachine", "assert_occurred", "occurring"]


class StateMachine(RuleBasedStateMachine):
    """A state machine that counts its states, over all histories, in ``seen``."""

    seen: Counter[str]

    def __init_subclass__(cls) -> None:
        cls.seen = Counter()


def occurring(machine: type[StateMachine], *states: str) -> type[TestCase]:
    """Return the test of the machine. It fails unless each state occurred in some history."""

    class Case(machine.TestCase):  # type: ignore[name-defined,misc]
        def runTest(self) -> None:
            machine.seen = Counter()
            super().runTest()
            assert_occurred(machine.seen, *states)

    return Case


def assert_occurred(seen: Counter[str], *states: str) -> None:
    """Fail with the states that did not occur."""
    missing = [state for state in states if not seen[state]]
    assert not missing, f"never {', '.join(missing)}; {dict(seen)}"
