"""The load that the router has booked, from the pick to the end of each request, by worker.

Pure: time is a parameter. ``dynamo._fast.sequences`` sums blocks and tokens by slot;
:mod:`prefill_load` subtracts what running prefills have probably computed, where that is modelled.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection

import msgspec

from dynamo._fast.seconds import SecondsCost
from dynamo._fast.sequences import ActiveSequences
from dynamo.errors import InvalidArgument
from dynamo.observability.metrics import Registry, gauge
from dynamo.router.labels import RouterLabels
from dynamo.router.load.prefill_load import PrefillLoad
from dynamo.router.load.prefill_model import PrefillModel, PrefillSpeed
from dynamo.router.worker_pool import Member

_WORKER = "dp_rank worker_id worker_type"

_WORKER_REGISTERED = gauge(
    "dynamo_component_router_worker_registered",
    "1 for each worker of the router",
    "dp_rank dynamo_component dynamo_namespace router_worker_id worker_id worker_type",
)
_DECODE_BLOCKS = gauge(
    "dynamo_frontend_worker_active_decode_blocks", "Blocks of running requests", _WORKER
)
_PREFILL_TOKENS = gauge(
    "dynamo_frontend_worker_active_prefill_tokens", "Prompt tokens still to be computed", _WORKER
)


# gc=False: it refers to nothing that refers back, and the collector need not visit thousands.
class Reservation(msgspec.Struct, gc=False):
    """One running request. ``overlap_blocks`` of its prompt were cached when it was booked.

    ``handle`` is its key in the compiled tables. ``remote``: another replica of the router sent it.
    ``expected_ttft_s``: what the cost in seconds predicts; 0 without such a cost.
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
            # No model subtracts from these columns: call the compiled method directly.
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
            # Ended before its first token: its busy interval says nothing about the speed.
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
        request_ids = []
        # A dict iterates in the order of insertion, which is that of reservation.
        for request_id, reservation in self._reservations.items():
            if reservation.booked_at_s >= before_s:
                break
            request_ids.append(request_id)
        return request_ids

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
        # The queue's policy wspt divides by it.
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


class WorkerMetrics:
    """One series per (worker, dp_rank) that can be chosen, removed with the worker."""

    def __init__(self, registry: Registry, labels: RouterLabels) -> None:
        self._labels = labels
        self._registered = registry.family(_WORKER_REGISTERED)
        self._loads = (registry.family(_PREFILL_TOKENS), registry.family(_DECODE_BLOCKS))

    def added(self, member: Member, active: ActiveLoad) -> None:
        """Export the worker and its load."""
        for rank, slot in member.slots.items():
            self._registered.labels(*self._registration(member, rank)).value = 1
            for part, family in enumerate(self._loads):
                child = family.labels(str(rank), str(member.worker_id), self._labels.worker_type)
                child.function = _reader(active, slot, part)

    def removed(self, member: Member) -> None:
        """Remove the worker's series."""
        for rank in member.slots:
            for family in self._loads:
                family.remove(str(rank), str(member.worker_id), self._labels.worker_type)
            self._registered.remove(*self._registration(member, rank))

    def _registration(self, member: Member, rank: int) -> tuple[str, ...]:
        labels = self._labels
        return (
            str(rank),
            labels.component,
            labels.namespace,
            str(member.worker_id),
            labels.router_id,
            labels.worker_type,
        )


def _reader(active: ActiveLoad, slot: int, part: int) -> Callable[[], float]:
    return lambda: active.load(slot)[part]
