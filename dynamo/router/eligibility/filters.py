"""The slots that a request may go to: allow-list, pin, dp_rank, taints, busy.

Pure. The order of the checks is part of the behaviour: it decides which error a request gets when
several constraints exclude all workers.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Mapping

import msgspec

from dynamo.errors import InvalidArgument, NoInstances, Overloaded
from dynamo.protocols.engine import Routing
from dynamo.router.worker_pool import Member, WorkerPool

_TAINTS_SHOWN = 128  # characters
_NO_ROUTING = Routing()
BOUND = "bound to another worker"
NO_SLOT = "no free slot"
"""Prefill workers take a number of prompts."""


class PinnedWorkerNotAllowed(InvalidArgument):
    """The request pins a worker that is not in its allow-list."""


class PinnedWorkerOverloaded(Overloaded):
    """The pinned worker is busy."""


class NoneAllowed(NoInstances):
    """None of the workers in the request's allow-list is registered."""


def pinned_worker(routing: Routing) -> tuple[str, int] | None:
    """The request field that pins a worker, and the worker; None without a pin."""
    if routing.backend_instance_id is not None:
        return "backend_instance_id", routing.backend_instance_id
    if routing.decode_worker_id is not None:
        return "decode_worker_id", routing.decode_worker_id
    return None


def eligible(worker_pool: WorkerPool, routing: Routing | None) -> array[int]:
    """Candidate slots (u32), never empty. O(1) without constraints, else O(workers).

    Raises NoInstances without any worker (NoneAllowed: none of the allow-list), InvalidArgument
    when the request names an unknown worker, rank or taint or contradicts itself
    (PinnedWorkerNotAllowed), Overloaded when only busy workers remain (PinnedWorkerOverloaded).
    """
    if not worker_pool.candidates:
        raise NoInstances("no endpoints: no worker is registered")
    if routing is None or not _constrains(routing):
        if worker_pool.all_eligible is not None:
            return worker_pool.all_eligible
        return _slots(_ready(worker_pool, worker_pool.members.values()), None)
    pin = pinned_worker(routing)
    if pin is not None:
        return _slots([_pinned(worker_pool, routing, *pin)], routing.dp_rank)
    members = _allowed(worker_pool, routing)
    if routing.dp_rank is not None:
        members = _with_rank(members, routing.dp_rank)
    if routing.required_taints:
        members = _tainted(members, routing.required_taints)
    return _slots(_ready(worker_pool, members), routing.dp_rank)


class Constraints(msgspec.Struct, gc=False, frozen=True):
    """Why :func:`eligible` excludes ranks, as it was at one moment: ``lacking`` has the missing
    taints by worker, ``single`` the workers with one rank, which serve any; ``failed`` are those
    that had the request before."""

    pin: int | None = None
    dp_rank: int | None = None
    single: Collection[int] = ()
    allowed: Collection[int] | None = None
    lacking: Mapping[int, str] = msgspec.field(default_factory=dict)
    prefers: bool = False
    session: bool = False
    busy: Collection[int] = ()
    avoided: Collection[int] = ()
    failed: Collection[int] = ()

    def excluded(self, worker_id: int, dp_rank: int) -> str:
        """Return why a rank that is not eligible is not, by its first failed check."""
        if worker_id in self.failed:
            return "failed with this request before"
        if self.allowed is not None and worker_id not in self.allowed:
            return "not in the request's allow-list"
        if self.pin is not None and worker_id != self.pin:
            return f"pinned to worker {self.pin:x}"
        if self.dp_rank not in (None, dp_rank) and worker_id not in self.single:
            return f"dp_rank {self.dp_rank} was asked for"
        if worker_id in self.lacking:
            return f"lacks the taints: {self.lacking[worker_id]}"
        if worker_id in self.busy:
            return "busy"
        if worker_id in self.avoided:
            return "does not answer"
        # All checks of :func:`eligible` passed: the choice was limited before it.
        return BOUND if self.session else NO_SLOT


def constraints_of(
    routing: Routing | None,
    worker_pool: WorkerPool,
    session: bool = False,
    failed: Collection[int] = (),
) -> Constraints:
    """Return what keeps ranks of ``worker_pool`` from requests with ``routing``. O(workers).

    ``session``: sessions are bound to workers here.
    """
    busy, avoided = frozenset(worker_pool.busy), frozenset(worker_pool.avoided)
    routing = routing or _NO_ROUTING
    pin, allowed = pinned_worker(routing), routing.allowed_worker_ids
    members, single, lacking = worker_pool.members.values(), frozenset[int](), {}
    if routing.dp_rank is not None and pin is None:
        single = frozenset(member.worker_id for member in members if len(member.slots) == 1)
    if routing.required_taints:
        required = set(routing.required_taints)
        missing_taints = {
            member.worker_id: required.difference(member.config.taints) for member in members
        }
        lacking = {
            worker_id: ", ".join(sorted(taints))[:_TAINTS_SHOWN]
            for worker_id, taints in missing_taints.items()
            if taints
        }
    return Constraints(
        pin=None if pin is None else pin[1],
        dp_rank=routing.dp_rank,
        single=single,
        allowed=None if allowed is None else frozenset(allowed),
        lacking=lacking,
        prefers=bool(routing.preferred_taints),
        session=session and routing.session_id is not None,
        busy=busy,
        avoided=avoided,
        failed=failed,
    )


def multiplier(preferred: Mapping[str, float], taints: list[str]) -> float:
    """Return the factor for the cost of a worker with ``taints``: between 1/e and e.

    ``preferred`` gives weights; a negative one raises the cost. tanh bounds the effect of the sum:
    however strong a preference, an overloaded worker still loses to an idle one.
    """
    total = sum(preferred.get(taint, 0.0) for taint in taints)
    return math.exp(-math.tanh(total))


def apply_preferred_taints(
    costs: array[float],
    slots: array[int],
    worker_pool: WorkerPool,
    preferred: Mapping[str, float],
) -> None:
    """Multiply ``costs[i]``, the cost of ``slots[i]``, by the factor of its worker. O(slots).

    Raises InvalidArgument for a weight that is not finite.
    """
    if not all(math.isfinite(weight) for weight in preferred.values()):
        raise InvalidArgument("the weights of preferred taints must be finite")
    for index, slot in enumerate(slots):
        owner = worker_pool.owners[slot]
        costs[index] *= multiplier(preferred, worker_pool.members[owner[0]].config.taints)


def _constrains(routing: Routing) -> bool:
    return (
        routing.backend_instance_id is not None
        or routing.decode_worker_id is not None
        or routing.dp_rank is not None
        or routing.allowed_worker_ids is not None
        or bool(routing.required_taints)
    )


def _pinned(worker_pool: WorkerPool, routing: Routing, field: str, worker_id: int) -> Member:
    if routing.allowed_worker_ids is not None and worker_id not in routing.allowed_worker_ids:
        raise PinnedWorkerNotAllowed(
            f"pinned worker {worker_id} is not in the request's allow-list"
        )
    member = worker_pool.members.get(worker_id)
    if member is None:
        raise InvalidArgument(
            f"InvalidRequest: nvext.{field}={worker_id} does not identify a known worker"
        )
    if routing.dp_rank is not None and routing.dp_rank not in member.slots:
        raise InvalidArgument(
            f"dp_rank {routing.dp_rank} is out of bounds for worker {worker_id}: {_bounds(member)}"
        )
    if routing.required_taints:
        _tainted([member], routing.required_taints)
    if worker_id in worker_pool.busy:
        raise PinnedWorkerOverloaded(f"pinned worker {worker_id} is overloaded")
    return member


def _bounds(member: Member) -> str:
    first = member.config.data_parallel_start_rank
    return f"[{first}, {first + len(member.slots)})"


def _allowed(worker_pool: WorkerPool, routing: Routing) -> list[Member]:
    if routing.allowed_worker_ids is None:
        return list(worker_pool.members.values())
    allowed = [
        worker_pool.members.get(worker_id)
        # Without repetitions: a worker named twice would be drawn twice as often.
        for worker_id in dict.fromkeys(routing.allowed_worker_ids)
    ]
    members = [member for member in allowed if member is not None]
    if not members:
        raise NoneAllowed("no endpoints: none of the request's allowed workers is registered")
    return members


def _with_rank(members: list[Member], dp_rank: int) -> list[Member]:
    """Workers that have the rank; one without data parallelism serves any rank.

    Dynamo behaves so (observed): a client may send dp_rank to a deployment that mixes both.
    """
    fitting = [member for member in members if dp_rank in member.slots or len(member.slots) == 1]
    if not fitting:
        raise InvalidArgument(f"dp_rank {dp_rank} is out of bounds for every worker")
    return fitting


def _tainted(members: list[Member], required: list[str]) -> list[Member]:
    fitting = [member for member in members if set(required) <= set(member.config.taints)]
    if not fitting:
        raise InvalidArgument(f"no worker has the required taints: {', '.join(required)}")
    return fitting


def _ready(worker_pool: WorkerPool, members: Iterable[Member]) -> list[Member]:
    members = list(members)
    ready = [member for member in members if member.worker_id not in worker_pool.busy]
    if not ready:
        raise Overloaded("all eligible workers are overloaded")
    avoided, is_silent = worker_pool.avoided, worker_pool.is_silent
    if not avoided:
        return ready
    answering = [member for member in ready if member.worker_id not in avoided]
    if answering:
        return answering
    # A lost connection may work again, and fails at once if not; a silent one costs seconds.
    not_silent = [member for member in ready if not is_silent(member.worker_id)]
    if not not_silent and any(member.worker_id not in avoided for member in members):
        raise Overloaded("all eligible workers that answer are overloaded")
    return not_silent or ready


def _slots(members: Iterable[Member], dp_rank: int | None) -> array[int]:
    slots = array("I")
    for member in members:
        if dp_rank is not None and dp_rank in member.slots:
            slots.append(member.slots[dp_rank])
        else:
            # No rank was asked for, or the only one serves any (:func:`_with_rank`).
            slots.extend(member.slots.values())
    return slots
