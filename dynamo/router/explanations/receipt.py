"""The inputs of one decision, copied when it was made, and the receipt that explains it later.

Names, terms and reasons are computed when the receipt is read. A copy costs about two microseconds,
most of them because a thousand copies evict other data from the CPU's caches. So of each router 100
decisions a second are copied; of others the total cost is kept. Pure.

Why ranks were not eligible for a request, kept with the decision for its receipt. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from heapq import nsmallest
from typing import Any, Protocol

import msgspec

from dynamo.protocols.engine import Routing
from dynamo.protocols.status import RouteCandidate, RouteReceipt
from dynamo.router.eligibility.filters import pinned_worker
from dynamo.router.kv_mode.cost import CostParams, Load, TierCounts, breakdown, effective_blocks
from dynamo.router.kv_mode.duplicates import duplicate_price
from dynamo.router.worker_pool import WorkerPool

MAX_CANDIDATES = 64
"""Candidates of a receipt. The inputs of larger pools are kept for the chosen one alone, or for
the cheapest where a receipt is asked for."""
CAPTURES_PER_SECOND = 100
"""Decisions of a router whose inputs are copied; those that a client asks for are not counted."""
_SMALL = 1e-6  # blocks
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


class CaptureLimit:
    """Limits the copies to ``CAPTURES_PER_SECOND``: the cost of a decision counts at high rates.

    ``left`` is what may be copied before :meth:`renew`.
    """

    __slots__ = ("_renewed_s", "left")

    def __init__(self) -> None:
        self.left = CAPTURES_PER_SECOND
        self._renewed_s = 0.0

    def renew(self, now_s: float) -> bool:
        """Allow more copies if the last second is over at ``now_s`` (any clock); return whether."""
        if now_s < self._renewed_s + 1.0:
            return False
        self.left, self._renewed_s = CAPTURES_PER_SECOND, now_s
        return True


class DecisionInputs(Protocol):
    """The inputs of one decision."""

    def receipt(self) -> RouteReceipt:
        """Return the decision with its reasons. O(candidates)."""
        ...


class DecisionTotals(msgspec.Struct, gc=False, frozen=True):
    """What is kept of a decision beyond the limit: the ``owner`` (worker id, rank) of the chosen
    slot, how many were ``eligible``, and its cost in the kv mode."""

    mode: str
    index: str
    owner: tuple[int, int]
    eligible: int
    cost: float | None = None

    def receipt(self) -> RouteReceipt:
        """See :class:`DecisionInputs`."""
        worker_id, dp_rank = self.owner
        chosen = RouteCandidate(
            worker=f"{worker_id:x}", dp_rank=dp_rank, chosen=True, cost=self.cost
        )
        return RouteReceipt(
            mode=self.mode,
            index=self.index,
            reason=f"chosen of {self.eligible}; the terms of {CAPTURES_PER_SECOND} decisions a "
            "second are kept, and these are not among them",
            candidates=(chosen,),
            omitted=self.eligible - 1,
        )


class KvInputs(msgspec.Struct, gc=False, frozen=True):
    """A decision of the kv mode. ``slots`` were eligible; ``costs`` has theirs in this order.

    The other columns (bytes of arrays) are indexed by slot, as ``owners``: ``device`` and ``lower``
    (host, disk, shared; empty where unused) are cached blocks, ``prefill`` active prompt tokens,
    ``decode`` blocks with those of this request. ``requests`` are those running on each of
    ``slots``, where they matter. ``recovering`` are slots whose cache is in doubt. ``eligible`` and
    ``omitted`` count the candidates before columns were narrowed; ``least_tokens`` is the least
    active prefill of the eligible ones then, ``best_overlap`` their most effective cached blocks.
    """

    index: str
    params: CostParams
    owners: Sequence[tuple[int, int]]
    slots: array[int]
    chosen: int
    isl_tokens: int
    best_overlap: float
    device: bytes
    prefill: bytes
    decode: bytes
    costs: bytes
    lower: tuple[bytes, bytes, bytes] | None = None
    requests: tuple[int, ...] = ()
    free_copy: int | None = None
    recovering: Collection[int] = ()
    constraints: Constraints | None = None
    eligible: int = 0
    omitted: int = 0
    least_tokens: int | None = None

    def receipt(self) -> RouteReceipt:
        """See :class:`DecisionInputs`."""
        rows = _Rows(self)
        recovers = not set(self.recovering).isdisjoint(self.slots)
        found = [rows.candidate(place) for place in range(len(self.slots))]
        found.sort(key=lambda row: (not row.chosen, row.cost))
        found += excluded_ranks(self.owners, self.slots, self.constraints)
        return RouteReceipt(
            mode="kv",
            index="recovering" if recovers else self.index,
            reason=self._reason(rows.costs),
            candidates=tuple(found[:MAX_CANDIDATES]),
            omitted=self.omitted + len(found[MAX_CANDIDATES:]),
        )

    def narrowed(self, wanted: bool) -> KvInputs:
        """Return the same for the chosen slot alone; ``wanted``: for the cheapest, too.

        O(slots).
        """
        rows = _Rows(self)
        places = _kept(self.slots, self.chosen, rows.costs if wanted else None)
        slots = [self.slots[place] for place in places]
        ranks = sum(worker_id >= 0 for worker_id, _ in self.owners)
        return msgspec.structs.replace(
            self,
            owners=[self.owners[slot] for slot in slots],
            slots=array("I", range(len(slots))),
            chosen=0,
            device=_pick("I", self.device, slots),
            prefill=_pick("q", self.prefill, slots),
            decode=_pick("q", self.decode, slots),
            costs=_pick("d", self.costs, places),
            lower=self.lower and tuple(one and _pick("I", one, slots) for one in self.lower),
            requests=tuple(self.requests[place] for place in places) if self.requests else (),
            free_copy=slots.index(self.free_copy) if self.free_copy in slots else None,
            recovering=[place for place, slot in enumerate(slots) if slot in self.recovering],
            eligible=len(self.slots),
            omitted=ranks - len(slots),
            least_tokens=rows.least,
        )

    def _reason(self, costs: array[float]) -> str:
        count = self.eligible or len(self.slots)
        forced = forced_choice(self.constraints, self.owners, self.slots, count)
        if forced:
            return forced
        cost, least = costs[self.slots.index(self.chosen)], min(costs)
        ties = costs.count(least)
        if cost > least:
            return f"drawn with temperature {self.params.temperature:g}, not the cheapest"
        if ties > 1:
            return f"one of {ties} with the least cost of {count}, chosen at random"
        reason = f"the cheapest of {count}"
        if self.constraints is not None and self.constraints.prefers:
            reason += " with the preferred taints"
        if self.free_copy == self.chosen:
            reason += "; another copy of the cached blocks pays off"
        return reason


class InflightInputs(msgspec.Struct, gc=False, frozen=True):
    """A decision of another ``mode``. ``inflight`` are the requests on each slot before it."""

    mode: str
    owners: Sequence[tuple[int, int]]
    slots: array[int]
    chosen: int
    inflight: Sequence[int]
    constraints: Constraints | None = None
    eligible: int = 0
    omitted: int = 0

    def receipt(self) -> RouteReceipt:
        """See :class:`DecisionInputs`."""
        found = [
            RouteCandidate(
                worker=f"{self.owners[slot][0]:x}",
                dp_rank=self.owners[slot][1],
                chosen=slot == self.chosen,
                terms={"in_flight": self.inflight[slot]},
            )
            for slot in self.slots
        ]
        found.sort(key=lambda row: not row.chosen)
        found += excluded_ranks(self.owners, self.slots, self.constraints)
        count = self.eligible or len(self.slots)
        forced = forced_choice(self.constraints, self.owners, self.slots, count)
        return RouteReceipt(
            mode=self.mode,
            reason=forced or f"{_MODES.get(self.mode, self.mode)} {count}",
            candidates=tuple(found[:MAX_CANDIDATES]),
            omitted=self.omitted + len(found[MAX_CANDIDATES:]),
        )

    def narrowed(self, wanted: bool) -> InflightInputs:
        """Return the same for the chosen slot alone; ``wanted``: for the first ones, too."""
        slots = [one for one in self.slots if one != self.chosen][: MAX_CANDIDATES - 1]
        slots = [self.chosen, *slots] if wanted else [self.chosen]
        ranks = sum(worker_id >= 0 for worker_id, _ in self.owners)
        return msgspec.structs.replace(
            self,
            owners=[self.owners[slot] for slot in slots],
            slots=array("I", range(len(slots))),
            chosen=0,
            inflight=[self.inflight[slot] for slot in slots],
            eligible=len(self.slots),
            omitted=ranks - len(slots),
        )


_MODES = {
    "round-robin": "the next in turn of",
    "random": "chosen at random of",
    "power-of-two": "the less loaded of two, drawn from",
    "least-loaded": "the least requests in flight of",
    "device-aware-weighted": "the least requests in flight for its device class of",
}


def _kept(slots: array[int], chosen: int, costs: array[float] | None) -> list[int]:
    """Return the places in ``slots`` to keep of a large pool: that of ``chosen`` alone, or with
    ``costs`` (of each of ``slots``) those of the cheapest, too. O(slots)."""
    place = slots.index(chosen)
    if costs is None:
        return [place]
    found = nsmallest(MAX_CANDIDATES, range(len(slots)), key=costs.__getitem__)
    return [place, *[one for one in found if one != place][: MAX_CANDIDATES - 1]]


class _Rows:
    """The columns of ``inputs`` as arrays, and its candidates."""

    def __init__(self, inputs: KvInputs) -> None:
        self._inputs = inputs
        self._device = _column("I", inputs.device)
        self._lower = [_column("I", one) for one in inputs.lower or (b"", b"", b"")]
        self._prefill = _column("q", inputs.prefill)
        self._decode = _column("q", inputs.decode)
        self.costs: array[float] = _column("d", inputs.costs)[: len(inputs.slots)]
        least = min(self._prefill[slot] for slot in inputs.slots)
        self.least = least if inputs.least_tokens is None else inputs.least_tokens

    def candidate(self, place: int) -> RouteCandidate:
        """The candidate ``slots[place]`` with the terms of its cost, which add up to it."""
        inputs = self._inputs
        slot = inputs.slots[place]
        worker_id, dp_rank = inputs.owners[slot]
        tiers = TierCounts(self._device[slot], *[one[slot] if one else 0 for one in self._lower])
        return RouteCandidate(
            worker=f"{worker_id:x}",
            dp_rank=dp_rank,
            chosen=slot == inputs.chosen,
            overlap_blocks=effective_blocks(inputs.params.weights, tiers),
            cost=self.costs[place],
            terms=self._terms(place, slot, tiers),
        )

    def _terms(self, place: int, slot: int, tiers: TierCounts) -> dict[str, float]:
        inputs, tokens = self._inputs, self._prefill[slot]
        weights = inputs.params.weights
        requests = inputs.requests[place] if inputs.requests else 0
        load = Load(tokens, max(tokens - self.least, 0), self._decode[slot], requests)
        found = breakdown(inputs.params, inputs.isl_tokens, tiers, load)
        scale = weights.prefill_scale
        terms = {
            "prompt": scale * inputs.isl_tokens / weights.block_size,
            "queued_prefill": scale * tokens / weights.block_size,
            "cached": scale * (found.prefill_blocks - found.raw_prefill_blocks),
            "decode": float(found.decode_blocks),
            "requests": found.request_blocks,
            "copies": scale * self._copies(slot, tiers),
        }
        # What is left is the factor of preferred taints.
        terms["taints"] = self.costs[place] - sum(terms.values())
        always = ("prompt", "queued_prefill", "cached", "decode")
        return {
            name: value for name, value in terms.items() if name in always or abs(value) > _SMALL
        }

    def _copies(self, slot: int, tiers: TierCounts) -> float:
        """The price of blocks that another candidate has cached, in blocks of prefill."""
        inputs = self._inputs
        if not inputs.params.duplicate_cost:
            return 0.0
        best = inputs.best_overlap
        lacking = max(best - effective_blocks(inputs.params.weights, tiers), 0.0)
        if slot == inputs.free_copy:
            return -lacking
        blocks = inputs.isl_tokens // inputs.params.weights.block_size
        return lacking * duplicate_price(inputs.params, best, blocks)


def _column(kind: str, data: bytes) -> array[Any]:
    """An array of ``data``."""
    made = array(kind)
    made.frombytes(data)
    return made


def _pick(kind: str, data: bytes, places: Sequence[int]) -> bytes:
    """Return the items of a column at ``places``."""
    column = _column(kind, data)
    return array(kind, [column[place] for place in places]).tobytes()
