"""What limits actions on workers: the GPU budget, the memory of GPUs, actions in progress. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from dynamo.errors import DynamoError
from dynamo.observability.logs import counted
from dynamo.serve.gpus.gpus import fits
from dynamo.serve.state.document import Document
from dynamo.serve.state.entries import ServiceEntries
from dynamo.serve.state.ledger import GpuLedger
from dynamo.serve.state.process_table import is_reserved, reservation

if TYPE_CHECKING:
    from dynamo.config.planner import PlannerSettings


class ActionFailed(DynamoError):
    """A worker could not be added or removed; everything reserved for it is free again."""

    code = "action_failed"
    status = 409
    kind = "Conflict"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionLimits:
    """The limits of actions on workers: those of a planner's options, by default those of a person.

    All workers of the services that are scaled, of ``model`` or of every model, hold at most
    ``max_gpus``. A decode or prefill worker counts ``decode_gpus`` or ``prefill_gpus``; None: the
    GPUs that the graph gives it, else 1.
    """

    max_gpus: float = math.inf
    decode_gpus: float | None = None
    prefill_gpus: float | None = None
    model: str | None = None
    start_timeout_s: float = 1800.0

    @classmethod
    def of_planner(cls, settings: PlannerSettings) -> Self:
        """Return the limits of a planner with these options."""
        return cls(
            max_gpus=settings.max_gpu_budget,
            decode_gpus=settings.decode_engine_num_gpu,
            prefill_gpus=settings.prefill_engine_num_gpu,
            model=settings.served_model_name,
            start_timeout_s=settings.start_timeout_s,
        )

    def scales(self, model: str) -> bool:
        """Whether the workers of ``model`` count in the budget."""
        return self.model in (None, model)

    def worker_gpus(self, assigned: float, is_prefill: bool) -> float:
        """Return what a worker with so many ``assigned`` GPUs counts in the budget."""
        return (self.prefill_gpus if is_prefill else self.decode_gpus) or assigned or 1.0

    def fits(self, held: float, needed: float, gpus: float = math.inf) -> bool:
        """Whether ``needed`` more GPUs are within the budget, and within ``gpus``."""
        return fits(min(self.max_gpus, gpus) - held, needed)

    def check(self, held: float, needed: float) -> None:
        """Raise ActionFailed if a worker's ``needed`` GPUs are more than the budget has left."""
        if not self.fits(held, needed):
            used = counted(held, "GPU is", "GPUs are")
            raise ActionFailed(
                f"{used} in use and a worker needs {needed:g}: more than "
                f"--max-gpu-budget {self.max_gpus:g}"
            )


def budget_held(
    ledger: GpuLedger, services: Collection[ServiceEntries], limits: ActionLimits
) -> float:
    """Return the GPUs of the budget that ``services`` hold now, draining workers included.

    A worker without GPUs counts as what the options say, else as 1.
    """
    total = 0.0
    for service in services:
        per_worker = limits.worker_gpus(service.gpus, service.is_prefill)
        for entry in service.entries:
            if entry.name in ledger.held:
                total += ledger.amount(entry.name)
            elif entry.asleep and entry.reserved_by is None:
                continue  # nothing wakes it
            elif entry.pids or entry.reserved_by is not None:
                # Each process of a watcher is a worker; `circusctl incr` adds some.
                total += per_worker * max(1, len(entry.pids))
    return total


def reserve(document: Document, name: str, operation: str) -> None:
    """Begin an ``operation`` of this process on a worker: write its record.

    Raises ActionFailed as :func:`check_unreserved`.
    """
    check_unreserved(document, name)
    document.components[name].reserved_by = reservation(operation)


def check_unreserved(document: Document, name: str) -> None:
    """Raise ActionFailed if a worker is gone, or another living process changes it."""
    entry = document.components.get(name)
    if entry is None:
        raise ActionFailed(f"{name}: removed by another command")
    owner = entry.reserved_by
    if owner is not None and is_reserved(entry, ()):
        begun = f" ({owner.operation})" if owner.operation else ""
        raise ActionFailed(f"{name}: process {owner.pid} changes it{begun}; wait for its end")
    if entry.replacing is not None:
        raise ActionFailed(f"{name}: the deployment replaces its process; wait for its end")
