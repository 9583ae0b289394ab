"""Adding and removing workers: within the GPU budget, and in one direction at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from dynamo.errors import DynamoError
from dynamo.observability.logs import counted
from dynamo.operations.steps.limits import ActionLimits
from dynamo.planner.capacity.observation import Pool
from dynamo.planner.connector import (
    ASLEEP,
    Connector,
    ScaledService,
    ScaledWorker,
)
from dynamo.planner.live.model_state import InFlight, pool_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerAction:
    """One worker was added to, or removed from, a service; ``problem`` says why it was not."""

    service: str
    model: str
    pool: str
    adds: bool
    seconds: float
    worker: str = ""
    problem: str = ""

    def __str__(self) -> str:
        verb = "add" if self.adds else "remove"
        where = f"{'to' if self.adds else 'from'} {self.service}"
        if self.problem:
            return f"cannot {verb} a worker {where}: {self.problem}"
        return f"{verb.rstrip('e')}ed {self.worker} {where} in {self.seconds:.1f} s"


OnAction = Callable[[WorkerAction], object]
LeastWorkers = Callable[[float, str], int]
"""Returns how many workers of so many GPUs each a pool keeps."""


@dataclass(eq=False, slots=True)
class _Add:
    """An add in flight; ``before`` are the workers listed when it began, None until then."""

    before: set[str] | None = None


@dataclass(slots=True)
class _Flight:
    """The actions in flight in one service."""

    adds: list[_Add] = field(default_factory=list)
    removing: int = 0
    given_up: bool = False


class WorkerActions:
    """Carries out the changes of all models through ``connector``.

    Before each add it counts the GPUs of all ``services()`` again, so that together they never
    exceed ``limits``. A service without a ``min`` keeps ``least`` workers, by the GPUs of one and
    the pool. A failed action is reported to ``on_action``, and logged unless the one before
    failed for the same reason.
    """

    def __init__(
        self, connector: Connector, limits: ActionLimits, least: LeastWorkers, on_action: OnAction
    ) -> None:
        self._connector = connector
        self._limits = limits
        self._least = least
        self._on_action = on_action
        self._flights: dict[str, _Flight] = {}
        self._adding: set[asyncio.Task[object]] = set()
        self._gate = asyncio.Lock()
        self._problems: dict[tuple[str, bool], str] = {}

    def configure(self, limits: ActionLimits, least: LeastWorkers) -> None:
        """Keep ``limits`` and ``least`` from the next action on."""
        self._limits, self._least = limits, least

    def pool(self, service: ScaledService, *, admitted: bool = False) -> Pool:
        """Return the pool of ``service`` with the actions in flight, or only the ``admitted``."""
        flight = self._flight(service.name)
        adds = [add for add in flight.adds if add.before is not None or not admitted]
        in_flight = InFlight(_unseen(adds, service), flight.removing)
        return pool_of(service, self._least(service.gpus_per_worker, service.pool), in_flight)

    def gpus(self, services: Iterable[ScaledService]) -> float:
        """Return the GPUs that ``services`` hold, those of adds in flight included."""
        return sum(self.pool(service).gpus for service in services)

    def conflict(self, service: str, delta: int) -> str:
        """Return why ``service`` cannot be changed by ``delta`` workers now, else ""."""
        flight = self._flight(service)
        if delta > 0 and flight.removing:
            removed = counted(flight.removing, "worker is", "workers are")
            return f"{removed} still being removed from it"
        if delta < 0 and flight.adds:
            added = counted(len(flight.adds), "worker is", "workers are")
            return f"{added} still being added to it"
        return ""

    def starting(self, service: str) -> int:
        """Return how many workers of ``service`` are being added here."""
        return len(self._flight(service).adds)

    def give_up(self, service: str, reason: str) -> None:
        """Fail the adds of ``service`` in flight for ``reason``; what they began is undone."""
        flight = self._flight(service)
        if flight.adds and not flight.given_up:
            log.info("%s: giving up its start: %s", service, reason)
            flight.given_up = True
            self._connector.give_up(service, reason)

    def gave_up(self, service: str) -> bool:
        """Return whether the last adds of ``service`` were given up: then they have not failed."""
        return self._flight(service).given_up

    def begin(self, service: ScaledService, delta: int) -> Coroutine[object, object, str]:
        """Count a change by ``delta`` workers from now on; the result carries it out.

        It returns "", or what went wrong.
        """
        flight = self._flight(service.name)
        adds = [_Add() for _ in range(delta)]
        flight.adds += adds
        flight.removing += max(0, -delta)
        flight.given_up = False
        work = [partial(self._add, service, add) for add in adds]
        # A list times a negative number is empty, as is a negative range above.
        work += [partial(self._remove, service)] * -delta
        return self._run_all(work)

    def cancel_adds(self) -> None:
        """Cancel the adds in flight; the connector undoes them, or its next repair keeps them."""
        for task in self._adding:
            task.cancel()

    async def _run_all(self, work: Iterable[Callable[[], Coroutine[object, object, str]]]) -> str:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(action()) for action in work]
        problems = {"cancelled" if task.cancelled() else task.result() for task in tasks} - {""}
        return "; ".join(sorted(problems))

    async def _add(self, service: ScaledService, add: _Add) -> str:
        adds = self._flight(service.name).adds
        task = asyncio.current_task()
        assert task is not None
        self._adding.add(task)
        try:
            return await self._act(service, True, self._admitted(service, add))
        finally:
            self._adding.discard(task)
            adds.remove(add)

    async def _remove(self, service: ScaledService) -> str:
        try:
            return await self._act(service, False, self._connector.remove(service.name))
        finally:
            self._flight(service.name).removing -= 1

    async def _admitted(self, service: ScaledService, add: _Add) -> str:
        """Add a worker if the budget allows it."""
        async with self._gate:
            services = await self._connector.services()
            mine = [
                candidate for candidate in services.values() if self._limits.scales(candidate.model)
            ]
            in_use = sum(self.pool(candidate, admitted=True).gpus for candidate in mine)
            self._limits.check(in_use, service.gpus_per_worker)
            listed = services.get(service.name, service).workers
            add.before = _awake(listed)
        # Outside the gate, as a start takes minutes: with `before` set, the next add counts it.
        name = await self._connector.add(service.name)
        for other in self._flight(service.name).adds:
            if other.before is not None:
                other.before.add(name)  # it is not the new worker of the others
        return name

    async def _act(self, service: ScaledService, adds: bool, work: Awaitable[str]) -> str:
        """Await ``work``, report its outcome, return the problem or ""."""
        started_s = time.monotonic()
        worker = problem = ""
        try:
            worker = await work
        except DynamoError as error:
            problem = error.message
        except Exception as error:  # the planner outlives every failure of an action
            log.exception("%s: an action failed", service.name)
            problem = repr(error)
        action = WorkerAction(
            service=service.name,
            model=service.model,
            pool=service.pool,
            adds=adds,
            seconds=time.monotonic() - started_s,
            worker=worker,
            problem=problem,
        )
        # What fails alike in each interval is a warning the first time only.
        repeated = problem and problem == self._problems.get((service.name, adds))
        fails = problem and not self.gave_up(service.name)
        level = logging.WARNING if fails else logging.INFO
        log.log(logging.DEBUG if repeated else level, "%s", action)
        self._problems[service.name, adds] = problem
        self._on_action(action)
        return problem

    def _flight(self, service: str) -> _Flight:
        return self._flights.setdefault(service, _Flight())


def _unseen(adds: Sequence[_Add], service: ScaledService) -> int:
    """Return how many of ``adds`` have no new worker in ``service`` yet."""
    names = _awake(service.workers)
    unseen = 0
    for add in reversed(adds):  # a newer one has fewer workers that can be its own
        new = set() if add.before is None else names - add.before
        if new:
            names.discard(max(new))
        else:
            unseen += 1
    return unseen


def _awake(workers: Iterable[ScaledWorker]) -> set[str]:
    """Return the names of those that do not sleep: a sleeping one may be the next to be added."""
    return {worker.name for worker in workers if worker.state != ASLEEP}
