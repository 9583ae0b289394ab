"""The relay of an engine's KV events: in order, each once, and what was lost is replayed."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from dynamo.llm.engine_events import EngineEvent, decode_events, time_of

HIGH_WATER_MESSAGES = 100_000
REPLAY_TIMEOUT_S = 5.0
"""Longest silence within a replay. The whole takes at most six times as long."""
REPLAY_PAUSE_S = 60.0
"""After a replay that failed, none is requested for this long."""
REPLAY_BYTES = 64 << 20
MESSAGE_BYTES = 64 << 20
"""ZMQ closes a connection that sends a larger message."""
_RECENT_MESSAGES = 1024
_RECENT_GAPS = 16
"""What is compared with a message whose number is not above the last."""
_VOID_S = 60.0
"""A message may wait this long in sockets. Older times are of another clock."""
_CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
_SEQUENCE = struct.Struct(">Q")
_END_OF_REPLAY = b"\xff" * 8
log = logging.getLogger(__name__)


class _Message(NamedTuple):
    """One message of the engine."""

    number: int
    payload: bytes
    dp_rank: int | None
    events: list[EngineEvent] | None


class EngineEventRelay:
    """A SUB socket on the engine's ``endpoint``, and its replay socket, if it has one.

    Calls ``on_events(dp_rank or None, events)`` once per message, ``on_dropped(count)`` for lost
    messages, ``on_malformed(error)`` for each event that is dropped. Before the events that follow
    a restart of the engine, or a loss that the replay did not repair, it calls ``on_reset()``: a
    removal may be lost, so no earlier block counts.

    A restarted engine numbers its messages from 0. One whose number is above the last is found by
    the connection that was closed, and by the replay: it has another message under the last number.
    A message that arrives twice, or so late that it counts as lost, is ignored.
    """

    def __init__(
        self,
        endpoint: str,
        topic: str,
        on_events: Callable[[int | None, list[EngineEvent]], None],
        on_dropped: Callable[[int], None],
        on_malformed: Callable[[Exception], None],
        on_reset: Callable[[], None],
        replay_endpoint: str | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.malformed = 0
        self._topic = topic
        self._on_events = on_events
        self._on_dropped = on_dropped
        self._on_malformed = on_malformed
        self._on_reset = on_reset
        self._replay_endpoint = replay_endpoint
        self._no_replay_until_s = 0.0
        self._disconnected = False  # since the last message
        self._disconnected_s = 0.0
        self._newest: int | None = None  # the last number that the SUB socket delivered
        self._expected: int | None = None  # the next number to apply; a replay may be ahead
        self._last = b""  # the payload before it
        self._void_before_s: float | None = None
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT_MESSAGES)
        self._gaps: deque[range] = deque(maxlen=_RECENT_GAPS)

    async def run(self) -> None:
        """Relay until cancelled; ZMQ reconnects when the engine restarts."""
        socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        # Before connect(): the first handshake would go unseen.
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _CONNECTED)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
            socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
            socket.setsockopt_string(zmq.SUBSCRIBE, self._topic)
            socket.connect(self.endpoint)
            message = _receive(socket)
            event = _receive(monitor)
            while True:
                if not message.done() and not event.done():
                    await asyncio.wait((message, event), return_when=asyncio.FIRST_COMPLETED)
                # ZMQ reports a lost connection before the first message of the next one.
                while event.done() or int(monitor.get(zmq.EVENTS)) & zmq.POLLIN:
                    await self._on_connection(parse_monitor_message(await event)["event"])
                    event = _receive(monitor)
                if message.done():
                    await self._on_message(message.result())
                    message = _receive(socket)
                await asyncio.sleep(0)  # receiving does not suspend while messages wait
        finally:
            socket.disable_monitor()
            monitor.close()
            socket.close()

    def cleared(self, now_s: float) -> None:
        """Ignore messages that the engine sent before ``now_s``, in Unix time."""
        self._void_before_s = now_s

    def ask_again(self) -> None:
        """Ask for all that the engine still has, with its next message."""
        if self._replay_endpoint is not None:
            self._expected, self._last, self._void_before_s = None, b"", None

    async def _on_connection(self, event: int) -> None:
        """Check the blocks at once: a restarted engine may have nothing to send."""
        if event == zmq.EVENT_DISCONNECTED:
            self._disconnected, self._disconnected_s = True, time.time()
            if self._replay_endpoint is None:
                self._restart("connection lost")
        elif self._replay_endpoint is not None and (self._disconnected or self._expected is None):
            await self._repair()

    async def _on_message(self, frames: list[bytes]) -> None:
        message = self._decoded(frames)
        if message is None:
            return  # the next message shows the gap
        if self._newest is not None and message.number <= self._newest:
            if message.events is None or self._is_repeated(message):
                return
            self._restart()
        self._newest = message.number
        # Later messages wait in the socket until the replay is complete.
        lost = message.number > (self._expected or 0)
        if (lost and self._replay_endpoint is not None) or self._disconnected:
            await self._repair()
        self._deliver(message)

    def _is_repeated(self, message: _Message) -> bool:
        """Return whether the message was applied before, or counts as lost already."""
        number, payload = message.number, message.payload
        sent_s, last_s = time_of(payload), time_of(self._last)
        if sent_s is None or last_s is None:
            return False
        return (number, hash(payload)) in self._recent or (
            any(number in gap for gap in self._gaps) and sent_s < last_s
        )

    def _restart(self, cause: str = "the engine restarted") -> None:
        if self._expected is not None:
            log.warning("%s: %s; cleared the engine's blocks", self.endpoint, cause)
            self._on_reset()
        if self._disconnected:  # messages of its last run may wait in the socket
            self._void_before_s = max(self._void_before_s or 0.0, self._disconnected_s)
        self._expected, self._last = None, b""
        self._recent.clear()
        self._gaps.clear()

    def _deliver(self, message: _Message) -> None:
        number = message.number
        expected = number if self._expected is None else self._expected
        if number < expected:  # already replayed
            return
        # A malformed message counts as lost, too.
        lost = range(expected, number + (message.events is None))
        if lost:
            self._gaps.append(lost)
            self._on_dropped(len(lost))
            log.warning(
                "%s: messages %d to %d of the engine are lost; cleared its blocks",
                self.endpoint,
                lost[0],
                lost[-1],
            )
            self._on_reset()
        self._expected, self._last = number + 1, message.payload
        self._recent.append((number, hash(message.payload)))
        if message.events is not None and not self._is_void(message.payload):
            self._on_events(message.dp_rank, message.events)

    def _is_void(self, payload: bytes) -> bool:
        """Return whether the message is older than a lost connection, or :meth:`cleared`."""
        if self._void_before_s is not None:
            sent_s = time_of(payload)
            if sent_s is not None and 0 < self._void_before_s - sent_s < _VOID_S:
                return True
            self._void_before_s = None
        return False

    async def _repair(self) -> None:
        """Apply the replay. It begins with the last message, which proves that it continues it."""
        start = max((self._expected or 0) - 1, 0)
        replayed = await self._replay(start)
        if self._expected is not None:
            first = replayed[0] if replayed else [b"", b"", b""]
            continued = first[1:] == [_SEQUENCE.pack(start), self._last]
            # Big-endian bytes compare like their numbers.
            newer = first[1] > _SEQUENCE.pack(self._expected)  # a gap: _deliver() clears
            if not continued and (self._disconnected or (replayed and not newer)):
                self._restart()
                if replayed and start:
                    replayed = await self._replay(0)  # its numbers have begun again
        self._disconnected = False
        for frames in replayed:
            message = self._decoded(frames)
            if message is not None:  # else the next one shows the gap
                self._deliver(message)
            await asyncio.sleep(0)

    async def _replay(self, start: int) -> list[list[bytes]]:
        """Return what the engine still has of its messages since ``start``, in frames.

        After a failure, nothing for :data:`REPLAY_PAUSE_S`: events wait for the answer.
        """
        now = asyncio.get_running_loop().time()
        if self._replay_endpoint is None or now < self._no_replay_until_s:
            return []
        replayed: list[list[bytes]] = []
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
            socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
            socket.connect(self._replay_endpoint)
            if await _receive_replay(socket, start, replayed):
                return replayed
            problem = f"more than {HIGH_WATER_MESSAGES} messages, or {REPLAY_BYTES} bytes"
        except (TimeoutError, zmq.ZMQError) as error:
            problem = str(error) or f"no complete replay in {REPLAY_TIMEOUT_S:g} s"
        finally:
            socket.close()
        self._no_replay_until_s = now + REPLAY_PAUSE_S
        log.warning("%s: %s; not used for %g s", self._replay_endpoint, problem, REPLAY_PAUSE_S)
        return replayed

    def _decoded(self, frames: list[bytes]) -> _Message | None:
        """Return the message; without events if only its payload is malformed."""
        number = -1
        try:
            _, counter, payload = frames
            (number,) = _SEQUENCE.unpack(counter)
            return _Message(number, payload, *decode_events(payload, self._on_malformed))
        except (ValueError, struct.error) as error:
            self.malformed += 1
            if self.malformed == 1:
                log.warning("%s: dropped a malformed message: %.200s", self.endpoint, error)
            return None if number < 0 else _Message(number, frames[-1], None, None)


def _receive(socket: zmq.asyncio.Socket) -> asyncio.Future[list[bytes]]:
    return cast("asyncio.Future[list[bytes]]", socket.recv_multipart())


async def _receive_replay(
    socket: zmq.asyncio.Socket, start: int, replayed: list[list[bytes]]
) -> bool:
    """Ask for the messages since ``start``. Return whether the answer was complete.

    vLLM sends the topic before each number; SGLang and earlier versions of vLLM do not.
    """
    clock = asyncio.get_running_loop().time
    size = 0
    end_s = clock() + 6 * REPLAY_TIMEOUT_S
    async with asyncio.timeout(REPLAY_TIMEOUT_S) as silence:
        # The empty frame is the envelope of a REQ socket: vLLM's ROUTER expects it.
        await socket.send_multipart([b"", _SEQUENCE.pack(start)])
        while size <= REPLAY_BYTES and len(replayed) < HIGH_WATER_MESSAGES:
            # The last two frames, with or without a topic before them.
            number, payload = [b"", b"", *(await socket.recv_multipart())[1:]][-2:]
            if number == _END_OF_REPLAY:
                return True
            if number:  # else the next one shows the gap
                replayed.append([b"", number, payload])
                size += len(payload)
            silence.reschedule(min(clock() + REPLAY_TIMEOUT_S, end_s))
            await asyncio.sleep(0)
    return False
