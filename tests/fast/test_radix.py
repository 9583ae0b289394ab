"""The prefix index: what each kind of event does, its limits, and what it costs in memory."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import pytest

from dynamo._fast import radix
from dynamo._fast.radix import InvalidSequence, ParentNotFound, RadixTree


def column(*values: int) -> array[int]:
    return array("Q", values)


def noise(count: int, seed: int) -> array[int]:
    words = array("Q")
    words.frombytes(random.Random(seed).randbytes(8 * count))
    return words


def stored(chain: list[int], *workers: int) -> RadixTree:
    """A tree in which each worker holds ``chain`` (local hashes), block i as 100 * worker + i."""
    tree = RadixTree()
    for worker in workers:
        blocks = [100 * worker + i for i in range(len(chain))]
        tree.store(tree.slot(worker, 0), None, column(*blocks), column(*chain))
    tree._check()
    return tree


def depths(tree: RadixTree, *chain: int) -> dict[int, int]:
    return {worker: depth for (worker, _), depth in tree.match(column(*chain)).items()}


def test_is_compiled() -> None:
    assert radix.__file__ is not None and radix.__file__.endswith(".so")


def test_depth_is_the_number_of_leading_blocks() -> None:
    tree = stored([1, 2, 3], 1)
    assert depths(tree, 1, 2, 3) == {1: 3}
    assert depths(tree, 1, 2, 3, 4) == {1: 3}
    assert depths(tree, 1, 2, 9) == {1: 2}
    assert depths(tree, 2, 3) == {}
    assert depths(tree) == {}


def test_workers_share_nodes_under_their_own_ids() -> None:
    tree = stored([1, 2, 3], 1, 2)
    assert (tree.blocks(), tree.nodes()) == (6, 3)
    assert depths(tree, 1, 2) == {1: 2, 2: 2}


def test_ranks_of_one_worker_are_apart() -> None:
    tree = RadixTree()
    tree.store(tree.slot(7, 0), None, column(1, 2), column(11, 12))
    tree.store(tree.slot(7, 1), None, column(1), column(11))
    assert tree.match(column(11, 12)) == {(7, 0): 2, (7, 1): 1}


def test_storing_again_changes_nothing() -> None:
    tree = stored([1, 2, 3], 1)
    assert tree.store(0, None, column(100, 101, 102), column(1, 2, 3)) == 0
    assert tree.store(0, 101, column(102), column(3)) == 0
    assert (tree.blocks(), tree.nodes()) == (3, 3)
    tree._check()


def test_a_hole_cuts_only_the_worker_that_has_it() -> None:
    tree = stored([1, 2, 3], 1, 2)
    assert tree.remove(tree.slot(1, 0), column(101)) == 0
    assert depths(tree, 1, 2, 3) == {1: 1, 2: 3}
    assert tree.store(tree.slot(1, 0), 100, column(101), column(2)) == 1
    assert depths(tree, 1, 2, 3) == {1: 3, 2: 3}


def test_a_hole_that_nobody_fills_keeps_the_blocks_behind_it() -> None:
    tree = stored([1, 2, 3], 1)
    tree.remove(0, column(101))
    assert depths(tree, 1, 2, 3) == {1: 1}
    assert (tree.blocks(), tree.nodes()) == (2, 3)
    tree.store(0, 102, column(103), column(4))
    tree.store(0, 100, column(101), column(2))
    assert depths(tree, 1, 2, 3, 4) == {1: 4}


def test_nodes_go_when_nobody_needs_them() -> None:
    tree = stored([1, 2, 3], 1)
    tree.remove(0, column(101))
    tree.remove(0, column(100))
    assert tree.nodes() == 3
    tree.remove(0, column(102))
    assert (tree.blocks(), tree.nodes()) == (0, 0)
    tree._check()


def test_unknown_hashes_are_counted_and_tolerated() -> None:
    tree = stored([1, 2], 1)
    assert tree.remove(0, column(5, 101, 101, 6)) == 3
    assert depths(tree, 1, 2) == {1: 1}


def test_clear_and_remove_worker() -> None:
    tree = stored([1, 2], 1, 2)
    tree.store(tree.slot(2, 1), None, column(9), column(1))
    assert tree.clear(tree.slot(1, 0)) == 2
    assert tree.match(column(1, 2)) == {(2, 0): 2, (2, 1): 1}
    assert (1, 0, 0) in tree.slots()
    assert tree.remove_worker(2) == 3
    assert tree.remove_worker(2) == 0
    assert tree.slots() == [(1, 0, 0)]
    assert (tree.blocks(), tree.nodes()) == (0, 0)
    tree._check()


def test_freed_slots_are_reused_and_start_empty() -> None:
    tree = stored([1, 2], 1, 2, 3)
    tree.remove_worker(2)
    with pytest.raises(ValueError, match="slot 1 is not registered"):
        tree.store(1, None, column(1), column(1))
    assert tree.slot(4, 0) == 1
    assert depths(tree, 1, 2) == {1: 2, 3: 2}
    tree.remove_worker(1)
    tree.remove_worker(4)
    assert [tree.slot(5, 0), tree.slot(5, 1), tree.slot(5, 2)] == [0, 1, 3]
    assert tree.capacity() == 4
    tree._check()


def test_an_id_stored_elsewhere_moves() -> None:
    tree = stored([1, 2, 3], 1)
    assert tree.store(0, 100, column(102), column(8)) == 0
    assert depths(tree, 1, 2, 3) == {1: 2}
    assert depths(tree, 1, 8) == {1: 2}
    assert tree.remove(0, column(102)) == 0
    assert depths(tree, 1, 8) == {1: 1}
    assert (tree.blocks(), tree.nodes()) == (2, 2)
    tree._check()


def test_an_id_that_moves_below_itself() -> None:
    tree = RadixTree()
    slot = tree.slot(1, 0)
    assert tree.store(slot, None, column(1, 2, 1), column(7, 8, 9)) == 2
    tree._check()
    assert depths(tree, 7, 8, 9) == {}
    assert tree.blocks() == 2


def test_an_id_that_moves_up_does_not_lose_its_new_place() -> None:
    tree = RadixTree()
    slot = tree.slot(1, 0)
    tree.store(slot, None, column(1, 2, 3), column(7, 8, 9))
    tree.remove(slot, column(1, 2))  # 3 alone keeps its ancestors
    tree.store(slot, None, column(3), column(7))
    assert depths(tree, 7) == {1: 1}
    assert (tree.blocks(), tree.nodes()) == (1, 1)
    tree._check()


def test_a_block_with_two_names_goes_with_the_last() -> None:
    tree = stored([1, 2], 1)
    assert tree.store(0, None, column(500, 501), column(1, 2)) == 2
    assert (tree.blocks(), tree.nodes()) == (4, 2)
    tree.remove(0, column(100, 101))
    assert depths(tree, 1, 2) == {1: 2}
    tree._check()
    tree.remove(0, column(500, 501))
    assert depths(tree, 1, 2) == {}
    assert tree.nodes() == 0


def test_clear_with_two_names() -> None:
    tree = stored([1, 2], 1, 2)
    tree.store(0, None, column(500, 501), column(1, 2))
    assert tree.clear(0) == 4
    tree._check()
    assert depths(tree, 1, 2) == {2: 2}


def test_refused_events_change_nothing() -> None:
    tree = stored([1, 2], 1)
    with pytest.raises(ParentNotFound, match="Failed to find parent block"):
        tree.store(0, 999, column(5), column(5))
    for parent, chain in ((101, [101]), (101, [5, 6, 6]), (None, [5, 5])):
        with pytest.raises(InvalidSequence, match="Invalid block sequence"):
            tree.store(0, parent, column(*chain), column(*chain))
    with pytest.raises(ValueError, match="differ in length"):
        tree.store(0, None, column(5, 6), column(5))
    with pytest.raises(ValueError, match="64 bits"):
        tree.store(0, 2**64, column(5), column(5))
    assert (tree.blocks(), tree.nodes()) == (2, 2)
    tree._check()


def test_parents_may_be_signed() -> None:
    tree = RadixTree()
    slot = tree.slot(1, 0)
    tree.store(slot, None, column(2**64 - 1), column(1))
    assert tree.store(slot, -1, array("q", [-2]), column(2)) == 1
    assert depths(tree, 1, 2) == {1: 2}
    assert tree.remove(slot, column(2**64 - 2)) == 0


def test_ids_and_hashes_may_be_any_value() -> None:
    tree = RadixTree()
    slot = tree.slot(2**64 - 1, 2**32 - 1)
    extremes = column(0, 2**64 - 1, 1, 2**63, 2**32)
    assert tree.store(slot, None, extremes, extremes) == 5
    assert tree.store(slot, 0, column(77), column(0)) == 1
    tree._check()
    assert tree.match(extremes) == {(2**64 - 1, 2**32 - 1): 5}
    assert tree.remove(slot, extremes) == 0


@pytest.mark.parametrize("offset", range(8))
def test_raw_bytes_at_any_alignment(offset: int) -> None:
    tree = RadixTree()
    slot = tree.slot(1, 0)
    blocks, local = noise(20, 1), noise(20, 2)

    def raw(words: array[int]) -> memoryview:
        return memoryview(bytes(offset) + words.tobytes())[offset:]

    assert tree.store(slot, None, raw(blocks), raw(local)) == 20
    assert tree.match(raw(local)) == {(1, 0): 20}
    assert tree.remove(slot, raw(blocks)) == 0


@pytest.mark.parametrize("bad", [array("I", [1]), array("d", [1.0]), b"1234567"])
def test_other_columns_are_refused(bad: object) -> None:
    tree = stored([1], 1)
    with pytest.raises((TypeError, ValueError)):
        tree.match(bad)  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError)):
        tree.store(0, None, bad, bad)  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError)):
        tree.remove(0, bad)  # type: ignore[arg-type]


def test_match_into_writes_every_slot() -> None:
    tree = stored([1, 2, 3], 1, 2, 3)
    tree.remove(1, column(201))
    tree.clear(2)
    out = array("I", [9] * 5)
    assert tree.match_into(column(1, 2, 3), out) == 2
    assert out.tolist() == [3, 1, 0, 9, 9]
    assert tree.match_into(column(5), out) == 0
    assert out.tolist() == [0, 0, 0, 9, 9]
    assert tree.match_into(column(), out) == 0


def test_match_into_checks_its_output() -> None:
    tree = stored([1], 1, 2)
    with pytest.raises(ValueError, match="at least 2 places"):
        tree.match_into(column(1), array("I", [0]))
    with pytest.raises(BufferError):
        tree.match_into(column(1), bytes(8))
    with pytest.raises(TypeError, match="unsigned 32-bit"):
        tree.match_into(column(1), array("i", [0, 0]))


def test_early_exit_stops_with_one_slot_left() -> None:
    tree = stored([1, 2, 3, 4], 1, 2)
    tree.remove(tree.slot(2, 0), column(202))
    assert tree.match(column(1, 2, 3, 4)) == {(1, 0): 4, (2, 0): 2}
    assert tree.match(column(1, 2, 3, 4), early_exit=True) == {(1, 0): 3, (2, 0): 2}


@pytest.mark.parametrize("workers", [63, 64, 65, 200, 1100])
def test_many_workers(workers: int) -> None:
    tree = RadixTree()
    order = list(range(workers))
    random.Random(workers).shuffle(order)
    slots = {worker: tree.slot(worker, 0) for worker in range(workers)}
    for worker in order:
        length = worker % 5 + 1
        tree.store(slots[worker], None, column(*range(1, length + 1)), column(*range(length)))
    tree._check()
    assert depths(tree, 0, 1, 2, 3, 4) == {worker: worker % 5 + 1 for worker in range(workers)}
    for worker in order[::2]:
        tree.remove_worker(worker)
    tree._check()
    kept = order[1::2]
    assert depths(tree, 0, 1, 2, 3, 4) == {worker: worker % 5 + 1 for worker in kept}
    for worker in kept:
        tree.remove(slots[worker], column(1, 2, 3, 4, 5))
    assert (tree.blocks(), tree.nodes()) == (0, 0)


def test_the_cap_drops_and_counts() -> None:
    tree = RadixTree(5)
    slot = tree.slot(1, 0)
    assert tree.store(slot, None, column(*range(1, 9)), column(*range(1, 9))) == 5
    assert (tree.blocks(), tree.dropped()) == (5, 3)
    assert depths(tree, *range(1, 9)) == {1: 5}
    assert tree.store(slot, None, column(*range(1, 6)), column(*range(1, 6))) == 0
    assert tree.dropped() == 3
    with pytest.raises(ParentNotFound):
        tree.store(slot, 8, column(9), column(9))
    tree.remove(slot, column(5))
    assert tree.store(slot, 4, column(50), column(5)) == 1
    tree._check()


def test_the_cap_also_bounds_nodes_that_nobody_holds() -> None:
    tree = RadixTree(10)
    slot = tree.slot(1, 0)
    for start in range(0, 100, 4):
        chain = column(*range(start + 1, start + 5))
        tree.store(slot, None, chain, chain)
        tree.remove(slot, chain[:3])
    assert tree.nodes() <= 10
    assert tree.dropped() > 0
    tree._check()


def test_dump_writes_whole_chains_parents_first() -> None:
    tree = stored([1, 2, 3], 1)
    tree.store(0, 101, column(110, 111), column(8, 9))
    chains = tree.dump()
    assert sum(len(blocks) for *_, blocks, _ in chains) == 5
    assert len(chains) == 2
    assert chains[0][2] is None
    assert chains[1][2] == 101
    again = RadixTree()
    for worker, rank, parent, blocks, local in chains:
        again.store(again.slot(worker, rank), parent, blocks, local)
    assert again.match(column(1, 2, 3)) == tree.match(column(1, 2, 3))
    assert again.match(column(1, 2, 8, 9)) == tree.match(column(1, 2, 8, 9))


def test_dump_writes_every_name_of_a_block() -> None:
    tree = stored([1, 2], 1)
    tree.store(0, None, column(500, 501), column(1, 2))
    again = RadixTree()
    for worker, rank, parent, blocks, local in tree.dump():
        again.store(again.slot(worker, rank), parent, blocks, local)
    again._check()
    assert again.blocks() == 4
    again.remove(0, column(100, 101))
    assert depths(again, 1, 2) == {1: 2}
    assert again.remove(0, column(500, 501)) == 0


def test_a_large_random_tree_survives_dump_and_rebuild() -> None:
    generator = random.Random(3)
    tree = RadixTree()
    prompts: list[array[int]] = []
    for number in range(600):
        base = generator.choice(prompts) if prompts else column(1)
        prompt = base[: generator.randrange(len(base) + 1)] + noise(20, number)
        prompts.append(prompt)
        worker = generator.randrange(90)
        ids = array("Q", (hash_of(worker, prompt, i) for i in range(len(prompt))))
        tree.store(tree.slot(worker, 0), None, ids, prompt)
    tree._check()
    again = RadixTree()
    for worker, rank, parent, blocks, local in tree.dump():
        again.store(again.slot(worker, rank), parent, blocks, local)
    again._check()
    assert (again.blocks(), again.nodes()) == (tree.blocks(), tree.nodes())
    assert all(again.match(prompt) == tree.match(prompt) for prompt in prompts)


def hash_of(worker: int, prompt: array[int], index: int) -> int:
    """An engine's id: the same for the same prefix on the same worker."""
    return hash((worker, prompt[: index + 1].tobytes())) % 2**64


def test_one_very_deep_chain_needs_no_stack() -> None:
    tree = RadixTree()
    slot = tree.slot(1, 0)
    blocks, local = noise(300_000, 1), noise(300_000, 2)
    tree.store(slot, None, blocks, local)
    assert tree.match(local) == {(1, 0): 300_000}
    assert len(tree.dump()) == 1
    tree.remove(slot, blocks[:-1])
    assert tree.nodes() == 300_000
    tree.remove(slot, blocks[-1:])
    assert tree.nodes() == 0


@pytest.mark.parametrize("length", [1, 16, 200])
def test_less_than_64_bytes_a_block(length: int) -> None:
    tree = RadixTree()
    slots = [tree.slot(worker, 0) for worker in range(4)]
    blocks, local = noise(400_000, 1), noise(400_000, 2)
    worst = 0.0
    for number, at in enumerate(range(0, len(blocks), length)):
        chunk = slice(at, at + length)
        tree.store(slots[number % 4], None, blocks[chunk], local[chunk])
        if tree.blocks() > 100_000 and number % 50 == 0:
            worst = max(worst, tree.memory_bytes() / tree.blocks())
    assert worst < 64


def test_siblings_whose_short_tags_collide_stay_apart() -> None:
    """Among 400,000 children of one node about 18 pairs share a 32-bit tag."""
    tree = RadixTree()
    slot = tree.slot(1, 0)
    local = noise(400_000, 7)
    for at in range(len(local)):
        tree.store(slot, None, local[at : at + 1], local[at : at + 1])
    assert tree.nodes() == tree.blocks() == len(set(local))
    tree._check()
    assert tree.remove(slot, local[::2]) == 0
    tree._check()
    assert not any(tree.match(local[at : at + 1]) for at in range(0, 2000, 2))
    assert all(tree.match(local[at : at + 1]) for at in range(1, 2000, 2))


def test_memory_returns_to_its_baseline() -> None:
    tree = RadixTree()
    slots = [tree.slot(worker, 0) for worker in range(100)]
    baseline = tree.memory_bytes()
    blocks, local = noise(20_000, 1), noise(20_000, 2)
    for slot in slots[::9]:
        tree.store(slot, None, blocks, local)
    full = tree.memory_bytes()
    assert full > baseline + 20_000 * (32 + 12)
    for slot in slots[::9]:
        tree.remove(slot, blocks)
    assert tree.memory_bytes() < baseline + 64 * 1024
    for slot in slots:
        tree.clear(slot)
    assert tree.memory_bytes() <= baseline + 1024
    tree._check()


def test_resident_memory_does_not_creep() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    blocks, local = noise(20_000, 1), noise(20_000, 2)

    def cycle() -> None:
        tree = RadixTree()
        for worker in range(70):
            tree.store(tree.slot(worker, 0), None, blocks[:500], local[:500])
        slot = tree.slot(99, 0)
        tree.store(slot, None, blocks, local)
        tree.store(slot, None, local, local)  # second names
        tree.dump()
        tree.remove(slot, blocks[::2])
        tree.remove_worker(5)
        tree.match(local)

    for _ in range(10):
        cycle()
    before = resident_bytes()
    for _ in range(30):
        cycle()
    assert resident_bytes() - before < 4 * 2**20


def test_hostile_ids_share_no_home() -> None:
    """Multiples of large powers of two, and runs, spread as well as random ids."""
    tree = RadixTree()
    for worker, stride in enumerate([1, 2**16, 2**32, 2**44]):
        ids = array("Q", (i * stride for i in range(1, 20_001)))
        tree.store(tree.slot(worker, 0), None, ids, ids)
        assert tree.match(ids)[(worker, 0)] == 20_000
        assert tree.remove(worker, ids) == 0
    assert tree.blocks() == 0
