"""How many GPUs of a deployment its scaled services may hold together."""

from __future__ import annotations

import math

from dynamo.errors import StatefileError
from dynamo.serve.entries import read_services
from dynamo.serve.gpu_holders import gpu_ids, held_gpus
from dynamo.serve.statefile import Document, Statefile

__all__ = ["capacity_of", "gpu_capacity"]


def gpu_capacity(statefile: Statefile, model: str | None) -> float:
    """Return the GPUs that services which are not scaled leave; ``model`` if only that is scaled.

    Infinite where none are assigned, and where the statefile cannot be read: the connector has the
    last word.
    """
    try:
        document = statefile.read()
    except StatefileError:
        return math.inf
    return math.inf if document is None else capacity_of(document, model)


def capacity_of(document: Document, model: str | None) -> float:
    """Return the same for a statefile."""
    total = len(gpu_ids(document))
    if not total:
        return math.inf
    scaled = {
        entry.name
        for service in read_services(document).values()
        if model in (None, service.model)
        for entry in service.entries
    }
    others = (share for name, (_, share) in held_gpus(document).items() if name not in scaled)
    return total - sum(others)
