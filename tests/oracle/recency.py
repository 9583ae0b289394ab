"""The order of dropping in plain Python: every block has its time and its place in the order."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

__all__ = ["Recency"]

Key = tuple[int, int]
COMMON = -1


class Recency:
    """``_order`` is the order of dropping, over all lists; pinned blocks are not in it."""

    def __init__(self) -> None:
        self._own: dict[int, bool] = {}
        self._held: set[Key] = set()
        self._order: dict[Key, tuple[float, int]] = {}
        self._leases: dict[int, tuple[int, list[int]]] = {}
        self._next = 0

    def open(self, slot: int, own_list: bool) -> None:
        self._own[slot] = self._own.get(slot, False) or own_list

    def close(self, slot: int) -> int:
        self._own.pop(slot, None)
        dropped = {key for key in self._held if key[0] == slot}
        self._held -= dropped
        self._order = {key: at for key, at in self._order.items() if key not in dropped}
        self._leases = {at: one for at, one in self._leases.items() if one[0] != slot}
        return len(dropped)

    def touch(self, slot: int, blocks: Sequence[int], now_s: float) -> None:
        list_ = slot if self._own[slot] else COMMON
        pinned = {(where, block) for where, chain in self._leases.values() for block in chain}
        for block in reversed(blocks):
            key = slot, block
            self._held.add(key)
            self._order.pop(key, None)
            if key not in pinned:
                self._order[key] = now_s, list_

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

    def age(self, before_s: float, limit: int) -> list[tuple[int, array[int]]]:
        old = [
            key for key, (at, list_) in self._order.items() if list_ == COMMON and at <= before_s
        ]
        return self._drop(old[:limit])

    def evict(self, slot: int, limit: int) -> list[tuple[int, array[int]]]:
        return self._drop([key for key, (_, list_) in self._order.items() if list_ == slot][:limit])

    def prune(self, limit: int) -> list[tuple[int, array[int]]]:
        return self._drop(sorted(self._order, key=self._order.__getitem__)[:limit])

    def blocks(self) -> int:
        return len(self._held)

    def blocks_of(self, slot: int) -> int:
        return sum(where == slot for where, _ in self._held)

    def leases(self) -> int:
        return len(self._leases)

    def _drop(self, keys: list[Key]) -> list[tuple[int, array[int]]]:
        chains: list[tuple[int, array[int]]] = []
        for slot, block in keys:
            self._held.discard((slot, block))
            del self._order[slot, block]
            if not chains or chains[-1][0] != slot:
                chains.append((slot, array("Q")))
            chains[-1][1].append(block)
        return chains
