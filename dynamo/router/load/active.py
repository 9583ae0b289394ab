"""The load that the router has booked: from the pick to the end of each request.

Pure: time is a parameter. ``dynamo._fast.sequences`` sums blocks and tokens by slot;
:mod:`prefill_load` subtracts what running prefills have probably computed, where that is modelled.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection

import msgspec

from dynamo._fast.sequences import ActiveSequences
from dynamo.errors import InvalidArgument
from dynamo.router.load.prefill_load import PrefillLoad, PrefillModel


class Reservation(msgspec.Struct, gc=False):
    """One running request. ``overlap_blocks`` of its prompt were cached when it was booked.

    ``handle`` is its key in the compiled tables. ``remote``: another replica of the router sent it.
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
    ) -> None:
        self.block_size = block_size
        self.track_blocks = track_blocks
        self.track_output = track_output
        self._prefills = None if prefill_model is None else PrefillLoad(prefill_model)
        self._clock = clock
        self._sequences = ActiveSequences()
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
    ) -> None:
        """Write, by slot, active prefill tokens and active blocks with this request's added.

        Columns of i64. Decode is 0 everywhere when blocks are not tracked.
        """
        if not self.track_blocks:
            sequence_hashes, unique_blocks = None, 0
        self._sequences.project_into(sequence_hashes, unique_blocks, prefill_tokens, decode_blocks)
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

    def mark_prefill_complete(self, request_id: str, now_s: float) -> Reservation | None:
        """Release the prefill tokens; return the reservation the first time, else None."""
        reservation = self._reservations.get(request_id)
        if reservation is None or reservation.first_token_at_s is not None:
            return None
        reservation.first_token_at_s = now_s
        self._sequences.end_prefill(reservation.handle)
        if self._prefills is not None:
            self._prefills.first_token(reservation.slot, request_id, now_s)
        return reservation

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
