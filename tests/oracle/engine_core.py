"""EngineCore messages in plain Python: the reference of ``dynamo/_fast/engine_core``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.runtime.requests.frames import pack


def pack_ids(ids: Sequence[int]) -> tuple[bytes, int]:
    """Return ``ids`` as MessagePack, and the largest."""
    return msgspec.msgpack.encode(list(ids)), max(ids, default=0)


class OracleTokenRouter:
    """The reference implementation of :class:`dynamo._fast.engine_core.TokenRouter`."""

    def __init__(self, kind: int, prefix: bytes) -> None:
        self._kind = kind
        self._prefix = prefix
        self._routes: dict[str, tuple[int, int]] = {}
        self._tokens: dict[str, int] = {}
        self._last_s: dict[str, float] = {}
        self._left_in: dict[str, int] = {}
        self._all_left_in = 0

    def __len__(self) -> int:
        return len(self._routes)

    def add(
        self, request_id: str, connection: int, stream: int, left_in: int, last_s: float
    ) -> None:
        """Pass plain tokens on, once message ``left_in`` was read; the last one came before."""
        self._last_s[request_id] = last_s
        self._left_in[request_id] = left_in
        self._routes[request_id] = (connection, stream)
        self._tokens[request_id] = 0

    def remove(self, request_id: str) -> tuple[int, float]:
        """Stop; return how many were passed on, and when the last one came."""
        self._routes.pop(request_id, None)
        return self._tokens.pop(request_id, 0), self._last_s.pop(request_id, 0.0)

    def stamp(self, request_id: str, time_s: float) -> float:
        """A token came another way; return when the last one came."""
        last_s = self._last_s.get(request_id, 0.0)
        if request_id in self._last_s:
            self._last_s[request_id] = time_s
        return last_s

    def leave(self, number: int) -> None:
        """Message ``number`` is not split."""
        self._all_left_in = number

    def split(
        self, message: bytes, number: int, read: int
    ) -> tuple[list[tuple[int, int, bytes]], bytes, list[tuple[float, int]]]:
        """Return the frames by connection, the message without them, and the gaps of tokens."""
        try:
            rank, outputs, *tail = msgspec.msgpack.decode(message)
        except (msgspec.MsgspecError, ValueError, TypeError):
            self._all_left_in = number
            return [], message, []
        frames: dict[int, list[bytes]] = {}
        kept = []
        gaps: list[float] = []
        time_s = tail[1] if len(tail) > 1 and isinstance(tail[1], float) else 0.0
        for output in outputs:
            request_id, ids = output[0], output[1]
            waits = max(self._left_in.get(request_id, 0), self._all_left_in) > read
            if request_id not in self._routes or waits or not _plain(ids, output[2:]):
                self._left_in[request_id] = number
                kept.append(output)
                continue
            connection, stream = self._routes[request_id]
            self._tokens[request_id] += 1
            if time_s > 0:
                gaps.append(time_s - self._last_s[request_id])
                self._last_s[request_id] = time_s
            item = self._prefix + _item_id(ids[0])
            frames.setdefault(connection, []).append(pack(self._kind, stream, item))
        if not frames:
            return [], message, []
        rest = msgspec.msgpack.encode([rank, kept, *tail])
        split = [(slot, len(parts), b"".join(parts)) for slot, parts in frames.items()]
        return split, rest, [(gap, len(list(run))) for gap, run in itertools.groupby(gaps)]


def _plain(ids: Any, further: Sequence[Any]) -> bool:
    one = isinstance(ids, list) and len(ids) == 1 and type(ids[0]) is int
    return (
        one
        and 0 <= ids[0] < 2**32
        and all(value is None or (type(value) is int and value == 0) for value in further)
    )


def _item_id(token: int) -> bytes:
    """A token id in 1, 3 or 5 bytes of msgpack."""
    if token < 0x80:
        return bytes([token])
    return bytes([0xCD if token < 0x10000 else 0xCE]) + token.to_bytes(
        2 if token < 0x10000 else 4, "big"
    )
