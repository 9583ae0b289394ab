"""Blocks in host memory: the log of a worker has those of its engine, an index those of the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from box import Box
    from machine import Process

    from dynamo._fast.radix import RadixTree
    from dynamo.router.caches.indexer import Indexer

__all__ = ["check_lower_tiers", "recovered"]

_TIERS = ("device", "host")
Block = tuple[int, int, int]
"""Rank, tier, hash."""


def recovered(recovery_steps: Any) -> Any:
    """Note the streams of an index that began with a dump: it has no blocks behind a hole.

    Such blocks may stay unknown when the hole is filled.
    """

    def noted(self: Any, recovery: Any, answer: Any, events: Any = None) -> Any:
        if answer is not None and answer.kind == "tree_dump" and answer.last_event_id:
            _dumped(self).add((recovery.worker_id, recovery.dp_rank))
        return recovery_steps(self, recovery, answer, events)

    return noted


_DUMPED: WeakKeyDictionary[Indexer, set[tuple[int, int]]] = WeakKeyDictionary()


def _dumped(indexer: Indexer) -> set[tuple[int, int]]:
    return _DUMPED.setdefault(indexer, set())


def check_lower_tiers(box: Box) -> Iterator[str]:
    """Yield where log and engine differ, or an index and the log."""
    logs: dict[tuple[str, int], set[Block]] = {}
    for process in box.processes("mocker"):
        for part in process.parts:
            if hasattr(part, "ranks") and part.publishes_events:
                worker = part.endpoint.component, part.endpoint.runtime.instance_id
                logs[worker] = set()
                for rank in part.ranks:
                    tree = part.events.event_log(rank.number)._tree
                    yield from _of_log(process, rank, tree)
                    logs[worker] |= {block for _, block in _blocks(tree)}
    for process in box.processes("frontend"):
        for part in process.parts:
            if hasattr(part, "recovering_slots") and part._streams:  # an Indexer
                yield from _of_index(process, part, logs)


def _of_log(process: Process, rank: Any, tree: RadixTree) -> Iterator[str]:
    caches = rank.pool.hashes(), rank.pool.host_hashes()
    for tier, (name, cache) in enumerate(zip(_TIERS, caches, strict=True)):
        count = tree.held(tree.slot(0, rank.number, tier))
        if count != len(cache):
            yield f"{process}: its log has {count} {name} blocks, its cache {len(cache)}"


def _of_index(
    process: Process, indexer: Indexer, logs: dict[tuple[str, int], set[Block]]
) -> Iterator[str]:
    indexed: dict[int, set[Block]] = {worker: set() for worker, _ in indexer._streams}
    for worker, block in _blocks(indexer._index):
        indexed[worker].add(block)
    component = indexer._counts._labels.component
    for worker, blocks in indexed.items():
        log = logs.get((component, worker))
        if log is None:  # it was written against the public API, or does not run
            continue
        extra = {block for block in blocks - log if block[1]}
        dumped = {rank for one, rank in _dumped(indexer) if one == worker}
        missing = {block for block in log - blocks if block[1] and block[0] not in dumped}
        if extra or missing:
            yield (
                f"{process.name}: the index has {len(extra)} host blocks of {worker:x} that it "
                f"does not hold, and lacks {len(missing)} of {sum(tier for _, tier, _ in log)}"
            )


def _blocks(tree: RadixTree) -> Iterator[tuple[int, Block]]:
    """Yield worker and block of all that is not behind a hole."""
    for worker, rank, _, hashes, _, tier in tree.dump_tiers():
        for block in hashes:
            yield worker, (rank, tier, block)
