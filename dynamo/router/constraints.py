"""Why ranks were not eligible for a request, kept with the decision for its receipt. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

import msgspec

from dynamo.protocols.engine import Routing
from dynamo.protocols.status import RouteCandidate
from dynamo.router.eligibility.filters import pinned_worker
from dynamo.router.worker_pool import WorkerPool

__all__ = ["Constraints", "constraints_of", "excluded_ranks", "forced_choice"]

_TAINTS = 128  # characters
_NO_SLOT = "no free slot"  # the only other reason: prefill workers take a number of prompts


class Constraints(msgspec.Struct, gc=False, frozen=True):
    """What excluded candidates: fields of the request, workers that were busy or did not answer,
    and those that had ``failed`` with the request before."""

    pin: int | None = None
    dp_rank: int | None = None
    listed: bool = False
    taints: str = ""
    prefers: bool = False
    session: bool = False
    busy: Collection[int] = ()
    avoided: Collection[int] = ()
    failed: Collection[int] = ()

    def excluded(self, worker_id: int, dp_rank: int) -> str:
        """Return why the rank was not eligible."""
        if worker_id in self.failed:
            return "failed with this request before"
        if self.pin is not None and worker_id != self.pin:
            return f"pinned to worker {self.pin:x}"
        if worker_id in self.busy:
            return "busy"
        if worker_id in self.avoided:
            return "does not answer"
        if self.dp_rank is not None and dp_rank != self.dp_rank:
            return f"dp_rank {self.dp_rank} was asked for"
        lists = ["not in the request's allow-list"] if self.listed else []
        if self.taints:
            lists.append(f"lacks the taints: {self.taints}")
        return " or ".join(lists) or ("bound to another worker" if self.session else _NO_SLOT)


def constraints_of(
    routing: Routing | None,
    worker_pool: WorkerPool,
    slots: array[int],
    session: bool,
    failed: Collection[int],
) -> Constraints | None:
    """Return what kept candidates of ``worker_pool`` out of ``slots``; None if nothing did.

    ``session``: sessions are bound to workers here.
    """
    if routing is None and not failed and slots is worker_pool.candidates:
        return None
    busy, avoided = frozenset(worker_pool.busy), frozenset(worker_pool.avoided)
    if routing is None:
        return Constraints(busy=busy, avoided=avoided, failed=failed)
    pin = pinned_worker(routing)
    return Constraints(
        pin=None if pin is None else pin[1],
        dp_rank=routing.dp_rank,
        listed=routing.allowed_worker_ids is not None,
        taints=", ".join(routing.required_taints or ())[:_TAINTS],
        prefers=bool(routing.preferred_taints),
        session=session and routing.session_id is not None,
        busy=busy,
        avoided=avoided,
        failed=failed,
    )


def excluded_ranks(
    owners: Sequence[tuple[int, int]], slots: array[int], constraints: Constraints | None
) -> list[RouteCandidate]:
    """The ranks that were not eligible."""
    if constraints is None:
        return []
    eligible = set(slots)
    return [
        RouteCandidate(
            worker=f"{worker_id:x}", dp_rank=rank, excluded=constraints.excluded(worker_id, rank)
        )
        for slot, (worker_id, rank) in enumerate(owners)
        if worker_id >= 0 and slot not in eligible
    ]


def forced_choice(
    constraints: Constraints | None,
    owners: Sequence[tuple[int, int]],
    slots: array[int],
    eligible: int,
) -> str:
    """Return the reason of a decision without an alternative, else ""."""
    if constraints is not None and constraints.pin is not None:
        return "the request names this worker"
    if constraints is not None and constraints.session:
        others = excluded_ranks(owners, slots, constraints)
        if others and all(one.excluded == "bound to another worker" for one in others):
            return "the session of the request is bound to this worker"
    if eligible > 1:
        return ""
    ranks = sum(worker_id >= 0 for worker_id, _ in owners)
    return "the only worker" if ranks == 1 else f"the only eligible one of {ranks}"
