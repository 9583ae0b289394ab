"""How several models share the GPUs of one box: which one gets a worker, which gives one up. Pure.

:func:`share` runs once per metric pull. A model whose requests wait without a worker claims one.
Its GPUs come from free ones, else from the first of these that suffices: idle models; workers of
busy models beyond their first; the last worker of a busy model that has served for the minimum
residency (time slicing). Lower priorities give up first, and ``min`` is never touched. A load that
the planner has begun, and that nothing waits for any more, counts as an idle model.

Loads are not wasted: a model that was loaded answers what waited for it, and serves for as long as
its load took, before a model that has waited for as long as its own load takes gets its turn. The
minimum residency is an upper bound for it. Models of one group are never awake together: all that
are awake give up their workers for a claim, or none does.

A claim that has waited for ``patience_s`` comes before all others, whatever its priority, and may
take from any model. So no model starves: where the minimums leave room for a worker of each of N
models, a claim waits at most ``patience_s`` and N turns of a residency, a drain and a start.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dynamo.errors import ConfigError
from dynamo.observability.logs import counted
from dynamo.serve.gpus.gpus import fits
from dynamo.serve.state.ledger import GpuLedger

_YIELD_SHARE = 10
"""A model without requests for this part of its load time makes room for others."""
_SourceWorker: TypeAlias = "tuple[SharedService, str]"
"""A service that may give up a worker, and the reason."""


class GpuRoom:
    """The GPUs one by one: free halves of two GPUs are not a whole one, and a stopped watcher
    keeps its own. The allocator of ``ledger`` decides, as when a worker starts."""

    def __init__(self, ledger: GpuLedger) -> None:
        self._ledger = ledger

    def count(self, gpus: float, beside: Sequence[float], without: Collection[str]) -> int:
        """Return how many workers of ``gpus`` each fit ``beside`` others of these sizes.

        ``without``: as if these workers held none.
        """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingLimits:
    """The options of sharing, in seconds; ``gpus`` bounds what all models hold together, and
    ``room`` what fits on the GPUs, where it is known.

    ``idle_timeout_s``: without requests for so long, a model drops to its minimum.
    ``yield_idle_s``: without requests for so long, it gives up workers to a model that needs them;
    a tenth of its load time is enough.
    ``residency_s``: a worker serves at least so long before another model takes its GPUs.
    ``patience_s``: a claim that waits for longer comes first.
    """

    gpus: float
    room: GpuRoom | None = None
    idle_timeout_s: float
    yield_idle_s: float = 2.0
    residency_s: float = 30.0
    patience_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedService:
    """One service of a model. ``wanted`` is what its policy wants; None: what it has.

    ``assigned`` GPUs are those that a worker gets; 0: none. ``serving`` are the names of its
    workers, the next to be removed first, ``leaving`` those that drain; ``unplaced`` more are about
    to get their GPUs.
    """

    name: str
    gpus_per_worker: float
    ready: int = 0
    starting: int = 0
    draining: int = 0
    minimum: int = 0
    wanted: int | None = None
    assigned: float = 0.0
    serving: Sequence[str] = ()
    leaving: Sequence[str] = ()
    unplaced: int = 0

    @property
    def workers(self) -> int:
        """The workers that serve or will serve."""
        return self.ready + self.starting

    @property
    def held(self) -> float:
        """The GPUs that it holds now."""
        return (self.ready + self.starting + self.draining) * self.gpus_per_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedModel:
    """One model: its decode service, then its prefill service if it has one.

    ``waiting`` requests have no worker, the oldest for ``oldest_s``. There were no requests for
    ``idle_s``; None if that is unknown. Its first worker has served for ``serving_s``, its newest
    one for ``newest_s``; an operator may have loaded it then. ``abandoned``: all its workers are
    being started by the planner, for requests that have left. ``pauses``: its last start has
    failed, and nothing is started for a while. ``load_s``: the time that its last load took, None
    if there was none. ``idle_timeout_s``: its own, None for that of all.
    ``groups``: see the module.
    """

    name: str
    services: Sequence[SharedService]
    priority: int = 0
    waiting: int = 0
    oldest_s: float = 0.0
    idle_s: float | None = None
    serving_s: float = 0.0
    newest_s: float = math.inf
    abandoned: bool = False
    pauses: bool = False
    load_s: float | None = None
    idle_timeout_s: float | None = None
    groups: Collection[str] = ()

    @property
    def decode(self) -> SharedService:
        """The service without which it cannot answer."""
        return self.services[0]

    @property
    def is_cold(self) -> bool:
        """Whether requests wait, no worker serves or starts, and one may be started."""
        return self.waiting > 0 and not self.decode.workers and not self.pauses

    def excludes(self, other: SharedModel) -> bool:
        """Whether the two may not be awake together."""
        return self is not other and not set(self.groups).isdisjoint(other.groups)

    def has_been_idle(self, seconds: float) -> bool:
        """Whether it is known to have had no request for ``seconds``."""
        return not self.waiting and self.idle_s is not None and self.idle_s >= seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceChange:
    """``service`` of ``model`` is to have ``workers`` workers, for the reason ``rule``."""

    model: str
    service: str
    workers: int
    rule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What to change now, and the GPUs that each model may hold as far as its policy decides."""

    changes: Sequence[ServiceChange] = ()
    limits: Mapping[str, float] = field(default_factory=dict)


def share(models: Sequence[SharedModel], limits: SharingLimits) -> Sharing:
    """Decide for all models together. Never more GPUs than ``limits.gpus``."""
    round_ = _Round(models, limits)
    # In this order: idle models free GPUs, claims take them, and growth gets what is left.
    for model in models:
        round_.drop_idle(model)
    for model in sorted(models, key=round_.rank):
        if model.is_cold:
            round_.claim(model, model.decode)
    for model in sorted(models, key=round_.rank):
        if not model.is_cold and not model.pauses:
            round_.complete(model)
            round_.grow(model)
    return round_.result()


class _Gpus:
    """The GPUs that are ``free``, in the budget and one by one, and those that will be soon."""

    def __init__(self, services: Sequence[SharedService], limits: SharingLimits) -> None:
        self.free = limits.gpus - sum(service.held for service in services)
        self._leaving = sum(service.draining * service.gpus_per_worker for service in services)
        self._room = limits.room
        self._taken = [service.assigned for service in services for _ in range(service.unplaced)]
        self._exiting = [name for service in services for name in service.leaving]
        self._given_up = Counter[str]()

    def have(self, service: SharedService, sources: Sequence[SharedService] | None = None) -> bool:
        """Whether there are GPUs for one more worker of ``service``.

        Without ``sources`` now, else when a worker of each of them has exited, and all that leave.
        """
        free, without = self.free, []
        if sources is not None:
            free += self._leaving + sum(source.gpus_per_worker for source in sources)
            without = [
                *self._exiting,
                *self._next(Counter(source.name for source in sources), sources),
            ]
        return fits(free, service.gpus_per_worker) and self._count(service, without) > 0

    def take(self, service: SharedService) -> None:
        """Count one more worker of ``service``."""
        self.free -= service.gpus_per_worker
        self._taken.append(service.assigned)

    def wait_for(self, service: SharedService, reserve: bool) -> None:
        """Let a worker of ``service`` have what leaves; ``reserve``: and what is free now."""
        # What it takes of the leaving GPUs is not there for the next one that asks.
        missing = max(0.0, service.gpus_per_worker - self.free)
        self._leaving = max(0.0, self._leaving - missing)
        if reserve:
            self.free = 0.0
            self._taken.append(service.assigned)

    def give_up(self, service: SharedService, count: int) -> None:
        """Count ``count`` workers of ``service`` as leaving."""
        self._leaving += count * service.gpus_per_worker
        self._exiting += self._next(Counter({service.name: count}), [service])
        self._given_up[service.name] += count

    def spare(self, services: Sequence[SharedService]) -> float:
        """Return the free GPUs that workers of ``services`` can use."""
        usable = max(self._count(service, ()) * service.gpus_per_worker for service in services)
        return max(0.0, min(self.free, usable))

    def _count(self, service: SharedService, without: Collection[str]) -> float:
        """Return how many workers fit on the GPUs; infinitely many where that is not known."""
        if self._room is None or not service.assigned:
            return math.inf
        return self._room.count(service.assigned, self._taken, without)

    def _next(self, counts: Mapping[str, int], services: Iterable[SharedService]) -> list[str]:
        """Return the names of the next workers to be removed, so many of each service."""
        names: list[str] = []
        for service in {service.name: service for service in services}.values():
            # Those before it were given up earlier in this round.
            first = self._given_up[service.name]
            names += service.serving[first : first + counts[service.name]]
        return names


class _Round:
    """One call of :func:`share`."""

    def __init__(self, models: Sequence[SharedModel], limits: SharingLimits) -> None:
        self._models = models
        self._limits = limits
        services = [service for model in models for service in model.services]
        self._workers = {service.name: service.workers for service in services}
        self._rules: dict[str, str] = {}
        self._gpus = _Gpus(services, limits)

    def rank(self, model: SharedModel) -> tuple[bool, float, float, str]:
        """The order of claims: those that are out of patience, then by priority and age."""
        late = self._is_late(model)
        priority = 0 if late else model.priority
        return (not late, -priority, -model.oldest_s, model.name)

    def drop_idle(self, model: SharedModel) -> None:
        """Reduce a model without requests to its minimum."""
        limit_s = model.idle_timeout_s
        if limit_s is None:
            limit_s = self._limits.idle_timeout_s
        # An operator may load or wake it without requests: the time starts when it serves.
        idle = model.has_been_idle(limit_s) and model.newest_s >= limit_s
        if idle and not any(service.starting for service in model.services):
            for service in model.services:
                if service.workers > service.minimum:
                    self._give_up(service, service.minimum, f"no requests for {limit_s:g} s")

    def claim(self, model: SharedModel, service: SharedService) -> None:
        """Get the first worker of a model whose requests wait, from others if need be."""
        late = self._is_late(model)
        if any(model.excludes(other) and self._is_there(other) for other in self._models):
            self._take_turn(model, late)
            return
        waiting = counted(model.waiting, "request waits", "requests wait")
        if self._start(service, f"{waiting} for a worker"):
            return
        sources = [*self._idle(model), *self._surplus(model, late), *self._last(model, late)]
        if self._take(sources, service) or late:
            # Reserved: no later claim gets what is free, or is about to be.
            self._gpus.wait_for(service, reserve=True)

    def complete(self, model: SharedModel) -> None:
        """Start a prefill worker behind the first decode worker, with GPUs that are free."""
        for service in model.services[1:]:
            used = self._workers[model.decode.name] and not self._is_idle(model)
            if used and not service.workers:
                self._start(service, "the model has a decode worker and no prefill worker")

    def grow(self, model: SharedModel) -> None:
        """Add the workers that a policy wants, one at a time, from idle models and those of lower
        priority if need be."""
        if self._is_idle(model) or not model.decode.workers or self._is_given_up(model):
            return
        for service in model.services:
            if (service.wanted or 0) <= self._workers[service.name]:
                continue
            if not self._start(service, "its policy wants it, and GPUs are free now"):
                self._take(self._spare_of_others(model), service)
                self._gpus.wait_for(service, reserve=False)

    def result(self) -> Sharing:
        """Return the changes of this round."""
        for model in self._models:  # prefill workers without a decode worker serve nothing
            for service in model.services[1:] if self._is_given_up(model) else ():
                if self._workers[service.name] > service.minimum:
                    self._give_up(service, service.minimum, self._rules[model.decode.name])
        changes = [
            ServiceChange(
                model=model.name,
                service=service.name,
                workers=self._workers[service.name],
                rule=self._rules[service.name],
            )
            for model in self._models
            for service in model.services
            if self._workers[service.name] != service.workers
        ]
        limits = {
            model.name: sum(service.held for service in model.services)
            + self._gpus.spare(model.services)
            + sum(service.gpus_per_worker for service, _ in self._spare_of_others(model))
            for model in self._models
        }
        return Sharing(changes=changes, limits=limits)

    def _take_turn(self, model: SharedModel, late: bool) -> None:
        """Have all models that exclude ``model`` give up their workers, if each of them may."""
        others = [
            other for other in self._models if model.excludes(other) and self._workers_of(other)
        ]
        if not all(self._may_leave(other, model, late) for other in others):
            return
        for other in others:
            for service in other.services:
                if self._workers[service.name] > service.minimum:
                    rule = f"requests of {model.name} wait, which is of the same group"
                    self._give_up(service, service.minimum, rule)
        if others or late:
            self._gpus.wait_for(model.decode, reserve=late)

    def _may_leave(self, other: SharedModel, model: SharedModel, late: bool) -> bool:
        """Whether all workers of ``other`` may go now for the requests of ``model``."""
        if other.decode.minimum or other not in self._others(model):
            return False
        return self._yields(other) or self._has_served(other, model, late)

    def _workers_of(self, model: SharedModel) -> int:
        return sum(self._workers[service.name] for service in model.services)

    def _is_there(self, model: SharedModel) -> bool:
        """Whether workers of ``model`` serve, will serve, or have not exited yet."""
        return self._workers_of(model) > 0 or any(s.workers or s.draining for s in model.services)

    def _start(self, service: SharedService, rule: str) -> bool:
        """Add a worker if its GPUs are free."""
        if not self._gpus.have(service):
            return False
        self._workers[service.name] += 1
        self._rules[service.name] = rule
        self._gpus.take(service)
        return True

    def _is_given_up(self, model: SharedModel) -> bool:
        return model.decode.workers > 0 and not self._workers[model.decode.name]

    def _is_idle(self, model: SharedModel) -> bool:
        return model.has_been_idle(self._limits.yield_idle_s)

    def _yields(self, model: SharedModel) -> bool:
        """Whether ``model`` has been idle for long enough that waiting requests take its GPUs.

        A load that nothing waits for gives way at once.
        """
        if model.abandoned:
            return True
        # The less a load costs, the sooner a model may give way.
        load_s = math.inf if model.load_s is None else model.load_s
        return model.has_been_idle(min(self._limits.yield_idle_s, load_s / _YIELD_SHARE))

    def _is_late(self, model: SharedModel) -> bool:
        return model.is_cold and model.oldest_s >= self._limits.patience_s

    def _take(self, sources: Sequence[_SourceWorker], service: SharedService) -> bool:
        """Have the first ``sources`` that suffice give up a worker each for one of ``service``.

        If all of them are not enough, none does.
        """
        chosen: list[_SourceWorker] = []
        rest = list(sources)
        while not self._gpus.have(service, [giver for giver, _ in chosen]):
            if not rest:
                return False
            chosen.append(rest.pop(0))
        for source in list(chosen):  # that is not needed beside those after it
            others = [pair for pair in chosen if pair is not source]
            if self._gpus.have(service, [giver for giver, _ in others]):
                chosen = others
        for giver, rule in chosen:
            self._give_up(giver, self._workers[giver.name] - 1, rule)
        return True

    def _spare_of_others(self, model: SharedModel) -> list[_SourceWorker]:
        """The workers that a busy model may have of others: of idle ones, and surplus ones."""
        idle = [
            pair
            for other in self._others(model)
            if self._is_idle(other) and other.priority <= model.priority and not other.abandoned
            for pair in self._above(other, 0, f"idle, and {model.name} needs a worker")
        ]
        return [*idle, *self._surplus(model, late=False, below=True)]

    def _give_up(self, service: SharedService, workers: int, rule: str) -> None:
        fewer = self._workers[service.name] - workers
        self._workers[service.name] = workers
        self._rules[service.name] = rule
        self._gpus.give_up(service, fewer)

    def _idle(self, model: SharedModel) -> Iterator[_SourceWorker]:
        """Workers of idle models: of abandoned loads, then of the longest idle one."""
        idle = [other for other in self._others(model) if self._yields(other)]
        for other in sorted(idle, key=lambda other: (not other.abandoned, -(other.idle_s or 0.0))):
            yield from self._above(other, 0, f"idle, and requests of {model.name} wait")

    def _surplus(
        self, model: SharedModel, late: bool, below: bool = False
    ) -> Iterator[_SourceWorker]:
        """Workers of busy models beyond the first; ``below``: of lower priorities only."""
        for other in self._busy(model):
            lower = other.priority < model.priority
            if lower or (not below and (late or other.priority == model.priority)):
                yield from self._above(other, 1, f"{model.name} needs a worker")

    def _last(self, model: SharedModel, late: bool) -> Iterator[_SourceWorker]:
        """The last worker of busy models that have had their turn."""
        for other in self._busy(model):
            if self._has_served(other, model, late):
                rule = f"requests of {model.name} wait, and its own were served for"
                for service in other.services:
                    # Its first worker alone: _surplus() offers the others.
                    if min(self._workers[service.name], 1) > service.minimum:
                        yield service, f"{rule} {other.serving_s:.0f} s"

    def _has_served(self, other: SharedModel, model: SharedModel, late: bool) -> bool:
        """Whether busy ``other`` has had its turn, and that of ``model`` is now."""
        limits = self._limits
        if not late and (other.priority > model.priority or other.waiting):
            return False
        if other.serving_s >= limits.residency_s:
            return True
        if other.load_s is None or model.load_s is None:
            return False
        return other.serving_s >= other.load_s and model.oldest_s >= model.load_s

    def _busy(self, model: SharedModel) -> list[SharedModel]:
        """The others that are not idle; lowest priority first, then the longest serving."""
        busy = [other for other in self._others(model) if not self._yields(other)]
        return sorted(busy, key=lambda other: (other.priority, -other.serving_s))

    def _others(self, model: SharedModel) -> Iterator[SharedModel]:
        for other in self._models:
            starting = any(service.starting for service in other.services)
            if other is not model and not other.is_cold and (other.abandoned or not starting):
                yield other

    def _above(self, model: SharedModel, kept: int, rule: str) -> Iterator[_SourceWorker]:
        """One pair for each worker of ``model`` above its minimum and ``kept``."""
        for service in reversed(model.services):
            for _ in range(self._workers[service.name] - max(kept, service.minimum)):
                yield service, rule
