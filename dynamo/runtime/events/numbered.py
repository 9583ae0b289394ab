"""What every subscriber does with an event that has arrived: look at its number, hand it over."""

from __future__ import annotations

import logging
from typing import Any

from dynamo.runtime.events.base import OnEvent, OnGap

__all__ = ["Numbered"]

log = logging.getLogger(__name__)


class Numbered:
    """Counts, finds gaps, and outlives callbacks that fail. For subscribers to build on."""

    def __init__(self, topic: str, on_event: OnEvent, on_gap: OnGap | None = None) -> None:
        self.topic = topic
        self.received = 0
        self.gaps = 0
        self.malformed = 0
        self._on_event = on_event
        self._on_gap = on_gap
        self._expected: dict[int, int] = {}
        self._addresses: dict[str, Any] = {}

    def _deliver(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        self.received += 1
        expected = self._expected.get(publisher_id, sequence)  # the first one is no gap
        self._expected[publisher_id] = sequence + 1
        try:
            if sequence != expected:
                self.gaps += 1
                if self._on_gap is not None:
                    self._on_gap(publisher_id, expected, sequence)
            self._on_event(publisher_id, sequence, payload)
        except Exception:  # one event must not end the subscription
            log.exception("%s: event %d of %x failed", self.topic, sequence, publisher_id)

    def _forget(self, publisher_id: int | None) -> None:
        if publisher_id is not None:
            self._expected.pop(publisher_id, None)

    def _count_malformed(self, error: Exception) -> None:
        self.malformed += 1
        if self.malformed & (self.malformed - 1) == 0:
            log.warning("%s: %d malformed events, last: %s", self.topic, self.malformed, error)
