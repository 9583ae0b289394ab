"""The kv mode: weigh cached prefixes against active load; the slot of the least cost is chosen.

A decision is four compiled calls over columns indexed by slot: hash, match, project, score.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sized
from functools import partial
from random import Random
from typing import Any

from dynamo._fast.radix import RadixTree
from dynamo._fast.scoring import choose, costs
from dynamo.config.router import RouterSettings
from dynamo.errors import DynamoError
from dynamo.observability.metrics import Counter
from dynamo.protocols.codec import Tokens
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.router.caches.predicted import (
    PredictedCache,
    make_optimistic_cache,
    make_predicted_cache,
)
from dynamo.router.caches.prompt import CachedBlocks, HashedPrompt, Hasher
from dynamo.router.decision.cost import (
    CopyOffer,
    CopyPolicy,
    CostParams,
    add_requests,
    cached_tokens,
    cost_params,
    overridden,
)
from dynamo.router.decision.decision import Attempt, Decision
from dynamo.router.decision.explanation import Explanation, Weighed, explanation, log_decision
from dynamo.router.decision.explanation import log as decision_log
from dynamo.router.decision.receipt import (
    MAX_CANDIDATES,
    CaptureLimit,
    DecisionInputs,
    DecisionTotals,
    KvInputs,
)
from dynamo.router.decision.seconds import Seconds
from dynamo.router.eligibility.eligibility_filter import EligibilityFilter
from dynamo.router.eligibility.filters import Constraints, apply_preferred_taints
from dynamo.router.load.active_load import ActiveLoad, Reservation
from dynamo.router.load.prefill_model import prefill_model
from dynamo.router.load.replica_loads import LocalRequests
from dynamo.router.modes.kv_metrics import DecisionMetrics
from dynamo.router.worker_pool import DenseSlots, WorkerPool


class KvPicker:
    """Chooses by cost. ``index`` is None where prefix overlap must not matter.

    ``served`` counts, by worker, the prompts of at least one block that got a first token;
    ``on_first_served`` is called with each worker at its first one. ``local_requests``, where set,
    records all reservations for other replicas of the router. ``recovering`` are the slots whose
    cache is in doubt. ``clock`` gives seconds; only differences count. A decision is O(prompt +
    slots × log prompt).
    """

    def __init__(
        self,
        settings: RouterSettings,
        block_size: int,
        index: RadixTree | None,
        metrics: DecisionMetrics | None = None,
        random: Random | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.worker_pool = WorkerPool(DenseSlots() if index is None else index)
        self.block_size = block_size
        self._seconds: Seconds | None = None
        if settings.in_seconds:
            weights = settings.host_cache_hit_weight, settings.disk_cache_hit_weight
            shared = settings.shared_cache_multiplier or 0.0
            self._seconds = Seconds(block_size, (*weights, shared))
        self.active = ActiveLoad(
            block_size,
            settings.track_active_blocks,
            settings.track_output_blocks,
            prefill_model(settings),
            clock,
            None if self._seconds is None else self._seconds.slots,
        )
        self.add_output_tokens = self.active.add_output_tokens  # called for each token: no layer
        self.eligibility = EligibilityFilter(self.worker_pool, settings, self.active.prefill_tokens)
        self.index = index
        self.weighs_overlap = index is not None
        self.tracks_output = settings.track_output_blocks
        self._predicts_all = index is not None and settings.predicts
        self.predicted: PredictedCache | None = None
        if index is not None and settings.predicts:
            self.predicted = make_predicted_cache(settings, index)
        self.optimistic = make_optimistic_cache(settings)
        self.predicts = self._predicts_all or self.optimistic is not None
        self.served: dict[int, int] = {}
        self.on_first_served: Callable[[int], None] | None = None
        self.local_requests: LocalRequests | None = None
        prices_copies = settings.duplicate_cost and self._seconds is None
        self._copies = CopyPolicy() if prices_copies else None
        chains = self.predicts or prices_copies or self._seconds is not None
        self._hasher = Hasher(
            block_size, index is not None, chains, settings.track_active_blocks, clock
        )
        self._params = cost_params(settings, block_size)
        self._cached_blocks = CachedBlocks(
            index, settings.shared_cache_type != "none", self.optimistic
        )
        self._metrics = metrics
        self.reused_tokens = Counter() if metrics is None else metrics.reused
        self._uniform = (random or Random()).random
        self._clock = clock
        self._captures = CaptureLimit()
        self.recovering: Collection[int] = ()
        self._settings = settings
        state = "predicted" if self._predicts_all else "exact"
        self._index_state = "none" if index is None else state
        self._resize()

    def pick(
        self,
        request_id: str | None,
        tokens: Tokens,
        *,
        routing: Routing | None = None,
        override: Mapping[str, Any] | None = None,
        attempt: Attempt | None = None,
    ) -> Decision:
        """See :meth:`dynamo.router.modes.picker.Picker.pick`."""
        now_s = self._clock()
        params = overridden(self._params, override) if override else self._params
        limited = routing if attempt is None else attempt.limit(routing)
        # The common request has no constraints and all workers are eligible: skip the filter.
        slots = self.worker_pool.all_eligible if limited is None else None
        if slots is None:
            slots = self.eligibility.slots(limited, now_s)
        prompt, offer = self._weigh(tokens, routing, params, slots, now_s)
        index = self._choose(slots, params, routing)
        slot = slots[index]
        worker_id, dp_rank = self.worker_pool.owners[slot]
        if decision_log.isEnabledFor(logging.INFO):
            kind = "decode" if self._metrics is None else self._metrics.worker_type
            log_decision(self._capture(params, slots, slot, prompt, offer), request_id, kind)
        inputs: DecisionInputs | None = None
        if request_id is not None:
            # Copy before booking: the booking changes the load, and may make the worker busy.
            captures = self._captures
            wanted = attempt is not None and attempt.wanted
            if captures.left or wanted or captures.renew(now_s):
                captures.left -= not wanted  # one that the client asked for does not count
                constraints = None
                # The pool's own column: no rank was excluded, so none needs a reason.
                if limited is not None or slots is not self.worker_pool.candidates:
                    failed = attempt.failed if attempt is not None else ()
                    constraints = self.eligibility.constraints(routing, failed)
                inputs = self._capture(params, slots, slot, prompt, offer, constraints)
                if len(inputs.owners) > MAX_CANDIDATES:
                    inputs = inputs.narrowed(wanted)
            else:
                owner, cost = (worker_id, dp_rank), self._costs[index]
                inputs = DecisionTotals("kv", self._index_state, owner, len(slots), cost)
            expected_s = 0.0
            if self._seconds is not None and params.in_seconds:
                expected_s = self._seconds.routed(index, slots, self._cached_blocks, prompt)
            self._book(request_id, slot, prompt, routing, params, expected_s)
            if offer is not None and self._copies is not None:
                self._copies.routed(request_id, slot, offer, now_s)
        overlap_blocks = self._cached_blocks.device[slot]
        return Decision(worker_id, dp_rank, overlap_blocks, prompt.blocks, inputs)

    @property
    def in_seconds(self) -> bool:
        """Whether costs are in seconds."""
        return self._seconds is not None

    def weigh(
        self,
        tokens: Tokens,
        routing: Routing | None = None,
        override: Mapping[str, Any] | None = None,
        explains: bool = False,
    ) -> Weighed:
        """Return what :meth:`pick` would weigh, over all slots. Books nothing.

        ``explains``: with constraints, O(workers).
        Raises InvalidArgument for a bad ``override`` only; other errors are in the result.
        """
        now_s = self._clock()
        params = overridden(self._params, override) if override else self._params
        slots, chosen, error = array("I"), -1, None
        try:
            slots = self.eligibility.slots(routing, now_s)
        except DynamoError as failure:
            error = failure
        prompt, offer = self._weigh(tokens, routing, params, slots, now_s)
        if error is None:
            try:
                chosen = slots[self._choose(slots, params, routing)]
            except DynamoError as failure:
                error = failure
        constraints = self.eligibility.constraints(routing) if explains else None
        inputs = self._capture(params, slots, chosen, prompt, offer, constraints)
        return Weighed(inputs, error, self._cached_blocks.ranges())

    def explain(
        self,
        tokens: Tokens,
        routing: Routing | None = None,
        override: Mapping[str, Any] | None = None,
        queued: Sized = (),
    ) -> Explanation:
        """See :meth:`dynamo.router.modes.picker.Picker.explain`."""
        weighed = self.weigh(tokens, routing, override, explains=True)
        table = explanation(weighed, self.worker_pool, self.active, len(queued))
        if self._seconds is not None:
            table.speed = self.active.prefill_speed()
            for row in table.candidates:
                slot = self.worker_pool.members[row.worker_id].slots[row.dp_rank]
                row.slowness = self._seconds.slots.slowness(slot)
        return table

    def predict(self, tokens: Tokens, worker_id: int, dp_rank: int = 0) -> None:
        """Without KV events, predict that a prompt sent by other means is cached there."""
        member = self.worker_pool.members.get(worker_id)
        if self.predicted is None or member is None or dp_rank not in member.slots:
            return
        now_s = self._clock()
        prompt = self._hasher.hash(tokens, None, True, now_s)
        self.predicted.routed(None, member.slots[dp_rank], prompt.chained, prompt.hashes, now_s)

    def predict_blocks(
        self,
        request_id: str,
        slot: int,
        chained: array[int],
        hashes: array[int],
        now_s: float,
    ) -> None:
        """Predict the blocks of a request on ``slot``, where decisions predict caches. O(blocks).

        The request may be one of another replica.
        """
        if self.predicted is not None:
            self.predicted.routed(request_id, slot, chained, hashes, now_s)
        if self.optimistic is not None:
            self.optimistic.routed(slot, chained, hashes, now_s)

    def mark_prefill_complete(self, request_id: str) -> None:
        """Drop the prompt from the load: its first token has arrived."""
        if self._copies is not None:
            self._copies.ended(request_id)
        now_s = self._clock()
        reservation = self.active.mark_prefill_complete(request_id, now_s)
        if reservation is None:
            return
        worker_id = reservation.worker_id
        if self.local_requests is not None:
            self.local_requests.prefill_completed(request_id)
        if self.eligibility.follows_load:
            self.eligibility.load_changed(worker_id)
        # A shorter prompt has no full block: its worker publishes nothing, and is not silent.
        if reservation.isl_tokens >= self.block_size:
            served = self.served.get(worker_id, 0)
            self.served[worker_id] = served + 1
            if not served and self.on_first_served is not None:
                self.on_first_served(worker_id)
        if self._metrics is not None:
            self._metrics.first_token(reservation, now_s)

    def free(self, request_id: str, output_tokens: int = 0) -> None:
        """Drop the load of a request that has ended, in whatever way."""
        if self._copies is not None:
            self._copies.ended(request_id)
        reservation = self.active.free(request_id, output_tokens)
        if self.local_requests is not None:
            self.local_requests.freed(request_id)
        if self.predicted is not None:
            self.predicted.ended(request_id, self._clock())
        if reservation is None:
            return
        if self._seconds is not None and reservation.first_token_at_s is not None:
            self._seconds.ended(self._clock() - reservation.first_token_at_s)
        # The replica that sent a remote request counts it.
        if self._metrics is not None and not reservation.remote:
            self._metrics.ended(reservation, self._clock())
        if self.eligibility.follows_load:
            self.eligibility.load_changed(reservation.worker_id)

    def add_worker(self, worker_id: int, config: RuntimeConfig, device_type: str = "cpu") -> None:
        """Add a worker, or replace its configuration."""
        member = self.worker_pool.add(worker_id, config, device_type)
        self._resize()
        self.eligibility.load_changed(worker_id)
        predicted = self._prediction_of(config)
        for slot in member.slots.values():
            if predicted is not None:
                predicted.add_slot(slot, config.total_kv_blocks)
            if self.optimistic is not None:
                self.optimistic.add_slot(slot)
            if self._seconds is not None:
                self._seconds.slots.add_slot(slot, config.total_kv_blocks or 0)

    def remove_worker(self, worker_id: int) -> None:
        """Remove a worker, its blocks and the load of its requests."""
        # While the index still has the slots: the end of a request may evict its blocks there.
        slots = self.worker_pool.slots_of(worker_id)
        for request_id in self.active.booked_on(set(slots)):
            self.free(request_id)
        self.eligibility.forget(worker_id)
        self.worker_pool.remove(worker_id)
        for slot in slots:
            for owner in (self._copies, self.predicted, self.optimistic):
                if owner is not None:
                    owner.drop_slot(slot)
            if self._seconds is not None:
                self._seconds.slots.drop_slot(slot)
        self.served.pop(worker_id, None)

    def expire(self, age_s: float) -> list[str]:
        """Drop the load of requests older than ``age_s`` that their caller never freed."""
        stale = self.active.stale(self._clock() - age_s)
        for request_id in stale:
            self.free(request_id)
        return stale

    def _prediction_of(self, config: RuntimeConfig) -> PredictedCache | None:
        """The prediction of a worker's cache; None where its KV events are followed, or no index.

        Beside workers with events, it is made for the first one without.
        """
        if self._predicts_all or self.index is None:
            return self.predicted
        if config.kv_event_publishing_enabled is not False:
            return None
        if self.predicted is None:
            self.predicted, self.predicts = make_predicted_cache(self._settings, self.index), True
            self._hasher = self._hasher._replace(chain=True)
        return self.predicted

    def _weigh(
        self,
        tokens: Tokens,
        routing: Routing | None,
        params: CostParams,
        slots: array[int],
        now_s: float,
    ) -> tuple[HashedPrompt, CopyOffer | None]:
        """Fill the columns and the costs of ``slots`` for a prompt.

        Returns the prompt and the best place for another copy of its cached blocks.
        """
        prompt = self._hasher.hash(tokens, routing, params.assume_kv_reuse, now_s)
        if self.predicted is not None:
            self.predicted.expire(now_s)  # before the search, which would count old predictions
        copies = () if self._copies is None else self._copies.in_progress(prompt.chained)
        cached, prefill, decode = self._cached_blocks, self._prefill, self._decode
        in_seconds = self._seconds is not None and params.in_seconds
        project = partial(
            self.active.project_into, prompt.shared, prompt.unique_blocks, prefill, decode
        )
        # Without the prompts that wait, a burst of one new document would be spread over all.
        raises = in_seconds and self.index is not None
        cached.match(prompt.hashes, now_s, copies, project if raises else None)
        if not raises:
            project()
        prompt.matched_s = self._clock()
        if self._seconds is not None and in_seconds:
            self._seconds.weigh(slots, cached, prompt, decode, self._costs)
            return prompt, None
        if self._seconds is not None:
            self.active.subtract_done(prefill)
        prompt.best_overlap = costs(
            params.weights,
            prompt.isl_tokens,
            slots,
            prefill,
            decode,
            self._costs,
            cached.device,
            cached.host,
            cached.disk,
            cached.shared,
        )
        if params.request_weight:
            add_requests(params.request_weight, slots, self._costs, self.active.load)
        if self._copies is None:
            return prompt, None
        return prompt, self._copies.add_prices(params, slots, cached, prompt, self._costs)

    def _choose(self, slots: array[int], params: CostParams, routing: Routing | None) -> int:
        """The index of the chosen slot in the weighed ``slots``."""
        if routing is not None and routing.preferred_taints:
            apply_preferred_taints(self._costs, slots, self.worker_pool, routing.preferred_taints)
        return choose(self._costs, len(slots), params.temperature, self._uniform())

    def _book(
        self,
        request_id: str,
        slot: int,
        prompt: HashedPrompt,
        routing: Routing | None,
        params: CostParams,
        expected_s: float,
    ) -> None:
        """Add the request to the load of the chosen slot."""
        worker_id, dp_rank = self.worker_pool.owners[slot]
        cached, now_s = self._cached_blocks, prompt.matched_s
        overlap_blocks = cached.device[slot]
        overlap: float = overlap_blocks
        cached_prompt_tokens = overlap_blocks * self.block_size
        if cached.tiered:  # else blocks are whole, and the weights of tiers need no look
            overlap = cached.effective(params.weights, slot)
            cached_prompt_tokens = cached_tokens(params.weights, overlap)
        prefill = 0
        if params.track_prefill_tokens:
            prefill = max(prompt.isl_tokens - cached_prompt_tokens, 0)
        expected = None if routing is None else routing.expected_output_tokens
        reservation = Reservation(
            slot,
            worker_id,
            dp_rank,
            prompt.isl_tokens,
            overlap_blocks,
            now_s,
            expected,
            expected_ttft_s=expected_s,
        )
        self.active.book(request_id, reservation, prompt.shared, prompt.unique_blocks, prefill)
        if routing is not None and routing.session_id is not None:
            self.eligibility.bind_session(routing.session_id, worker_id, dp_rank, now_s)
        if self.eligibility.follows_load:
            self.eligibility.load_added(worker_id)
        if self.local_requests is not None:
            self.local_requests.booked(request_id, reservation, prompt, prefill)
        if self.predicts:
            self.predict_blocks(request_id, slot, prompt.chained, prompt.hashes, now_s)
        if self._metrics is not None:
            self._metrics.decided(prompt, self._clock(), overlap, self.block_size)
            if cached.shares:
                self._metrics.shared(cached.shared_blocks, cached.of(slot).shared, prompt.blocks)

    def _capture(
        self,
        params: CostParams,
        slots: array[int],
        slot: int,
        prompt: HashedPrompt,
        offer: CopyOffer | None,
        constraints: Constraints | None = None,
    ) -> KvInputs:
        """Copy the columns of the decision that :meth:`_weigh` has prepared."""
        pool, cached, index = self.worker_pool, self._cached_blocks, self._index_state
        if self.recovering and not set(self.recovering).isdisjoint(slots):
            index = "recovering"
        prefill = array("q", self._prefill)
        if self._seconds is not None and params.in_seconds:
            self.active.subtract_done(prefill)
        requests: tuple[int, ...] = ()
        if params.request_weight:
            requests = tuple(self.active.load(eligible_slot)[2] for eligible_slot in slots)
        return KvInputs(
            "kv",
            index,
            pool.owners,
            slots,
            slot,
            constraints,
            params,
            prompt.isl_tokens,
            prompt.best_overlap,
            cached.device.tobytes(),
            prefill.tobytes(),
            self._decode.tobytes(),
            self._costs.tobytes(),
            cached.lower_columns() if cached.tiered or cached.shared else None,
            requests,
            offer.target if offer is not None and offer.free else None,
            terms=self._seconds.terms.tobytes() if self._seconds and params.in_seconds else b"",
        )

    def _resize(self) -> None:
        """Make the columns long enough for all slots that the index has ever assigned."""
        capacity = 0 if self.index is None else self.index.capacity()
        width = 16
        while width < max(self.worker_pool.width, capacity):
            width *= 2
        self._cached_blocks.resize(width)
        self._prefill = array("q", bytes(8 * width))
        self._decode = array("q", bytes(8 * width))
        self._costs = array("d", bytes(8 * width))
        if self._seconds is not None:
            self._seconds.resize(width)
