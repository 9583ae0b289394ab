"""Load that the router itself has booked: from the pick to the end of each request. Spec 3.5.

Pure: time is handed in. Blocks and tokens are summed per slot by ``dynamo._fast.sequences``; how
far a running prefill probably is, where that is modelled, by :mod:`prefill_load` beside it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dynamo._fast.sequences import ActiveSequences
from dynamo.errors import InvalidArgument
from dynamo.router.load.prefill_load import PrefillLoad, PrefillModel

__all__ = ["ActiveLoad", "Reservation"]


@dataclass(slots=True)
class Reservation:
    """One running request. ``overlap_blocks`` of its prompt were cached when it was placed.

    ``remote``: another replica of the router sent it.
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
    """Bookings by request id. Every call but ``book`` may be repeated and tolerates unknown ids.

    With ``prefill_model`` all active prefill tokens it tells are those not computed yet, as far as
    the model knows by ``clock``; without, a prompt counts in full until its first token (and the
    clock is not read). Spec 3.6.
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
        self._bookings: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self._bookings)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._bookings

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
        reservation_id: Reservation,
        sequence_hashes: array[int] | None,
        unique_blocks: int,
        prefill_tokens: int,
    ) -> None:
        """Hold the load until :meth:`free`. Raises InvalidArgument for an id already running."""
        held = self._bookings.get(request_id)
        if held is not None:
            raise InvalidArgument(
                f"Request {request_id} already exists (assigned to worker {held.worker_id})"
            )
        if not self.track_blocks:
            sequence_hashes, unique_blocks = None, 0
        reservation_id.handle = self._sequences.book(
            reservation_id.slot, sequence_hashes, unique_blocks, prefill_tokens
        )
        self._bookings[request_id] = reservation_id
        if self._prefills is not None:
            cached = reservation_id.isl_tokens - prefill_tokens
            now_s = reservation_id.booked_at_s
            self._prefills.begin(reservation_id.slot, request_id, prefill_tokens, cached, now_s)

    def mark_prefill_complete(self, request_id: str, now_s: float) -> Reservation | None:
        """Release the prefill tokens; the booking the first time, else None."""
        reservation_id = self._bookings.get(request_id)
        if reservation_id is None or reservation_id.first_token_at_s is not None:
            return None
        reservation_id.first_token_at_s = now_s
        self._sequences.end_prefill(reservation_id.handle)
        if self._prefills is not None:
            self._prefills.first_token(reservation_id.slot, request_id, now_s)
        return reservation_id

    def add_output_tokens(self, request_id: str, count: int) -> None:
        """Count generated tokens, and the blocks they fill when output is tracked."""
        reservation_id = self._bookings.get(request_id)
        if reservation_id is None:
            return
        before = reservation_id.isl_tokens + reservation_id.output_tokens
        reservation_id.output_tokens += count
        if self.track_output and self.track_blocks:
            crossed = (before + count) // self.block_size - before // self.block_size
            if crossed:
                self._sequences.grow(reservation_id.handle, crossed, _faded(reservation_id))

    def free(self, request_id: str) -> Reservation | None:
        """End the request; its booking, or None when there is none (any more)."""
        reservation_id = self._bookings.pop(request_id, None)
        if reservation_id is not None:
            self._sequences.release(reservation_id.handle)
            if self._prefills is not None and reservation_id.first_token_at_s is None:
                self._prefills.abandon(reservation_id.slot, request_id, self._clock())
        return reservation_id

    def booked_on(self, slots: Collection[int]) -> list[str]:
        """The requests that are booked on any of ``slots``. O(all requests)."""
        return [
            key for key, reservation_id in self._bookings.items() if reservation_id.slot in slots
        ]

    def stale(self, before_s: float) -> list[str]:
        """Who was booked before ``before_s``; bookings stand in order of time. O(them)."""
        found = []
        for request_id, reservation_id in self._bookings.items():
            if reservation_id.booked_at_s >= before_s:
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
        slots = {reservation_id.slot for reservation_id in self._bookings.values()}
        assert sum(self.load(slot)[2] for slot in slots) == len(self._bookings)


def _faded(reservation_id: Reservation) -> float:
    expected = reservation_id.expected_output_tokens
    return min(reservation_id.output_tokens / expected, 1.0) if expected else 0.0
