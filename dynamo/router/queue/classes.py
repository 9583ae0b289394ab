"""Classes of queued requests: which one a request is of, when it waits, whose turn it is, and the
metrics of each. Pure.

Turns follow deficit round robin: a class is served while its credit covers the uncached tokens of
its head, and each round adds its quantum to its credit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import ceil
from typing import Any, Generic, NamedTuple

from dynamo.config.router import RouterSettings
from dynamo.config.router_policy import PolicyClass, PolicyProfile
from dynamo.errors import Overloaded, RouterQueueLimitExceeded
from dynamo.observability.metrics import Registry, counter, gauge, histogram
from dynamo.router.queue.waiting import POLICY_CLASS, E, WaitingQueue, Work

_NO_WORKERS = 1
"""Limits of a pool without workers are those of one: requests there fail for another reason."""

_QUEUED = "model policy_class worker_type"
_REASONED = "model policy_class reason worker_type"
_REQUESTS = gauge(
    "dynamo_frontend_router_queue_pending_requests",
    "Requests waiting in the router's queue",
    _QUEUED,
)
_ISL_TOKENS = gauge(
    "dynamo_frontend_router_queue_pending_isl_tokens",
    "Prompt tokens of the requests waiting in the router's queue",
    _QUEUED,
)
_CACHED_TOKENS = gauge(
    "dynamo_frontend_router_queue_pending_cached_tokens",
    "Those of them that a worker holds",
    _QUEUED,
)
_BACKPRESSURE = counter(
    "dynamo_frontend_router_queue_backpressure_total",
    "Requests that had to wait: behind others, or for prefill load to fall",
    _REASONED,
)
_RECEIVED = counter(
    "dynamo_frontend_router_admission_received_total",
    "Requests that came to the router's queue, whether they had to wait or not",
    _QUEUED,
)
_REJECTED = counter(
    "dynamo_frontend_router_admission_rejected_total",
    "Requests turned away there: the queue was full, or all workers overloaded",
    _REASONED,
)
_LEFT = counter(
    "dynamo_frontend_router_queue_left_total",
    "Requests whose client left while they waited",
    _QUEUED,
)
_WAIT_SECONDS = histogram(
    "dynamo_frontend_router_queue_wait_seconds",
    "Time in the router's queue of the requests that had to wait and were served",
    (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
    _QUEUED,
)
_LIMIT, _OVERLOADED = "queue_limit", "overloaded"
_BACKLOG, _PREFILL = "backlog", "prefill_load"


class QueueMetrics:
    """The series of a class of ``model`` in ``registry``, or in a registry of their own."""

    def __init__(
        self,
        registry: Registry | None = None,
        model: str = "",
        worker_type: str = "decode",
        policy_class: str = POLICY_CLASS,
    ) -> None:
        self._registry = registry
        self._labels = (model, policy_class, worker_type)
        into = registry or Registry()
        self.received = into.child(_RECEIVED, *self._labels)
        self.left = into.child(_LEFT, *self._labels)
        self.waited = into.child(_WAIT_SECONDS, *self._labels)
        self._rejected, self._pressed = (
            {
                reason: into.child(spec, model, policy_class, reason, worker_type)
                for reason in reasons
            }
            for spec, reasons in (
                (_REJECTED, (_LIMIT, _OVERLOADED)),
                (_BACKPRESSURE, (_BACKLOG, _PREFILL)),
            )
        )

    def show(self, queue: WaitingQueue[Any]) -> None:
        """Export the size of ``queue``."""
        if self._registry is None:
            return
        for spec, read in (
            (_REQUESTS, queue.__len__),
            (_ISL_TOKENS, lambda: queue.isl_tokens),
            (_CACHED_TOKENS, lambda: queue.cached_tokens),
        ):
            self._registry.child(spec, *self._labels).function = read

    def joined(self, before: int) -> None:
        """Count a queued request, with ``before`` others ahead."""
        self._pressed[_BACKLOG if before else _PREFILL].value += 1

    def refused(self, error: Overloaded) -> None:
        """Count a rejected request."""
        full = isinstance(error, RouterQueueLimitExceeded)
        self._rejected[_LIMIT if full else _OVERLOADED].value += 1


class QueueClass(Generic[E]):
    """The waiting requests of one class. ``limit`` bounds them whatever the class says.

    ``credit`` and :class:`Turns` count uncached prompt tokens.
    """

    def __init__(
        self,
        config: PolicyClass,
        limit: int,
        work: Work | None = None,
        metrics: QueueMetrics | None = None,
    ) -> None:
        self.name = config.name
        self.quantum = config.quantum
        self.credit = 0.0
        self.queue: WaitingQueue[E] = WaitingQueue(config.queue_policy, limit, work)
        self.metrics = metrics or QueueMetrics(policy_class=config.name)
        self.metrics.show(self.queue)
        self._config = config
        self._never_waits = (
            config.prefill_busy_threshold is None and config.prefill_busy_threshold_frac is None
        )

    def admits(self, loads: Iterable[tuple[int, int]], count: int) -> bool:
        """Return whether a request may be routed, by (prefill tokens, batch size) of each of
        ``count`` ranks."""
        if self._never_waits:
            return True
        needed = count - self._config.busy_worker_ratio * count  # ranks that are not busy, less 1
        for tokens, batch in loads:
            if not self._is_busy(tokens, batch):
                needed -= 1
                if needed < 0:
                    return True
        return False

    def limit_error(self, workers: int) -> RouterQueueLimitExceeded | None:
        """Return why no more requests may wait, with ``workers``; None if they may."""
        queue, config = self.queue, self._config
        count = max(workers, _NO_WORKERS)
        for kind, current, limit in (
            ("requests", len(queue), config.request_queue_limit_per_worker),
            ("raw_isl_tokens", queue.isl_tokens, config.raw_isl_token_queue_limit_per_worker),
            ("cached_tokens", queue.cached_tokens, config.cached_token_queue_limit_per_worker),
        ):
            if limit is not None and current >= limit * count:
                return self._error(kind, current, limit * count)
        return self._error("requests", len(queue), queue.limit) if queue.is_full else None

    def _error(self, kind: str, current: int, limit: int) -> RouterQueueLimitExceeded:
        return RouterQueueLimitExceeded(
            f'router policy class "{self.name}" queue {kind} limit reached '
            f"(current={current}, limit={limit})"
        )

    def _is_busy(self, tokens: int, batch: int) -> bool:
        fixed, share = self._config.prefill_busy_threshold, self._config.prefill_busy_threshold_frac
        return (fixed is not None and tokens > fixed) or (
            share is not None and tokens > share * batch
        )


class Turn(NamedTuple, Generic[E]):
    """A class that may be served next, after ``rounds`` of the ring, with its head."""

    rounds: int
    position: int
    queue_class: QueueClass[E]
    head: E


class Turns(Generic[E]):
    """Whose turn it is among ``classes``. O(classes) a step."""

    def __init__(self, classes: Sequence[QueueClass[E]]) -> None:
        self._classes = classes
        self._current = len(classes) - 1  # so that the first class is the first

    def in_order(self) -> list[Turn[E]]:
        """Return the classes with requests, the one whose turn it is first."""
        turns = []
        count = len(self._classes)
        for number, queue_class in enumerate(self._classes):
            head = queue_class.queue.head()
            if head is None:
                # Deficit round robin: an empty class keeps no credit for a later burst.
                queue_class.credit = 0.0
                continue
            missing = max(0.0, uncached_tokens(head) - queue_class.credit)
            rounds = ceil(missing / queue_class.quantum)
            position = (number - self._current) % count
            # The class that was served last continues while it has credit, then it is the last.
            turns.append(
                Turn(rounds, position if position or not rounds else count, queue_class, head)
            )
        return sorted(turns, key=lambda turn: turn[:2])

    def served(self, turn: Turn[E], waiting: Collection[Turn[E]]) -> None:
        """Charge the request that ``turn`` had at its head.

        ``waiting`` are the other classes that could have been served: the rounds count for them.
        """
        for other in (*waiting, turn):
            # Classes before the chosen one in the ring were passed once more than those after it.
            rounds = turn.rounds if other.position <= turn.position else max(turn.rounds - 1, 0)
            other.queue_class.credit += rounds * other.queue_class.quantum
        turn.queue_class.credit -= uncached_tokens(turn.head)
        self._current = self._classes.index(turn.queue_class)


def uncached_tokens(entry: E) -> int:
    """Return the prompt tokens that no worker holds, at least one."""
    return max(entry.isl_tokens - entry.cached_tokens, 1)


class Classifier:
    """Finds the class of a request by ``profile``."""

    def __init__(self, profile: PolicyProfile) -> None:
        self._floors = [
            (bucket.min_tokens, bucket.bucket) for bucket in profile.uncached_isl_buckets
        ]
        self._default = profile.default_policy_family
        self._explicit = {
            row.name: number
            for number, row in enumerate(profile.policy_classes)
            if row.policy_family is None
        }
        self._matrix = {
            (row.policy_family, row.cache_bucket): number
            for number, row in enumerate(profile.policy_classes)
            if row.policy_family is not None
        }
        self._families = {family for family, _ in self._matrix}

    def explicit(self, name: str | None) -> int | None:
        """Return the number of the class that a client names, if it may; None otherwise."""
        return None if name is None else self._explicit.get(name)

    @property
    def by_cache(self) -> bool:
        """Whether the class depends on what is cached."""
        return len(self._floors) > 1

    def by_family(self, name: str | None, uncached: int) -> int:
        """Return the number of the class for a family, or the default one, and a prompt."""
        family = name if name in self._families else self._default
        bucket = next(bucket for floor, bucket in reversed(self._floors) if uncached >= floor)
        return self._matrix[family, bucket]


def default_class(settings: RouterSettings) -> PolicyClass:
    """Return the only class of a queue without a policy file."""
    return PolicyClass(
        name=POLICY_CLASS,
        quantum=1,
        queue_policy=settings.queue_policy,  # type: ignore[arg-type] # one of the three
        prefill_busy_threshold_frac=settings.queue_threshold,
    )


def profile_of(settings: RouterSettings, model: str) -> PolicyProfile | None:
    """Return the classes for requests of ``model`` in the policy file, if any."""
    if settings.policies is None:
        return None
    return settings.policies.models.get(model, settings.policies.profile)
