"""The reference implementation of ``dynamo._fast.sequences``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ActiveSequences", "Request"]


@dataclass
class Request:
    """One running request; ``faded`` is the share of its single-owner blocks not counted."""

    slot: int
    hashes: tuple[int, ...]
    unique_blocks: int
    prefill_tokens: int
    faded: float = 0.0


class ActiveSequences:
    """Requests by handle; every sum is computed on each call."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self._next = 0

    def book(
        self, slot: int, hashes: Sequence[int] | None, unique_blocks: int, prefill_tokens: int
    ) -> int:
        """Hold the blocks and the prefill."""
        self._next += 1
        self.requests[self._next] = Request(
            slot, tuple(hashes or ()), unique_blocks, prefill_tokens
        )
        return self._next

    def end_prefill(self, handle: int) -> bool:
        """Release the prefill tokens."""
        if handle not in self.requests:
            return False
        self.requests[handle].prefill_tokens = 0
        return True

    def grow(self, handle: int, blocks: int, faded: float = 0.0) -> bool:
        """Add output blocks."""
        if handle not in self.requests:
            return False
        self.requests[handle].unique_blocks += blocks
        self.requests[handle].faded = faded
        return True

    def release(self, handle: int) -> bool:
        """End the request."""
        return self.requests.pop(handle, None) is not None

    def clear(self, slot: int) -> int:
        """End all requests of ``slot``."""
        ended = [handle for handle, request in self.requests.items() if request.slot == slot]
        for handle in ended:
            del self.requests[handle]
        return len(ended)

    def held(self, slot: int) -> Counter[int]:
        """How many requests of ``slot`` hold each hash."""
        return Counter(
            hash_
            for request in self.requests.values()
            if request.slot == slot
            for hash_ in request.hashes
        )

    def load(self, slot: int) -> tuple[int, float, int]:
        """(prefill tokens, blocks before rounding, requests) of ``slot``."""
        held = self.held(slot)
        here = [request for request in self.requests.values() if request.slot == slot]
        blocks = len(held) + sum(request.unique_blocks for request in here)
        faded = sum(
            request.faded
            * (request.unique_blocks + sum(held[hash_] == 1 for hash_ in request.hashes))
            for request in here
        )
        return sum(request.prefill_tokens for request in here), blocks - faded, len(here)

    def project(
        self, hashes: Sequence[int] | None, unique_blocks: int, slots: int
    ) -> list[tuple[int, float]]:
        """(prefill tokens, blocks with this request added) of every slot."""
        rows = []
        for slot in range(slots):
            prefill, blocks, _ = self.load(slot)
            held = self.held(slot)
            new = sum(hash_ not in held for hash_ in hashes or ())
            rows.append((prefill, blocks + new + unique_blocks))
        return rows
