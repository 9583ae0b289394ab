"""Which fault happens when: drawn from a seed, before the run. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["FAULTS", "LASTING_FAULTS", "PlannedFault", "make_schedule", "read_weights"]

FAULTS = {
    "worker killed": 20,
    "worker terminated": 8,
    "worker stopped": 12,
    "fatal request": 3,
    "requests cut": 20,
    "events cut": 12,
    "socket removed": 5,
    "lease removed": 4,
    "statefile removed": 2,
    "disk full": 4,
    "frontend killed": 3,
    "frontend terminated": 2,
    "frontend stopped": 5,
    "arbiter stopped": 3,
    "guard stopped": 2,
    "all workers killed": 1,
    "arbiter killed": 1,
    "guard killed": 1,
    "deployment terminated": 1,
}
"""The faults, and how often each comes among a hundred."""

_ENDING = (
    "fatal request",
    "frontend killed",
    "frontend terminated",
    "all workers killed",
    "arbiter killed",
    "guard killed",
    "deployment terminated",
)
LASTING_FAULTS = {kind: weight for kind, weight in FAULTS.items() if kind not in _ENDING}
"""Those that frontend, arbiter, planner and some workers survive, for a soak of these."""


class PlannedFault(NamedTuple):
    """A fault at ``at_s`` of the run; ``dice`` seeds its choice of target and duration."""

    at_s: float
    kind: str
    dice: str


def read_weights(text: str) -> dict[str, int]:
    """Read ``kind, kind:weight``; a kind without a weight has that of FAULTS. Raises ValueError."""
    found = {}
    for part in text.split(","):
        kind, colon, weight = (word.strip() for word in part.partition(":"))
        if kind not in FAULTS:
            raise ValueError(f"{kind!r} is not one of: {', '.join(FAULTS)}")
        if colon and not (weight.isdecimal() and int(weight)):
            raise ValueError(f"the share {weight!r} of {kind!r} is not a whole number from 1")
        found[kind] = int(weight) if colon else FAULTS[kind]
    return found


def make_schedule(
    seed: int, seconds: float, per_second: float, faults: Mapping[str, int] = FAULTS
) -> list[PlannedFault]:
    """Return the faults of a run in order: shuffled decks of ``faults``, at random times.

    One in each interval of ``1 / per_second``: in a cluster of faults, requests use up their
    migrations.
    """
    dice = random.Random(f"faults {seed}")
    count = int(seconds * per_second)
    kinds: list[str] = []
    while len(kinds) < count:
        deck = [kind for kind, weight in faults.items() for _ in range(weight)]
        dice.shuffle(deck)
        kinds += deck
    times = [(number + dice.random()) / per_second for number in range(count)]
    return [
        PlannedFault(at_s, kind, f"{seed}/{number}")
        for number, (at_s, kind) in enumerate(zip(times, kinds[:count], strict=True))
    ]
