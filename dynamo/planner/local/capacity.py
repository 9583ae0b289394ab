"""How many GPUs of a deployment its scaled services may hold together, and which are free."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from dynamo.errors import ConfigError, StatefileError
from dynamo.planner.sharing.gpu_sharing import GpuCapacity
from dynamo.serve.gpus.ledger import GpuLedger
from dynamo.serve.state.entries import read_services
from dynamo.serve.state.reservations import ledger_of
from dynamo.serve.state.statefile import Document, Statefile

__all__ = ["LedgerRoom", "capacity_of", "gpu_capacity"]


class LedgerRoom:
    """A :class:`GpuRoom` by the ledger: the allocator decides, as when a worker starts."""

    def __init__(self, ledger: GpuLedger) -> None:
        self._ledger = ledger

    def count(self, gpus: float, beside: Sequence[float], without: Collection[str]) -> int:
        """See :class:`GpuRoom`."""
        allocator = self._ledger.allocator(without)
        count = 0
        try:
            for other in beside:
                if other:
                    allocator.assign("another worker", other)
            while True:
                allocator.assign("a worker", gpus)
                count += 1
        except ConfigError:  # no more fit
            return count


def gpu_capacity(statefile: Statefile, model: str | None) -> GpuCapacity:
    """Return the GPUs that services which are not scaled leave; ``model`` if only that is scaled.

    Infinite where none are assigned, and where the statefile cannot be read: the connector has the
    last word.
    """
    try:
        document = statefile.read()
    except StatefileError:
        document = None
    return GpuCapacity(math.inf) if document is None else capacity_of(document, model)


def capacity_of(document: Document, model: str | None) -> GpuCapacity:
    """Return the same for a statefile."""
    ledger = ledger_of(document)
    if not ledger.ids:
        return GpuCapacity(math.inf)
    scaled = {
        entry.name
        for service in read_services(document).values()
        if model in (None, service.model)
        for entry in service.entries
    }
    others = sum(ledger.amount(name) for name in ledger.held if name not in scaled)
    return GpuCapacity(len(ledger.ids) - others, LedgerRoom(ledger))
