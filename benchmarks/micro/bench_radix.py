"""The prefix index from Python calls: events applied, prompts matched, bytes a block.

Each case is one round over the whole load; ``extra_info`` has M blocks a second and bytes a block.

python -m pytest benchmarks/micro/bench_radix.py --benchmark-enable
"""

from __future__ import annotations

from array import array
from random import Random
from typing import Any, NamedTuple

import pytest

from dynamo._fast.radix import RadixTree

WORKERS = 8
ROUNDS = 7


class Event(NamedTuple):
    """One stored event: the arguments of ``RadixTree.store``."""

    slot: int
    parent: int | None
    blocks: array[int]
    tokens: array[int]


class Load(NamedTuple):
    """Prompts of equal length, and the events that store each of them on one worker."""

    prompts: list[array[int]]
    events: list[Event]
    blocks: int


def hashes(count: int, source: Random) -> array[int]:
    words = array("Q")
    words.frombytes(source.randbytes(8 * count))
    return words


def make_load(prompts: int, blocks: int, event_blocks: int, shared: int = 0) -> Load:
    """``shared`` leading blocks are the same in all prompts, as a system prompt is."""
    source = Random(1)
    system = hashes(shared, source)
    load = Load([], [], prompts * blocks)
    for number in range(prompts):
        tokens = system + hashes(blocks - shared, source)
        names = hashes(blocks, source)
        load.prompts.append(tokens)
        for at in range(0, blocks, event_blocks):
            part = slice(at, at + event_blocks)
            parent = names[at - 1] if at else None
            load.events.append(Event(number % WORKERS, parent, names[part], tokens[part]))
    return load


def empty_tree(workers: int = WORKERS) -> RadixTree:
    tree = RadixTree()
    for worker in range(workers):
        tree.slot(worker, 0)
    return tree


def apply(tree: RadixTree, load: Load) -> RadixTree:
    store = tree.store
    for slot, parent, blocks, tokens in load.events:
        store(slot, parent, blocks, tokens)
    return tree


def report(benchmark: Any, operations: int, tree: RadixTree) -> None:
    if benchmark.stats is not None:
        benchmark.extra_info["million_blocks_per_s"] = operations / benchmark.stats["min"] / 1e6
    benchmark.extra_info["bytes_per_block"] = tree.memory_bytes() / max(tree.blocks(), 1)


CASES = {
    "100k blocks, prompts of 64, events of 64": (1_600, 64, 64),
    "1M blocks, prompts of 64, events of 64": (16_000, 64, 64),
    "1M blocks, prompts of 64, events of 16, 16 shared": (16_000, 64, 16, 16),
    "1M blocks, prompts of 10, events of 10": (100_000, 10, 10),
    "1M blocks, prompts of 64, events of 1": (16_000, 64, 1),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@every_case
def test_apply(benchmark: Any, case: tuple[int, ...]) -> None:
    load = make_load(*case)
    trees: list[RadixTree] = []

    def setup() -> tuple[tuple[RadixTree, Load], dict[str, Any]]:
        trees[:] = [empty_tree()]
        return (trees[0], load), {}

    benchmark.pedantic(apply, setup=setup, rounds=ROUNDS)
    report(benchmark, load.blocks, trees[0])


@every_case
def test_match(benchmark: Any, case: tuple[int, ...]) -> None:
    load = make_load(*case)
    tree = apply(empty_tree(), load)
    depths = array("I", bytes(4 * tree.capacity()))
    Random(2).shuffle(load.prompts)

    def match_all() -> None:
        match = tree.match_into
        for prompt in load.prompts:
            match(prompt, depths)

    benchmark.pedantic(match_all, rounds=ROUNDS)
    report(benchmark, load.blocks, tree)


def test_full_caches_take_and_evict(benchmark: Any) -> None:
    """The steady state: every prompt stored evicts another one, its last block first."""
    load = make_load(16_000, 64, 64)
    half = len(load.events) // 2
    old, new = load.events[:half], load.events[half:]
    evicted = [(event.slot, event.blocks[::-1]) for event in old]
    Random(3).shuffle(evicted)
    trees: list[RadixTree] = []

    def setup() -> tuple[tuple[RadixTree], dict[str, Any]]:
        trees[:] = [apply(empty_tree(), Load([], old, 0))]
        return (trees[0],), {}

    def churn(tree: RadixTree) -> None:
        store, remove = tree.store, tree.remove
        for (slot, gone), (taker, parent, blocks, tokens) in zip(evicted, new, strict=True):
            remove(slot, gone)
            store(taker, parent, blocks, tokens)

    benchmark.pedantic(churn, setup=setup, rounds=ROUNDS)
    report(benchmark, load.blocks, trees[0])


@pytest.mark.parametrize("workers", [8, 64, 1024])
def test_match_a_prompt_that_all_workers_hold(benchmark: Any, workers: int) -> None:
    source = Random(1)
    tree, prompt = empty_tree(workers), hashes(256, source)
    for slot in range(workers):
        tree.store(slot, None, hashes(256, source), prompt)
    depths = array("I", bytes(4 * workers))
    assert benchmark(tree.match_into, prompt, depths) == workers


@pytest.mark.parametrize("length", [1, 64])
def test_one_call_on_a_warm_tree(benchmark: Any, length: int) -> None:
    """What a call costs beside its blocks: the same chain stored again."""
    tree, names, tokens = empty_tree(), hashes(length, Random(1)), hashes(length, Random(2))
    tree.store(0, None, names, tokens)
    assert benchmark(tree.store, 0, None, names, tokens) == 0
