"""Workers that are too busy to take a request: thresholds over reported and booked load, and
workers that have just rejected one.

Pure. A worker is busy when every rank of it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from dynamo.config.router import RouterSettings
from dynamo.protocols.card import UNKNOWN_BATCH_TOKENS, RuntimeConfig
from dynamo.protocols.kv import KvMetrics
from dynamo.router.worker_pool import Member, WorkerPool


@dataclass(frozen=True)
class Thresholds:
    """Limits that a rank must exceed to be busy; None: no limit. ``any``: at least one is set."""

    decode_blocks_share: float | None = None
    prefill_tokens: int | None = None
    prefill_batch_share: float | None = None
    any: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        limits = self.decode_blocks_share, self.prefill_tokens, self.prefill_batch_share
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
