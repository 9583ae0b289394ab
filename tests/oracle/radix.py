"""The prefix index in plain Python: every block is named by the whole path of its local hashes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import count

__all__ = ["InvalidSequence", "ParentNotFound", "RadixTree"]

Path = tuple[int, ...]
Chain = tuple[int, int, int | None, list[int], list[int]]
TIER_SHIFT = 28
TIERS = 4


class ParentNotFound(Exception):
    """The parent is not known for that slot."""


class InvalidSequence(Exception):
    """A block names itself as its parent."""


class RadixTree:
    """What each slot holds is a dict: external block hash -> path from the root."""

    def __init__(self, max_blocks: int = 0) -> None:
        self._cap = max_blocks or 2**32
        self._owners: dict[tuple[int, int], int] = {}
        self._held: defaultdict[int, dict[int, Path]] = defaultdict(dict)
        self._dropped = 0

    def slot(self, worker: int, dp_rank: int, tier: int = 0) -> int:
        owner = (worker, dp_rank)
        if owner not in self._owners:
            taken = set(self._owners.values())
            self._owners[owner] = next(slot for slot in count() if slot not in taken)
        return self._owners[owner] | tier << TIER_SHIFT

    def store(
        self,
        slot: int,
        parent_hash: int | None,
        block_hashes: Sequence[int],
        tokens_hashes: Sequence[int],
    ) -> int:
        held = self._held[slot]
        path = () if parent_hash is None else self._find(slot, parent_hash)
        parents = [parent_hash, *block_hashes]
        if any(parent == block for parent, block in zip(parents, block_hashes, strict=False)):
            raise InvalidSequence
        before = len(held)
        for done, (block, local) in enumerate(zip(block_hashes, tokens_hashes, strict=True)):
            path = (*path, local)
            if held.get(block) == path:
                continue
            nodes = self._prefixes()
            is_new = block not in held
            if (is_new and self.blocks() >= self._cap) or (
                path not in nodes and len(nodes) >= self._cap
            ):
                self._dropped += len(block_hashes) - done
                break
            held[block] = path
        return len(held) - before

    def remove(self, slot: int, block_hashes: Sequence[int]) -> int:
        return sum(self._held[slot].pop(block, None) is None for block in block_hashes)

    def clear(self, slot: int) -> int:
        return len(self._held.pop(slot, {}))

    def remove_worker(self, worker: int) -> int:
        owners = [owner for owner in self._owners if owner[0] == worker]
        numbers = [self._owners.pop(owner) for owner in owners]
        return sum(
            self.clear(number | tier << TIER_SHIFT) for number in numbers for tier in range(TIERS)
        )

    def match(
        self, tokens_hashes: Sequence[int], early_exit: bool = False
    ) -> dict[tuple[int, int], int]:
        """``early_exit``: depths stop where at most one slot continues."""
        depths = {
            owner: self._depth(slot, tuple(tokens_hashes)) for owner, slot in self._owners.items()
        }
        if early_exit:
            second = sorted([0, 0, *depths.values()])[-2]
            depths = {owner: min(depth, second + 1) for owner, depth in depths.items()}
        return {owner: depth for owner, depth in depths.items() if depth}

    def extend(self, tokens_hashes: Sequence[int], depths: Sequence[int], tier: int) -> list[int]:
        """Return, per slot, how far the tier continues behind ``depths[slot]``."""
        extensions = [0] * len(depths)
        for number in self._owners.values():
            paths = set(self._held[number | tier << TIER_SHIFT].values())
            end = depths[number]
            while end < len(tokens_hashes) and tuple(tokens_hashes[: end + 1]) in paths:
                end += 1
            extensions[number] = end - depths[number]
        return extensions

    def adopt(self, slot: int, block_hashes: Sequence[int]) -> int:
        unknown = 0
        for block in block_hashes:
            try:
                self._held[slot][block] = self._find(slot, block)
            except ParentNotFound:
                unknown += 1
        return unknown

    def ranges(self, tokens_hashes: Sequence[int], tier: int) -> list[tuple[int, int]]:
        """Return runs of blocks that any slot of the tier holds, up to the last held block."""
        known = self._prefixes()
        paths = {
            path
            for number in self._owners.values()
            for path in self._held[number | tier << TIER_SHIFT].values()
        }
        found: list[tuple[int, int]] = []
        for place in range(len(tokens_hashes)):
            path = tuple(tokens_hashes[: place + 1])
            if path not in known:
                break
            if path in paths and found and found[-1][1] == place:
                found[-1] = (found[-1][0], place + 1)
            elif path in paths:
                found.append((place, place + 1))
        return found

    def dump(self) -> list[Chain]:
        """One chain per block of the device that is reachable there, shallow ones first."""
        chains: list[Chain] = []
        for (worker, rank), slot in self._owners.items():
            held = self._held[slot]
            names: dict[Path, int] = {}
            for block, path in sorted(held.items(), key=lambda item: len(item[1])):
                parent = path[:-1]
                if parent and parent not in names:
                    continue
                names.setdefault(path, block)
                chains.append((worker, rank, names.get(parent), [block], [path[-1]]))
        return chains

    def blocks(self) -> int:
        return sum(map(len, self._held.values()))

    def nodes(self) -> int:
        return len(self._prefixes())

    def dropped(self) -> int:
        return self._dropped

    def ids(self, slot: int) -> set[int]:
        """External ids that the slot holds."""
        return set(self._held[slot])

    def paths(self, slot: int) -> set[Path]:
        """Paths that the slot holds, reachable or not."""
        return set(self._held[slot].values())

    def copies(self) -> Counter[tuple[int, int, Path]]:
        """How many external ids name each (worker, rank, path)."""
        return Counter(
            (*owner, path)
            for owner, slot in self._owners.items()
            for path in self._held[slot].values()
        )

    def _find(self, slot: int, block: int) -> Path:
        number = slot % (1 << TIER_SHIFT)
        for place in (slot, *(number | tier << TIER_SHIFT for tier in range(TIERS))):
            if block in self._held[place]:
                return self._held[place][block]
        raise ParentNotFound

    def _prefixes(self) -> set[Path]:
        return {
            path[:end]
            for held in self._held.values()
            for path in held.values()
            for end in range(1, len(path) + 1)
        }

    def _depth(self, slot: int, wanted: Path) -> int:
        paths = set(self._held[slot].values())
        depth = 0
        while depth < len(wanted) and wanted[: depth + 1] in paths:
            depth += 1
        return depth
