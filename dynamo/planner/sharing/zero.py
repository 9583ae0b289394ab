"""Scale to zero: which models may have no worker, and how they compete for GPUs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dynamo.planner.connector import DRAINING, READY, STARTING, ScaledService
from dynamo.planner.observation import Pool
from dynamo.planner.policies.base import DECODE, PoolDecision, ScalingDecision
from dynamo.planner.scaled_model import ScaledModel
from dynamo.planner.sharing.sharing import SharedModel, SharedService
from dynamo.protocols.control import OnDemandModel

__all__ = [
    "ModelDemand",
    "TurnClock",
    "cold_decision",
    "is_cold",
    "is_on_demand",
    "record_of",
    "shared_model",
    "warm",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDemand:
    """The requests of a model in all frontends, as the frontends report them.

    ``waiting`` have no worker, the oldest for ``oldest_s``. There were no requests for ``idle_s``;
    None if no frontend reports.
    """

    waiting: int = 0
    oldest_s: float = 0.0
    idle_s: float | None = None


class TurnClock:
    """Since when the first worker of each model serves."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def serving_s(self, model: str, ready: int, now_s: float) -> float:
        """Return how long ``model`` has had a worker that serves, 0 without one."""
        if not ready:
            self._since_s.pop(model, None)
            return 0.0
        return now_s - self._since_s.setdefault(model, now_s)


def is_on_demand(pools: Mapping[str, Pool]) -> bool:
    """Whether the planner may remove the last worker that answers: prefill workers serve nothing
    without it."""
    return pools[DECODE].minimum == 0


def is_cold(pools: Mapping[str, Pool]) -> bool:
    """Whether the model has no worker, and gets its first one when requests wait."""
    return is_on_demand(pools) and not pools[DECODE].workers


def cold_decision(pools: Mapping[str, Pool]) -> ScalingDecision:
    """Return what happens to a cold model now: nothing, its policy is not asked."""
    rule = "no worker and no requests; the first request starts one"
    return ScalingDecision(
        pools=tuple(PoolDecision(pool=name, wanted=0, rule=rule) for name in pools)
    )


def warm(pools: Mapping[str, Pool]) -> dict[str, Pool]:
    """Return the pools as a policy sees them: the last worker is not the policy's to remove."""
    return {name: replace(pool, minimum=max(1, pool.minimum)) for name, pool in pools.items()}


def shared_model(
    model: ScaledModel,
    pools: Mapping[str, Pool],
    demand: ModelDemand,
    serving_s: float,
    wanted: Mapping[str, int],
) -> SharedModel:
    """Return ``model`` as :func:`~dynamo.planner.sharing.sharing.share` sees it.

    ``wanted`` has the workers that its policy wants, by pool.
    """
    services = [_shared(one, pools[one.pool], wanted.get(one.pool)) for one in model.services]
    return SharedModel(
        name=model.name,
        services=services,
        priority=model.decode.priority,
        waiting=demand.waiting,
        oldest_s=demand.oldest_s,
        idle_s=demand.idle_s,
        serving_s=serving_s,
    )


def _shared(service: ScaledService, pool: Pool, wanted: int | None) -> SharedService:
    serving = [one.name for one in service.workers if one.state in (READY, STARTING)][::-1]
    leaving = [one.name for one in service.workers if one.state == DRAINING]
    soon = max(0, pool.draining - len(leaving))  # removals that have just begun
    return SharedService(
        name=service.name,
        gpus_per_worker=pool.gpus_per_worker,
        ready=pool.ready,
        starting=pool.starting,
        draining=pool.draining,
        minimum=pool.minimum,
        wanted=wanted,
        assigned=service.assigned,
        serving=serving[soon:],
        leaving=[*leaving, *serving[:soon]],
        unplaced=max(0, pool.workers - len(serving[soon:])),
    )


def record_of(model: ScaledModel, namespace: str) -> OnDemandModel:
    """Return the record by which frontends list ``model`` and hold its requests."""
    return OnDemandModel(namespace, model.name)
