"""The load that the router has booked, from the pick to the end of each request, and its metrics.

Pure: time is a parameter. ``dynamo._fast.sequences`` sums blocks and tokens by slot;
:mod:`prefill_load` subtracts what running prefills have probably computed, where that is modelled.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from itertools import accumulate

import msgspec

from dynamo._fast.seconds import SecondsCost
from dynamo._fast.sequences import ActiveSequences
from dynamo.errors import InvalidArgument
from dynamo.observability.metrics import (
    ISL_BUCKETS,
    OSL_BUCKETS,
    TTFT_BUCKETS,
    Registry,
    counter,
    histogram,
)
from dynamo.router.kv_mode.prompt import HashedPrompt
from dynamo.router.metrics import ROUTED, RouterLabels
from dynamo.router.prefill_load import PrefillLoad
from dynamo.router.prefill_model import PrefillModel, PrefillSpeed

_MODELLED = "dynamo_component dynamo_namespace model phase router_id worker_id"
_TYPED = f"{ROUTED} worker_type"
_HASHING_MS_BUCKETS = tuple(0.001 * 2**i for i in range(15))
_RATIO_BUCKETS = tuple(0.05 * i for i in range(21))
# Each bound is three times the one before, with the rounding of repeated multiplication: Dynamo
# writes 7.290000000000001, and that text is part of the bucket's identity.
_OVERHEAD_MS_BUCKETS = tuple(accumulate(range(16), lambda bound, _: bound * 3, initial=0.01))

# Where the time of a decision goes.
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


class Reservation(msgspec.Struct, gc=False):
    """One running request. ``overlap_blocks`` of its prompt were cached when it was booked.

    ``handle`` is its key in the compiled tables. ``remote``: another replica of the router sent it.
    ``expected_ttft_s``: what the cost in seconds expects; 0 if it was not asked.
    """

    slot: int
    worker_id: int
    dp_rank: int
    isl_tokens: int
    overlap_blocks: int
    booked_at_s: float
    expected_output_tokens: int | None = None
    handle: int = -1
    output_tokens: int = 0
    first_token_at_s: float | None = None
    remote: bool = False
    expected_ttft_s: float = 0.0


class ActiveLoad:
    """Reservations by request id. Every call but ``book`` may be repeated and ignores unknown ids.

    With ``prefill_model``, active prefill tokens are those that the model predicts as not computed
    yet at the time of ``clock``. Without one, a prompt counts in full until its first token, and
    the clock is not read.
    """

    def __init__(
        self,
        block_size: int,
        track_blocks: bool = True,
        track_output: bool = False,
        prefill_model: PrefillModel | None = None,
        clock: Callable[[], float] = float,
        seconds: SecondsCost | None = None,
    ) -> None:
        self.block_size = block_size
        self.track_blocks = track_blocks
        self.track_output = track_output
        self._prefills = None if prefill_model is None else PrefillLoad(prefill_model, seconds)
        self._clock = clock
        self._seconds = seconds
        self._sequences = ActiveSequences()
        if track_blocks and (prefill_model is None or seconds is not None):
            self.project_into = self._sequences.project_into  # type: ignore[method-assign] # no layer
        self._reservations: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self._reservations)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._reservations

    def project_into(
        self,
        sequence_hashes: array[int] | None,
        unique_blocks: int,
        prefill_tokens: array[int],
        decode_blocks: array[int],
        depths: array[int] | None = None,
    ) -> None:
        """Write, by slot, active prefill tokens and active blocks with this request's added.

        Columns of i64. Decode is 0 everywhere when blocks are not tracked. Raises ``depths`` (u32),
        if given, to the leading blocks that running requests hold: a worker that computes them, or
        will, has no need to compute them again. With ``seconds``, prompts that are being computed
        count in full: :meth:`subtract_done` is for the few decisions that need to know.
        """
        if not self.track_blocks:
            sequence_hashes, unique_blocks = None, 0
        load = self._sequences
        load.project_into(sequence_hashes, unique_blocks, prefill_tokens, decode_blocks, depths)
        if self._seconds is None:
            self.subtract_done(prefill_tokens)

    def subtract_done(self, prefill_tokens: array[int]) -> None:
        """Subtract from a column of i64, by slot, the tokens that are probably computed."""
        if self._prefills is not None:
            self._prefills.subtract_done(prefill_tokens, self._clock())

    def book(
        self,
        request_id: str,
        reservation: Reservation,
        sequence_hashes: array[int] | None,
        unique_blocks: int,
        prefill_tokens: int,
    ) -> None:
        """Add the load until :meth:`free`. Raises InvalidArgument for an id already running."""
        running = self._reservations.get(request_id)
        if running is not None:
            raise InvalidArgument(
                f"Request {request_id} already exists (assigned to worker {running.worker_id})"
            )
        if not self.track_blocks:
            sequence_hashes, unique_blocks = None, 0
        reservation.handle = self._sequences.book(
            reservation.slot, sequence_hashes, unique_blocks, prefill_tokens
        )
        self._reservations[request_id] = reservation
        if self._prefills is not None:
            cached = reservation.isl_tokens - prefill_tokens
            now_s = reservation.booked_at_s
            self._prefills.begin(reservation.slot, request_id, prefill_tokens, cached, now_s)
            self._mark_waiting(self._prefills, reservation.slot)

    def mark_prefill_complete(self, request_id: str, now_s: float) -> Reservation | None:
        """Release the prefill tokens; return the reservation the first time, else None."""
        reservation = self._reservations.get(request_id)
        if reservation is None or reservation.first_token_at_s is not None:
            return None
        reservation.first_token_at_s = now_s
        self._sequences.end_prefill(reservation.handle)
        if self._prefills is not None:
            self._prefills.first_token(reservation.slot, request_id, now_s)
            self._mark_waiting(self._prefills, reservation.slot)
        if self._seconds is not None:
            self._seconds.add_decoding(reservation.slot, 1)
        return reservation

    def _mark_waiting(self, prefills: PrefillLoad, slot: int) -> None:
        """Say that prompts of a slot wait for memory if it has no room for all."""
        if self._seconds is not None and self._seconds.is_full(slot, self._sequences.load(slot)[1]):
            prefills.mark_waiting(slot)

    def add_output_tokens(self, request_id: str, count: int) -> None:
        """Count generated tokens, and the blocks they fill when output is tracked."""
        reservation = self._reservations.get(request_id)
        if reservation is None:
            return
        before = reservation.isl_tokens + reservation.output_tokens
        reservation.output_tokens += count
        if self.track_output and self.track_blocks:
            # Only a full block is load: count the block borders that the new tokens cross.
            crossed = (before + count) // self.block_size - before // self.block_size
            if crossed:
                self._sequences.grow(reservation.handle, crossed, _faded(reservation))

    def free(self, request_id: str, output_tokens: int = 0) -> Reservation | None:
        """End the request after ``output_tokens`` more; return its reservation, if any."""
        reservation = self._reservations.pop(request_id, None)
        if reservation is not None:
            reservation.output_tokens += output_tokens
            self._sequences.release(reservation.handle)
            if self._prefills is not None and reservation.first_token_at_s is None:
                self._prefills.abandon(reservation.slot, request_id, self._clock())
            if self._seconds is not None and reservation.first_token_at_s is not None:
                self._seconds.add_decoding(reservation.slot, -1)
        return reservation

    def booked_on(self, slots: Collection[int]) -> list[str]:
        """The requests that are booked on any of ``slots``. O(all requests)."""
        running = self._reservations.items()
        return [request_id for request_id, reservation in running if reservation.slot in slots]

    def stale(self, before_s: float) -> list[str]:
        """The requests booked before ``before_s``. O(their number)."""
        found = []
        # A dict iterates in the order of insertion, which is that of reservation.
        for request_id, reservation in self._reservations.items():
            if reservation.booked_at_s >= before_s:
                break
            found.append(request_id)
        return found

    def load(self, slot: int) -> tuple[int, int, int]:
        """(active prefill tokens, active blocks, active requests) of ``slot``."""
        prefill, blocks, requests = self._sequences.load(slot)
        if prefill and self._prefills is not None:
            prefill -= self._prefills.done_tokens(slot, self._clock())
        return prefill, blocks, requests

    def prefill_tokens(self, slot: int) -> int:
        """Return the active prefill tokens of ``slot``."""
        return self.load(slot)[0]

    def backlog(self, slot: int) -> tuple[int, float | None]:
        """Return the prompt tokens that wait on a slot, and the seconds until it begins with
        another prompt; None while no prefill was measured."""
        tokens = self.load(slot)[0]
        if self._seconds is not None:
            return tokens, self._seconds.wait_s(slot, self._clock())
        expected_s = None if self._prefills is None else self._prefills.predict(tokens, 0)
        return tokens, expected_s if tokens else 0.0

    def prefill_speed(self) -> PrefillSpeed | None:
        """What is expected of prefills; None without a model that learns."""
        return None if self._prefills is None else self._prefills.speed()

    def prefill_seconds(self, tokens: int, cached_tokens: int) -> float:
        """Return the time that ``tokens`` behind cached ones take; the tokens, where none is known.

        Never 0.
        """
        expected_s = None
        if self._prefills is not None:
            expected_s = self._prefills.predict(tokens, cached_tokens)
        return max(tokens if expected_s is None else expected_s, 1e-9)

    def restore_prefill_speed(self, speed: PrefillSpeed) -> None:
        """Expect ``speed`` of prefills until some were measured."""
        if self._prefills is not None:
            self._prefills.restore(speed)

    def memory_bytes(self) -> int:
        """Bytes held by the compiled tables."""
        return self._sequences.memory_bytes()

    def _check(self) -> None:
        self._sequences._check()
        slots = {reservation.slot for reservation in self._reservations.values()}
        assert sum(self.load(slot)[2] for slot in slots) == len(self._reservations)


def _faded(reservation: Reservation) -> float:
    """The share of the expected output that exists: so much of the request is about to end."""
    expected = reservation.expected_output_tokens
    return min(reservation.output_tokens / expected, 1.0) if expected else 0.0


class DecisionMetrics:
    """The duration of decisions by step, the cached blocks they found, the progress of requests.

    ``reused`` is updated by the picker itself.
    """

    def __init__(self, registry: Registry, place: RouterLabels) -> None:
        steps = (
            _BLOCK_HASHING_MS,
            _SEQ_HASHING_MS,
            _FIND_MATCHES_MS,
            _SCHEDULING_MS,
        )
        self.worker_type = place.worker_type
        self._hashing, self._chaining, self._matching, self._scheduling = (
            registry.child(step, place.router_id) for step in steps
        )
        self._total = registry.child(_TOTAL_MS, place.router_id)
        self._started = registry.child(_STARTED, *place.router)
        self._ended = registry.child(_REQUESTS, *place.router)
        self._hit_rate = registry.child(_HIT_RATE, *place.router)
        self._isl = registry.child(_ISL, *place.modelled)
        self._osl = registry.child(_OSL, *place.router)
        self._ttft = registry.child(_TTFT, *place.router)
        self._ttft_error = registry.child(_TTFT_ERROR, *place.router)
        self._itl = registry.child(_ITL, *place.router)
        self._cached, self._best, self.reused = (
            registry.child(spec, *place.modelled)
            for spec in (_SELECTED_TOKENS, _BEST_TOKENS, _REUSED_TOKENS)
        )
        self._elsewhere = registry.child(_NON_MAX, *place.typed)
        self._lost = registry.child(_LOST_BLOCKS, *place.typed)
        self._beyond = registry.child(_SHARED_BEYOND, *place.router)
        self._shared_rate = registry.child(_SHARED_HIT_RATE, *place.router)

    def decided(
        self,
        prompt: HashedPrompt,
        booked_s: float,
        found: float,
        block_size: int,
    ) -> None:
        """Count a request booked at ``booked_s``; its worker has ``found`` effective blocks."""
        best = prompt.best_overlap
        begun_s, hashed_s, chained_s = prompt.begun_s, prompt.hashed_s, prompt.chained_s
        self._hashing.observe((hashed_s - begun_s) * 1e3)
        self._chaining.observe((chained_s - hashed_s) * 1e3)
        self._matching.observe((prompt.matched_s - chained_s) * 1e3)
        self._scheduling.observe((booked_s - prompt.matched_s) * 1e3)
        self._total.observe((booked_s - begun_s) * 1e3)
        self._started.value += 1
        self._isl.observe(prompt.isl_tokens)
        self._cached.value += found * block_size
        self._best.value += best * block_size
        if best > found:
            self._elsewhere.value += 1
            self._lost.observe(best - found)
        if prompt.blocks:
            self._hit_rate.observe(found / prompt.blocks)

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
