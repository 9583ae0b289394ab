"""The sharing of GPUs in the live loop: from the models and their demand to changes and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from dynamo.config.planner import PlannerSettings
from dynamo.planner.connector import ScaledService
from dynamo.planner.live.model_state import ModelState, Pools
from dynamo.planner.observation import Pool
from dynamo.planner.policies.base import PoolDecision, ScalingDecision
from dynamo.planner.sharing.sharing import GpuRoom, Sharing, SharingLimits, share
from dynamo.planner.sharing.zero import (
    ModelDemand,
    TurnClock,
    is_cold,
    is_on_demand,
    record_of,
    shared_model,
    warm,
)
from dynamo.protocols.control import OnDemandModel
from dynamo.serve.gpus.gpus import fits

_PATIENCE = 4
"""Minimum residencies after which a waiting model comes before those of higher priority."""


class DemandSource(Protocol):
    """The frontends' view of models on demand; see :class:`OnDemandRegistry`."""

    def demand(self, model: str) -> ModelDemand:
        """Return the requests of ``model`` in all frontends."""

    async def announce(self, records: Mapping[str, OnDemandModel]) -> None:
        """Let frontends hold the requests of these models, and of no others."""


@dataclass(frozen=True, slots=True)
class GpuCapacity:
    """The GPUs that all models together may hold, and what fits on them, where it is known."""

    gpus: float
    room: GpuRoom | None = None


class GpuSharing:
    """Decides once per tick. ``capacity`` reads what there is now."""

    def __init__(
        self,
        settings: PlannerSettings,
        namespace: str,
        source: DemandSource,
        capacity: Callable[[], GpuCapacity],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._namespace = namespace
        self._source = source
        self._capacity = capacity
        self._clock = clock
        self._turns = TurnClock()
        self._plan = Sharing()

    async def update(self, models: Mapping[str, tuple[ModelState, Pools]]) -> None:
        """Announce the models on demand, and decide for all ``models``."""
        await self._source.announce(
            {
                state.model.decode.name: record_of(state.model, self._namespace)
                for state, pools in models.values()
                if is_on_demand(pools) and not self._settings.no_operation
            }
        )
        now_s = self._clock()
        shared = [
            replace(
                shared_model(
                    state.model,
                    pools,
                    self._source.demand(name),
                    self._turns.serving_s(name, pools[state.model.decode.pool].ready, now_s),
                    state.wanted,
                ),
                pauses=now_s < state.retry_s,
            )
            for name, (state, pools) in models.items()
        ]
        self._plan = share(shared, self._limits())

    def decision(self, state: ModelState) -> ScalingDecision:
        """Return what to change in the services of a model now."""
        pools = {service.name: service.pool for service in state.model.services}
        return ScalingDecision(
            pools=tuple(
                PoolDecision(pool=pools[change.service], wanted=change.workers, rule=change.rule)
                for change in self._plan.changes
                if change.model == state.model.name
            )
        )

    def max_gpus(self, model: str) -> float:
        """Return the GPUs that the policy of ``model`` may give it."""
        return self._plan.limits.get(model, 0.0)

    def has_room(self, service: ScaledService, delta: int, held: float, needed: float) -> bool:
        """Whether ``delta`` more workers of ``service`` fit now.

        They need ``needed`` GPUs of the budget, of which all models hold ``held``.
        """
        capacity = self._capacity()
        gpus, room = min(self._settings.max_gpu_budget, capacity.gpus), capacity.room
        if not fits(gpus - held, needed):
            return False
        return room is None or not service.assigned or room.count(service.assigned, (), ()) >= delta

    def seen(self, pools: Pools) -> dict[str, Pool]:
        """Return ``pools`` as the policy sees them."""
        return warm(pools) if is_on_demand(pools) else dict(pools)

    def is_cold(self, pools: Pools) -> bool:
        """Whether the model has no worker until requests wait for one."""
        return is_cold(pools)

    def _limits(self) -> SharingLimits:
        settings, capacity = self._settings, self._capacity()
        return SharingLimits(
            gpus=min(settings.max_gpu_budget, capacity.gpus),
            room=capacity.room,
            idle_timeout_s=settings.idle_timeout_s,
            residency_s=settings.min_residency_s,
            patience_s=_PATIENCE * settings.min_residency_s,
        )
