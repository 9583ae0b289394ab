"""Session affinity: requests of one session go to the worker of its first request.

Pure: time is a parameter. Bounded: above the limit the session that was idle longest is dropped.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import NamedTuple

import msgspec

from dynamo.errors import InvalidArgument, NoInstances, Overloaded
from dynamo.observability.metrics import Counter
from dynamo.protocols.engine import Routing
from dynamo.router.eligibility.filters import eligible, pinned_worker
from dynamo.router.worker_pool import WorkerPool

__all__ = ["Sessions"]


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
            oldest = next(iter(self._bindings.values()))
            if oldest.used_s > before_s:
                return
            self._bindings.popitem(last=False)
