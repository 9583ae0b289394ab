"""Stored responses: bounds, conversations, and the bytes that they share."""

from __future__ import annotations

import random
from typing import Any

from dynamo.frontend.apis.responses.store import ResponseStore, StoredResponse


def made(parent: StoredResponse | None = None, size: int = 100, name: str = "") -> StoredResponse:
    """A response of ``size`` bytes with one item in and one out."""
    items: Any = ([{"id": f"in{name}"}], [{"id": f"out{name}"}])
    return StoredResponse(parent, bytes(size), [{"role": "user", "content": name}], items, 0)


SIZE = made().size_bytes


def test_the_least_recently_used_go_first() -> None:
    store = ResponseStore(3 * SIZE)
    assert store.enabled and not ResponseStore(0).enabled
    for name in "abc":
        assert store.put("", name, made())
    assert store.get("", "a") is not None
    store.put("", "d", made())
    assert [store.get("", name) is not None for name in "abcd"] == [True, False, True, True]
    assert store.size_bytes == 3 * SIZE
    few = ResponseStore(1 << 20, 2)
    for name in "abc":
        few.put("", name, made())
    assert len(few) == 2 and few.get("", "a") is None


def test_what_is_too_large_drops_nothing() -> None:
    store = ResponseStore(2 * SIZE)
    one = made()
    store.put("", "a", one)
    assert not store.put("", "b", made(size=5 * SIZE))
    two = made(one)
    assert store.put("", "b", two) and not store.put("", "c", made(two))
    assert store.get("", "a") and store.get("", "b") and len(store) == 2


def test_owners_are_apart() -> None:
    store = ResponseStore(1 << 20)
    store.put("ann", "a", made(name="1"))
    store.put("bob", "a", made(name="2"))
    assert store.get("", "a") is None and not store.delete("", "a")
    found = store.get("bob", "a")
    assert found is not None and found.messages[0]["content"] == "2"
    assert store.find_items("ann", {"out1", "in1", "x"}).keys() == {"out1", "in1"}
    assert not store.find_items("bob", {"out1"})
    assert store.find_items("bob", {"out1"}, store.get("ann", "a"))  # a conversation it continues


def test_a_conversation_is_kept_once() -> None:
    store = ResponseStore(1 << 20)
    one = made(name="1")
    two = made(one, name="2")
    for name, each in (("1", one), ("2", two), ("3", made(two, name="3"))):
        store.put("", name, each)
    assert store.size_bytes == 3 * SIZE
    assert store.delete("", "1") and store.delete("", "2") and not store.delete("", "2")
    assert store.size_bytes == 3 * SIZE  # the third needs them
    last = store.get("", "3")
    assert last is not None
    assert [each["content"] for each in last.history()] == ["1", "2", "3"]
    assert store.find_items("", {"out1"}, last) == {"out1": {"id": "out1"}}
    assert not store.find_items("", {"out1"})
    store.delete("", "3")
    assert store.size_bytes == 0


def test_a_parent_that_was_dropped_counts_again() -> None:
    store = ResponseStore(1 << 20)
    one = made()
    store.put("", "1", one)
    store.delete("", "1")  # while the request that continues it is running
    assert store.size_bytes == 0
    store.put("", "2", made(one))
    assert store.size_bytes == 2 * SIZE
    store._check()


def test_long_conversations_end() -> None:
    store = ResponseStore(1 << 30)
    last = None
    for number in range(20_000):
        last = made(last)
        store.put("", str(number % 10), last)
    store._check()
    last = None
    for number in range(10):
        store.delete("", str(number))
    assert store.size_bytes == 0


def test_any_history_keeps_the_invariants() -> None:
    dice = random.Random(5)
    store = ResponseStore(40 * SIZE, 25)
    known: list[StoredResponse | None] = [None]
    for _ in range(4000):
        owner, name = dice.choice("ab"), str(dice.randrange(40))
        match dice.randrange(4):
            case 0:
                store.delete(owner, name)
            case 1:
                known.append(store.get(owner, name))
            case _:
                store.put(owner, name, made(dice.choice(known[-20:]), dice.randrange(400)))
        store._check()
