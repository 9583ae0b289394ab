"""Plain tokens of EngineCore's messages: from the socket to the streams without Python objects.

A step's message has one output for each running request, most of them one token and nothing else.
``_fast/engine_core`` makes them the frames of each connection; vLLM's decoder gets the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from dynamo._fast.engine_core import TokenRouter
from dynamo.protocols.engine import TOKEN_PREFIX
from dynamo.runtime.requests.frames import DATA
from dynamo.runtime.requests.server import ServerConnection
from dynamo.runtime.requests.stream import EndpointStats, ServerStream

OnGaps = Callable[[int, list[tuple[float, int]]], None]
"""Receives a rank and its gaps: the seconds since a request's last token, and how many tokens
arrived then."""


class PlainTokens:
    """The streams that get their plain tokens directly.

    Messages with other outputs wait for their reader. The tokens of a request do not overtake those
    that wait.
    """

    def __init__(self, on_gaps: OnGaps = lambda rank, gaps: None) -> None:
        self.on_gaps = on_gaps
        #: The gaps of the last message.
        self.gaps: list[tuple[float, int]] = []
        #: Tokens passed on, for each message that waits for its reader, which removes its count.
        self.counts: deque[int] = deque()
        #: Tokens passed on since the last of these messages.
        self.count = 0
        #: Messages with other outputs so far, and how many of them their reader has read.
        self.sent = self.read = 0
        self._router = TokenRouter(DATA, TOKEN_PREFIX)
        self._numbers: dict[ServerConnection, int] = {}
        self._connections: dict[int, tuple[ServerConnection, EndpointStats]] = {}
        self._next = 0
        self._on_full: dict[str, Callable[[], None]] = {}

    def add(
        self,
        request_id: str,
        stream: ServerStream,
        on_full: Callable[[], None],
        last_s: float = 0.0,
    ) -> None:
        """Pass the tokens of ``request_id`` on to ``stream`` until :meth:`remove`.

        ``on_full`` is called when the connection is above its high-water mark. The engine sent the
        last token at ``last_s``.
        """
        connection, number, stats = stream.route()
        slot = self._numbers.get(connection)
        if slot is None:
            slot = self._add_connection(connection, stats)
        self._router.add(request_id, slot, number, self.sent, last_s)
        self._on_full[request_id] = on_full

    def remove(self, request_id: str) -> tuple[int, float]:
        """Stop; return how many tokens were passed on, and when the engine sent the last one.

        (0, 0.0) for a request that was not added.
        """
        if self._on_full.pop(request_id, None) is None:
            return 0, 0.0
        return self._router.remove(request_id)

    def stamp(self, request_id: str, time_s: float) -> float:
        """Note a token that was not passed on; return when the last one of its request was."""
        return self._router.stamp(request_id, time_s)

    def pass_on(self, message: bytes) -> bytes:
        """Write the plain tokens of an encoded step to their streams; return the other outputs."""
        frames, rest, self.gaps = self._router.split(message, self.sent + 1, self.read)
        for slot, count, data in frames:
            connection, stats = self._connections[slot]
            self.count += count
            stats.response_bytes.value += len(data)
            connection.write(data)
            if connection.above_high_water:
                # Of all requests: those whose own connection is below its mark ignore the call. A
                # copy, as the call removes its request.
                for on_full in list(self._on_full.values()):
                    on_full()
        return rest

    def leave(self) -> None:
        """The next message has outputs of any request, and is not passed on."""
        self._router.leave(self.sent + 1)

    def _add_connection(self, connection: ServerConnection, stats: EndpointStats) -> int:
        """Number a new connection, and forget closed ones, whose streams are removed."""
        for old in [old for old in self._numbers if old.closed]:
            del self._connections[self._numbers.pop(old)]
        slot = self._numbers[connection] = self._next
        self._connections[slot] = (connection, stats)
        self._next += 1
        return slot


class StepDecoder:
    """Decodes the messages of EngineCore in place of ``decoder``, vLLM's own."""

    def __init__(self, decoder: Any, tokens: PlainTokens) -> None:
        self._decoder = decoder
        self._tokens = tokens

    def decode(self, frames: Sequence[Any]) -> Any:
        """Return vLLM's EngineCoreOutputs without the tokens that were passed on."""
        tokens = self._tokens
        if len(frames) != 1:  # with tensors: log probabilities, pooling
            tokens.leave()
            outputs = self._decoder.decode(frames)
        else:
            outputs = self._decoder.decode(tokens.pass_on(frames[0].bytes))
            if tokens.gaps:
                tokens.on_gaps(outputs.engine_index, tokens.gaps)
        # CoreEngine counts the same messages in ``read``: a message that was passed on as a whole
        # has no reader to wait for.
        if outputs.outputs:
            tokens.sent += 1
        # Only these get a reader: vLLM's client drops what has neither.
        if not outputs.utility_output and (outputs.outputs or outputs.scheduler_stats):
            tokens.counts.append(tokens.count)
            tokens.count = 0
        return outputs
