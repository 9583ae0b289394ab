"""Classes of the queue: which one a request is of, when it waits, its limits, and its turn."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from test_request_queue import World

from dynamo.config.router_policy import PolicyClass, PolicyProfile, RouterPolicies
from dynamo.errors import RouterQueueLimitExceeded
from dynamo.router.labels import RouterLabels
from dynamo.router.modes.factory import make_index
from dynamo.router.modes.kv import KvPicker
from dynamo.router.modes.policy import GuardedClassifier
from dynamo.router.modes.policy_types import ClassPolicy, PolicyRequest
from dynamo.router.queue.classes import Classifier, QueueClass, QueueMetrics, Turns, profile_of
from dynamo.router.queue.request_queue import RequestQueue, make_queue
from dynamo.router.queue.waiting import Priority, QueueEntry

MATRIX: dict[str, Any] = {
    "default_policy_family": "standard",
    "uncached_isl_buckets": [
        {"min_tokens": 0, "bucket": "short"},
        {"min_tokens": 40, "bucket": "long"},
    ],
    "policy_classes": [
        {"name": f"{family}_{bucket}", "policy_family": family, "cache_bucket": bucket,
         "quantum": 100, "prefill_busy_threshold_frac": 0.5}
        for family in ("standard", "urgent")
        for bucket in ("short", "long")
    ] + [{"name": "bulk", "quantum": 10, "prefill_busy_threshold": 0}],
}  # fmt: skip


def profile(given: dict[str, Any] = MATRIX) -> PolicyProfile:
    made = msgspec.convert(given, PolicyProfile)
    assert made.problem() == ""
    return made


def two_classes(**quanta: int) -> PolicyProfile:
    """Explicit classes with these quanta beside the default one, each with a low threshold."""
    rows = [
        {"name": name, "quantum": quantum, "prefill_busy_threshold": 10}
        for name, quantum in quanta.items()
    ]
    plain = {"name": "plain", "policy_family": "plain", "cache_bucket": "all", "quantum": 1}
    return profile(
        {
            "default_policy_family": "plain",
            "uncached_isl_buckets": [{"min_tokens": 0, "bucket": "all"}],
            "policy_classes": [plain, *rows],
        }
    )


class Classes(World):
    """A world whose queue has classes."""

    def __init__(
        self, given: PolicyProfile, workers: int = 1, classify: Any = None, **more: Any
    ) -> None:
        super().__init__(workers, **more)
        metrics = partial(QueueMetrics, self.registry, "m")
        policy = None
        if classify is not None:
            named = ClassPolicy("request_classifier", SimpleNamespace(classify=classify))
            place = RouterLabels("ns", "backend", "m")
            policy = GuardedClassifier(named, self.registry, place, lambda: 0.0)
        self.queue = RequestQueue(
            self.picker, self.settings, metrics, self.clock, self.later, given, policy
        )

    def finish(self, *names: str) -> None:
        for name in names:
            self.picker.mark_prefill_complete(name)
            self.queue.wake()
            self.turn(0.2)


def test_which_class_a_request_is_of() -> None:
    found = Classifier(profile())
    names = [row.name for row in profile().policy_classes]
    assert found.explicit("bulk") == names.index("bulk")
    assert found.explicit("standard_short") is None  # only by what is cached
    assert found.by_cache
    for family, uncached, name in (
        ("urgent", 0, "urgent_short"),
        ("urgent", 40, "urgent_long"),
        (None, 39, "standard_short"),
        ("unknown", 1000, "standard_long"),
        ("standard_long", 0, "standard_short"),
    ):
        assert names[found.by_family(family, uncached)] == name


def test_busy_by_tokens_by_share_or_by_part_of_the_pool() -> None:
    def admits(loads: list[int], **given: Any) -> bool:
        made = QueueClass[QueueEntry](PolicyClass(name="a", quantum=1, **given), 10)
        return made.admits(((load, 100) for load in loads), len(loads))

    assert admits([10**9])  # without a threshold nothing waits
    assert not admits([51, 60], prefill_busy_threshold=50)
    assert admits([51, 50], prefill_busy_threshold=50)
    assert not admits([51, 60], prefill_busy_threshold=100, prefill_busy_threshold_frac=0.5)
    half = {"prefill_busy_threshold": 50, "busy_worker_ratio": 0.5}
    assert admits([60, 0, 0, 0], **half)
    assert not admits([60, 60, 0, 0], **half)


def test_limits_are_for_each_worker() -> None:
    config = PolicyClass(
        name="a",
        quantum=1,
        request_queue_limit_per_worker=2,
        raw_isl_token_queue_limit_per_worker=50,
    )
    made = QueueClass[QueueEntry](config, 100)
    assert made.limit_error(1) is None
    made.queue.add(QueueEntry(Priority(), 60))
    error = made.limit_error(1)
    assert str(error) == (
        'router policy class "a" queue raw_isl_tokens limit reached (current=60, limit=50)'
    )
    assert made.limit_error(2) is None
    made.queue.add(QueueEntry(Priority(), 1))
    assert "queue requests limit reached (current=2, limit=2)" in str(made.limit_error(1))
    tiny = QueueClass[QueueEntry](PolicyClass(name="b", quantum=1), 1)
    tiny.queue.add(QueueEntry(Priority(), 1))
    assert "limit=1" in str(tiny.limit_error(8))


def served_order(quanta: dict[str, int], costs: dict[str, list[int]], steps: int) -> str:
    classes = [
        QueueClass[QueueEntry](PolicyClass(name=n, quantum=q), 99) for n, q in quanta.items()
    ]
    for made in classes:
        for cost in costs[made.name]:
            made.queue.add(QueueEntry(Priority(), cost))
    turns, order = Turns(classes), ""
    for _ in range(steps):
        first, *others = turns.in_order()
        first.queue_class.queue.remove(first.head)
        turns.served(first, others)
        order += first.queue_class.name
    return order


def test_turns_follow_the_quanta() -> None:
    even = {"a": [10] * 20, "b": [10] * 20}
    assert served_order({"a": 10, "b": 10}, even, 8) == "abababab"
    assert served_order({"a": 30, "b": 10}, even, 8) == "aaabaaab"
    # A large request waits for its credit, however many rounds that takes.
    assert served_order({"a": 10, "b": 10}, {"a": [10] * 20, "b": [30] * 5}, 8) == "aaabaaab"
    # No credit is kept without requests.
    assert served_order({"a": 100, "b": 10}, {"a": [10], "b": [10] * 3}, 4) == "abbb"


def test_a_class_that_was_idle_returns_without_credit() -> None:
    first, second = (
        QueueClass[QueueEntry](PolicyClass(name=name, quantum=quantum), 9)
        for name, quantum in (("a", 100), ("b", 10))
    )
    turns = Turns([first, second])
    first.queue.add(QueueEntry(Priority(), 10))
    (turn,) = turns.in_order()
    first.queue.remove(turn.head)
    turns.served(turn, [])
    assert turns.in_order() == []
    for queue_class, tokens in ((first, 80), (second, 10)):
        queue_class.queue.add(QueueEntry(Priority(), tokens))
    assert [one.queue_class.name for one in turns.in_order()] == ["b", "a"]


def test_a_class_waits_for_its_own_threshold_and_not_for_others() -> None:
    world = Classes(two_classes(slow=10, fast=10))
    assert world.ask("first", 60, policy_class="slow")
    assert not world.ask("second", 60, first=100, policy_class="slow")
    assert not world.ask("third", 60, first=200, policy_class="fast")
    assert world.ask("plain", 60, first=300)  # its class never waits
    assert len(world.queue) == 2
    assert world.sample("queue_pending_requests", policy_class="slow") == 1
    assert world.sample("admission_received_total", policy_class="plain") == 1
    world.finish("first", "plain")
    assert world.order == ["first", "plain", "second"]
    world.finish("second")
    assert world.order[-1] == "third" and len(world.queue) == 0


def test_a_blocked_class_does_not_block_the_others() -> None:
    world = Classes(two_classes(slow=10, fast=10), workers=2)
    for worker_id in (1, 2):
        prompt = {"first": 100 * worker_id, "backend_instance_id": worker_id}
        assert world.ask(f"running {worker_id}", 60, policy_class="slow", **prompt)
    assert not world.ask("pinned", 60, policy_class="slow", backend_instance_id=1)
    assert not world.ask("free", 60, first=900, policy_class="fast")
    world.finish("running 2")
    assert world.order[-1] == "free"
    assert [*world.queued] == ["pinned", "free"] and len(world.queue) == 1


def test_a_full_class_refuses_and_others_do_not() -> None:
    given = two_classes(slow=10, fast=10)
    rows = [
        msgspec.structs.replace(row, request_queue_limit_per_worker=1)
        if row.name == "slow" else row
        for row in given.policy_classes
    ]  # fmt: skip
    world = Classes(msgspec.structs.replace(given, policy_classes=rows))
    world.ask("first", 60, policy_class="slow")
    world.ask("second", 60, first=100, policy_class="slow")
    with pytest.raises(RouterQueueLimitExceeded, match='class "slow" queue requests limit'):
        world.ask("third", 60, first=200, policy_class="slow")
    world.queue.check()  # other classes take requests
    assert not world.ask("fourth", 60, first=300, policy_class="fast")
    rejected = partial(world.sample, "admission_rejected_total", reason="queue_limit")
    assert (rejected(policy_class="slow"), rejected(policy_class="fast")) == (1, 0)


def test_a_class_without_a_limit_keeps_the_queue_open_while_requests_wait_in_all() -> None:
    rows = [
        msgspec.structs.replace(
            row,
            prefill_busy_threshold=10,
            request_queue_limit_per_worker=1 if row.name == "fast" else None,
        )
        for row in two_classes(slow=10, fast=10).policy_classes
    ]
    given = msgspec.structs.replace(two_classes(slow=10, fast=10), policy_classes=rows)
    world = Classes(given)
    world.ask("first", 60, policy_class="slow")
    for at, row in enumerate(rows, 1):
        assert not world.ask(row.name, 60, first=100 * at, policy_class=row.name)
    with pytest.raises(RouterQueueLimitExceeded, match='class "fast" queue requests limit'):
        world.ask("last", 60, first=900, policy_class="fast")
    world.queue.check()
    assert not world.ask("more", 60, first=1000, policy_class="slow")


def test_a_class_with_a_limit_of_0_refuses_what_would_wait() -> None:
    given = two_classes(slow=10, fast=10)
    rows = [
        msgspec.structs.replace(
            row, prefill_busy_threshold=10, request_queue_limit_per_worker=int(row.name == "fast")
        )
        for row in given.policy_classes
    ]
    replaced = msgspec.structs.replace(given, policy_classes=rows)
    world = Classes(profile(msgspec.to_builtins(replaced)))
    assert world.ask("first", 60, policy_class="slow")
    with pytest.raises(RouterQueueLimitExceeded, match=r"current=0, limit=0"):
        world.ask("second", 60, first=100, policy_class="slow")
    assert not world.ask("third", 60, first=200, policy_class="fast")
    world.queue.check()  # a request of the empty class may still find a worker
    world.finish("first")
    world.finish("third")
    assert world.ask("fourth", 60, first=300, policy_class="slow")
    assert world.order == ["first", "third", "fourth"]


def test_the_bucket_is_that_of_the_best_cached_worker() -> None:
    world = Classes(profile())
    index = world.picker.index
    assert index is not None
    world.ask("cold", 60)
    assert world.sample("admission_received_total", policy_class="standard_long") == 1
    world.ask("short", 20, first=500, policy_class="urgent")
    assert world.sample("admission_received_total", policy_class="urgent_short") == 1


def test_a_classifier_comes_before_the_client() -> None:
    seen: list[PolicyRequest] = []

    def classify(request: PolicyRequest) -> str | None:
        seen.append(request)
        return "slow" if request.tokens > 50 else None

    world = Classes(two_classes(slow=10, fast=10), classify=classify)
    world.ask("long", 60, policy_class="fast")
    world.ask("short", 8, first=100, policy_class="fast")
    received = partial(world.sample, "admission_received_total")
    assert (received(policy_class="slow"), received(policy_class="fast")) == (1, 1)
    assert (seen[0].tokens, seen[0].blocks, seen[0].policy_class) == (60, 15, "fast")


def test_profiles_by_model() -> None:
    own, root = two_classes(own=1), two_classes(root=1)
    world = World()
    settings = dataclasses.replace(
        world.settings,
        queue_threshold=None,
        policies=RouterPolicies(profile=root, models={"m": own}),
    )
    assert profile_of(settings, "m") is own and profile_of(settings, "other") is root
    picker = KvPicker(settings, 4, make_index(settings))
    place = RouterLabels("ns", "c", "m")
    assert make_queue(settings, picker, world.registry, place) is not None
    prefill = dataclasses.replace(place, worker_type="prefill")
    assert make_queue(settings, picker, world.registry, prefill) is None
