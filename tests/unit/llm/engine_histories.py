"""Histories of an engine: its events through the relay, the publisher and two lossy routers.

``python tests/unit/llm/engine_histories.py --seeds 200`` runs many and prints how many a minute;
``--seed 37`` runs one.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from random import Random

from engine_pool import MODELS, SIZE, EnginePool, Prompt, Shape
from oracle.ingest import Counts

from dynamo._fast.hashing import block_hashes, seed_for
from dynamo._fast.ingest import Ingest
from dynamo._fast.radix import RadixTree
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import SystemSettings
from dynamo.llm import KvEventPublisher
from dynamo.llm.engine_relay import EngineEventRelay
from dynamo.llm.prefix_index import short_hash
from dynamo.protocols import codec
from dynamo.protocols.kv import STORAGE_TIERS, KvEvent, KvEventBatch, KvQuery
from dynamo.router.caches.event_threads import apply_handoff
from dynamo.router.caches.indexer import Indexer, Recovery
from dynamo.runtime import DistributedRuntime
from dynamo.worker.publish import EventLog

__all__ = ["EVERY_STATE", "MODEL_STATES", "REPLAYS", "History", "run"]

REPLAYS = ("none", "all", "few", "malformed", "silent")
"""What the replay socket answers: nothing, as there is none; all; the newest; broken; never."""

WORKER = 3
STEPS = 250
EVERY_STATE = (
    *("copied", "copy removed", "last removed", "reused", "cache not read", "grown", "GPU"),
    *("clear", "salt", "adapter", "images", "never stored", "sleep", "in flight", "restarted"),
    *("lost", "twice", "late", "router lost", "router complete", "found", "not found"),
)
"""States that occur in each history."""

_HOST = ("CPU", "by hash", "host removed", "host clear", "host cleared with all")
_WINDOW = ("several in a window",)
_BEGINNING = ("size 8", "beginning of a block")
MODEL_STATES = {
    "no groups": _HOST,
    "one group": _HOST,
    "local": _HOST,
    "hybrid": (*_HOST, *_WINDOW),
    "two that decide": (*_HOST, "size 16"),
    "other sizes": (*_HOST, *_WINDOW, *_BEGINNING, "size 6", "size 16"),
    "large blocks": (*_WINDOW, *_BEGINNING),
    "large and small": (*_HOST, *_BEGINNING),
}
"""Those of each model besides."""


class Router:
    """An index in Python, or with a thread whose iterations the test runs."""

    def __init__(self, compiled: bool, rank: int) -> None:
        self.rank = rank
        self.tree = RadixTree()
        self.asked: list[Recovery] = []
        self.complete = True
        self.counts = Counts()
        self.ingest = Ingest(self.tree, 1, "kv-events") if compiled else None
        self.indexer = Indexer(self.tree, self.asked.append, self.counts, self.ingest)
        self.indexer.add(WORKER, rank, self.tree.slot(WORKER, rank))

    def deliver(self, events: list[KvEvent]) -> None:
        batch = KvEventBatch(WORKER, events)
        if self.ingest is None:
            self.indexer.apply(batch)
            return
        self.ingest.push(0, codec.encode(batch))
        self.ingest.stop(0)
        self.ingest.run(0)
        while (handoff := self.ingest.next_handoff()) is not None:
            apply_handoff(handoff, self.indexer, self.counts)

    def settle(self, log: EventLog) -> None:
        """Ask for what is missing, as two sweeps of the router do."""
        for _ in range(2):  # a query that waits for its answer takes the place of the first
            self.indexer.verify()
            while self.asked:
                query = self.asked.pop()
                answer = log.answer(KvQuery(self.rank, query.start, query.end))
                if answer.kind == "tree_dump":  # without the blocks behind a hole
                    self.complete = log.blocks() == len(contents(log._tree))
                self.indexer.recovered(query, answer)
        self.complete = self.complete or not log.blocks()


class Replaying(EngineEventRelay):
    """A relay whose engine replays ``sent`` at once, as ``answers`` says."""

    sent: list[list[bytes]]
    answers = "none"

    async def _replay(self, start: int) -> list[list[bytes]]:
        messages = self.sent[start:] if self.answers in ("all", "few", "malformed") else []
        if self.answers == "few":
            return [message for message in self.sent[-5:] if message in messages]
        if self.answers == "malformed" and len(messages) > 2:
            messages[-2] = [b"", messages[-2][1], b"\xc1"]
        return messages


class History:
    """One rank of an engine, its worker and two routers; ``pool.states`` has what happened.

    ``changing``: the engine has other groups of layers after each restart.
    """

    def __init__(
        self,
        seed: int,
        replays: str,
        runtime: DistributedRuntime,
        rank: int = 0,
        changing: bool = False,
    ) -> None:
        source = self.source = Random(f"{seed} {replays} {rank} {changing}")
        self.rank, self.changing = rank, changing
        shape = Shape(
            source.random() < 0.5,
            source.random() < 0.5,
            source.choice(["bytes", "int", "signed"]),
            source.random() < 0.8,
            source.random() < 0.5,
        )
        self.model = [*MODELS][seed % len(MODELS)]
        self.pool = EnginePool(source, self.model, shape, rank)
        self.replays = replays
        self.publisher = KvEventPublisher(
            runtime.endpoint("ns.comp.generate"), kv_block_size=SIZE, dp_rank=rank
        )
        self.malformed: list[Exception] = []
        self.relay = Replaying(
            "ipc://engine",
            "",
            self.publisher._on_engine_events,
            lambda count: None,
            self.malformed.append,
            self.publisher._on_reset,
            None if replays == "none" else "ipc://replay",
        )
        self.publisher._engine = self.relay
        self.sent: list[list[bytes]] = []
        self.relay.sent, self.relay.answers = self.sent, replays
        self.log = self.publisher._sender.event_log(rank)
        self.routers = [Router(False, rank), Router(True, rank)]
        for router in self.routers:
            router.settle(self.log)
        self.applied = 0
        self.wire: deque[list[bytes]] = deque()
        self.late: list[list[bytes]] = []
        self.started = 0

    async def run(self) -> None:
        """Run all steps; the index is compared with the pool whenever all has arrived."""
        for _ in range(STEPS):
            if self.source.random() < 0.03:
                self._restart()
            self._send(self.pool.step())
            if self.source.random() < 0.03:
                await self._sleep()
            while self.wire and self.source.random() < 0.8:
                await self._arrive()
            if not self.wire:
                self.check()
        await self._quiet()

    def _send(self, payload: bytes) -> None:
        message = [b"", len(self.sent).to_bytes(8, "big"), payload]
        self.sent.append(message)
        kind = self.source.choices(("ok", "lost", "twice", "late"), (30, 1, 1, 1))[0]
        self.pool.states[kind] += 1
        if kind == "late":
            self.late.append(message)
        elif kind != "lost":
            self.wire += [message] * (2 if kind == "twice" else 1)
            if self.source.random() < 0.5:
                self.wire += self.late
                self.late.clear()

    async def _arrive(self) -> None:
        await self.relay._on_message(self.wire.popleft())
        self._publish()

    def _publish(self) -> None:
        fresh = [event for event in self.log._ring if event.event_id > self.applied]
        self.applied = self.log.last_event_id
        for router in self.routers:
            if self.source.random() < 0.1:
                self.pool.states["router lost"] += bool(fresh)
            elif fresh:
                router.deliver(fresh)

    def _restart(self) -> None:
        """Begin the numbers again; sometimes the first message that arrives continues them."""
        self.pool.states["restarted"] += 1
        if self.changing:
            self.model = self.source.choice([*MODELS])
        self.pool.restart(self.model)
        self.wire.clear()
        self.late.clear()
        self.sent.clear()
        seen = self.relay._expected or 0
        if self.source.random() < 0.5:
            self.pool.states["numbers continue"] += 1
            for _ in range(seen + self.source.randrange(3)):
                number = len(self.sent).to_bytes(8, "big")
                self.sent.append([b"", number, self.pool.step()])
        # Without a gap, or with numbers that may be lost ones, only the connection shows it.
        replayed = self.replays == "all" and len(self.sent) > seen and self.source.random() < 0.5
        self.relay._disconnected = not replayed

    async def _sleep(self) -> None:
        """The engine drops its blocks, and publishes that with its next step."""
        while self.pool.running:
            self.pool.finish()
        if self.pool.events:
            self._send(self.pool.shape.payload(self.pool.events, self.rank))
            self.pool.events = []
        self.pool.states["sleep"] += 1
        self.pool.states["in flight"] += bool(self.wire)
        self.pool.clear()
        self.publisher.publish_all_cleared()
        self._publish()
        while self.wire:
            await self._arrive()
        assert not self.log.blocks(), "blocks from before the sleep"

    async def _quiet(self) -> None:
        while self.wire:
            await self._arrive()
        while not self.pool.events:
            self.pool.prefill()
        self._send(self.pool.shape.payload(self.pool.events, self.rank))
        self.pool.events = []
        self.wire.append(self.sent[-1])
        while self.wire:
            await self._arrive()
        self.check()

    def check(self) -> None:
        """Compare: never more than the engine has, nor less if nothing is lost for good."""
        held, index = self.pool.held(), contents(self.log._tree)
        sizes = {self.pool.groups[number].size for number in self.pool.deciding}
        # Lost or late messages at the end have no successor that shows it.
        known = bool(self.sent) and self.relay._last == self.sent[-1][2]
        if known and sizes == {SIZE}:
            assert index <= held, index - held
            if self.replays == "all":  # also those without their parents, which no dump has
                counts = Counter(tier for tier, _ in held)
                tree = self.log._tree
                for number, tier in enumerate(STORAGE_TIERS):
                    assert tree.held(tree.slot(0, self.rank, number)) == counts[tier], tier
        for prompt in [self.pool.prompt(), *self.pool.recent] if known else []:
            if prompt.adapter is not None and not self.pool.shape.adapter_names:
                continue
            indexed, expected = prefix(self.log._tree, prompt), self.pool.prefix(prompt)
            step = max(sizes) // SIZE
            self.pool.states["found" if expected else "not found"] += 1
            assert indexed - indexed % step <= expected, (prompt, indexed, expected)
            # Where an image lies in a larger block is not known.
            if self.replays == "all" and not (step > 1 and prompt.images):
                assert indexed - indexed % step == expected, (prompt, indexed, expected)
        if self.source.random() < 0.3:
            self.settle()

    def settle(self) -> None:
        """Both routers have the worker's index, also where they lost messages."""
        expected = contents(self.log._tree)
        for router in self.routers:
            router.settle(self.log)
            router.tree._check()
            found = contents(router.tree)
            assert found <= expected and (found == expected or not router.complete)
            self.pool.states["router complete"] += router.complete


def contents(tree: RadixTree) -> set[tuple[str, int]]:
    return {
        (STORAGE_TIERS[tier], block)
        for _, _, _, blocks, _, tier in tree.dump_tiers()
        for block in blocks
    }


def prefix(tree: RadixTree, prompt: Prompt) -> int:
    """Return how many leading blocks of a prompt the index finds on the device."""
    images = dict(prompt.images)
    count = len(prompt.tokens) // SIZE
    hashes = block_hashes(
        prompt.tokens,
        SIZE,
        seed=seed_for(prompt.adapter, prompt.salt),
        mm_hashes=[[short_hash(images[at])] if at in images else [] for at in range(count)]
        if images
        else None,
    )
    return max(tree.match(hashes).values(), default=0)


async def run(
    seed: int, replays: str, path: Path, ranks: int = 1, changing: bool = False
) -> list[Counter[str]]:
    """Run the histories of ``ranks`` side by side. Return their states."""
    settings = RuntimeSettings(namespace="ns", state_dir=str(path / "state"))
    runtime = DistributedRuntime(settings=settings, system=SystemSettings(grace_period_s=0))
    try:
        histories = [History(seed, replays, runtime, rank, changing) for rank in range(ranks)]
        async with asyncio.TaskGroup() as group:
            for history in histories:
                group.create_task(history.run())
        for history in histories:
            history.check()
            assert not history.malformed, history.malformed[0]
        return [history.pool.states for history in histories]
    finally:
        await runtime.close()


def run_all(seeds: Iterable[int]) -> None:
    """Run the histories of ``seeds`` with each kind of replay, and print the rate."""
    logging.disable(logging.WARNING)
    begin = time.monotonic()
    states = Counter[str]()
    count = 0
    for seed in seeds:
        for replays in REPLAYS:
            with tempfile.TemporaryDirectory() as path:
                try:
                    (seen,) = asyncio.run(run(seed, replays, Path(path)))
                    states += seen
                except BaseException:
                    print(f"seed {seed}, replay {replays}")
                    raise
            count += 1
    minutes = (time.monotonic() - begin) / 60
    print(f"{count} histories, {count / minutes:.0f} a minute")
    for state, number in sorted(states.items()):
        print(f"{number:9} {state}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    run_all(range(options.seeds) if options.seed is None else [options.seed])
