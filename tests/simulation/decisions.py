"""Whether routers choose workers as they promise: among those that may take the request, in turn.

What may take a request is computed here a second time, from the workers and what is known of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import fake_os

if TYPE_CHECKING:
    from machine import Process

__all__ = ["check_router", "dequeued", "freed", "picked", "reported", "submitted", "woken"]


_MOST_WORKERS = 4
"""Of a box."""


class _Bound(NamedTuple):
    worker_id: int
    dp_rank: int
    used_s: float


class _Seen:
    """What the choices of one picker were so far: sessions, and the requests on each slot."""

    def __init__(self) -> None:
        self.sessions: dict[str, _Bound] = {}
        self.running: dict[str, tuple[int, int]] = {}
        self.last: tuple[tuple[int, int], list[tuple[int, int]]] | None = None

    def load(self, owner: tuple[int, int]) -> int:
        """Return how many requests run on a rank."""
        return sum(one == owner for one in self.running.values())


def _seen(picker: Any) -> _Seen:
    seen: _Seen = vars(picker).setdefault("_seen_by_checks", _Seen())
    return seen


def picked(pick: Any) -> Any:
    """Check each choice."""

    def checked(self: Any, request_id: str | None, tokens: Any, **rest: Any) -> Any:
        routing, attempt = rest.get("routing"), rest.get("attempt")
        able = set(_able(self.worker_pool, routing, attempt))
        now_s, seen = self._clock(), _seen(self)
        problems = list(_of_worker_pool(self.worker_pool))
        bound = _bound(self, seen, routing, able, now_s)
        decision = pick(self, request_id, tokens, **rest)
        owner = decision.worker_id, decision.dp_rank
        if owner not in able:
            problems.append(f"chose {owner}, able were {sorted(able)}")
        if bound is not None and bound != owner:
            problems.append(f"chose {owner} for a session of {bound}")
        turns = [one for one in _ordered(self.worker_pool) if one in able]
        problems += _by_mode(self, seen, owner, turns if bound is None else [bound])
        if request_id is not None:
            seen.running[request_id] = owner
            seen.last = owner, turns
            fake_os.machine().attempts.decided.setdefault(request_id, set()).add(owner)
            if routing is not None and routing.session_id is not None:
                seen.sessions[routing.session_id] = _Bound(*owner, now_s)
        _tell(problems)
        return decision

    return checked


def freed(free: Any) -> Any:
    """Note the end of a request at a router."""

    def checked(self: Any, request_id: str, output_tokens: int = 0) -> None:
        _seen(self).running.pop(request_id, None)
        free(self, request_id, output_tokens)

    return checked


def _tell(problems: list[str]) -> None:
    machine = fake_os.machine()
    machine.failures += [f"{machine.current}: a router {one}" for one in problems]


def _able(pool: Any, routing: Any, attempt: Any) -> Iterator[tuple[int, int]]:
    """Yield the ranks that may get a request: of workers that answer, if there are any."""
    members = list(pool.members.values())
    rank = None
    if attempt is not None and attempt.among is not None:
        among = attempt.among()
        members = [one for one in members if one.worker_id in among]
    elif routing is not None and routing.allowed_worker_ids is not None:
        members = [one for one in members if one.worker_id in routing.allowed_worker_ids]
    if routing is not None:
        rank = routing.dp_rank
        pin = routing.backend_instance_id or routing.decode_worker_id
        if pin is not None:
            members = [one for one in members if one.worker_id == pin]
        taints = set(routing.required_taints or ())
        members = [one for one in members if taints <= set(one.config.taints)]
    members = [one for one in members if one.worker_id not in pool.busy]
    answering = [one for one in members if one.worker_id not in pool.avoided]
    loud = [one for one in members if not pool.is_silent(one.worker_id)]
    for member in answering or loud or members:
        first, count = member.config.data_parallel_start_rank, member.config.data_parallel_size
        ranks = range(first, first + max(count, 1))
        for one in ranks:
            if rank is None or one == rank or rank not in ranks:
                yield member.worker_id, one


def _ordered(pool: Any) -> Iterator[tuple[int, int]]:
    """Yield the ranks in the order of their turns: a worker that comes again has another place."""
    return (pool.owners[slot] for slot in pool.candidates)


def _bound(
    picker: Any, seen: _Seen, routing: Any, able: Collection[tuple[int, int]], now_s: float
) -> tuple[int, int] | None:
    """Return the rank that a session stays with; None: it may have any."""
    sessions = picker.eligibility.sessions
    if sessions is None or routing is None or routing.session_id is None:
        return None
    bound = seen.sessions.get(routing.session_id)
    if bound is None or now_s - bound.used_s >= sessions._ttl_s or routing.dp_rank is not None:
        return None
    owner = bound.worker_id, bound.dp_rank
    avoided = bound.worker_id in picker.worker_pool.avoided  # it has any rank of that worker then
    return owner if owner in able and not avoided else None


def _by_mode(
    picker: Any, seen: _Seen, owner: tuple[int, int], able: Collection[tuple[int, int]]
) -> Iterator[str]:
    """The modes that count requests choose a rank with few; one after the other has its turn."""
    mode, load = getattr(picker, "mode", "kv"), seen.load
    if mode == "least-loaded" and load(owner) > min(map(load, able), default=0):
        yield f"chose {owner} with {load(owner)} requests, others have less"
    if mode == "power-of-two" and len(able) > 1 and load(owner) > sorted(map(load, able))[-2]:
        yield f"chose {owner} with {load(owner)} requests, the others have less"
    if mode == "round-robin" and seen.last == (owner, able) and len(able) > 1:
        yield f"chose {owner} twice in turn"


def reported(report: Any) -> Any:
    """A worker that was full is asked again once it has reported."""

    def checked(self: Any, state: Any) -> None:
        report(self, state)
        if state.worker_id in self._at_capacity:
            _tell([f"keeps {state.worker_id:x} for full after its report"])

    return checked


# -- the queue of a router


def submitted(submit: Any) -> Any:
    """A new request waits behind those that wait."""

    def checked(self: Any, request_id: str, tokens: Any, **rest: Any) -> Any:
        before = len(self._requests)
        full = {one.name: [*_full(self, one)] for one in self._classes}
        waiting = {one.name: len(one.queue) for one in self._classes}
        found = submit(self, request_id, tokens, **rest)
        _tell([f"took one more into {one.name}, which had {', '.join(full[one.name])}"
               for one in self._classes
               if full[one.name] and len(one.queue) > waiting[one.name]])  # fmt: skip
        if self._only is not None and before and hasattr(found, "worker_id"):
            _tell([f"let a request go before {before} that wait"])
        return found

    return checked


def _full(queue: Any, in_class: Any) -> Iterator[str]:
    """Yield the limits that the requests of a class have reached."""
    workers, config = max(len(queue.picker.worker_pool.members), 1), in_class._config
    waiting = [one for one in queue._requests.values() if one.in_class is in_class]
    for what, figure, limit in (
        ("requests", len(waiting), config.request_queue_limit_per_worker),
        ("prompt tokens", sum(one.isl_tokens for one in waiting),
         config.raw_isl_token_queue_limit_per_worker),
        ("cached tokens", sum(one.cached_tokens for one in waiting),
         config.cached_token_queue_limit_per_worker),
    ):  # fmt: skip
        if limit is not None and figure >= limit * workers:
            yield f"{figure} {what} of {limit * workers}"
    if len(waiting) >= in_class.queue.limit:
        yield f"{len(waiting)} requests of {in_class.queue.limit}"


def dequeued(route: Any) -> Any:
    """The head of a queue is the one that goes first by its policy."""

    def checked(self: Any, request: Any) -> Any:
        others = [one for one in self._requests.values() if one.in_class is request.in_class]
        gone = route(self, request)
        if gone:
            policy = request.in_class._config.queue_policy
            ahead = [one for one in others if _before(policy, one, request)]
            if ahead:
                _tell([f"took {request.request_id} by {policy}, before it are {len(ahead)}"])
        return gone

    return checked


def _before(policy: str, other: Any, request: Any) -> bool:
    one, two = other.priority, request.priority
    if one.strict != two.strict:
        return bool(one.strict > two.strict)
    if policy == "fcfs":
        first = other.arrived_s - max(one.priority_boost_s, 0.0)
        return bool(first < request.arrived_s - max(two.priority_boost_s, 0.0))
    if policy == "lcfs":
        first = other.arrived_s + one.priority_boost_s
        return bool(first > request.arrived_s + two.priority_boost_s)
    return False  # what is cached changes with time


def woken(change: Any) -> Any:
    """After a change of load or workers no request waits that may go."""

    def checked(self: Any, *args: Any, **rest: Any) -> Any:
        result = change(self, *args, **rest)
        process = fake_os.machine().current
        if process is None:
            return result
        for part in process.parts:
            if type(part).__name__ == "RequestQueue" and part._requests:
                process.loop.call_soon(_look, process, part)
        return result

    return checked


def _look(process: Process, queue: Any) -> None:
    late = queue._drain_timer is None and not queue._closed
    if not late or queue.picker.active._prefills is not None:
        return  # a load that falls with time is looked at ten times a second
    _tell([f"lets requests wait: {one}" for one in _admissible(queue)])


def _admissible(queue: Any) -> Iterator[str]:
    from dynamo.errors import DynamoError

    if queue.picker.eligibility.busy.any_at_capacity:
        return
    for in_class in queue._classes:
        head = in_class.queue.head()
        try:
            if head is not None and queue._admits(in_class, head.routing, head.attempt):
                yield f"{head.request_id} of {len(in_class.queue)} may go, and none looks"
        except DynamoError:
            continue


# -- what is true of a router at any moment


def check_router(process: Process, part: Any) -> Iterator[str]:
    """Yield the figures of a router, a queue, or a worker's admission that are not so."""
    kind = type(part).__name__
    if kind == "RequestQueue":
        yield from _of_queue(process, part)
    elif kind == "InflightPicker":
        yield from _of_picker(process, part)
    elif kind == "KvPicker":
        yield from _of_kv(process, part)
    elif kind == "BusyWatch":
        yield from _of_busy(process, part)


def _of_queue(process: Process, queue: Any) -> Iterator[str]:
    for in_class in queue._classes:
        waiting = [one for one in queue._requests.values() if one.in_class is in_class]
        line = in_class.queue
        for name, shown, figure in (
            ("requests", len(line), len(waiting)),
            ("prompt tokens", line.isl_tokens, sum(one.isl_tokens for one in waiting)),
            ("cached tokens", line.cached_tokens, sum(one.cached_tokens for one in waiting)),
        ):
            if shown != figure:
                yield f"{process}: class {in_class.name} counts {shown} {name}, it has {figure}"
        own = in_class._config.request_queue_limit_per_worker
        most = line.limit if own is None else own * max(_MOST_WORKERS, 1)
        if len(line) > most:
            yield f"{process}: class {in_class.name} has {len(line)} requests, of {most}"


def _of_picker(process: Process, picker: Any) -> Iterator[str]:
    yield from (f"{process}: {one}" for one in _of_worker_pool(picker.worker_pool))
    seen = _seen(picker)
    for slot, owner in enumerate(picker.worker_pool.owners):
        if owner[0] >= 0 and picker._inflight[slot] != seen.load(owner):
            yield f"{process}: {owner} has {picker._inflight[slot]}, not {seen.load(owner)}"


def _of_kv(process: Process, picker: Any) -> Iterator[str]:
    yield from (f"{process}: {one}" for one in _of_worker_pool(picker.worker_pool))
    seen = _seen(picker)
    remote = [one.slot for one in picker.active._reservations.values() if one.remote]
    for slot, owner in enumerate(picker.worker_pool.owners):
        count = picker.active.load(slot)[2] if owner[0] >= 0 else 0
        own = seen.load(owner) + remote.count(slot)
        if owner[0] >= 0 and count != own:
            yield f"{process}: {owner} has {count} requests, not {own}"


def _of_worker_pool(pool: Any) -> Iterator[str]:
    """The columns are those of the members, and what all may choose from is up to date."""
    pairs = {
        (member.worker_id, rank): slot
        for member in pool.members.values()
        for rank, slot in member.slots.items()
    }
    owners = {owner: slot for slot, owner in enumerate(pool.owners) if owner[0] >= 0}
    if pairs != owners or sorted(pool.candidates) != sorted(pairs.values()):
        yield f"has slots {owners} for {pairs}"
    busy = pool.busy & pool.members.keys()
    avoided = pool.avoided & pool.members.keys()
    if (pool.all_eligible is None) != bool(not pairs or busy or avoided):
        yield f"may choose from {pool.all_eligible}, busy are {busy}, avoided {avoided}"
    if pool.all_busy != (bool(pool.members) and len(busy) == len(pool.members)):
        yield f"says all_busy={pool.all_busy} of {len(busy)} of {len(pool.members)}"


def _of_busy(process: Process, watch: Any) -> Iterator[str]:
    """A worker is busy that is full, or each rank of which is over a limit; no other."""
    pool = watch._worker_pool
    for member in pool.members.values():
        reports = watch._reports.get(member.worker_id, {})
        ranks = [_over(watch, member, reports.get(rank), slot)
                 for rank, slot in member.slots.items()]  # fmt: skip
        busy = member.worker_id in watch._at_capacity or all(ranks)
        if busy != (member.worker_id in pool.busy):
            yield f"{process}: {member.worker_id:x} is {'' if busy else 'not '}busy, it is not so"


def _over(watch: Any, member: Any, report: Any, slot: int) -> bool:
    limits, config = watch._thresholds, member.config
    booked = watch._booked(slot) if watch._booked is not None else 0
    tokens = max(booked, (report and report.active_prefill_tokens) or 0)
    over = limits.prefill_tokens is not None and tokens > limits.prefill_tokens
    if limits.prefill_batch_share is not None:
        over |= tokens > limits.prefill_batch_share * (config.max_num_batched_tokens or 10_000_000)
    if limits.decode_blocks_share is not None and report is not None:
        total = report.kv_total_blocks or config.total_kv_blocks or 0
        used = max(report.active_decode_blocks or 0, report.kv_used_blocks or 0)
        over |= bool(total) and used > limits.decode_blocks_share * total
    return over
