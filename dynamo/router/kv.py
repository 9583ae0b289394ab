"""The kv mode: cached prefix against active load, one cost per slot, the cheapest wins.

One decision is four compiled calls over columns indexed by slot: hash, match, project, score.
Spec 3.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sized
from random import Random
from typing import Any

from dynamo._fast.radix import RadixTree
from dynamo._fast.scoring import choose, costs
from dynamo.config.router import RouterSettings
from dynamo.errors import DynamoError
from dynamo.protocols.card import RuntimeConfig
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing
from dynamo.router.caches.cached_blocks import CachedBlocks
from dynamo.router.caches.predicted import PredictedCache, make_optimistic_cache
from dynamo.router.cost import CostParams, add_requests, cached_tokens, cost_params, overridden
from dynamo.router.decision_log import log as decision_log
from dynamo.router.decision_log import log_candidates, log_selected
from dynamo.router.decision_snapshot import DecisionSnapshot
from dynamo.router.duplicates import CopyOffer, CopyPolicy
from dynamo.router.eligibility.eligibility_filter import EligibilityFilter
from dynamo.router.eligibility.taints import apply_preferred_taints
from dynamo.router.explain import Explanation, explain
from dynamo.router.load.active import ActiveLoad, Reservation
from dynamo.router.load.prefill_model import prefill_model
from dynamo.router.metrics import DecisionMetrics
from dynamo.router.picker import Decision
from dynamo.router.prompt import HashedPrompt, Hasher
from dynamo.router.sync.local import LocalRequests
from dynamo.router.worker_pool import DenseSlots, WorkerPool

__all__ = ["KvPicker"]


class KvPicker:
    """Cost-based choice. ``index`` is None where prefix overlap must not matter.

    ``predicts``: decisions predict caches, for a while or for good.
    ``served`` counts, by worker, the prompts of at least one block that got a first token.
    ``on_first_served`` hears of each worker's first of them.
    ``local_requests``, where set, is told of everything booked, for other replicas of the router.
    ``clock`` gives seconds and is only ever subtracted. Decision cost: O(prompt + slots × log
    prompt).
    """

    def __init__(
        self,
        settings: RouterSettings,
        block_size: int,
        index: RadixTree | None,
        metrics: DecisionMetrics | None = None,
        random: Random | None = None,
        clock: Callable[[], float] = time.perf_counter,
        predicted: PredictedCache | None = None,
    ) -> None:
        self.worker_pool = WorkerPool(DenseSlots() if index is None else index)
        self.block_size = block_size
        self.active = ActiveLoad(
            block_size,
            settings.track_active_blocks,
            settings.track_output_blocks,
            prefill_model(settings),
            clock,
        )
        self.eligibility = EligibilityFilter(self.worker_pool, settings, self._booked_prefill)
        self.index = index
        self.weighs_overlap = index is not None
        self.tracks_output = settings.track_output_blocks
        self.optimistic = make_optimistic_cache(settings)
        self.predicts = predicted is not None or self.optimistic is not None
        self._copies = CopyPolicy() if settings.duplicate_cost else None
        chains = self.predicts or self._copies is not None
        self._hasher = Hasher(block_size, index is not None, chains, settings.track_active_blocks)
        self._params = cost_params(settings, block_size)
        self._held = CachedBlocks(index, settings.shared_cache_type != "none")
        self._metrics = metrics
        self._uniform = (random or Random()).random
        self._clock = clock
        self.predicted = predicted
        self.served: dict[int, int] = {}
        self.local_requests: LocalRequests | None = None
        self.on_first_served: Callable[[int], None] = _nobody
        self._resize()

    def pick(
        self,
        request_id: str | None,
        tokens: Tokens,
        *,
        routing: Routing | None = None,
        override: Mapping[str, Any] | None = None,
    ) -> Decision:
        """See :meth:`dynamo.router.picker.Picker.pick`."""
        now_s = self._clock()
        times = [now_s]
        params = overridden(self._params, override) if override else self._params
        slots = self.eligibility.slots(routing, now_s)
        prompt = self._look(tokens, routing, params, times)
        slot, best_overlap, offer = self._choose(prompt, slots, params, routing, now_s)
        decision = self._decision(slot, prompt)
        if decision_log.isEnabledFor(logging.INFO):
            self._log_decision(request_id, prompt, params, slots, slot, offer)
        if request_id is None:
            return decision
        found = self._book(request_id, slot, decision, prompt, routing, params)
        if offer is not None and self._copies is not None:
            self._copies.routed(request_id, slot, offer, now_s)
        times.append(self._clock())
        if self._metrics is not None:
            self._metrics.decided(times, prompt, found, best_overlap, self.block_size)
            if self._held.shares:
                beyond = self._held.of(slot).shared
                self._metrics.shared(self._held.shared_blocks, beyond, prompt.blocks)
        return decision

    def snapshot(
        self,
        tokens: Tokens,
        routing: Routing | None = None,
        override: Mapping[str, Any] | None = None,
    ) -> DecisionSnapshot:
        """What :meth:`pick` would weigh, over all slots; books nothing. Raises InvalidArgument
        for a bad ``override`` only."""
        now_s = self._clock()
        params = overridden(self._params, override) if override else self._params
        prompt = self._look(tokens, routing, params, [now_s])
        self.active.project_into(prompt.shared, prompt.unique_blocks, self._prefill, self._decode)
        slots, chosen, offer, error = array("I"), None, None, None
        try:
            slots = self.eligibility.slots(routing, now_s)
            chosen, _, offer = self._choose(prompt, slots, params, routing, now_s)
        except DynamoError as failure:
            error = failure
        return self._snapshot(prompt, params, slots, chosen, offer, error)

    def explain(
        self,
        tokens: Tokens,
        routing: Routing | None = None,
        override: Mapping[str, Any] | None = None,
        queued: Sized = (),
    ) -> Explanation:
        """See :meth:`dynamo.router.picker.Picker.explain`."""
        snapshot = self.snapshot(tokens, routing, override)
        return explain(snapshot, self.worker_pool, self.active, routing, len(queued))

    def predict(self, tokens: Tokens, worker_id: int, dp_rank: int = 0) -> None:
        """Somebody else sent the prompt there: without events, predict that it is cached."""
        member = self.worker_pool.members.get(worker_id)
        if self.predicted is None or member is None or dp_rank not in member.slots:
            return
        now_s = self._clock()
        prompt = self._hasher.hash(tokens, None, True, self._clock, [])
        slot = member.slots[dp_rank]
        self.predicted.routed(None, slot, prompt.chained, prompt.hashes, now_s)

    def predict_blocks(
        self,
        request_id: str,
        slot: int,
        chained: array[int],
        hashes: array[int],
        now_s: float,
    ) -> None:
        """The request, ours or a replica's, goes to ``slot``: where decisions predict caches, its
        blocks will be there. O(blocks)."""
        if self.predicted is not None:
            self.predicted.routed(request_id, slot, chained, hashes, now_s)
        if self.optimistic is not None:
            self.optimistic.routed(slot, chained, hashes, now_s)

    def mark_prefill_complete(self, request_id: str) -> None:
        """The first token is here: the prompt is no load any more."""
        if self._copies is not None:
            self._copies.ended(request_id)
        reservation_id = self.active.mark_prefill_complete(request_id, self._clock())
        if reservation_id is None:
            return
        if self.local_requests is not None:
            self.local_requests.prefill_completed(request_id)
        self.eligibility.load_changed(reservation_id.worker_id)
        if reservation_id.isl_tokens >= self.block_size:
            served = self.served.get(reservation_id.worker_id, 0)
            self.served[reservation_id.worker_id] = served + 1
            if not served:
                self.on_first_served(reservation_id.worker_id)
        if self._metrics is not None:
            self._metrics.first_token(reservation_id)

    def add_output_tokens(self, request_id: str, count: int) -> None:
        """``count`` more tokens were generated."""
        self.active.add_output_tokens(request_id, count)

    def add_reused_tokens(self, tokens: int) -> None:
        """An engine said that it took ``tokens`` of some prompt from its cache."""
        if self._metrics is not None:
            self._metrics.add_reused_tokens(tokens)

    def free(self, request_id: str) -> None:
        """The request has ended, however it did."""
        reservation_id = self._end(request_id)
        if reservation_id is not None:
            self.eligibility.load_changed(reservation_id.worker_id)

    def add_worker(self, worker_id: int, config: RuntimeConfig, device_type: str = "cpu") -> None:
        """A worker appeared, or its configuration changed."""
        member = self.worker_pool.add(worker_id, config, device_type)
        self._resize()
        self.eligibility.load_changed(worker_id)
        for slot in member.slots.values():
            if self.predicted is not None:
                self.predicted.add_slot(slot, config.total_kv_blocks)
            if self.optimistic is not None:
                self.optimistic.add_slot(slot)

    def remove_worker(self, worker_id: int) -> None:
        """A worker is gone: its blocks leave the index, its requests end."""
        self.eligibility.forget(worker_id)
        slots = self.worker_pool.remove(worker_id)
        for request_id in self.active.booked_on(set(slots)):
            self._end(request_id)
        for slot in slots:
            if self._copies is not None:
                self._copies.drop_slot(slot)
            if self.predicted is not None:
                self.predicted.drop_slot(slot)
            if self.optimistic is not None:
                self.optimistic.drop_slot(slot)
        self.served.pop(worker_id, None)

    def expire(self, age_s: float) -> list[str]:
        """Drop the load of requests older than ``age_s``, which somebody forgot to free."""
        stale = self.active.stale(self._clock() - age_s)
        for request_id in stale:
            self.free(request_id)
        return stale

    def _end(self, request_id: str) -> Reservation | None:
        """Release all that the request holds; its booking, if it had one."""
        if self._copies is not None:
            self._copies.ended(request_id)
        reservation_id = self.active.free(request_id)
        if self.local_requests is not None:
            self.local_requests.freed(request_id)
        if self.predicted is not None:
            self.predicted.ended(request_id, self._clock())
        if reservation_id is not None and self._metrics is not None and not reservation_id.remote:
            self._metrics.ended(reservation_id, self._clock())
        return reservation_id

    def _booked_prefill(self, slot: int) -> int:
        return self.active.load(slot)[0]

    def _resize(self) -> None:
        """Columns by slot, long enough for the slots that the index has ever handed out."""
        known = 0 if self.index is None else self.index.capacity()
        width = 16
        while width < max(self.worker_pool.width, known):
            width *= 2
        self._held.resize(width)
        self._prefill = array("q", bytes(8 * width))
        self._decode = array("q", bytes(8 * width))
        self._costs = array("d", bytes(8 * width))

    def _look(
        self, tokens: Tokens, routing: Routing | None, params: CostParams, times: list[float]
    ) -> HashedPrompt:
        """Hash the prompt and find what every slot holds of it."""
        prompt = self._hasher.hash(tokens, routing, params.assume_kv_reuse, self._clock, times)
        if self.predicted is not None:
            self.predicted.expire(times[0])
        copies = [] if self._copies is None else self._copies.in_progress(prompt.chained)
        self._held.look(prompt.hashes, self.optimistic, times[0], copies)
        times.append(self._clock())
        return prompt

    def _choose(
        self,
        prompt: HashedPrompt,
        slots: array[int],
        params: CostParams,
        routing: Routing | None,
        now_s: float,
    ) -> tuple[int, float, CopyOffer | None]:
        """The slot with the least cost, the most effective blocks that one of them has, and where
        a copy of these would help."""
        held, prefill, decode = self._held, self._prefill, self._decode
        self.active.project_into(prompt.shared, prompt.unique_blocks, prefill, decode)
        best_overlap = costs(
            params.weights,
            prompt.isl_tokens,
            slots,
            prefill,
            decode,
            self._costs,
            held.device,
            held.host,
            held.disk,
            held.shared,
        )
        if params.request_weight:
            add_requests(params.request_weight, slots, self._costs, self.active.load)
        offer = None
        if self._copies is not None:
            offer = self._copies.add_prices(
                params, slots, held, best_overlap, prompt, self._costs, now_s
            )
        if routing is not None and routing.preferred_taints:
            apply_preferred_taints(self._costs, slots, self.worker_pool, routing.preferred_taints)
        chosen = choose(self._costs, len(slots), params.temperature, self._uniform())
        return slots[chosen], best_overlap, offer

    def _decision(self, slot: int, prompt: HashedPrompt) -> Decision:
        owner = self.worker_pool.owners[slot]
        assert owner is not None, "a candidate slot has an owner"
        return Decision(*owner, self._held.device[slot], prompt.blocks)

    def _book(
        self,
        request_id: str,
        slot: int,
        decision: Decision,
        prompt: HashedPrompt,
        routing: Routing | None,
        params: CostParams,
    ) -> float:
        """Make it the slot's load; the effective blocks of the prompt that are there."""
        found = self._held.effective(params.weights, slot)
        prefill = 0
        if params.track_prefill_tokens:
            prefill = max(prompt.isl_tokens - cached_tokens(params.weights, found), 0)
        now_s = self._clock()
        reservation_id = Reservation(
            slot,
            decision.worker_id,
            decision.dp_rank,
            prompt.isl_tokens,
            decision.overlap_blocks,
            now_s,
            None if routing is None else routing.expected_output_tokens,
        )
        self.active.book(request_id, reservation_id, prompt.shared, prompt.unique_blocks, prefill)
        self.eligibility.settled(routing, decision.worker_id, decision.dp_rank, now_s)
        if self.local_requests is not None:
            self.local_requests.booked(request_id, reservation_id, prompt, prefill)
        if self.predicts:
            self.predict_blocks(request_id, slot, prompt.chained, prompt.hashes, now_s)
        return found

    def _snapshot(
        self,
        prompt: HashedPrompt,
        params: CostParams,
        slots: array[int],
        chosen: int | None,
        offer: CopyOffer | None,
        error: DynamoError | None = None,
    ) -> DecisionSnapshot:
        costs = {} if error else dict(zip(slots, self._costs, strict=False))
        columns = self._held.copy(), self._prefill[:], self._decode[:]
        free_copy = offer.target if offer is not None and offer.free else None
        return DecisionSnapshot(prompt, params, slots, *columns, costs, chosen, error, free_copy)

    def _log_decision(
        self,
        request_id: str | None,
        prompt: HashedPrompt,
        params: CostParams,
        slots: array[int],
        slot: int,
        offer: CopyOffer | None,
    ) -> None:
        decision = self._decision(slot, prompt)
        if decision_log.isEnabledFor(logging.DEBUG):
            snapshot = self._snapshot(prompt, params, slots, slot, offer)
            log_candidates(snapshot, self.worker_pool.owners, self.active, decision)
        if request_id is not None:
            worker_type = "decode" if self._metrics is None else self._metrics.worker_type
            cost = self._costs[slots.index(slot)]
            log_selected(request_id, decision, self._held.of(slot), cost, worker_type)


def _nobody(worker_id: int) -> None:
    """Hears that a worker has served its first prompt, and does nothing."""
