"""The order of forgetting in plain Python: every block has its time and its place in the order."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

__all__ = ["Recency"]

Key = tuple[int, int]
COMMON = -1


class Recency:
    """``_order`` is the order of forgetting, over all lines; pinned blocks are not in it."""

    def __init__(self) -> None:
        self._own: dict[int, bool] = {}
        self._held: set[Key] = set()
        self._order: dict[Key, tuple[float, int]] = {}
        self._leases: dict[int, tuple[int, list[int]]] = {}
        self._next = 0

    def open(self, slot: int, own_line: bool) -> None:
        self._own[slot] = self._own.get(slot, False) or own_line

    def close(self, slot: int) -> int:
        self._own.pop(slot, None)
        gone = {key for key in self._held if key[0] == slot}
        self._held -= gone
        self._order = {key: at for key, at in self._order.items() if key not in gone}
        self._leases = {at: one for at, one in self._leases.items() if one[0] != slot}
        return len(gone)

    def touch(self, slot: int, blocks: Sequence[int], now_s: float) -> None:
        line = slot if self._own[slot] else COMMON
        pinned = {(where, block) for where, chain in self._leases.values() for block in chain}
        for block in reversed(blocks):
            key = slot, block
            self._held.add(key)
            self._order.pop(key, None)
            if key not in pinned:
                self._order[key] = now_s, line

    def pin(self, slot: int, blocks: Sequence[int], now_s: float) -> int:
        self._next += 1
        self._leases[self._next] = slot, list(blocks)
        self.touch(slot, blocks, now_s)
        return self._next

    def release(self, lease: int, now_s: float) -> bool:
        if lease not in self._leases:
            return False
        slot, blocks = self._leases.pop(lease)
        self.touch(slot, blocks, now_s)
        return True

    def age(self, before_s: float, most: int) -> list[tuple[int, array[int]]]:
        old = [key for key, (at, line) in self._order.items() if line == COMMON and at <= before_s]
        return self._forget(old[:most])

    def evict(self, slot: int, most: int) -> list[tuple[int, array[int]]]:
        return self._forget([key for key, (_, line) in self._order.items() if line == slot][:most])

    def prune(self, most: int) -> list[tuple[int, array[int]]]:
        return self._forget(sorted(self._order, key=self._order.__getitem__)[:most])

    def blocks(self) -> int:
        return len(self._held)

    def blocks_of(self, slot: int) -> int:
        return sum(where == slot for where, _ in self._held)

    def leases(self) -> int:
        return len(self._leases)

    def _forget(self, keys: list[Key]) -> list[tuple[int, array[int]]]:
        chains: list[tuple[int, array[int]]] = []
        for slot, block in keys:
            self._held.discard((slot, block))
            del self._order[slot, block]
            if not chains or chains[-1][0] != slot:
                chains.append((slot, array("Q")))
            chains[-1][1].append(block)
        return chains
