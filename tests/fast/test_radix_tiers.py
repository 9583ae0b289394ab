"""Storage tiers of the prefix index: apart in matches, together as parents and in dumps."""

from __future__ import annotations

from array import array
from collections import Counter
from random import Random

import pytest
from occurred import assert_occurred
from oracle import radix as oracle

from dynamo._fast import radix
from dynamo._fast.radix import ParentNotFound, RadixTree

HOST, DISK = 1, 2


def column(*values: int) -> array[int]:
    return array("Q", values)


def extensions(tree: RadixTree, tier: int, *chain: int) -> list[int]:
    """Return, per slot, how far ``tier`` continues behind the device's blocks."""
    depths, further = (array("I", bytes(4 * tree.capacity())) for _ in range(2))
    tree.match_into(column(*chain), depths)
    tree.extend_into(column(*chain), depths, further, tier)
    return further.tolist()


@pytest.fixture
def tree() -> RadixTree:
    """Worker 1 holds 11 12 on the device and 11 12 13 14 on the host."""
    made = RadixTree()
    made.store(made.slot(1, 0), None, column(1, 2), column(11, 12))
    made.store(made.slot(1, 0, HOST), None, column(1, 2, 3, 4), column(11, 12, 13, 14))
    made._check()
    return made


def test_a_lower_tier_is_not_seen_by_match(tree: RadixTree) -> None:
    assert tree.match(column(11, 12, 13, 14)) == {(1, 0): 2}
    assert tree.slots() == [(1, 0, 0)] and tree.capacity() == 1
    only_host = RadixTree()
    only_host.store(only_host.slot(1, 0, HOST), None, column(1), column(11))
    assert only_host.match(column(11)) == {}
    assert only_host.match(column(11), early_exit=True) == {}


def test_a_lower_tier_goes_on_where_the_device_ends(tree: RadixTree) -> None:
    assert extensions(tree, HOST, 11, 12, 13, 14, 15) == [2]
    assert extensions(tree, HOST, 11, 12, 13) == [1]
    assert extensions(tree, HOST, 11, 12) == [0]
    assert extensions(tree, HOST, 99) == [0]
    assert extensions(tree, DISK, 11, 12, 13) == [0]
    tree.remove(tree.slot(1, 0), column(1, 2))
    assert extensions(tree, HOST, 11, 12, 13, 14) == [4]
    tree.remove(tree.slot(1, 0, HOST), column(2))
    assert extensions(tree, HOST, 11, 12, 13, 14) == [1]
    tree._check()


def test_parents_are_found_in_other_tiers_of_the_same_owner() -> None:
    tree = RadixTree()
    device, host, disk = (tree.slot(1, 0, tier) for tier in (0, HOST, DISK))
    tree.store(device, None, column(1, 2), column(11, 12))
    tree.store(host, 2, column(3), column(13))
    tree.store(disk, 3, column(4), column(14))
    assert extensions(tree, HOST, 11, 12, 13, 14) == [1]
    further = array("I", [0])
    assert tree.extend_into(column(11, 12, 13, 14), array("I", [3]), further, DISK) == 1
    assert further[0] == 1
    with pytest.raises(ParentNotFound):
        tree.store(tree.slot(1, 1, HOST), 2, column(3), column(13))
    with pytest.raises(ParentNotFound):
        tree.store(tree.slot(2, 0), 2, column(3), column(13))
    tree._check()


def test_a_block_gone_from_the_device_stays_an_ancestor() -> None:
    tree = RadixTree()
    tree.store(tree.slot(1, 0), None, column(1, 2), column(11, 12))
    tree.store(tree.slot(1, 0, HOST), 1, column(2), column(12))
    tree.remove(tree.slot(1, 0), column(1, 2))
    assert (tree.blocks(), tree.nodes()) == (1, 2)
    assert extensions(tree, HOST, 11, 12) == [0]
    tree.store(tree.slot(1, 0), None, column(1), column(11))
    assert extensions(tree, HOST, 11, 12) == [1]
    tree._check()


def test_clear_is_for_one_tier_and_remove_worker_for_all(tree: RadixTree) -> None:
    assert tree.held(tree.slot(1, 0, HOST)) == 4
    assert tree.clear(tree.slot(1, 0)) == 2
    assert extensions(tree, HOST, 11, 12) == [2]
    tree.store(tree.slot(1, 0), None, column(1), column(11))
    assert tree.clear_all(tree.slot(1, 0)) == 5
    tree.store(tree.slot(1, 0, HOST), None, column(1, 2, 3, 4), column(11, 12, 13, 14))
    assert tree.remove_worker(1) == 4
    assert (tree.blocks(), tree.nodes()) == (0, 0)
    assert tree.slot(2, 0) == 0
    assert extensions(tree, HOST, 11, 12) == [0]
    tree._check()


def test_dumps_name_the_tier(tree: RadixTree) -> None:
    assert [(tier, list(blocks)) for *_, blocks, _, tier in tree.dump_tiers()] == [
        (0, [1, 2]),
        (HOST, [1, 2, 3, 4]),
    ]
    assert [list(blocks) for _, _, _, blocks, _ in tree.dump()] == [[1, 2]]


def test_a_tier_takes_over_what_another_one_knows(tree: RadixTree) -> None:
    disk = tree.slot(1, 0, DISK)
    assert tree.adopt(disk, column(4, 77, 2)) == 1
    assert tree.held(disk) == 2
    tree.clear(tree.slot(1, 0, HOST))
    assert tree.ranges(column(11, 12, 13, 14), DISK) == [(1, 2), (3, 4)]
    assert tree.ranges(column(11, 12, 99), DISK) == [(1, 2)]
    assert tree.ranges(column(11, 12), HOST) == []
    assert tree.adopt(tree.slot(2, 0), column(1)) == 1
    tree._check()


def test_the_cap_holds_for_what_is_taken_over() -> None:
    tree = RadixTree(3)
    tree.store(tree.slot(1, 0), None, column(1, 2), column(11, 12))
    assert tree.adopt(tree.slot(1, 0, HOST), column(1, 2)) == 0
    assert (tree.blocks(), tree.dropped()) == (3, 1)
    tree._check()


def test_tiers_that_were_used() -> None:
    tree = RadixTree()
    tree.slot(1, 0)
    assert tree.tiers() == 0
    tree.slot(1, 0, DISK)
    assert tree.tiers() == 1 << DISK


def test_slots_that_cannot_be(tree: RadixTree) -> None:
    with pytest.raises(ValueError, match="tier"):
        tree.slot(1, 0, 4)
    with pytest.raises(ValueError, match="tier"):
        tree.ranges(column(1), 0)
    with pytest.raises(ValueError, match="tier"):
        tree.extend_into(column(1), array("I", [0]), array("I", [0]), 0)
    with pytest.raises(ValueError, match="at least 1"):
        tree.extend_into(column(1), array("I"), array("I", [0]), HOST)
    with pytest.raises(ValueError, match="not registered"):
        tree.store(tree.slot(1, 0) | DISK << 28, None, column(1), column(1))
    assert tree.held(77) == 0


KINDS = {"store": 8, "remove": 6, "match": 6, "clear": 1, "remove worker": 0.3, "adopt": 2}


@pytest.mark.parametrize("same_names", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_random_histories(seed: int, same_names: bool) -> None:  # noqa: C901 - event kinds
    """``same_names``: an id means one block in all tiers, as engines do; then dumps are exact."""
    source = Random(seed)
    fast, reference = radix.RadixTree(), oracle.RadixTree()
    for other in range([0, 70][seed % 2]):
        assert fast.slot(1000 + other, 0) == reference.slot(1000 + other, 0)
    names: dict[tuple[int, ...], int] = {}
    seen = Counter[str]()

    def slot(tier: int) -> int:
        owner = (source.randrange(3), source.randrange(2), tier)
        made = reference.slot(*owner)
        assert fast.slot(*owner) == made
        return int(made)

    def path() -> list[int]:
        return [source.randrange(2) for _ in range(source.randrange(1, 7))]

    def ids(of: list[int]) -> list[int]:
        if not same_names:
            return [source.randrange(40) for _ in of]
        ends = range(1, len(of) + 1)
        return [names.setdefault(tuple(of[:end]), 1000 + len(names)) for end in ends]

    for step in range(800):
        tier = source.choice([0, 0, 1, 2])
        place, chain = slot(tier), path()
        blocks = ids(chain)
        before = fast.blocks()
        kind = source.choices([*KINDS], [*KINDS.values()])[0]
        match kind:
            case "store":
                begin = source.randrange(len(chain))
                parent = blocks[begin - 1] if begin else None
                store(fast, reference, place, parent, blocks[begin:], chain[begin:])
            case "remove":
                assert fast.remove(place, column(*blocks)) == reference.remove(place, blocks)
            case "match":
                compare(fast, reference, chain)
                for lower in (1, 2, 3):
                    assert fast.ranges(column(*chain), lower) == reference.ranges(chain, lower)
            case "clear":
                assert fast.clear(place) == reference.clear(place)
            case "remove worker":
                worker = source.randrange(3)
                assert fast.remove_worker(worker) == reference.remove_worker(worker)
            case "adopt":
                assert fast.adopt(place, column(*blocks)) == reference.adopt(place, blocks)
        seen[f"{kind} in tier {tier}"] += fast.blocks() != before or kind == "match"
        fast._check()
        assert (fast.blocks(), fast.nodes()) == (reference.blocks(), reference.nodes())
        if step % 50 == 49:
            again = rebuilt(fast)
            for query in [path() for _ in range(20)]:
                if same_names:
                    compare(again, reference, query)
    assert_occurred(seen, *(f"{kind} in tier {tier}" for kind in KINDS for tier in range(3)))


def store(
    fast: RadixTree,
    reference: oracle.RadixTree,
    slot: int,
    parent: int | None,
    blocks: list[int],
    local: list[int],
) -> None:
    """Both take the chain, or refuse it for the same reason."""
    try:
        expected = reference.store(slot, parent, blocks, local)
    except oracle.ParentNotFound:
        with pytest.raises(radix.ParentNotFound):
            fast.store(slot, parent, column(*blocks), column(*local))
    except oracle.InvalidSequence:
        with pytest.raises(radix.InvalidSequence):
            fast.store(slot, parent, column(*blocks), column(*local))
    else:
        assert fast.store(slot, parent, column(*blocks), column(*local)) == expected


def compare(fast: RadixTree, reference: oracle.RadixTree, query: list[int]) -> None:
    """Depths and what the tiers add to them, for all owners."""
    assert fast.match(column(*query)) == reference.match(query)
    depths, further = (array("I", bytes(4 * fast.capacity())) for _ in range(2))
    fast.match_into(column(*query), depths)
    known = {owner[:2]: depths[owner[2]] for owner in fast.slots()}
    for tier in (1, 2, 3):
        extended = fast.extend_into(column(*query), depths, further, tier)
        width = max([slot for *_, slot in oracle_slots(reference)], default=-1) + 1
        expected = [0] * width
        for worker, rank, slot in oracle_slots(reference):
            expected[slot] = known.get((worker, rank), 0)
        expected = reference.extend(query, expected, tier)
        mine = {owner[:2]: further[owner[2]] for owner in fast.slots()}
        theirs = {(worker, rank): expected[slot] for worker, rank, slot in oracle_slots(reference)}
        assert {k: v for k, v in mine.items() if v} == {k: v for k, v in theirs.items() if v}
        assert extended == sum(map(bool, theirs.values()))


def oracle_slots(reference: oracle.RadixTree) -> list[tuple[int, int, int]]:
    return [(*owner, slot) for owner, slot in reference._owners.items()]


def rebuilt(tree: RadixTree) -> RadixTree:
    """A new tree from the dump; a chain under an ambiguous id may be missing, never misplaced."""
    again = RadixTree()
    for worker, rank, parent, blocks, local, tier in tree.dump_tiers():
        try:
            again.store(again.slot(worker, rank, tier), parent, blocks, local)
        except ParentNotFound:
            continue
    again._check()
    for length in range(1, 7):
        for number in range(2**length):
            query = column(*((number >> bit) & 1 for bit in range(length)))
            theirs = tree.match(query)
            assert all(theirs.get(owner, 0) >= n for owner, n in again.match(query).items())
    return again
