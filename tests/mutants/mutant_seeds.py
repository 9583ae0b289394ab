"""The seeds of the simulation that find mutants; ``scripts/mutate --simulate N`` writes it."""

from __future__ import annotations

SEEDS: dict[str, int] = {
    "answer-without-a-length-is-cut": 75,
    "buckets-that-do-not-add-up": 1,
    "change-during-a-write-is-forgotten": 18,
    "client-that-left-keeps-its-place-in-the-queue": 15,
    "cold-start-waits-on-wall-time": 89,
    "drain-waits-for-ever": 2,
    "exit-during-a-stop-is-a-death": 5,
    "gap-of-several-tokens-counted-whole": 13,
    "health-check-while-asleep": 357,
    "id-of-an-ended-request-stays-taken": 1,
    "itl-divided-by-all-tokens": 9,
    "kill-without-a-stop-of-the-engine": 2,
    "later-check-replaces-an-earlier-one": 1,
    "minimum-of-tokens-stays-after-a-migration": 37,
    "queued-tokens-never-subtracted": 129,
    "rank-0-of-the-decision-is-not-sent": 1,
    "recording-not-in-the-order-of-arrival": 10,
    "removed-series-keeps-its-labels": 13,
    "replacement-that-failed-holds-its-gpus": 27,
    "report-of-a-frontend-that-ended-counts": 70,
    "reports-of-a-removed-worker-kept": 15,
    "requests-of-a-removed-worker-stay-in-flight": 25,
    "silence-noticed-a-tick-late": 269,
    "statefile-not-synced": 125,
    "stored-response-counted-once-more": 95,
    "tokens-counted-twice-after-a-migration": 59,
    "usage-counts-the-tokens-of-the-first-worker-twice": 16,
    "worker-that-is-gone-stays-out": 425,
}
