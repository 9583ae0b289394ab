"""Preferred taints: a worker that has them looks cheaper than it is. Spec 3.1."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping

from dynamo.errors import InvalidArgument
from dynamo.router.worker_pool import WorkerPool

__all__ = ["apply_preferred_taints", "multiplier"]


def multiplier(preferred: Mapping[str, float], taints: list[str]) -> float:
    """What the cost of a worker with ``taints`` is multiplied by: between 1/e and e.

    ``preferred`` gives weights; a negative one makes the worker dearer.
    """
    total = sum(preferred.get(taint, 0.0) for taint in taints)
    return math.exp(-math.tanh(total))


def apply_preferred_taints(
    costs: array[float], slots: array[int], worker_pool: WorkerPool, preferred: Mapping[str, float]
) -> None:
    """Apply the multiplier to ``costs[i]``, the cost of ``slots[i]``. O(slots).

    Raises InvalidArgument for a weight that is not finite.
    """
    if not all(math.isfinite(weight) for weight in preferred.values()):
        raise InvalidArgument("the weights of preferred taints must be finite")
    for number, slot in enumerate(slots):
        owner = worker_pool.owners[slot]
        assert owner is not None, "a candidate slot has an owner"
        costs[number] *= multiplier(preferred, worker_pool.members[owner[0]].config.taints)
