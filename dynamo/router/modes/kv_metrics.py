"""The metrics of the kv mode's decisions and of the requests that they sent."""

from __future__ import annotations

from itertools import accumulate

from dynamo.observability.metrics import (
    ISL_BUCKETS,
    OSL_BUCKETS,
    TTFT_BUCKETS,
    Registry,
    counter,
    histogram,
)
from dynamo.router.caches.prompt import HashedPrompt
from dynamo.router.labels import ROUTED, RouterLabels
from dynamo.router.load.active_load import Reservation

_MODELLED = "dynamo_component dynamo_namespace model phase router_id worker_id"
_TYPED = f"{ROUTED} worker_type"
_HASHING_MS_BUCKETS = tuple(0.001 * 2**i for i in range(15))
_RATIO_BUCKETS = tuple(0.05 * i for i in range(21))
# Each bound is three times the one before, with the rounding of repeated multiplication: Dynamo
# writes 7.290000000000001, and that text is part of the bucket's identity.
_OVERHEAD_MS_BUCKETS = tuple(accumulate(range(16), lambda bound, _: bound * 3, initial=0.01))

_BLOCK_HASHING_MS = histogram(
    "dynamo_router_overhead_block_hashing_ms", "Block hashing", _HASHING_MS_BUCKETS, "router_id"
)
_SEQ_HASHING_MS = histogram(
    "dynamo_router_overhead_seq_hashing_ms", "Sequence hashing", _HASHING_MS_BUCKETS, "router_id"
)
_FIND_MATCHES_MS = histogram(
    "dynamo_router_overhead_indexer_find_matches_ms",
    "Index lookup",
    _OVERHEAD_MS_BUCKETS,
    "router_id",
)
_SCHEDULING_MS = histogram(
    "dynamo_router_overhead_scheduling_ms",
    "Cost, choice, booking",
    _OVERHEAD_MS_BUCKETS,
    "router_id",
)
_TOTAL_MS = histogram(
    "dynamo_router_overhead_total_ms", "Whole decision", _OVERHEAD_MS_BUCKETS, "router_id"
)

# The routed requests.
_STARTED = counter("dynamo_component_router_requests_started_total", "Requests routed", ROUTED)
_REQUESTS = counter("dynamo_component_router_requests_total", "Routed requests ended", ROUTED)
_ISL = histogram(
    "dynamo_component_router_input_sequence_tokens",
    "Prompt length of routed requests",
    ISL_BUCKETS,
    _MODELLED,
)
_OSL = histogram(
    "dynamo_component_router_output_sequence_tokens", "Output length", OSL_BUCKETS, ROUTED
)
_TTFT = histogram(
    "dynamo_component_router_time_to_first_token_seconds", "TTFT", TTFT_BUCKETS, ROUTED
)
_TTFT_ERROR = histogram(
    "dynamo_router_ttft_error_seconds",
    "Difference of the TTFT that --router-cost seconds expected and the one observed",
    TTFT_BUCKETS,
    ROUTED,
)
_ITL = histogram(
    "dynamo_component_router_inter_token_latency_seconds",
    "Inter-token latency",
    (0, 0.0019, 0.0035, 0.0067, 0.013, 0.024, 0.045, 0.084, 0.16, 0.3, 0.56, 1.1, 2),
    ROUTED,
)

# What the caches held, and what the choice gave up.
_HIT_RATE = histogram(
    "dynamo_component_router_kv_hit_rate", "Cached share of the prompt", _RATIO_BUCKETS, ROUTED
)
_SELECTED_TOKENS = counter(
    "dynamo_component_router_kv_selected_cached_prefix_tokens_total",
    "Prompt tokens that the chosen workers held",
    _MODELLED,
)
_BEST_TOKENS = counter(
    "dynamo_component_router_kv_best_eligible_cached_prefix_tokens_total",
    "Prompt tokens that the eligible worker with most of them held",
    _MODELLED,
)
_REUSED_TOKENS = counter(
    "dynamo_component_router_kv_worker_reused_tokens_total",
    "Prompt tokens that engines report as taken from their cache",
    _MODELLED,
)
_NON_MAX = counter(
    "dynamo_component_router_non_max_overlap_selections_total",
    "Requests sent elsewhere than where most of their prompt is cached",
    _TYPED,
)
_LOST_BLOCKS = histogram(
    "dynamo_component_router_overlap_blocks_lost",
    "Cached blocks that these requests did without",
    tuple(0.25 * 2**i for i in range(16)),
    _TYPED,
)
_SHARED_BEYOND = histogram(
    "dynamo_component_router_shared_cache_beyond_blocks",
    "Blocks in the shared cache beyond those on the chosen device",
    tuple(2.0**i for i in range(12)),
    ROUTED,
)
_SHARED_HIT_RATE = histogram(
    "dynamo_component_router_shared_cache_hit_rate",
    "Share of the prompt that is in the shared cache",
    _RATIO_BUCKETS,
    ROUTED,
)


class DecisionMetrics:
    """The duration of decisions by step, the cached blocks they found, the progress of requests.

    ``reused`` is updated by the picker itself.
    """

    def __init__(self, registry: Registry, labels: RouterLabels) -> None:
        steps = (
            _BLOCK_HASHING_MS,
            _SEQ_HASHING_MS,
            _FIND_MATCHES_MS,
            _SCHEDULING_MS,
        )
        self.worker_type = labels.worker_type
        self._hashing, self._chaining, self._matching, self._scheduling = (
            registry.child(step, labels.router_id) for step in steps
        )
        self._total = registry.child(_TOTAL_MS, labels.router_id)
        self._started = registry.child(_STARTED, *labels.router)
        self._ended = registry.child(_REQUESTS, *labels.router)
        self._hit_rate = registry.child(_HIT_RATE, *labels.router)
        self._isl = registry.child(_ISL, *labels.modelled)
        self._osl = registry.child(_OSL, *labels.router)
        self._ttft = registry.child(_TTFT, *labels.router)
        self._ttft_error = registry.child(_TTFT_ERROR, *labels.router)
        self._itl = registry.child(_ITL, *labels.router)
        self._cached, self._best, self.reused = (
            registry.child(spec, *labels.modelled)
            for spec in (_SELECTED_TOKENS, _BEST_TOKENS, _REUSED_TOKENS)
        )
        self._elsewhere = registry.child(_NON_MAX, *labels.typed)
        self._lost = registry.child(_LOST_BLOCKS, *labels.typed)
        self._beyond = registry.child(_SHARED_BEYOND, *labels.router)
        self._shared_rate = registry.child(_SHARED_HIT_RATE, *labels.router)

    def decided(
        self,
        prompt: HashedPrompt,
        booked_s: float,
        overlap: float,
        block_size: int,
    ) -> None:
        """Count a request booked at ``booked_s``; its worker has ``overlap`` effective blocks."""
        best = prompt.best_overlap
        begun_s, hashed_s, chained_s = prompt.begun_s, prompt.hashed_s, prompt.chained_s
        self._hashing.observe((hashed_s - begun_s) * 1e3)
        self._chaining.observe((chained_s - hashed_s) * 1e3)
        self._matching.observe((prompt.matched_s - chained_s) * 1e3)
        self._scheduling.observe((booked_s - prompt.matched_s) * 1e3)
        self._total.observe((booked_s - begun_s) * 1e3)
        self._started.value += 1
        self._isl.observe(prompt.isl_tokens)
        self._cached.value += overlap * block_size
        self._best.value += best * block_size
        if best > overlap:
            self._elsewhere.value += 1
            self._lost.observe(best - overlap)
        if prompt.blocks:
            self._hit_rate.observe(overlap / prompt.blocks)

    def shared(self, blocks: int, beyond: int, prompt_blocks: int) -> None:
        """Count shared ``blocks`` of a prompt, ``beyond`` of them not cached on the chosen slot."""
        if prompt_blocks:
            self._beyond.observe(beyond)
            self._shared_rate.observe(blocks / prompt_blocks)

    def first_token(self, reservation: Reservation, now_s: float) -> None:
        """Count the time to a request's first token, and how far it was from what was expected."""
        ttft_s = now_s - reservation.booked_at_s
        self._ttft.observe(ttft_s)
        if reservation.expected_ttft_s:
            self._ttft_error.observe(abs(ttft_s - reservation.expected_ttft_s))

    def ended(self, reservation: Reservation, now_s: float) -> None:
        """Count a request that has ended, in whatever way."""
        self._ended.value += 1
        self._osl.observe(reservation.output_tokens)
        gaps = reservation.output_tokens - 1
        if reservation.first_token_at_s is not None and gaps > 0:
            self._itl.observe((now_s - reservation.first_token_at_s) / gaps, gaps)
