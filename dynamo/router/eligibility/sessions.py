"""Session affinity: requests of one session stay with the worker of the first. Spec 4.

Pure: time is handed in. Bounded: beyond the limit the session that was idle longest is forgotten.
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


class _Bond(NamedTuple):
    """Where a session lives, and when it was last heard of."""

    worker_id: int
    dp_rank: int
    used_s: float


class Sessions:
    """Which worker each session belongs to, for ``ttl_s`` after its last request.

    ``hard``: an overloaded worker refuses its sessions' requests. Soft: they go elsewhere, and the
    session with them. Either way a session moves when its worker is gone or shunned, or when the
    request's own constraints exclude it; a pin in the request beats the bond. All calls O(1)
    amortised.
    """

    def __init__(self, ttl_s: float, limit: int, hard: bool = True) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self._hard = hard
        self._bonds: OrderedDict[str, _Bond] = OrderedDict()
        self.kept = Counter()
        self.moved = Counter()
        self.dropped = Counter()

    def __len__(self) -> int:
        return len(self._bonds)

    def eligible(self, worker_pool: WorkerPool, routing: Routing, now_s: float) -> array[int]:
        """Candidate slots: the bound one if it can be had. Raises as :func:`eligible`."""
        bond = self._bond(routing.session_id, now_s)
        if (
            bond is None
            or bond.worker_id in worker_pool.avoided
            or pinned_worker(routing) is not None
        ):
            return eligible(worker_pool, routing)
        rank = bond.dp_rank if routing.dp_rank is None else routing.dp_rank
        bound = msgspec.structs.replace(routing, backend_instance_id=bond.worker_id, dp_rank=rank)
        try:
            return eligible(worker_pool, bound)
        except Overloaded:
            if self._hard:
                raise
        except (InvalidArgument, NoInstances):
            pass  # gone, or not what this request may use: choose anew
        return eligible(worker_pool, routing)

    def bind(self, session_id: str, worker_id: int, dp_rank: int, now_s: float) -> None:
        """The session's request went there; its time starts anew."""
        before = self._bonds.get(session_id)
        if before is not None:
            same = (before.worker_id, before.dp_rank) == (worker_id, dp_rank)
            (self.kept if same else self.moved).value += 1
        self._bonds[session_id] = _Bond(worker_id, dp_rank, now_s)
        self._bonds.move_to_end(session_id)
        self._expire(now_s)
        if len(self._bonds) > self._limit:
            self._bonds.popitem(last=False)
            self.dropped.value += 1

    def _bond(self, session_id: str | None, now_s: float) -> _Bond | None:
        self._expire(now_s)
        return None if session_id is None else self._bonds.get(session_id)

    def _expire(self, now_s: float) -> None:
        before_s = now_s - self._ttl_s
        while self._bonds:
            oldest = next(iter(self._bonds.values()))
            if oldest.used_s > before_s:
                return
            self._bonds.popitem(last=False)
