"""A deployment for the planner's loop, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from dynamo.config.planner import PlannerSettings
from dynamo.operations.steps.limits import ActionFailed
from dynamo.planner.capacity.observation import Observation, Pull, Traffic, WorkerLoad
from dynamo.planner.connector import (
    DRAINING,
    READY,
    STARTING,
    ScaledService,
    ScaledWorker,
)
from dynamo.planner.live.actions import WorkerAction
from dynamo.planner.live.decisions import DecisionRecord
from dynamo.planner.live.loop import LoopObserver
from dynamo.planner.live.model_state import Pools, ScaledModel
from dynamo.planner.live.sources import LiveSources
from dynamo.planner.policies.base import PoolDecision, ScalingDecision


class FakeConnector:
    """Services whose workers start and drain when the test says so, or at once."""

    def __init__(self, *services: ScaledService, manual: bool = False) -> None:
        self.by_name = {service.name: service for service in services}
        self.calls: list[str] = []
        self.gates: list[asyncio.Event] = []
        self.most_gpus = 0.0
        self.failure: Exception | None = None
        self.unknown: Exception | None = None
        self.reason = ""
        self._manual = manual
        self._number = 0

    def configure(self, settings: PlannerSettings) -> None:
        pass

    async def reconcile(self) -> list[str]:
        return []

    async def services(self) -> Mapping[str, ScaledService]:
        if self.unknown is not None:
            raise self.unknown
        return dict(self.by_name)

    async def add(self, service: str) -> str:
        self._number += 1
        name = f"{service}_{self._number}"
        self.calls.append(f"add {service}")
        if self.failure is not None:
            raise self.failure
        self._put(service, ScaledWorker(name=name, state=STARTING))
        try:
            await self._wait()
        except asyncio.CancelledError:
            self._drop(service, name)
            self.calls.append(f"undo {service}")
            raise
        self._drop(service, name)
        if self.reason:
            reason, self.reason = self.reason, ""
            raise ActionFailed(f"given up: {reason}")
        self._put(service, ScaledWorker(name=name, state=READY, worker_id=self._number))
        return name

    def give_up(self, service: str, reason: str) -> None:
        """Let the starts that wait fail, as a connector that undoes them."""
        self.calls.append(f"give up {service}")
        self.reason = reason
        for gate in self.gates:
            gate.set()

    async def remove(self, service: str) -> str:
        self.calls.append(f"remove {service}")
        ready = [w for w in self.by_name[service].workers if w.state == READY]
        if not ready:
            raise ActionFailed(f"{service} has no worker")
        worker = ready[-1]
        self._drop(service, worker.name)
        self._put(service, replace(worker, state=DRAINING))
        await self._wait()
        self._drop(service, worker.name)
        return worker.name

    def count(self, service: str, state: str = READY) -> int:
        return sum(worker.state == state for worker in self.by_name[service].workers)

    async def _wait(self) -> None:
        gate = asyncio.Event()
        self.gates.append(gate)
        if not self._manual:
            gate.set()
        await gate.wait()

    def _put(self, service: str, worker: ScaledWorker) -> None:
        found = self.by_name[service]
        self.by_name[service] = replace(found, workers=(*found.workers, worker))
        gpus = sum(len(one.workers) * one.gpus_per_worker for one in self.by_name.values())
        self.most_gpus = max(self.most_gpus, gpus)

    def _drop(self, service: str, name: str) -> None:
        found = self.by_name[service]
        workers = tuple(worker for worker in found.workers if worker.name != name)
        self.by_name[service] = replace(found, workers=workers)


def service(
    name: str, workers: int = 1, model: str = "tiny", pool: str = "decode", gpus: float = 1.0
) -> ScaledService:
    """Return a service with workers that serve."""
    ready = [
        ScaledWorker(name=f"{name}-{number}", state=READY, worker_id=1000 + number)
        for number in range(workers)
    ]
    return ScaledService(
        name=name, model=model, pool=pool, gpus_per_worker=gpus, workers=tuple(ready)
    )


class FakeSources(LiveSources):
    """The same KV load on every worker."""

    def __init__(self, usage: float = 0.0) -> None:
        self.usage = usage
        self.queue: float | None = None
        self.known = True
        self.pulls = 0

    def follow(self, models: Iterable[ScaledModel]) -> None:
        pass

    def pull(self, model: ScaledModel, now_s: float) -> Pull:
        self.pulls += 1
        loads = [
            WorkerLoad(
                worker_id=worker.worker_id,
                kv_used_blocks=int(1000 * self.usage),
                kv_total_blocks=1000,
            )
            for worker in model.decode.workers
            if worker.state == READY and worker.worker_id is not None
        ]
        return Pull(at_s=now_s, decode=tuple(loads), prefill_queue=self.queue)

    async def read_frontends(self) -> None:
        pass

    def traffic(self, model: str, now_s: float, *, ends: bool) -> Traffic:
        return Traffic(duration_s=1.0, arrived=3, known=self.known)


@dataclass
class Wanted:
    """A policy that wants what the test says."""

    decode: int | Callable[[Observation], int] = 1
    interval_s: float = 0.02
    blocking: bool = True
    name: str = "wanted"
    seen: list[Observation] = field(default_factory=list)
    failures: list[Collection[str]] = field(default_factory=list)

    def decide(self, seen: Observation) -> ScalingDecision:
        self.seen.append(seen)
        wanted = self.decode if isinstance(self.decode, int) else self.decode(seen)
        return ScalingDecision(pools=(PoolDecision(pool="decode", wanted=wanted, rule="test"),))

    def applied(self, decision: ScalingDecision, failed: Collection[str]) -> None:
        self.failures.append(tuple(failed))

    def __deepcopy__(self, memo: object) -> Wanted:
        return replace(self, seen=[], failures=[])


class Recorder(LoopObserver):
    """Keeps what the loop reports."""

    def __init__(self) -> None:
        self.counts: list[Pools] = []
        self.pools: list[Pools] = []
        self.decisions: list[DecisionRecord] = []
        self.records: list[DecisionRecord] = []
        self.actions: list[WorkerAction] = []
        self.models_forgotten: list[str] = []
        self.waits_for: dict[str, str] = {}

    def counted(self, model: str, now_s: float, pools: Pools) -> None:
        self.counts.append(pools)

    def waits(self, model: str, reason: str) -> None:
        self.waits_for[model] = reason

    def pulled(self, model: str, pull: Pull, pools: Pools) -> None:
        self.pools.append(pools)

    def decided(self, record: DecisionRecord, seen: Observation, decision: ScalingDecision) -> None:
        self.decisions.append(record)

    def finished(self, record: DecisionRecord) -> None:
        self.records.append(record)

    def acted(self, action: WorkerAction) -> None:
        self.actions.append(action)

    def forgotten(self, model: str) -> None:
        self.models_forgotten.append(model)
