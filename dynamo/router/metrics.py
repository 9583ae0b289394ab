"""What the router counts of its decisions: children looked up once, then plain additions.

What it counts of caches, eligibility, the queue and replicas stands in those rooms. Spec 6.2, 6.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Whose metrics these are: the component routed to, and the process that routes.

    ``phase`` and ``worker_type`` are label values: what the routed requests do there (aggregated,
    prefill, decode), and what the workers are (prefill, decode).
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
        """Label values of the families that tell prefill workers from others."""
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
    """Where the time of a decision goes, what it finds, and how its requests end."""

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
        self._ttft = histogram(registry, Router.TTFT).labels(*place.router)
        self._itl = histogram(registry, Router.ITL).labels(*place.router)
        self._cached, self._best, self._reused = (
            counter(registry, spec).labels(*place.modelled)
            for spec in (Hits.SELECTED_TOKENS, Hits.BEST_TOKENS, Hits.REUSED_TOKENS)
        )
        self._elsewhere = counter(registry, Hits.NON_MAX).labels(*place.typed)
        self._lost = histogram(registry, Hits.LOST_BLOCKS).labels(*place.typed)
        self._beyond = histogram(registry, Hits.SHARED_BEYOND).labels(*place.router)
        self._shared_rate = histogram(registry, Hits.SHARED_HIT_RATE).labels(*place.router)

    def decided(
        self,
        times: Sequence[float],
        prompt: HashedPrompt,
        found: float,
        best: float,
        block_size: int,
    ) -> None:
        """A request was booked; ``times`` are the borders of the four steps, seconds.

        ``found`` effective blocks of it are where it goes, ``best`` is the most that any eligible
        worker has.
        """
        begun, hashed, chained, matched, ended = times
        self._hashing.observe((hashed - begun) * 1e3)
        self._chaining.observe((chained - hashed) * 1e3)
        self._matching.observe((matched - chained) * 1e3)
        self._scheduling.observe((ended - matched) * 1e3)
        self._total.observe((ended - begun) * 1e3)
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
        """``blocks`` of a prompt are shared, ``beyond`` of them behind the chosen slot's."""
        if prompt_blocks:
            self._beyond.observe(beyond)
            self._shared_rate.observe(blocks / prompt_blocks)

    def add_reused_tokens(self, tokens: int) -> None:
        """An engine said how many prompt tokens it did not have to compute."""
        self._reused.value += tokens

    def first_token(self, reservation_id: Reservation) -> None:
        """The first token came."""
        if reservation_id.first_token_at_s is not None:
            self._ttft.observe(reservation_id.first_token_at_s - reservation_id.booked_at_s)

    def ended(self, reservation_id: Reservation, now_s: float) -> None:
        """A request ended, however it did."""
        self._ended.value += 1
        self._osl.observe(reservation_id.output_tokens)
        gaps = reservation_id.output_tokens - 1
        if reservation_id.first_token_at_s is not None and gaps > 0:
            self._itl.observe((now_s - reservation_id.first_token_at_s) / gaps, gaps)


class WorkerMetrics:
    """One row per (worker, dp_rank) that can be chosen; gone with the worker."""

    def __init__(self, registry: Registry, place: RouterLabels) -> None:
        self._place = place
        self._registered = gauge(registry, Router.WORKER_REGISTERED)
        self._loads = (
            gauge(registry, FrontendNames.WORKER_PREFILL_TOKENS),
            gauge(registry, FrontendNames.WORKER_DECODE_BLOCKS),
        )

    def added(self, member: Member, active: ActiveLoad | None) -> None:
        """Show the worker and, where load is tracked, its load."""
        for rank, slot in member.slots.items():
            self._registered.labels(*self._registration(member, rank)).set(1)
            if active is None:
                continue
            for part, family in enumerate(self._loads):
                child = family.labels(str(rank), str(member.worker_id), self._place.worker_type)
                child.function = _reader(active, slot, part)

    def removed(self, member: Member) -> None:
        """Forget the worker's rows."""
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
