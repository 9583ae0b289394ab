"""A heap with removals against a sorted list."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from occurred import StateMachine, occurring

from dynamo.router.queue.waiting import LazyHeap

ITEMS = st.integers(0, 12)


class HeapMachine(StateMachine):
    """Any history of pushes, changes of key and removals."""

    def __init__(self) -> None:
        super().__init__()
        self.heap: LazyHeap[int] = LazyHeap()
        self.keys: dict[int, tuple[int, int]] = {}
        self.pushes = 0

    def order(self) -> list[int]:
        return sorted(self.keys, key=lambda item: self.keys[item])

    @rule(item=ITEMS, key=st.integers(-2, 2))
    def push(self, item: int, key: int) -> None:
        self.pushes += 1
        self.seen["another key"] += self.keys.get(item, (key,))[0] != key
        self.heap.push(item, key)
        self.keys[item] = key, self.pushes

    @rule(item=ITEMS)
    def remove(self, item: int) -> None:
        assert self.heap.remove(item) == (item in self.keys)
        self.seen["removed" if item in self.keys else "removed unknown"] += 1
        self.keys.pop(item, None)

    @precondition(lambda self: self.keys)
    @rule()
    def remove_the_first(self) -> None:
        first = self.heap.first()
        assert first is not None and self.heap.remove(first)
        assert first == self.order()[0]
        del self.keys[first]
        self.seen["others after the first"] += bool(self.keys)

    @invariant()
    def it_agrees_with_the_sorted_list(self) -> None:
        self.heap._check()
        assert len(self.heap) == len(self.keys)
        assert self.heap.in_order() == self.order()
        assert self.heap.first() == next(iter(self.order()), None)
        for item, (key, _) in self.keys.items():
            assert item in self.heap and self.heap.key(item) == key


HeapMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHeap = occurring(
    HeapMachine, "another key", "removed", "removed unknown", "others after the first"
)


def test_removed_items_are_released() -> None:
    heap: LazyHeap[str] = LazyHeap()
    heap.push("first", 0)
    for number in range(10_000):
        heap.push(f"item {number}", number + 1)
        heap.remove(f"item {number}")
        heap._check()
    assert len(heap) == 1


def test_items_are_never_compared() -> None:
    heap: LazyHeap[object] = LazyHeap()
    items = [object() for _ in range(100)]
    for item in items:
        heap.push(item, 1.0)
    assert heap.in_order() == items and heap.first() is items[0]
