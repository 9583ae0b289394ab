"""The interface of every router mode, and the modes that ignore KV caches.

A mode picks a worker, follows the progress of the request and frees its load. A slot is one
(worker, dp_rank). Modes choose among slots, so that a worker with two ranks gets twice the requests
of a worker with one.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from random import Random
from typing import Any, Protocol

from dynamo.config.router import RouterSettings
from dynamo.errors import InvalidArgument
from dynamo.observability.metrics import Counter
from dynamo.protocols.codec import Tokens
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.router.decision.decision import Attempt, Decision
from dynamo.router.decision.explanation import Explanation
from dynamo.router.decision.receipt import (
    MAX_CANDIDATES,
    CaptureLimit,
    DecisionInputs,
    DecisionTotals,
    InflightInputs,
)
from dynamo.router.eligibility.eligibility_filter import EligibilityFilter
from dynamo.router.eligibility.filters import pinned_worker
from dynamo.router.worker_pool import DenseSlots, WorkerPool


class Picker(Protocol):
    """Chooses workers and tracks their load. Synchronous and cheap.

    Everything but ``pick`` may be repeated and ignores unknown ids. ``weighs_overlap``: decisions
    depend on what workers have cached. ``tracks_output``: :meth:`add_output_tokens` changes the
    load. ``reused_tokens`` counts the prompt tokens that engines report as cached.
    """

    worker_pool: WorkerPool
    eligibility: EligibilityFilter
    reused_tokens: Counter
    weighs_overlap: bool
    tracks_output: bool

    def pick(
        self,
        request_id: str | None,
        tokens: Tokens,
        *,
        routing: Routing | None = None,
        override: Mapping[str, Any] | None = None,
        attempt: Attempt | None = None,
    ) -> Decision:
        """Choose a worker and book the load under ``request_id`` (None: book nothing).

        Raises NoInstances, Overloaded, or InvalidArgument for a mistake in the request.
        """

    def explain(
        self,
        tokens: Tokens,
        routing: Routing | None = None,
        override: Mapping[str, Any] | None = None,
        queued: Sized = (),
    ) -> Explanation:
        """Return what :meth:`pick` would weigh now, behind ``queued`` requests. Books nothing.

        Raises InvalidArgument for a bad ``override``, or in a mode that weighs nothing.
        """

    def mark_prefill_complete(self, request_id: str) -> None:
        """Drop the prompt from the load: its first token has arrived."""

    def add_output_tokens(self, request_id: str, count: int) -> None:
        """Count ``count`` more generated tokens."""

    def free(self, request_id: str, output_tokens: int = 0) -> None:
        """Drop the load of a request that has ended, in whatever way.

        ``output_tokens`` are those not reported by :meth:`add_output_tokens`.
        """

    def add_worker(self, worker_id: int, config: RuntimeConfig, device_type: str = "cpu") -> None:
        """Add a worker, or replace its configuration."""

    def remove_worker(self, worker_id: int) -> None:
        """Remove a worker and the load of its requests."""


class InflightPicker:
    """Chooses among the eligible slots by ``mode``, and counts requests in flight on each.

    ``mode`` is one of :data:`MODES`. O(1) without constraints; O(slots) by load. While a busy
    threshold is set, the prompts without a first token are counted, too.
    """

    weighs_overlap = False
    tracks_output = False

    def __init__(
        self,
        mode: str,
        random: Random | None = None,
        settings: RouterSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = settings or RouterSettings(mode=mode)
        self.worker_pool = WorkerPool(DenseSlots())
        self._prefill: list[int] = []
        self.eligibility = EligibilityFilter(self.worker_pool, settings, self._prefill.__getitem__)
        self.reused_tokens = Counter()  # not exported: caches do not matter to these modes
        self._clock = clock
        self._gpu_weight = settings.encoder_cuda_to_cpu_ratio
        self._random = random or Random()
        self._direct = mode == "direct"
        self.mode = mode
        self._captures = CaptureLimit()
        self._choose = partial(MODES[mode], self)
        self._next = 0
        self._slot_of: dict[str, int] = {}
        self._prompt_tokens: dict[str, int] = {}
        self._inflight: list[int] = []

    def pick(
        self,
        request_id: str | None,
        tokens: Tokens,
        *,
        routing: Routing | None = None,
        override: Mapping[str, Any] | None = None,
        attempt: Attempt | None = None,
    ) -> Decision:
        """See :meth:`Picker.pick`; ``tokens`` and ``override`` are ignored."""
        if self._direct and (routing is None or pinned_worker(routing) is None):
            raise InvalidArgument(
                "router mode direct: the request must name its worker, in "
                "nvext.backend_instance_id or the header x-worker-instance-id"
            )
        if request_id is not None and request_id in self._slot_of:
            raise InvalidArgument(f"Request {request_id} already exists")
        now_s = self._clock()
        slots = self.eligibility.slots(attempt.limit(routing) if attempt else routing, now_s)
        slot = self._choose(slots)
        owner = self.worker_pool.owners[slot]
        if request_id is None:
            return Decision(*owner)
        inputs = self._inputs(slots, slot, routing, attempt or Attempt(), now_s)
        self._slot_of[request_id] = slot
        self._inflight[slot] += 1
        if self.eligibility.follows_load:
            self._prompt_tokens[request_id] = len(tokens)
            self._prefill[slot] += len(tokens)
            self.eligibility.load_added(owner[0])
        if routing is not None and routing.session_id is not None:
            self.eligibility.bind_session(routing.session_id, *owner, now_s)
        return Decision(*owner, inputs=inputs)

    def explain(
        self,
        tokens: Tokens,
        routing: Routing | None = None,
        override: Mapping[str, Any] | None = None,
        queued: Sized = (),
    ) -> Explanation:
        """Raise InvalidArgument: these modes compute no cost."""
        raise InvalidArgument("only --router-mode kv weighs candidates, so there is no table")

    def mark_prefill_complete(self, request_id: str) -> None:
        """Drop the prompt from the prefill tokens; a request has one weight from start to end."""
        if self._prompt_tokens:
            self._prefilled(request_id, self._slot_of.get(request_id))

    def add_output_tokens(self, request_id: str, count: int) -> None:
        """Do nothing."""

    def free(self, request_id: str, output_tokens: int = 0) -> None:
        """Count the request as ended."""
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            self._inflight[slot] -= 1
            self._prefilled(request_id, slot)

    def add_worker(self, worker_id: int, config: RuntimeConfig, device_type: str = "cpu") -> None:
        """Add a worker, or replace its configuration."""
        self.worker_pool.add(worker_id, config, device_type)
        missing = self.worker_pool.width - len(self._inflight)
        self._inflight.extend([0] * missing)
        self._prefill.extend([0] * missing)
        self.eligibility.load_changed(worker_id)

    def remove_worker(self, worker_id: int) -> None:
        """Remove a worker and its requests in flight."""
        slots = set(self.worker_pool.slots_of(worker_id))
        for request_id in [key for key, slot in self._slot_of.items() if slot in slots]:
            self.free(request_id)
        self.eligibility.forget(worker_id)
        self.worker_pool.remove(worker_id)

    def _inputs(
        self,
        slots: array[int],
        slot: int,
        routing: Routing | None,
        attempt: Attempt,
        now_s: float,
    ) -> DecisionInputs:
        """Copy what the choice of ``slot`` among ``slots`` weighed, within the limit."""
        pool = self.worker_pool
        captures = self._captures
        if not (captures.left or attempt.wanted or captures.renew(now_s)):
            return DecisionTotals(self.mode, "none", pool.owners[slot], len(slots))
        # A receipt that the client requests does not count against the limit.
        captures.left -= not attempt.wanted
        constraints = None
        if routing is not None or attempt.failed or slots is not pool.candidates:
            constraints = self.eligibility.constraints(routing, attempt.failed)
        inputs = InflightInputs(
            self.mode, "none", pool.owners, slots, slot, constraints, self._inflight[:]
        )
        return inputs if len(pool.owners) <= MAX_CANDIDATES else inputs.narrowed(attempt.wanted)

    def _prefilled(self, request_id: str, slot: int | None) -> None:
        """Subtract the request's prompt, unless done already; the load of ``slot`` has dropped."""
        tokens = self._prompt_tokens.pop(request_id, 0)
        if slot is None:
            return
        self._prefill[slot] -= tokens
        pool = self.worker_pool
        if self.eligibility.follows_load and slot < pool.width:  # else the rank was removed
            self.eligibility.load_changed(pool.owners[slot][0])

    def _check(self) -> None:
        slots = list(self._slot_of.values())
        assert self._inflight == [slots.count(slot) for slot in range(len(self._inflight))]
        assert sum(self._prefill) == sum(self._prompt_tokens.values())

    def _round_robin(self, slots: array[int]) -> int:
        # Modulo the eligible slots of now: their number changes from request to request.
        self._next += 1
        return slots[(self._next - 1) % len(slots)]

    def _random_slot(self, slots: array[int]) -> int:
        return self._random.choice(slots)

    def _power_of_two(self, slots: array[int]) -> int:
        # sample() needs two of them.
        if len(slots) == 1:
            return slots[0]
        first, second = self._random.sample(slots, 2)
        return first if self._inflight[first] <= self._inflight[second] else second

    def _least_loaded(self, slots: Sequence[int]) -> int:
        least = min(self._inflight[slot] for slot in slots)
        return self._random.choice([slot for slot in slots if self._inflight[slot] == least])

    def _device_aware(self, slots: array[int]) -> int:
        """The least loaded slot of the device class with less in flight for its capacity."""
        cpu: list[int] = []
        other: list[int] = []
        for slot in slots:
            owner = self.worker_pool.owners[slot]
            (cpu if self.worker_pool.members[owner[0]].device_type == "cpu" else other).append(slot)
        if not cpu or not other:
            return self._least_loaded(slots)
        cpu_load = sum(self._inflight[slot] for slot in cpu) / len(cpu)
        # Dynamo's ratio says how many requests a GPU takes for one on a CPU.
        other_load = sum(self._inflight[slot] for slot in other) / len(other) / self._gpu_weight
        return self._least_loaded(cpu if cpu_load < other_load else other)


MODES: dict[str, Callable[[InflightPicker, array[int]], int]] = {
    "round-robin": InflightPicker._round_robin,
    "random": InflightPicker._random_slot,
    "power-of-two": InflightPicker._power_of_two,
    "least-loaded": InflightPicker._least_loaded,
    "device-aware-weighted": InflightPicker._device_aware,
    "direct": InflightPicker._least_loaded,
}
"""How each mode chooses among slots; direct chooses among the pinned worker's ranks."""
