"""What one decision weighed, copied when it was made, and the receipt that explains it later.

Names, terms and reasons are computed when the receipt is read. A copy costs about two microseconds,
most of them because a thousand copies evict other data from the CPU's caches. So of each router 100
decisions a second are copied; of others the total cost is kept. Pure.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from array import array
from collections.abc import Sequence
from heapq import nsmallest
from typing import Any, Self, TypeAlias

import msgspec
from msgspec import StructMeta

from dynamo.protocols.status import RouteCandidate, RouteReceipt
from dynamo.router.caches.prompt import TierCounts, effective_blocks
from dynamo.router.decision.cost import CostBreakdown, CostParams, Load, breakdown, duplicate_price
from dynamo.router.decision.seconds import TERMS
from dynamo.router.eligibility.filters import BOUND, Constraints

MAX_CANDIDATES = 64
"""Candidates of a receipt. The inputs of larger pools are kept for the chosen one alone, or for
the cheapest where a receipt is asked for."""
CAPTURES_PER_SECOND = 100
"""Decisions of a router whose inputs are copied; those that a client asks for are not counted."""
_SMALL = 1e-6  # blocks


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


class DecisionTotals(msgspec.Struct, gc=False, frozen=True):
    """What is kept of a decision beyond the limit: the ``owner`` (worker id, rank) of the chosen
    slot, how many were ``eligible``, and its cost in the kv mode."""

    mode: str
    index: str
    owner: tuple[int, int]
    eligible: int
    cost: float | None = None

    def receipt(self) -> RouteReceipt:
        """Return the decision without its reasons."""
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


# Inputs are kept by the thousand: without gc=False each full collection would visit all of them.
# Nothing in them may refer back, directly or through a traceback: a cycle would never be freed.
class _Narrowed(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """How many ranks were ``eligible`` and how many are ``omitted``, if not all are kept."""

    eligible: int = 0
    omitted: int = 0


class _AbstractStruct(StructMeta, ABCMeta):
    """The class of a Struct with abstract methods."""


class RankInputs(_Narrowed, gc=False, frozen=True, metaclass=_AbstractStruct):
    """A decision of ``mode``: ``slots`` were eligible, one of them is ``chosen`` (-1: none).

    ``owners`` are indexed by slot.
    """

    mode: str
    index: str
    owners: Sequence[tuple[int, int]]
    slots: array[int]
    chosen: int
    constraints: Constraints | None

    @property
    def unit(self) -> str:
        """What costs are counted in; empty where there are none."""
        return ""

    def receipt(self) -> RouteReceipt:
        """Return the decision with its reasons. O(candidates)."""
        rows = self.candidates()
        for slot, reason in self.excluded().items():
            worker_id, rank = self.owners[slot]
            rows.append(RouteCandidate(worker=f"{worker_id:x}", dp_rank=rank, excluded=reason))
        return RouteReceipt(
            mode=self.mode,
            index=self.index,
            reason=self._forced_choice() or self.choice(self.eligible or len(self.slots)),
            unit=self.unit,
            candidates=tuple(rows[:MAX_CANDIDATES]),
            omitted=self.omitted + len(rows[MAX_CANDIDATES:]),
        )

    @abstractmethod
    def candidates(self) -> list[RouteCandidate]:
        """Return the eligible ranks, the chosen one first."""

    @abstractmethod
    def choice(self, count: int) -> str:
        """Return the reason of the choice among ``count`` ranks."""

    def _keep(self, indices: list[int], **columns: Any) -> Self:
        """Return the same for the ranks at ``indices`` in ``slots``, the chosen one first."""
        constraints = self.constraints
        if constraints is not None:  # no excluded rank is left to explain
            constraints = msgspec.structs.replace(constraints, allowed=None, lacking={}, single=())
        slots = [self.slots[index] for index in indices]
        ranks = sum(worker_id >= 0 for worker_id, _ in self.owners)
        return msgspec.structs.replace(
            self,
            owners=[self.owners[slot] for slot in slots],
            slots=array("I", range(len(slots))),
            chosen=0,  # the first of ``indices``
            eligible=len(self.slots),
            omitted=ranks - len(slots),
            constraints=constraints,
            **columns,
        )

    def excluded(self) -> dict[int, str]:
        """Return the slots of workers that could not be chosen, with the reason. O(slots)."""
        if self.constraints is None:
            return {}
        eligible = set(self.slots)
        reasons = {}
        for slot, (worker_id, rank) in enumerate(self.owners):
            if worker_id >= 0 and slot not in eligible:
                reasons[slot] = self.constraints.excluded(worker_id, rank)
            elif slot in eligible and self.chosen < 0:
                reasons[slot] = "rejected by the policy"
        return reasons

    def _forced_choice(self) -> str:
        """Return the reason of a decision without an alternative, else ""."""
        constraints = self.constraints
        if constraints is not None and constraints.pin is not None:
            return "the request names this worker"
        if constraints is not None and constraints.session:
            reasons = set(self.excluded().values())
            if reasons == {BOUND}:
                return "the session of the request is bound to this worker"
        if (self.eligible or len(self.slots)) > 1:
            return ""
        ranks = sum(worker_id >= 0 for worker_id, _ in self.owners)
        return "the only worker" if ranks == 1 else f"the only eligible one of {ranks}"


# Bytes of the columns: a copy of an array takes twice the time, and most receipts are never read.
class KvInputs(RankInputs, gc=False, frozen=True):
    """A decision of the kv mode.

    The columns are bytes of arrays, indexed by slot; but ``costs`` are those of ``slots``, in this
    order. ``device`` and ``lower`` (host, disk, shared; None where unused) are cached blocks,
    ``prefill`` active prompt tokens, ``decode`` blocks with those of this request. ``requests`` are
    those running on each of ``slots``, where they matter. ``free_copy`` is the slot that may
    compute what others have cached without the price of a copy. ``best_overlap`` are the most
    effective cached blocks of an eligible slot, ``least_tokens`` the least active prefill of one
    before columns were narrowed. With a cost in seconds, ``terms`` has four for each of ``slots``.
    """

    params: CostParams
    isl_tokens: int
    best_overlap: float
    device: bytes
    prefill: bytes
    decode: bytes
    costs: bytes
    lower: tuple[bytes, bytes, bytes] | None
    requests: tuple[int, ...]
    free_copy: int | None
    least_tokens: int | None = None
    terms: bytes = b""
    policy: str = ""
    """The policy that chose; "" for the built-in choice."""

    @property
    def unit(self) -> str:
        """See :class:`RankInputs`."""
        return "seconds" if self.terms else "blocks"

    @property
    def prompt_blocks(self) -> int:
        """The full blocks of the prompt."""
        return self.isl_tokens // self.params.weights.block_size

    def cost_by_slot(self) -> dict[int, float]:
        """Return the cost of each eligible slot; empty if none could be chosen."""
        if self.chosen < 0:
            return {}
        # Not strict: the column is as long as all slots; eligible ones come first.
        return dict(zip(self.slots, _column("d", self.costs), strict=False))

    def tiers(self, slot: int) -> TierCounts:
        """Return the cached blocks of a slot."""
        lower = (_column("I", data)[slot] if data else 0 for data in self.lower or ())
        return TierCounts(_column("I", self.device)[slot], *lower)

    def effective(self, slot: int) -> float:
        """Return the blocks that the slot need not compute, lower tiers by their weight."""
        return effective_blocks(self.params.weights, self.tiers(slot))

    def load(self, slot: int, requests: int, least_tokens: int | None = None) -> Load:
        """Return the load of a slot with ``requests`` running there."""
        tokens: int = _column("q", self.prefill)[slot]
        excess = 0 if least_tokens is None else max(tokens - least_tokens, 0)
        return Load(tokens, excess, _column("q", self.decode)[slot], requests)

    def load_at(self, index: int, least_tokens: int | None) -> Load:
        """Return the load of ``slots[index]``, with its requests where they matter."""
        requests = self.requests[index] if self.requests else 0
        return self.load(self.slots[index], requests, least_tokens)

    def least_prefill(self) -> int | None:
        """Return the least active prefill of the eligible slots; None without any. O(slots)."""
        if self.least_tokens is not None:
            return self.least_tokens
        prefill = _column("q", self.prefill)
        return min((prefill[slot] for slot in self.slots), default=None)

    def breakdown(self, slot: int, load: Load) -> CostBreakdown:
        """Return the terms of the cost of a slot, its prefill blocks with the price of copies."""
        plain = breakdown(self.params, self.isl_tokens, self.tiers(slot), load)
        return plain._replace(prefill_blocks=plain.prefill_blocks + self._copies(slot))

    def candidates(self) -> list[RouteCandidate]:
        """See :class:`RankInputs`; the cheapest ones next."""
        costs, least = _column("d", self.costs), self.least_prefill()
        rows = [
            RouteCandidate(
                worker=f"{self.owners[slot][0]:x}",
                dp_rank=self.owners[slot][1],
                chosen=slot == self.chosen,
                overlap_blocks=self.effective(slot),
                cost=costs[index],
                terms=self._terms(index, costs[index], least),
            )
            for index, slot in enumerate(self.slots)
        ]
        rows.sort(key=lambda row: (not row.chosen, row.cost))
        return rows

    def choice(self, count: int) -> str:
        """See :class:`RankInputs`."""
        # The column is as wide as the others; beyond the slots it has costs of earlier decisions.
        costs = list(_column("d", self.costs)[: len(self.slots)])
        cost, least = costs[self.slots.index(self.chosen)], min(costs)
        ties = costs.count(least)
        if self.policy:
            return f"chosen of {count} by the policy {self.policy}"
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

    def narrowed(self, wanted: bool) -> KvInputs:
        """Return the same for the chosen slot alone; ``wanted``: for the cheapest, too.

        O(slots).
        """
        indices = [self.slots.index(self.chosen)]
        if wanted:
            costs = _column("d", self.costs)
            cheapest = nsmallest(MAX_CANDIDATES, range(len(self.slots)), key=costs.__getitem__)
            indices += [index for index in cheapest if index != indices[0]][: MAX_CANDIDATES - 1]
        slots = [self.slots[index] for index in indices]
        host, disk, shared = self.lower or (b"", b"", b"")
        return self._keep(
            indices,
            device=_pick("I", self.device, slots),
            prefill=_pick("q", self.prefill, slots),
            decode=_pick("q", self.decode, slots),
            costs=_pick("d", self.costs, indices),
            lower=(_pick("I", host, slots), _pick("I", disk, slots), _pick("I", shared, slots)),
            requests=tuple(self.requests[index] for index in indices) if self.requests else (),
            free_copy=slots.index(self.free_copy) if self.free_copy in slots else None,
            least_tokens=self.least_prefill(),
            terms=_pick(
                "d", self.terms, [TERMS * index + i for index in indices for i in range(TERMS)]
            ),
        )

    def seconds(self, index: int, cost: float) -> dict[str, float]:
        """Return the terms of the cost of ``slots[index]`` in seconds; empty if it is in blocks."""
        if not self.terms:
            return {}
        parts = _column("d", self.terms)[TERMS * index : TERMS * (index + 1)]
        terms = dict(zip(("wait", "compute", "others", "running"), parts, strict=True))
        if abs(rest := cost - sum(parts)) > _SMALL:
            terms[self._rest] = rest
        return terms

    @property
    def _rest(self) -> str:
        """The name of what is left of a cost: the share of a policy, or of preferred taints."""
        return "policy" if self.policy else "taints"

    def _terms(self, index: int, cost: float, least_tokens: int | None) -> dict[str, float]:
        """Return the terms of the cost of ``slots[index]``, which add up to it."""
        if self.terms:
            return self.seconds(index, cost)
        slot = self.slots[index]
        weights = self.params.weights
        load = self.load_at(index, least_tokens)
        parts = breakdown(self.params, self.isl_tokens, self.tiers(slot), load)
        scale = weights.prefill_scale
        terms = {
            "prompt": scale * self.isl_tokens / weights.block_size,
            "queued_prefill": scale * load.prefill_tokens / weights.block_size,
            "cached": scale * (parts.prefill_blocks - parts.raw_prefill_blocks),
            "decode": float(parts.decode_blocks),
            "requests": parts.request_blocks,
            "copies": scale * self._copies(slot),
        }
        terms[self._rest] = cost - sum(terms.values())
        always = ("prompt", "queued_prefill", "cached", "decode")
        return {
            name: value for name, value in terms.items() if name in always or abs(value) > _SMALL
        }

    def _copies(self, slot: int) -> float:
        """Return the price of blocks that another candidate has cached, in blocks of prefill."""
        best = self.best_overlap
        if not self.params.duplicate_cost or not best:
            return 0.0
        lacking = max(best - self.effective(slot), 0.0)
        if slot == self.free_copy:  # counts as if the slot had the prefix already
            return -lacking
        return lacking * duplicate_price(self.params, best, self.prompt_blocks)


class InflightInputs(RankInputs, gc=False, frozen=True):
    """A decision of another mode. ``inflight`` are the requests on each slot before it."""

    inflight: Sequence[int]

    def candidates(self) -> list[RouteCandidate]:
        """See :class:`RankInputs`."""
        rows = [
            RouteCandidate(
                worker=f"{self.owners[slot][0]:x}",
                dp_rank=self.owners[slot][1],
                chosen=slot == self.chosen,
                terms={"in_flight": self.inflight[slot]},
            )
            for slot in self.slots
        ]
        rows.sort(key=lambda row: not row.chosen)
        return rows

    def choice(self, count: int) -> str:
        """See :class:`RankInputs`."""
        return f"{_MODES.get(self.mode, self.mode)} {count}"

    def narrowed(self, wanted: bool) -> InflightInputs:
        """Return the same for the chosen slot alone; ``wanted``: for the first ones, too."""
        indices = [self.slots.index(self.chosen)]
        if wanted:
            others = (index for index in range(len(self.slots)) if index != indices[0])
            indices += list(others)[: MAX_CANDIDATES - 1]
        return self._keep(indices, inflight=[self.inflight[self.slots[index]] for index in indices])


DecisionInputs: TypeAlias = DecisionTotals | KvInputs | InflightInputs
"""What is kept of one decision."""

_MODES = {
    "round-robin": "the next in turn of",
    "random": "chosen at random of",
    "power-of-two": "the less loaded of two, drawn from",
    "least-loaded": "the least requests in flight of",
    "device-aware-weighted": "the least requests in flight for its device class of",
}


def _column(kind: str, data: bytes) -> memoryview[Any]:
    """Return the items of a column."""
    return memoryview(data).cast(kind)  # type: ignore[call-overload,no-any-return]


def _pick(kind: str, data: bytes, indices: Sequence[int]) -> bytes:
    """Return the items of a column at ``indices``; nothing of an empty one."""
    column = _column(kind, data)
    return array(kind, [column[index] for index in indices] if data else []).tobytes()
