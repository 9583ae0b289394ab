"""The relay of an engine's own KV events, received over ZMQ."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable

import zmq
import zmq.asyncio

from dynamo.llm.engine_events import EngineEvent, decode_events

__all__ = ["EngineEventRelay"]

HIGH_WATER_MESSAGES = 100_000
_SEQUENCE = struct.Struct(">Q")
log = logging.getLogger(__name__)


class EngineEventRelay:
    """A SUB socket on the engine's ``endpoint``.

    Calls ``on_events(dp_rank or None, events)`` once per message, ``on_dropped(count)`` for a gap
    in the engine's sequence numbers, ``on_malformed(error)`` for each event that is dropped.
    """

    def __init__(
        self,
        endpoint: str,
        topic: str,
        on_events: Callable[[int | None, list[EngineEvent]], None],
        on_dropped: Callable[[int], None],
        on_malformed: Callable[[Exception], None],
    ) -> None:
        self.endpoint = endpoint
        self.malformed = 0
        self._topic = topic
        self._on_events = on_events
        self._on_dropped = on_dropped
        self._on_malformed = on_malformed
        self._expected: int | None = None

    async def run(self) -> None:
        """Relay until cancelled; ZMQ reconnects when the engine restarts."""
        socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
            socket.setsockopt_string(zmq.SUBSCRIBE, self._topic)
            socket.connect(self.endpoint)
            while True:
                self._on_message(await socket.recv_multipart())
        finally:
            socket.close()

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            _, number, payload = frames
            (sequence,) = _SEQUENCE.unpack(number)
            dp_rank, events = decode_events(payload, self._on_malformed)
        except (ValueError, struct.error) as error:
            self.malformed += 1
            if self.malformed == 1:
                log.warning("%s: dropped a malformed message: %.200s", self.endpoint, error)
            return
        # A lower number is a restarted engine, not a gap.
        if self._expected is not None and sequence > self._expected:
            self._on_dropped(sequence - self._expected)
        self._expected = sequence + 1
        self._on_events(dp_rank, events)
