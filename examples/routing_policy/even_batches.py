"""A routing policy: keep batches even, whatever the caches say, and none too large."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.router.modes.policy_types import PolicyRequest, PolicyWorker


class EvenBatches:
    """Each running request of a worker costs ``weight`` blocks, squared."""

    def __init__(self, weight: float = 1.0, most: int = 64) -> None:
        self._weight = weight
        self._most = most

    def filter(self, request: PolicyRequest, worker: PolicyWorker) -> bool:
        """Whether the worker has room in its batch."""
        return worker.requests < self._most

    def score(self, request: PolicyRequest, workers: Sequence[PolicyWorker]) -> list[float]:
        """The built-in cost, and the price of the batch."""
        return [worker.cost + self._weight * worker.requests**2 for worker in workers]
