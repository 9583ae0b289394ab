"""A model of vLLM's block pool: the events that vLLM publishes, and what it would find."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import msgspec

__all__ = ["MODELS", "SIZE", "EnginePool", "Prompt", "Shape", "identifier"]

SIZE = 4
"""Tokens of the blocks that are hashed, and of the router's blocks."""

BLOCKS = 48
HOST_BLOCKS = 24
BRANCHES = 2
FULL = ("full_attention", "mla_attention", "sink_full_attention")


class Group(NamedTuple):
    """Layers with one kind of attention. ``window``: the blocks of a request that stay."""

    kind: str | None
    size: int = SIZE
    window: int | None = None


MODELS: dict[str, list[Group]] = {
    "no groups": [Group(None)],
    "one group": [Group("full_attention")],
    "local": [Group("chunked_local_attention")],
    "hybrid": [Group("sliding_window", window=2), Group("full_attention")],
    "two that decide": [Group("mla_attention"), Group("sink_full_attention"), Group("mamba", 16)],
    "other sizes": [
        Group("full_attention"),
        Group("sliding_window", 2 * SIZE, 1),
        Group("mamba", 4 * SIZE, 1),
        Group("sliding_window_mla", 6),
    ],
    "large blocks": [Group("sliding_window", window=1), Group("full_attention", 2 * SIZE)],
    "large and small": [Group("full_attention"), Group("mla_attention", 2 * SIZE)],
}


class Prompt(NamedTuple):
    """What the hashes of a prompt depend on. ``images`` has identifiers by index of block."""

    tokens: list[int]
    salt: str | None = None
    adapter: str | None = None
    images: tuple[tuple[int, str], ...] = ()


def identifier(number: int) -> str:
    """Return an image's identifier, as vLLM's hashes."""
    return hashlib.sha256(b"image %d" % number).hexdigest()


@dataclass
class Shape:
    """How the engine writes its events."""

    array: bool = False
    batch_map: bool = False
    hashes: str = "bytes"
    adapter_names: bool = True
    more_fields: bool = False

    def hash(self, value: bytes | None) -> bytes | int | None:
        if value is None or self.hashes == "bytes":
            return value
        return int.from_bytes(value[-8:], "big", signed=self.hashes == "signed")

    def event(self, name: str, **fields: Any) -> Any:
        if self.array:
            values = [name, *fields.values()]
            return [*values, *["new"] * 9] if self.more_fields and len(values) > 9 else values
        more = {"origin_node": 1, "tags": ["x"]} if self.more_fields else {}
        return {"type": name, **fields, **more}

    def payload(self, events: list[Any], rank: int) -> bytes:
        fields = {"ts": time.time(), "events": events, "data_parallel_rank": rank}
        if self.batch_map:
            return msgspec.msgpack.encode({**fields, "more": 1})
        return msgspec.msgpack.encode([*fields.values(), *(["more"] if self.more_fields else [])])


class Cached(NamedTuple):
    """The name of a block in the cache."""

    group: int
    hash: bytes


@dataclass(eq=False)
class Block:
    """One physical block: the name under which it is found, and how many requests use it."""

    name: Cached | None = None
    users: int = 0


@dataclass(eq=False)
class Running:
    """A running request: its blocks of each group, None where a window has moved on."""

    prompt: Prompt
    hashes: list[bytes]
    blocks: list[list[Block | None]]
    cached: list[int] = field(default_factory=list)


class EnginePool:
    """The blocks of one engine, and the events of its steps.

    ``states`` counts what has happened, for tests that assert what they are meant for.
    """

    def __init__(self, source: Random, model: str, shape: Shape, rank: int = 0) -> None:
        self.source = source
        self.shape = shape
        self.rank = rank
        self.states = Counter[str]()
        self.recent: deque[Prompt] = deque(maxlen=8)
        self.restart(model)

    def restart(self, model: str) -> None:
        """Begin with an empty cache."""
        self.groups = MODELS[model]
        self.deciding = [n for n, group in enumerate(self.groups) if group.kind in FULL] or [0]
        self.free: OrderedDict[Block, None] = OrderedDict((Block(), None) for _ in range(BLOCKS))
        self.copies = Counter[Cached]()
        self.host: OrderedDict[Cached, None] = OrderedDict()
        self.running: list[Running] = []
        self.events: list[Any] = []

    # --- what the engine has

    def held(self) -> set[tuple[str, int]]:
        """Return (tier, last eight bytes of the hash) of what all deciding groups hold."""
        tiers = {"device": self.copies.keys(), "host_pinned": self.host.keys()}
        return {
            (tier, int.from_bytes(name.hash[-8:], "big"))
            for tier, names in tiers.items()
            for name in names
            if all(Cached(group, name.hash) in names for group in self.deciding)
        }

    def prefix(self, prompt: Prompt) -> int:
        """Return how many leading router blocks of a prompt the engine would find."""
        hashes = chain(prompt)
        sizes = [self.groups[group].size // SIZE for group in self.deciding]
        step = max(sizes)
        end = 0
        while end + step <= len(hashes) and all(
            Cached(group, hashes[at - 1]) in self.copies
            for group, size in zip(self.deciding, sizes, strict=True)
            for at in range(end + size, end + step + 1, size)
        ):
            end += step
        return end

    # --- steps of the scheduler

    def step(self) -> bytes:
        """Run one step, and return the message that the engine publishes."""
        actions = {
            self.prefill: 10,
            self.grow: 6,
            self.finish: 7,
            self.evict: 1,
            self.offload: 3,
            self.clear: 0.3,
            self.clear_host: 0.3,
        }
        while True:
            self.source.choices([*actions], [*actions.values()])[0]()
            if self.events and self.source.random() < 0.6:
                events, self.events = self.events, []
                return self.shape.payload(events, self.rank)

    def prompt(self) -> Prompt:
        """Return a prompt of a small tree, often one that shares a prefix with others."""
        tokens: list[int] = []
        for _ in range(self.source.randrange(1, 9)):
            tokens += [self.source.randrange(BRANCHES)] * SIZE
        tokens += [7] * self.source.randrange(SIZE)
        salt = self.source.choice([None, None, None, "a", "b"])
        adapter = self.source.choice([None, None, None, "sql", "law"])
        images = ((1, identifier(self.source.randrange(2))),) if self.source.random() < 0.1 else ()
        return Prompt(tokens, salt, adapter, images)

    def prefill(self) -> None:
        prompt = self.prompt()
        self.recent.append(prompt)
        hashes = chain(prompt)
        hits = min(self.prefix(prompt), (len(prompt.tokens) - 1) // SIZE)
        step = max(self.groups[group].size // SIZE for group in self.deciding)
        hits -= hits % step
        if self.source.random() < 0.1:  # it asks for log probabilities of the prompt
            hits = 0
            self.states["cache not read"] += 1
        request = Running(prompt, hashes, [[] for _ in self.groups])
        need = sum(len(hashes) * SIZE // group.size + 1 for group in self.groups)
        while need > len(self.free) and self.running:
            self.finish()
        if need > len(self.free):
            return
        self._reuse(request, hits)
        self._extend(request)
        self.running.append(request)

    def _reuse(self, request: Running, hits: int) -> None:
        reused = {block.name: block for block in self._blocks() if block.name is not None}
        for number, group in enumerate(self.groups):
            blocks = request.blocks[number]
            for at in range(hits * SIZE // group.size):
                end = (at + 1) * group.size // SIZE
                block = reused.get(Cached(number, request.hashes[end - 1]))
                if block is not None:
                    block.users += 1
                    self.free.pop(block, None)
                    self.states["reused"] += 1
                blocks.append(block)
            request.cached.append(len(blocks))

    def _blocks(self) -> list[Block]:
        used = [
            block for request in self.running for row in request.blocks for block in row if block
        ]
        return [*self.free, *used]

    def grow(self) -> None:
        """A running request generates tokens."""
        if self.running and len(self.free) > 4 * len(self.groups):
            request = self.source.choice(self.running)
            if len(request.hashes) < 10:
                tokens = request.prompt.tokens
                tokens += [self.source.randrange(BRANCHES)] * SIZE
                request.hashes = chain(request.prompt)
                self._extend(request)
                self.states["grown"] += 1

    def _extend(self, request: Running) -> None:
        for number, group in enumerate(self.groups):
            start, end = request.cached[number], len(request.hashes) * SIZE // group.size
            if start >= end:
                continue
            kept = range(max(start, end - (group.window or end)), end)
            for at in range(start, end):
                request.blocks[number].append(self._allocate() if at in kept else None)
            names = [self._name(request, number, at) for at in kept]
            for at, name in zip(kept, names, strict=True):
                block = request.blocks[number][at]
                assert block is not None
                self.states["copied"] += self.copies[name] > 0
                block.name = name
                self.copies[name] += 1
            self._store(request, number, start, end, [*kept])
            request.cached[number] = end
            self._store_beginning(request, number)

    def _store_beginning(self, request: Running, number: int) -> None:
        """Make the first half of a block known, as vLLM does at the end of a prompt."""
        size = self.groups[number].size
        if size == 2 * SIZE and len(request.hashes) % 2 and self.source.random() < 0.5:
            block = self._allocate()
            block.name = Cached(number, request.hashes[-1])
            self.copies[block.name] += 1
            at = len(request.hashes) - 1
            self._store(request, number, at, at + 1, [at], SIZE)
            self.states["beginning of a block"] += 1
            self._free(block)

    def _name(self, request: Running, number: int, at: int) -> Cached:
        end = (at + 1) * self.groups[number].size // SIZE
        return Cached(number, request.hashes[end - 1])

    def _store(
        self,
        request: Running,
        number: int,
        start: int,
        end: int,
        kept: list[int],
        size: int | None = None,
    ) -> None:
        size = size or self.groups[number].size
        hashes = [request.hashes[(at + 1) * size // SIZE - 1] for at in kept]
        parent = None if start == 0 else request.hashes[start * size // SIZE - 1]
        self.states["several in a window"] += len(kept) < end - start
        self.states["size " + str(size)] += 1
        self._append_stored(request, hashes, parent, start * size, end * size, size, number, kept)

    def _append_stored(
        self,
        request: Running,
        hashes: list[bytes],
        parent: bytes | None,
        first: int,
        last: int,
        size: int,
        number: int,
        kept: list[int],
        medium: str = "GPU",
    ) -> None:
        prompt, shape = request.prompt, self.shape
        adapter_id = None if prompt.adapter is None else 1 + len(prompt.adapter)
        keys = [self._extra_keys(prompt, at * size, (at + 1) * size) for at in kept]
        fields = {
            "block_hashes": [shape.hash(block) for block in hashes],
            "parent_block_hash": shape.hash(parent),
            "token_ids": prompt.tokens[first:last],
            "block_size": size,
            "lora_id": adapter_id,
            "medium": medium,
            "lora_name": prompt.adapter if shape.adapter_names else None,
            "extra_keys": keys,
        }
        if self.groups[number].kind is not None:
            fields |= {"group_idx": number, "kv_cache_spec_kind": self.groups[number].kind}
        for state in ("salt", "adapter", "images"):
            self.states[state] += bool(getattr(prompt, state))
        self.states[medium] += 1
        self.events.append(shape.event("BlockStored", **fields))

    def _extra_keys(self, prompt: Prompt, first: int, last: int) -> list[Any] | None:
        names = [prompt.adapter] if prompt.adapter and self.shape.adapter_names else []
        images = [
            [image, at * SIZE - first]
            for at, image in prompt.images
            if first <= at * SIZE < last and at * SIZE < len(prompt.tokens)
        ]
        salts = [prompt.salt] if prompt.salt and first == 0 else []
        return [*names, *images, *salts] or None

    def finish(self) -> None:
        if self.running:
            request = self.running.pop(self.source.randrange(len(self.running)))
            if self.source.random() < 0.4:
                self._offload(request)
            for row in request.blocks:
                for block in reversed(row):
                    if block is not None:
                        self._free(block)

    def _free(self, block: Block) -> None:
        block.users -= 1
        if block.users == 0:
            self.free[block] = None

    def _allocate(self) -> Block:
        block = next(iter(self.free))
        del self.free[block]
        self._forget(block)
        block.users = 1
        return block

    def _forget(self, block: Block) -> None:
        if block.name is not None:
            self.copies[block.name] -= 1
            self.states["copy removed" if self.copies[block.name] else "last removed"] += 1
            if not self.copies[block.name]:
                del self.copies[block.name]
            self._remove([block.name], "GPU")
            block.name = None

    def _remove(self, names: list[Cached], medium: str) -> None:
        fields: dict[str, Any] = {
            "block_hashes": [self.shape.hash(name.hash) for name in names],
            "medium": medium,
        }
        if self.groups[names[0].group].kind is not None:
            fields["group_idx"] = names[0].group
        self.events.append(self.shape.event("BlockRemoved", **fields))

    def evict(self) -> None:
        """Give up some blocks that no request uses; name one that was never there."""
        if self.source.random() < 0.3:
            self._remove([Cached(self.deciding[0], hashlib.sha256(b"never").digest())], "GPU")
            self.states["never stored"] += 1
        for block in self.source.sample([*self.free], min(3, len(self.free))):
            self._forget(block)

    def offload(self) -> None:
        if self.running:
            self._offload(self.source.choice(self.running))

    def _offload(self, request: Running) -> None:
        """Store a prefix in host memory: by hashes alone, or with its tokens."""
        for number in self.deciding:
            size = self.groups[number].size
            if size != SIZE:
                continue
            by_hash = self.source.random() < 0.5
            for at, digest in enumerate(request.hashes):
                name = Cached(number, digest)
                if name in self.host or name not in self.copies:
                    continue
                self.host[name] = None
                self._append_offloaded(request, number, at, by_hash)
        while len(self.host) > HOST_BLOCKS:
            name, _ = self.host.popitem(last=False)
            self._remove([name], "CPU")
            self.states["host removed"] += 1

    def _append_offloaded(self, request: Running, number: int, at: int, by_hash: bool) -> None:
        hashes = [request.hashes[at]]
        if not by_hash:
            parent = request.hashes[at - 1] if at else None
            first = at * SIZE
            self._append_stored(
                request, hashes, parent, first, first + SIZE, SIZE, number, [at], "CPU"
            )
            return
        self.states["by hash"] += 1
        fields = {
            "block_hashes": [self.shape.hash(block) for block in hashes],
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 0,
            "lora_id": None,
            "medium": "CPU",
            "lora_name": None,
            "extra_keys": None,
        }
        if self.groups[number].kind is not None:
            fields |= {"group_idx": number, "kv_cache_spec_kind": self.groups[number].kind}
        self.events.append(self.shape.event("BlockStored", **fields))

    def clear(self) -> None:
        """Reset the prefix cache, which needs that no request runs."""
        while self.running:
            self.finish()
        for block in self.free:
            block.name = None
        self.states["clear"] += bool(self.copies)
        self.states["host cleared with all"] += bool(self.host)
        self.copies.clear()
        self.host.clear()
        self.events.append(self.shape.event("AllBlocksCleared"))

    def clear_host(self) -> None:
        self.states["host clear"] += bool(self.host)
        self.host.clear()
        event: Any = {"type": "AllBlocksCleared", "medium": "CPU"}
        self.events.append(event)


def chain(prompt: Prompt) -> list[bytes]:
    """Return the hash of each block, which depends on all before it."""
    digest, hashes = b"root", []
    images = dict(prompt.images)
    for at in range(len(prompt.tokens) // SIZE):
        tokens = prompt.tokens[at * SIZE : (at + 1) * SIZE]
        salt = prompt.salt if at == 0 else None
        text = repr((digest, tokens, prompt.adapter, images.get(at), salt))
        digest = hashlib.sha256(text.encode()).digest()
        hashes.append(digest)
    return hashes
