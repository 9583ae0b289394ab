"""The GPU budget of the planner: what workers count in it. Pure."""

from __future__ import annotations

from collections.abc import Collection

from dynamo.config.planner import PlannerSettings
from dynamo.serve.gpus.ledger import GpuLedger
from dynamo.serve.state.entries import ServiceEntries

__all__ = ["budget_held", "budget_share"]


def budget_share(service: ServiceEntries, settings: PlannerSettings) -> float:
    """Return what a worker counts in the GPU budget: as the options say, else its GPUs, else 1."""
    given = (
        settings.prefill_engine_num_gpu if service.is_prefill else settings.decode_engine_num_gpu
    )
    return given or service.gpus or 1.0


def budget_held(
    ledger: GpuLedger, services: Collection[ServiceEntries], settings: PlannerSettings
) -> float:
    """Return the GPUs of the budget that ``services`` hold now, draining workers included.

    A worker without GPUs counts as what the options say, else as 1.
    """
    total = 0.0
    for service in services:
        each = budget_share(service, settings)
        for entry in service.entries:
            if entry.name in ledger.held:
                total += ledger.amount(entry.name)
            elif entry.asleep and entry.reserved_by is None:
                continue
            elif entry.pids or entry.reserved_by is not None:
                total += each * max(1, len(entry.pids))
    return total
