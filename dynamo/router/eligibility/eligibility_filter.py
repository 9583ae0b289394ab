"""Who may take a request: constraints, busy workers and sessions in one place for all modes."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from dynamo.config.router import RouterSettings
from dynamo.protocols.engine import Routing
from dynamo.router.eligibility.busy import BusyWatch, Thresholds, configured
from dynamo.router.eligibility.filters import eligible
from dynamo.router.eligibility.sessions import Sessions
from dynamo.router.worker_pool import WorkerPool

__all__ = ["EligibilityFilter"]


class EligibilityFilter:
    """Stands before the choice; ``sessions`` is None without session affinity.

    ``booked`` gives the active prefill tokens of a slot where the router tracks them. ``on_change``
    is called when load has gone or workers have come, gone or changed.
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
        self.on_change: Callable[[], None] | None = None
        self.sessions: Sessions | None = None
        if settings.session_affinity_ttl_s is not None:
            hard = settings.session_affinity_mode == "hard"
            ttl_s, limit = settings.session_affinity_ttl_s, settings.session_limit
            self.sessions = Sessions(ttl_s, limit, hard)

    @property
    def thresholds(self) -> Thresholds:
        """Above which load a worker is busy. To set them is O(ranks)."""
        return self._thresholds

    @thresholds.setter
    def thresholds(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        if self.admission_control:
            self.busy.thresholds = thresholds

    def slots(self, routing: Routing | None, now_s: float) -> array[int]:
        """Candidate slots, never empty. Raises as :func:`filters.eligible`."""
        if self.sessions is None or routing is None or routing.session_id is None:
            return eligible(self.worker_pool, routing)
        return self.sessions.eligible(self.worker_pool, routing, now_s)

    def settled(self, routing: Routing | None, worker_id: int, dp_rank: int, now_s: float) -> None:
        """The request goes there and is booked."""
        if self.sessions is not None and routing is not None and routing.session_id is not None:
            self.sessions.bind(routing.session_id, worker_id, dp_rank, now_s)
        self.busy.look(worker_id)

    def load_changed(self, worker_id: int) -> None:
        """The worker's booked load or configuration is another."""
        self.busy.look(worker_id)
        if self.on_change is not None:
            self.on_change()

    def forget(self, worker_id: int) -> None:
        """The worker is gone."""
        self.busy.forget(worker_id)
        if self.on_change is not None:
            self.on_change()
