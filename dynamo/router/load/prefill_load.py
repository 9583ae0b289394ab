"""What running prefills have not computed yet, and what is learned when they end.

Pure: time is handed in. :mod:`dynamo._fast.prefill_queue` keeps the prefills of each slot,
:mod:`prefill_model` says how long each should take.
"""

from __future__ import annotations

from dynamo._fast.prefill_queue import PrefillQueues
from dynamo._fast.seconds import SecondsCost
from dynamo.router.load.prefill_model import BusyInterval, PrefillFit, PrefillModel, PrefillSpeed

_INTERVAL_PREFILLS = 8


class PrefillLoad:
    """The active prefills by slot, oldest first. Every call is O(1) but :meth:`subtract_done`.

    Memory is bounded by the booked requests.
    """

    def __init__(self, model: PrefillModel, seconds: SecondsCost | None = None) -> None:
        self._model = model
        self._queues = PrefillQueues(seconds)
        self._seconds = seconds
        self.abandon = self._queues.abandon  # these are called for each request: no layer
        self.mark_waiting = self._queues.mark_waiting
        self.done_tokens = self._queues.done_tokens
        self.subtract_done = self._queues.subtract_done
        self._predicted_by_seconds = False
        if seconds is not None and isinstance(model, PrefillFit):
            self._predicted_by_seconds = True  # by the fit of the model
            seconds.set_fit(*model.estimate)

    def begin(
        self, slot: int, request_id: str, tokens: int, cached_tokens: int, now_s: float
    ) -> None:
        """Add a booked prompt with ``tokens`` to compute; one without is no load."""
        if tokens > 0:
            expected_s = (
                None if self._predicted_by_seconds else self._model.predict(tokens, cached_tokens)
            )
            self._queues.begin(slot, request_id, tokens, cached_tokens, expected_s, now_s)

    def first_token(self, slot: int, request_id: str, now_s: float) -> None:
        """Remove a computed prompt, and learn from it. Ignores unknown requests."""
        # A prior is not of this GPU: each prompt is a sample. Later an interval ends after eight.
        hurries = self._model.hurries
        limit = 1 if hurries else _INTERVAL_PREFILLS
        interval = self._queues.first_token(slot, request_id, now_s, not hurries, limit)
        if interval is not None:
            self._observe(slot, BusyInterval(*interval), now_s)

    def speed(self) -> PrefillSpeed | None:
        """Return what the model expects, if it learns."""
        if not isinstance(self._model, PrefillFit):
            return None
        fixed_s, token_s, attention_s = self._model.estimate
        return PrefillSpeed(
            fixed_s=fixed_s,
            token_s=token_s,
            attention_s=attention_s,
            samples=len(self._model),
        )

    def predict(self, tokens: int, cached_tokens: int) -> float | None:
        """Return the seconds that a prompt takes on a worker of slowness 1; None: unknown."""
        return self._model.predict(tokens, cached_tokens)

    def restore(self, speed: PrefillSpeed) -> None:
        """Expect what an earlier router measured, until this one has measured."""
        if isinstance(self._model, PrefillFit):
            self._model.restore(speed)
            if self._seconds is not None:
                self._seconds.set_fit(*self._model.estimate)

    def _observe(self, slot: int, interval: BusyInterval, now_s: float) -> None:
        """Fit the model to an interval as a worker of the middle of the pool would take it."""
        seconds = self._seconds
        if seconds is not None:
            # The model is of a worker in the middle of the pool: scale a slow one's time.
            slower = seconds.slowness(slot) / seconds.middle_slowness()
            interval = interval._replace(seconds=interval.seconds / slower)
        self._model.observe(interval, now_s)
        if seconds is not None and isinstance(self._model, PrefillFit):
            seconds.set_fit(*self._model.estimate)
