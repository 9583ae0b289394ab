"""The blocks that one data-parallel rank of an engine holds, derived from its events. Pure."""

from __future__ import annotations

import logging
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from dynamo._fast.hashing import block_hashes as hash_blocks
from dynamo._fast.hashing import seed_for
from dynamo.llm.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored
from dynamo.protocols.kv import STORAGE_TIERS, BlocksCleared, BlocksRemoved, BlocksStored, KvChange

MAX_BLOCKS = 1 << 22
"""Blocks of one rank that are counted, about 100 bytes each; further ones are not published."""

_DEVICE = STORAGE_TIERS[0]
_FULL_ATTENTION = ("full_attention", "mla_attention", "sink_full_attention")
_U64 = 0xFFFF_FFFF_FFFF_FFFF
# 2**64 divided by the golden ratio: its multiples differ in high and low bits.
_ODD = 0x9E37_79B9_7F4A_7C15

log = logging.getLogger(__name__)

Key = tuple[str, int | None]
"""Tier and group of layers."""


class AttentionGroup:
    """Selects the events of the groups of layers that decide which prompts are cached.

    A hybrid model stores each block in several groups, under the same hash, and a group with a
    sliding window drops its blocks early. Groups with full attention decide, whenever they appear;
    until then, the first group does.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._full: set[int | None] = set()

    @property
    def has_full(self) -> bool:
        """Whether a group with full attention is known."""
        return bool(self._full)

    def select(self, events: list[EngineEvent]) -> list[EngineEvent]:
        """Return the events of the deciding groups, and those without a group.

        The first event of full attention clears the blocks of a group that decided before it.
        """
        stored = [
            event for event in events if isinstance(event, EngineStored) and event.group is not None
        ]
        full = {event.group for event in stored if event.attention in _FULL_ATTENTION}
        replaced = bool(full) and not self._full and self._first is not None
        self._full |= full
        if self._first is None and not self._full and stored:
            self._first = stored[0].group
        accepted = {None, *(self._full or {self._first})}
        selected: list[EngineEvent] = [
            event for event in events if isinstance(event, EngineCleared) or event.group in accepted
        ]
        return [EngineCleared(), *selected] if replaced else selected


class StoredCopies(NamedTuple):
    """What the event of stored blocks depends on besides the event itself."""

    seed: int | None
    """Of the hashes of a chain with a salt; None without one."""
    absent: list[int]
    """The blocks that another group has removed."""


class BlockCopies:
    """The blocks that one rank of an engine holds, with the number of copies of each.

    vLLM keeps several blocks of equal content and publishes the removal of each copy. Groups of
    layers count separately. A block that one of several groups has removed is absent until that
    group stores it again. The salt of a block is known as long as any tier has it.
    """

    def __init__(self) -> None:
        self._counts = defaultdict[Key, Counter[int]](Counter)
        self._seeds = defaultdict[Key, dict[int, int]](dict)
        self._absent: dict[str, dict[int, set[int | None]]] = {}

    def blocks(self) -> int:
        """Count the blocks, once for each tier and group."""
        return sum(map(len, self._counts.values()))

    def stored(self, event: EngineStored) -> StoredCopies | None:
        """Count a copy of each block; None, and nothing is counted, above :data:`MAX_BLOCKS`."""
        blocks, key = event.block_hashes, (event.storage_tier, event.group)
        if self.blocks() + len(blocks) > MAX_BLOCKS:
            return None
        counts = self._counts[key]
        counts.update(
            [block for block in blocks if block not in counts] if event.reused else blocks
        )
        seed = None
        if event.cache_salt is not None:
            seed = seed_for(event.lora_name, event.cache_salt)
        elif self._seeds and event.parent_hash is not None:
            seed = self._seed_of(event.parent_hash)
        elif self._seeds and not event.token_ids:
            seeds = {block: self._seed_of(block) for block in blocks}  # of the other tiers
            salted = {block: seed for block, seed in seeds.items() if seed is not None}
            self._seeds[key].update(salted)
        if seed is not None:
            self._seeds[key].update(dict.fromkeys(blocks, seed))
        return StoredCopies(seed, self._still_absent(event))

    def removed(self, event: EngineRemoved) -> list[int]:
        """Discount a copy of each block. Return the blocks of which none is left."""
        tier, group = key = event.storage_tier, event.group
        counts: dict[int, int] = self._counts.get(key, {})
        seeds = self._seeds.get(key, {})
        others = [
            blocks for other, blocks in self._counts.items() if other[0] == tier and other != key
        ]
        gone = []
        for block in event.block_hashes:
            # The removal of a block that was never counted is passed on.
            copies = counts.pop(block, 1) - 1
            if copies:
                counts[block] = copies
                continue
            gone.append(block)
            seeds.pop(block, None)
            if any(block in blocks for blocks in others):
                self._absent.setdefault(tier, {}).setdefault(block, set()).add(group)
            elif tier in self._absent:
                self._absent[tier].pop(block, None)
        return gone

    def cleared(self, storage_tier: str = _DEVICE) -> None:
        """Forget the blocks of a tier; for the device, all."""
        for key in [key for key in self._counts if storage_tier in (_DEVICE, key[0])]:
            del self._counts[key]
            self._seeds.pop(key, None)
        for tier in [tier for tier in self._absent if storage_tier in (_DEVICE, tier)]:
            del self._absent[tier]

    def _seed_of(self, block: int) -> int | None:
        return next((seeds[block] for seeds in self._seeds.values() if block in seeds), None)

    def _still_absent(self, event: EngineStored) -> list[int]:
        """Return the blocks that another group has removed; ``event`` stores those of its group."""
        absent = self._absent.get(event.storage_tier)
        if not absent:
            return []
        still = []
        for block in event.block_hashes:
            groups = absent.get(block)
            if groups is not None:
                groups.discard(event.group)
                if groups:
                    still.append(block)
                else:
                    del absent[block]
        return still


class EngineBlocks:
    """The blocks of one rank, and what routers have to be sent of its engine's events.

    Blocks of the engine may have a multiple of ``block_size`` tokens. Then each consists of parts:
    the last one has the block's hash, the others ids that follow from it. Where another group has
    blocks of ``block_size``, these decide, and larger blocks only take away.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._groups = AttentionGroup()
        self._copies = BlockCopies()
        self._parts: dict[int | None, int] = {}
        self._beginnings: Counter[tuple[int | None, int]] = Counter()
        self._warned = False

    def select(self, events: list[EngineEvent]) -> list[EngineEvent]:
        """See :meth:`AttentionGroup.select`."""
        had_full = self._groups.has_full
        selected = self._groups.select(events)
        if self._groups.has_full and not had_full:
            self._parts.clear()  # of a group that no longer decides
        return selected

    def cleared(self) -> None:
        """Forget all blocks."""
        self._copies.cleared()
        self._beginnings.clear()

    def restarted(self) -> None:
        """Forget all blocks, and which groups decide: another engine may have other groups."""
        self.cleared()
        self._groups = AttentionGroup()
        self._parts.clear()

    def changes(self, event: EngineEvent) -> list[KvChange]:
        """Return the changes on the event's tier. ValueError or TypeError: invalid token ids."""
        if isinstance(event, EngineStored):
            return self._stored(event)
        if isinstance(event, EngineRemoved):
            gone = self._copies.removed(self._without_beginnings(event))
            if 1 not in self._parts.values():
                gone = _parts_of(gone, self._parts.get(event.group, 1))
            return [BlocksRemoved(_column(gone))] if gone else []
        self._copies.cleared(event.storage_tier)
        if event.storage_tier == _DEVICE:
            self._beginnings.clear()
        return [BlocksCleared()]

    def _stored(self, event: EngineStored) -> list[KvChange]:
        blocks, size = event.block_hashes, event.block_size
        # A sliding window names the tokens of its span, but only the blocks that are left.
        dense = bool(event.token_ids) and len(event.token_ids) == size * len(blocks)
        parts, rest = divmod(size, self._block_size)
        if dense and (rest or parts < self._parts.get(event.group, 1)):
            if event.group in self._parts:
                self._count_beginnings(event)
            else:
                self._warn(
                    f"an engine has blocks of {size} tokens, this worker of {self._block_size}: "
                    "they are not published. Give the worker the engine's block size"
                )
            return []
        cleared: list[KvChange] = []
        if dense and self._resizes(event.group, parts):
            self.cleared()
            cleared = [BlocksCleared()]
        copies = self._copies.stored(event)
        if copies is None:
            self._warn(f"an engine has more than {MAX_BLOCKS} blocks in one rank")
            return cleared
        if not event.token_ids:
            usable = event.storage_tier != _DEVICE and size in (0, self._block_size)
            return [*cleared, BlocksStored(_column(blocks), b"")] if usable else cleared
        if not dense or (parts > 1 and event.mm_hashes):
            return cleared
        local = hash_blocks(
            event.token_ids,
            self._block_size,
            seed=seed_for(event.lora_name) if copies.seed is None else copies.seed,
            mm_hashes=event.mm_hashes,
        )
        ids = _parts_of(blocks, parts)
        absent = copies.absent
        if parts > 1 and 1 in self._parts.values():
            absent = [*absent, *set(ids).difference(blocks)]
        stored = BlocksStored(_column(ids), local.tobytes(), event.parent_hash)
        return [*cleared, stored, *([BlocksRemoved(_column(absent))] if absent else [])]

    def _count_beginnings(self, event: EngineStored) -> None:
        """Count what vLLM names besides its blocks: the beginning of a block that is not full.

        Another group may have a whole block of that hash.
        """
        if len(self._beginnings) + len(event.block_hashes) <= MAX_BLOCKS:
            self._beginnings.update((event.group, block) for block in event.block_hashes)

    def _without_beginnings(self, event: EngineRemoved) -> EngineRemoved:
        if not self._beginnings:
            return event
        blocks = []
        for block in event.block_hashes:
            key = event.group, block
            if self._beginnings[key] > 1:
                self._beginnings[key] -= 1
            elif self._beginnings.pop(key, 0) == 0:
                blocks.append(block)
        return event._replace(block_hashes=blocks)

    def _resizes(self, group: int | None, parts: int) -> bool:
        """Note the size of a group's blocks. Return whether earlier ids of parts are invalid."""
        before = self._parts.get(group)
        if before is not None and parts <= before:
            return False
        # The first group with blocks of the worker's size replaces those with larger ones.
        is_first = parts == 1 and bool(self._parts) and 1 not in self._parts.values()
        self._parts[group] = parts
        return before is not None or is_first

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s; further warnings of this rank are left out", text)


def _parts_of(blocks: list[int], parts: int) -> list[int]:
    """Return the ids of the parts of each block, the block's own hash as the last."""
    if parts == 1:
        return blocks
    # From 1: the last part is the block's own hash, which other blocks name as their parent.
    inner = [part * _ODD for part in range(1, parts)]
    return [part for block in blocks for part in (*((block ^ n) & _U64 for n in inner), block)]


def _column(hashes: Iterable[int]) -> bytes:
    return array("Q", hashes).tobytes()
