"""Eligible slots for every mode: constraints, busy workers, sessions.

Requests of one session go to the worker of its first request. A worker is busy when every rank of
it is over a threshold of reported or booked load, or when it has just rejected a request.

Pure: time is a parameter. Above its limit, the table of sessions drops the one idle longest.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from dynamo.config.router import RouterSettings
from dynamo.errors import InvalidArgument, NoInstances, Overloaded
from dynamo.observability.metrics import Counter, Registry, counter, gauge
from dynamo.protocols.control import UNKNOWN_BATCH_TOKENS, RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.protocols.kv import KvMetrics
from dynamo.router.eligibility.filters import (
    Constraints,
    constraints_of,
    eligible,
    pinned_worker,
)
from dynamo.router.labels import COMPONENT, RouterLabels
from dynamo.router.worker_pool import Member, WorkerPool

_BUSY_WORKERS = gauge(
    "dynamo_component_router_busy_workers",
    "Workers over their busy thresholds or at capacity, which get no requests",
    COMPONENT,
)
_SESSIONS = gauge("dynamo_component_router_sessions", "Sessions bound to a worker", COMPONENT)
_SESSION_REQUESTS = counter(
    "dynamo_component_router_session_requests_total",
    "Requests of known sessions that stayed with their worker, or moved",
    "dynamo_component dynamo_namespace outcome worker_id",
)
_SESSIONS_DROPPED = counter(
    "dynamo_component_router_sessions_dropped_total",
    "Sessions forgotten before their time because there were too many",
    COMPONENT,
)


@dataclass(frozen=True)
class Thresholds:
    """Limits that a rank must exceed to be busy; None: no limit. ``any``: at least one is set."""

    decode_blocks_share: float | None = None
    prefill_tokens: int | None = None
    prefill_batch_share: float | None = None
    any: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        limits = self.decode_blocks_share, self.prefill_tokens, self.prefill_batch_share
        # Computed once, since requests read it; a frozen class allows no plain assignment.
        object.__setattr__(self, "any", limits != (None, None, None))


def configured(settings: RouterSettings) -> Thresholds:
    """The thresholds in the settings, which have an effect with admission control only."""
    return Thresholds(
        settings.active_decode_blocks_threshold,
        settings.active_prefill_tokens_threshold,
        settings.active_prefill_tokens_threshold_frac,
    )


def is_busy(
    thresholds: Thresholds, config: RuntimeConfig, report: KvMetrics | None, prefill_tokens: int
) -> bool:
    """Whether one rank is busy. ``prefill_tokens`` are those that the router has booked there."""
    share = thresholds.decode_blocks_share
    if report is not None and share is not None:
        total = report.kv_total_blocks or config.total_kv_blocks
        used = max(report.active_decode_blocks or 0, report.kv_used_blocks or 0)
        if total and used / total > share:
            return True
    return _prefills_too_much(thresholds, config, _active_tokens(report, prefill_tokens))


def _active_tokens(report: KvMetrics | None, booked_tokens: int) -> int:
    # The greater of both: a report is older than the bookings, and does not include those of
    # requests still on their way; bookings do not include the requests of other routers.
    reported = None if report is None else report.active_prefill_tokens
    return max(booked_tokens, reported or 0)


def _prefills_too_much(thresholds: Thresholds, config: RuntimeConfig, prefill_tokens: int) -> bool:
    if thresholds.prefill_tokens is not None and prefill_tokens > thresholds.prefill_tokens:
        return True
    share = thresholds.prefill_batch_share
    batch = config.max_num_batched_tokens or UNKNOWN_BATCH_TOKENS
    return share is not None and prefill_tokens > share * batch


class BusyWatch:
    """Keeps ``worker_pool.busy`` up to date with the load and the ``thresholds``.

    ``booked`` gives the active prefill tokens of a slot, None where the router tracks none. A
    worker is busy when all its ranks are, and from a rejection "worker at capacity" until its next
    load report. Each call is O(ranks of the worker).
    """

    def __init__(
        self,
        worker_pool: WorkerPool,
        thresholds: Thresholds,
        booked: Callable[[int], int] | None = None,
    ) -> None:
        self._worker_pool = worker_pool
        self._thresholds = thresholds
        self._booked = booked
        self._reports: dict[int, dict[int, KvMetrics]] = {}
        self._at_capacity: set[int] = set()

    @property
    def thresholds(self) -> Thresholds:
        """The limits in effect; may be replaced at any time."""
        return self._thresholds

    @thresholds.setter
    def thresholds(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        for worker_id in self._worker_pool.members:
            self.update(worker_id)

    def report(self, state: KvMetrics) -> None:
        """Store a worker's report of its load. Reports of unknown workers are ignored."""
        if state.worker_id in self._worker_pool.members:
            self._at_capacity.discard(state.worker_id)
            self._reports.setdefault(state.worker_id, {})[state.dp_rank] = state
            self.update(state.worker_id)

    def reports(self, worker_id: int) -> Collection[KvMetrics]:
        """Return the latest report of each rank; none without thresholds, which need them."""
        return self._reports.get(worker_id, {}).values()

    def update(self, worker_id: int) -> None:
        """Decide again whether the worker is busy, after its load or configuration changed."""
        pool = self._worker_pool
        if not self._thresholds.any:
            # Without thresholds only rejections make a worker busy.
            if pool.busy:
                pool.set_busy(worker_id, worker_id in self._at_capacity)
            return
        member = pool.members.get(worker_id)
        if member is not None:
            pool.set_busy(worker_id, worker_id in self._at_capacity or self._all_busy(member))

    def rejected(self, worker_id: int) -> bool:
        """Treat a worker that has rejected a request as busy; return False if it was already."""
        if worker_id in self._at_capacity or worker_id not in self._worker_pool.members:
            return False
        self._at_capacity.add(worker_id)
        self._worker_pool.set_busy(worker_id, True)
        return True

    def recovered(self, worker_id: int) -> None:
        """Take back :meth:`rejected`: one of the worker's requests has ended, or time has passed.

        Unknown workers are ignored.
        """
        if worker_id in self._at_capacity:
            self._at_capacity.discard(worker_id)
            self.update(worker_id)

    def would_prefill_too_much(self, worker_id: int, more_tokens: int) -> bool:
        """Whether ``more_tokens`` take each rank of the worker over a limit of prefill tokens.

        False for an unknown worker.
        """
        member = self._worker_pool.members.get(worker_id)
        reports = self._reports.get(worker_id, {})
        return member is not None and all(
            _prefills_too_much(
                self._thresholds,
                member.config,
                _active_tokens(reports.get(rank), self._booked_on(slot)) + more_tokens,
            )
            for rank, slot in member.slots.items()
        )

    def forget(self, worker_id: int) -> None:
        """Forget the reports of a removed worker."""
        self._reports.pop(worker_id, None)
        self._at_capacity.discard(worker_id)
        self._worker_pool.set_busy(worker_id, False)

    @property
    def any_at_capacity(self) -> bool:
        """Whether some worker is busy because it has rejected a request."""
        return bool(self._at_capacity)

    def _all_busy(self, member: Member) -> bool:
        reports = self._reports.get(member.worker_id, {})
        return all(
            is_busy(
                self._thresholds,
                member.config,
                reports.get(rank),
                self._booked_on(slot),
            )
            for rank, slot in member.slots.items()
        )

    def _booked_on(self, slot: int) -> int:
        return 0 if self._booked is None else self._booked(slot)


class _Binding(NamedTuple):
    """The rank of a session, and the time of its last request."""

    worker_id: int
    dp_rank: int
    used_s: float


class Sessions:
    """The worker of each session, for ``ttl_s`` after its last request.

    ``hard``: requests are refused while the session's worker is overloaded. Soft: they go to
    another worker, and the session moves there. In both modes a session moves when its worker was
    removed or is avoided, or when the constraints of a request exclude it; a pin in the request
    takes precedence. All calls are O(1) amortized.
    """

    def __init__(self, ttl_s: float, limit: int, hard: bool = True) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self._hard = hard
        self._bindings: OrderedDict[str, _Binding] = OrderedDict()
        self.kept = Counter()
        self.moved = Counter()
        self.dropped = Counter()

    def __len__(self) -> int:
        return len(self._bindings)

    def eligible(self, worker_pool: WorkerPool, routing: Routing, now_s: float) -> array[int]:
        """Candidate slots: the bound one if it is eligible. Raises as :func:`filters.eligible`."""
        binding = self._binding(routing.session_id, now_s)
        if (
            binding is None
            or binding.worker_id in worker_pool.avoided
            or pinned_worker(routing) is not None
        ):
            return eligible(worker_pool, routing)
        rank = binding.dp_rank if routing.dp_rank is None else routing.dp_rank
        bound = msgspec.structs.replace(
            routing, backend_instance_id=binding.worker_id, dp_rank=rank
        )
        try:
            return eligible(worker_pool, bound)
        except Overloaded:
            if self._hard:
                raise
        except (InvalidArgument, NoInstances):
            pass  # removed, or excluded by this request: choose another worker
        return eligible(worker_pool, routing)

    def bind(self, session_id: str, worker_id: int, dp_rank: int, now_s: float) -> None:
        """Bind the session to the rank of its last request, and restart its ttl."""
        before = self._bindings.get(session_id)
        if before is not None:
            same = (before.worker_id, before.dp_rank) == (worker_id, dp_rank)
            (self.kept if same else self.moved).value += 1
        self._bindings[session_id] = _Binding(worker_id, dp_rank, now_s)
        self._bindings.move_to_end(session_id)
        self._expire(now_s)
        if len(self._bindings) > self._limit:
            self._bindings.popitem(last=False)
            self.dropped.value += 1

    def _binding(self, session_id: str | None, now_s: float) -> _Binding | None:
        self._expire(now_s)
        return None if session_id is None else self._bindings.get(session_id)

    def _expire(self, now_s: float) -> None:
        before_s = now_s - self._ttl_s
        while self._bindings:
            oldest = next(iter(self._bindings.values()))  # bind() keeps the order of last use
            if oldest.used_s > before_s:
                return
            self._bindings.popitem(last=False)


class EligibilityFilter:
    """Returns the slots that a choice may be made from.

    ``booked`` gives the active prefill tokens of a slot where the router tracks them. ``sessions``
    is None without session affinity. ``on_change`` is called after load has dropped and after
    workers have changed. ``follows_load``: :meth:`load_added` and :meth:`load_changed` have an
    effect; a caller on the request path skips them otherwise.
    """

    def __init__(
        self,
        worker_pool: WorkerPool,
        settings: RouterSettings,
        booked: Callable[[int], int] | None = None,
    ) -> None:
        self.worker_pool = worker_pool
        self.admission_control = settings.admission_control == "token-capacity"
        self._thresholds = configured(settings) if self.admission_control else Thresholds()
        self.busy = BusyWatch(worker_pool, self._thresholds, booked)
        self._on_change: Callable[[], None] | None = None
        self.follows_load = self.busy.thresholds.any
        self.sessions: Sessions | None = None
        if settings.session_affinity_ttl_s is not None:
            hard = settings.session_affinity_mode == "hard"
            ttl_s, limit = settings.session_affinity_ttl_s, settings.session_limit
            self.sessions = Sessions(ttl_s, limit, hard)

    @property
    def thresholds(self) -> Thresholds:
        """The load above which a worker is busy. Setting them is O(ranks).

        Without admission control they are stored and have no effect.
        """
        return self._thresholds

    @thresholds.setter
    def thresholds(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        if self.admission_control:
            self.busy.thresholds = thresholds
            self._update_follows_load()

    @property
    def on_change(self) -> Callable[[], None] | None:
        """See the class."""
        return self._on_change

    @on_change.setter
    def on_change(self, callback: Callable[[], None] | None) -> None:
        self._on_change = callback
        self._update_follows_load()

    def slots(self, routing: Routing | None, now_s: float) -> array[int]:
        """Candidate slots, never empty. Raises as :func:`filters.eligible`."""
        if self.sessions is None or routing is None or routing.session_id is None:
            return eligible(self.worker_pool, routing)
        return self.sessions.eligible(self.worker_pool, routing, now_s)

    def constraints(self, routing: Routing | None, failed: Collection[int] = ()) -> Constraints:
        """Return what keeps ranks from requests with ``routing``, now. O(workers)."""
        return constraints_of(routing, self.worker_pool, self.sessions is not None, failed)

    def bind_session(self, session_id: str, worker_id: int, dp_rank: int, now_s: float) -> None:
        """Bind the session of a booked request to its worker, with session affinity."""
        if self.sessions is not None:
            self.sessions.bind(session_id, worker_id, dp_rank, now_s)

    def rejected(self, worker_id: int) -> bool:
        """See :meth:`BusyWatch.rejected`."""
        marked = self.busy.rejected(worker_id)
        self._update_follows_load()
        return marked

    def recovered(self, worker_id: int) -> None:
        """See :meth:`BusyWatch.recovered`. Requests that wait are routed again."""
        self.busy.recovered(worker_id)
        self._update_follows_load()
        self._changed()

    def avoid(self, worker_id: int, avoided: bool) -> None:
        """See :meth:`WorkerPool.avoid`. Requests that wait are routed again."""
        self.worker_pool.avoid(worker_id, avoided)
        self._changed()

    def load_added(self, worker_id: int) -> None:
        """Update the worker after a request was booked there."""
        self.busy.update(worker_id)

    def load_changed(self, worker_id: int) -> None:
        """Update the worker after its load dropped or its configuration changed."""
        if self.busy.any_at_capacity:  # what has ended there leaves room for another request
            self.busy.recovered(worker_id)
            self._update_follows_load()
        self.busy.update(worker_id)
        self._changed()

    def forget(self, worker_id: int) -> None:
        """Forget a removed worker."""
        self.busy.forget(worker_id)
        self._update_follows_load()
        self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()

    def _update_follows_load(self) -> None:
        watch = self.busy
        self.follows_load = (
            watch.thresholds.any or watch.any_at_capacity or self._on_change is not None
        )


def export_eligibility(
    registry: Registry, labels: RouterLabels, eligibility: EligibilityFilter
) -> None:
    """Export busy workers and bound sessions."""
    here = labels.component, labels.namespace
    busy = registry.child(_BUSY_WORKERS, *here, labels.router_id)
    busy.function = lambda: len(eligibility.worker_pool.busy)
    sessions = eligibility.sessions
    if sessions is None:
        return
    registry.child(_SESSIONS, *here, labels.router_id).function = sessions.__len__
    sessions.kept = registry.child(_SESSION_REQUESTS, *here, "kept", labels.router_id)
    sessions.moved = registry.child(_SESSION_REQUESTS, *here, "moved", labels.router_id)
    sessions.dropped = registry.child(_SESSIONS_DROPPED, *here, labels.router_id)
