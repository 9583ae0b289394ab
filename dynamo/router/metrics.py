"""The metrics of decisions: children are looked up once, then a count is a plain addition.

Caches, eligibility, the queue and replicas export theirs in their own modules. Spec 6.2, 6.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dynamo.observability.metrics import Registry
from dynamo.observability.names import FrontendNames, Router, counter, gauge, histogram
from dynamo.observability.names_router import Hits
from dynamo.router.load.active import ActiveLoad, Reservation
from dynamo.router.prompt import HashedPrompt
from dynamo.router.worker_pool import Member

__all__ = ["DecisionMetrics", "RouterLabels", "WorkerMetrics"]


@dataclass(frozen=True)
class RouterLabels:
    """The label values of a router: the component routed to, and the process that routes.

    ``phase`` is the work of the routed requests there (aggregated, prefill, decode),
    ``worker_type`` the kind of worker (prefill, decode).
    """

    namespace: str
    component: str
    model: str = ""
    router_id: str = "0"
    phase: str = "aggregated"
    worker_type: str = "decode"

    @property
    def router(self) -> tuple[str, ...]:
        """Label values of the per-router families."""
        return self.component, self.namespace, self.router_id, self.router_id

    @property
    def typed(self) -> tuple[str, ...]:
        """Label values of the families that distinguish prefill workers from others."""
        return (*self.router, self.worker_type)

    @property
    def modelled(self) -> tuple[str, ...]:
        """Label values of the per-model families."""
        return (
            self.component,
            self.namespace,
            self.model,
            self.phase,
            self.router_id,
            self.router_id,
        )


class DecisionMetrics:
    """The duration of decisions by step, the cached blocks they found, the progress of requests.

    ``ttft`` and ``reused`` are updated by the picker itself.
    """

    def __init__(self, registry: Registry, place: RouterLabels) -> None:
        steps = (
            Router.BLOCK_HASHING_MS,
            Router.SEQ_HASHING_MS,
            Router.FIND_MATCHES_MS,
            Router.SCHEDULING_MS,
        )
        self.worker_type = place.worker_type
        self._hashing, self._chaining, self._matching, self._scheduling = (
            histogram(registry, step).labels(place.router_id) for step in steps
        )
        self._total = histogram(registry, Router.TOTAL_MS).labels(place.router_id)
        self._started = counter(registry, Router.STARTED).labels(*place.router)
        self._ended = counter(registry, Router.REQUESTS).labels(*place.router)
        self._hit_rate = histogram(registry, Router.HIT_RATE).labels(*place.router)
        self._isl = histogram(registry, Router.ISL).labels(*place.modelled)
        self._osl = histogram(registry, Router.OSL).labels(*place.router)
        self.ttft = histogram(registry, Router.TTFT).labels(*place.router)
        self._itl = histogram(registry, Router.ITL).labels(*place.router)
        self._cached, self._best, self.reused = (
            counter(registry, spec).labels(*place.modelled)
            for spec in (Hits.SELECTED_TOKENS, Hits.BEST_TOKENS, Hits.REUSED_TOKENS)
        )
        self._elsewhere = counter(registry, Hits.NON_MAX).labels(*place.typed)
        self._lost = histogram(registry, Hits.LOST_BLOCKS).labels(*place.typed)
        self._beyond = histogram(registry, Hits.SHARED_BEYOND).labels(*place.router)
        self._shared_rate = histogram(registry, Hits.SHARED_HIT_RATE).labels(*place.router)

    def decided(
        self,
        prompt: HashedPrompt,
        booked_s: float,
        found: float,
        block_size: int,
    ) -> None:
        """Count a request booked at ``booked_s``; its worker has ``found`` effective blocks."""
        best = prompt.best_overlap
        begun_s, hashed_s, chained_s = prompt.begun_s, prompt.hashed_s, prompt.chained_s
        self._hashing.observe((hashed_s - begun_s) * 1e3)
        self._chaining.observe((chained_s - hashed_s) * 1e3)
        self._matching.observe((prompt.matched_s - chained_s) * 1e3)
        self._scheduling.observe((booked_s - prompt.matched_s) * 1e3)
        self._total.observe((booked_s - begun_s) * 1e3)
        self._started.value += 1
        self._isl.observe(prompt.isl_tokens)
        self._cached.value += found * block_size
        self._best.value += best * block_size
        if best > found:
            self._elsewhere.value += 1
            self._lost.observe(best - found)
        if prompt.blocks:
            self._hit_rate.observe(found / prompt.blocks)

    def shared(self, blocks: int, beyond: int, prompt_blocks: int) -> None:
        """Count shared ``blocks`` of a prompt, ``beyond`` of them not cached on the chosen slot."""
        if prompt_blocks:
            self._beyond.observe(beyond)
            self._shared_rate.observe(blocks / prompt_blocks)

    def ended(self, reservation: Reservation, now_s: float) -> None:
        """Count a request that has ended, in whatever way."""
        self._ended.value += 1
        self._osl.observe(reservation.output_tokens)
        gaps = reservation.output_tokens - 1
        if reservation.first_token_at_s is not None and gaps > 0:
            self._itl.observe((now_s - reservation.first_token_at_s) / gaps, gaps)


class WorkerMetrics:
    """One series per (worker, dp_rank) that can be chosen, removed with the worker."""

    def __init__(self, registry: Registry, place: RouterLabels) -> None:
        self._place = place
        self._registered = gauge(registry, Router.WORKER_REGISTERED)
        self._loads = (
            gauge(registry, FrontendNames.WORKER_PREFILL_TOKENS),
            gauge(registry, FrontendNames.WORKER_DECODE_BLOCKS),
        )

    def added(self, member: Member, active: ActiveLoad) -> None:
        """Export the worker and its load."""
        for rank, slot in member.slots.items():
            self._registered.labels(*self._registration(member, rank)).set(1)
            for part, family in enumerate(self._loads):
                child = family.labels(str(rank), str(member.worker_id), self._place.worker_type)
                child.function = _reader(active, slot, part)

    def removed(self, member: Member) -> None:
        """Remove the worker's series."""
        for rank in member.slots:
            for family in self._loads:
                family.remove(str(rank), str(member.worker_id), self._place.worker_type)
            self._registered.remove(*self._registration(member, rank))

    def _registration(self, member: Member, rank: int) -> tuple[str, ...]:
        place = self._place
        return (
            str(rank),
            place.component,
            place.namespace,
            str(member.worker_id),
            place.router_id,
            place.worker_type,
        )


def _reader(active: ActiveLoad, slot: int, part: int) -> Callable[[], float]:
    return lambda: active.load(slot)[part]
