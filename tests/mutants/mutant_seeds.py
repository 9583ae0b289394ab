"""The seeds of the simulation that find mutants; ``scripts/mutate --simulate N`` writes it."""

from __future__ import annotations

SEEDS: dict[str, int] = {
    "answer-without-a-length-is-cut": 75,
    "buckets-that-do-not-add-up": 1,
    "change-during-a-write-is-forgotten": 18,
    "client-that-left-keeps-its-place-in-the-queue": 97,
    "cold-start-waits-on-wall-time": 89,
    "exit-during-a-stop-is-a-death": 5,
    "gap-of-several-tokens-counted-whole": 13,
    "id-of-an-ended-request-stays-taken": 1,
    "itl-divided-by-all-tokens": 9,
    "older-look-overwrites-a-newer-one": 47,
    "replacement-that-failed-holds-its-gpus": 27,
    "requests-of-a-removed-worker-stay-in-flight": 1,
    "tokens-counted-twice-after-a-migration": 59,
    "usage-counts-the-tokens-of-the-first-worker-twice": 16,
}
