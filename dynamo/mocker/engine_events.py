"""KV events in the format of vLLM, published over ZeroMQ for programs that read engines' events."""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Iterable
from typing import Any

import msgspec
import zmq

from dynamo.errors import ConfigError
from dynamo.mocker.blocks import HOST, CacheChange
from dynamo.protocols.kv import BlocksCleared, BlocksStored

_SEQUENCE = struct.Struct(">Q")
_TOPIC = b""
_LINGER_MS = 200
_encode = msgspec.msgpack.Encoder().encode


class EngineEventSockets:
    """A PUB socket for each rank of a worker, on ``port`` plus its number. Raises ConfigError.

    A slow subscriber loses messages, which it notices by their numbers.
    """

    def __init__(self, host: str, port: int, ranks: int, block_size: int) -> None:
        self._block_size = block_size
        self._numbers = [0] * ranks
        self._sockets: list[zmq.Socket[bytes]] = []
        for rank in range(ranks):
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
            self._sockets.append(socket)
            address = f"tcp://{host}:{port + rank}"
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                self.close()
                raise ConfigError(
                    f"--zmq-kv-events-ports: cannot listen on {address}: {error}; choose another"
                ) from None

    def publish(self, dp_rank: int, changes: Iterable[CacheChange]) -> None:
        """Send ``changes`` of a rank as one message; see :mod:`dynamo.llm.engine_events`."""
        payload = _encode((time.time(), [self._event(change) for change in changes], dp_rank))
        number = self._numbers[dp_rank]
        self._numbers[dp_rank] = number + 1
        self._sockets[dp_rank].send_multipart([_TOPIC, _SEQUENCE.pack(number), payload])

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        for socket in self._sockets:
            socket.close(_LINGER_MS)

    def _event(self, cache_change: CacheChange) -> tuple[Any, ...]:
        change, tier, blocks = cache_change
        medium = "CPU" if tier == HOST else "GPU"
        if isinstance(change, BlocksCleared):
            return ("AllBlocksCleared",)
        hashes = array("Q", change.block_hashes).tolist()
        if not isinstance(change, BlocksStored):
            return "BlockRemoved", hashes, medium
        if blocks is None:  # offloaded: named by their hashes alone
            return "BlockStored", hashes, None, [], self._block_size, None, medium
        size, first = self._block_size, change.start_position or 0
        tokens = list(blocks.tokens[first * size : (first + len(hashes)) * size])
        lora, salt = blocks.lora_name, blocks.cache_namespace
        keys = None
        if first == 0 and salt is not None:
            keys = [[*([] if lora is None else [lora]), salt], *[None] * (len(hashes) - 1)]
        return "BlockStored", hashes, change.parent_hash, tokens, size, None, medium, lora, keys
