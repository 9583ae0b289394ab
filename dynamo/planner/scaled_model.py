"""The services of one model, and its pools as a policy sees them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dynamo.config.planner import PlannerSettings
from dynamo.planner.connector import ASLEEP, DRAINING, READY, STARTING, ScaledService
from dynamo.planner.observation import Pool
from dynamo.planner.policies.base import DECODE, PREFILL

__all__ = ["InFlight", "ScaledModel", "gpus_per_worker", "left_out", "models_of", "pool_of"]


@dataclass(frozen=True, slots=True)
class InFlight:
    """Actions that the planner has begun in a service.

    ``unseen`` workers are being added and not listed by the connector yet, ``removing`` ones are
    being removed, listed as draining or not.
    """

    unseen: int = 0
    removing: int = 0


@dataclass(frozen=True, slots=True)
class ScaledModel:
    """The services that serve ``name``; ``prefill`` is None in aggregated serving."""

    name: str
    decode: ScaledService
    prefill: ScaledService | None = None

    @property
    def services(self) -> tuple[ScaledService, ...]:
        """The services, decode first."""
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)

    def service(self, pool: str) -> ScaledService | None:
        """Return the service of ``pool``."""
        return self.prefill if pool == PREFILL else self.decode

    def ready(self) -> frozenset[str]:
        """Return the workers that serve, by name."""
        return frozenset(w.name for one in self.services for w in one.workers if w.state == READY)


def models_of(services: Iterable[ScaledService], only: str | None) -> dict[str, ScaledModel]:
    """Return the models, ``only`` this one if given; those with a higher priority first.

    One service of a pool is scaled: the one with the highest priority, then the first by name.
    Prefill workers without a ``min`` of their own follow decode workers to zero.
    """
    pools: dict[str, dict[str, ScaledService]] = {}
    for service in sorted(services, key=lambda one: (-one.priority, one.name)):
        if only is None or service.model == only:
            pools.setdefault(service.model, {}).setdefault(service.pool, service)
    return {
        name: ScaledModel(name, found[DECODE], _beside(found[DECODE], found.get(PREFILL)))
        for name, found in pools.items()
        if DECODE in found
    }


def _beside(decode: ScaledService, prefill: ScaledService | None) -> ScaledService | None:
    if prefill is None or prefill.minimum is not None or decode.minimum != 0:
        return prefill
    return replace(prefill, minimum=0)


def left_out(services: Iterable[ScaledService], models: Iterable[ScaledModel]) -> list[str]:
    """Return a sentence for each service of these models that :func:`models_of` left out."""
    scaled = {(one.name, s.pool): s.name for one in models for s in one.services}
    return [
        f"service {one.name} is not scaled: of the {one.pool} workers of model {one.model}, only "
        f"{name} is. Join both services, or give the one to be scaled a higher priority"
        for one in services
        if (name := scaled.get((one.model, one.pool))) not in (None, one.name)
    ]


def gpus_per_worker(service: ScaledService, settings: PlannerSettings) -> float:
    """Return the GPUs of a worker: as the options say, else the graph, else 1."""
    given = (
        settings.prefill_engine_num_gpu
        if service.pool == PREFILL
        else settings.decode_engine_num_gpu
    )
    return given or service.gpus_per_worker or 1.0


def pool_of(service: ScaledService, settings: PlannerSettings, in_flight: InFlight) -> Pool:
    """Return the pool of ``service``; actions ``in_flight`` count as if they were visible."""
    counts: Mapping[str, int] = {
        state: sum(worker.state == state for worker in service.workers)
        for state in (READY, STARTING, DRAINING, ASLEEP)
    }
    leaving = max(0, in_flight.removing - counts[DRAINING])
    from_ready = min(leaving, counts[READY])
    return Pool(
        ready=counts[READY] - from_ready,
        starting=counts[STARTING] + in_flight.unseen,
        draining=counts[DRAINING] + from_ready,
        asleep=counts[ASLEEP],
        gpus_per_worker=gpus_per_worker(service, settings),
        minimum=settings.min_gpu_budget if service.minimum is None else service.minimum,
        maximum=service.maximum,
    )
