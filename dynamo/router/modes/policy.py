"""The kv mode with a policy that chooses among the weighed workers.

A policy must not stop the router: one that fails or takes too long is switched off, and the
built-in cost replaces it.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable
from random import Random
from typing import ClassVar, Generic, TypeVar

import msgspec

from dynamo._fast.radix import RadixTree
from dynamo._fast.scoring import choose
from dynamo.config.router import RouterSettings
from dynamo.config.router_policy import WEIGHTED
from dynamo.errors import Unavailable, text_of
from dynamo.observability.metrics import Registry, counter, gauge, histogram
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing
from dynamo.router.caches.prompt import HashedPrompt
from dynamo.router.decision.cost import CopyOffer, CostParams
from dynamo.router.decision.receipt import KvInputs
from dynamo.router.eligibility.filters import Constraints, apply_preferred_taints
from dynamo.router.labels import RouterLabels
from dynamo.router.modes.kv import KvPicker
from dynamo.router.modes.kv_metrics import DecisionMetrics
from dynamo.router.modes.policy_types import (
    ClassPolicy,
    PolicyChoice,
    PolicyRequest,
    PolicyWorker,
    WorkerPolicy,
    make_classifier,
    make_policy,
    policy_request,
)

SLOW_S = 0.001
"""What a policy may take for a decision."""
_SLOW_IN_A_ROW = 3
"""Slow decisions in a row that switch a policy off: one alone may be the machine's."""
_STALL_S = 0.05
"""A decision this slow switches it off at once: nothing may hold the event loop longer."""
_LABELS = "model policy worker_type"
_ACTIVE = gauge(
    "dynamo_frontend_router_policy_active",
    "1 while a policy of --router-policy-config is asked, 0 once it is switched off",
    _LABELS,
)
_FAILURES = counter(
    "dynamo_frontend_router_policy_failures_total",
    "Decisions of a policy that failed or were slow",
    "model policy reason worker_type",
)
_SECONDS = histogram(
    "dynamo_frontend_router_policy_seconds",
    "Time that a policy took for a decision",
    (0.00001, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.005, 0.01, 0.05),
    _LABELS,
)
log = logging.getLogger(__name__)
T = TypeVar("T")
P = TypeVar("P", WorkerPolicy, ClassPolicy)


class Guard(Generic[P]):
    """Calls ``policy`` while it behaves. ``clock`` gives seconds."""

    INSTEAD: ClassVar[str]
    """What replaces the policy."""

    def __init__(
        self,
        policy: P,
        registry: Registry,
        labels: RouterLabels,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.active = True
        self.name = policy.name
        self._policy: P = policy
        self._clock = clock
        self._slow = 0
        values = labels.model, self.name, labels.worker_type
        self._shown = registry.child(_ACTIVE, *values)
        self._shown.value = 1
        self._seconds = registry.child(_SECONDS, *values)
        self._failures = {
            reason: registry.child(_FAILURES, labels.model, self.name, reason, labels.worker_type)
            for reason in ("raised", "slow")
        }

    def call(self, policy: Callable[[], T]) -> T | None:
        """Return what ``policy`` returns, or None if it has failed."""
        begun_s = self._clock()
        try:
            answer = policy()
        except BaseException as error:  # noqa: BLE001 - code of users, which may call sys.exit()
            self._failures["raised"].value += 1
            self._switch_off(f"it raised {type(error).__name__}: {text_of(error)}", error)
            return None
        took_s = self._clock() - begun_s
        self._seconds.observe(took_s)
        # One fast decision starts the count again: only slow ones in a row are the policy's.
        if took_s <= SLOW_S:
            self._slow = 0
            return answer
        self._failures["slow"].value += 1
        self._slow += 1
        if self._slow >= _SLOW_IN_A_ROW or took_s > _STALL_S:
            limit_ms = 1e3 * SLOW_S
            self._switch_off(f"a decision took {1e3 * took_s:.1f} ms, more than {limit_ms:g} ms")
        return answer

    def _switch_off(self, reason: str, error: BaseException | None = None) -> None:
        self.active = False
        self._shown.value = 0
        log.warning(
            "policy %s is switched off until the router restarts, %s: %s",
            self.name, self.INSTEAD, reason, exc_info=error,
        )  # fmt: skip


class GuardedPolicy(Guard[WorkerPolicy]):
    """Asks a policy for workers while it behaves."""

    INSTEAD = "the built-in cost goes on"

    def choose(self, request: PolicyRequest, workers: list[PolicyWorker]) -> PolicyChoice | None:
        """Return what the policy chooses, or None if it has failed."""
        return self.call(lambda: self._policy.choose(request, workers))


class GuardedClassifier(Guard[ClassPolicy]):
    """Asks a policy for the class of a request while it behaves."""

    INSTEAD = "clients name their class"

    def classify(self, request: PolicyRequest) -> str | None:
        """Return the name of a class or family, None for that of the client."""
        return self.call(lambda: self._policy.classify(request)) if self.active else None


class PolicyPicker(KvPicker):
    """A :class:`KvPicker` whose weighed workers are chosen by ``policy``.

    The policy is also asked for decisions that are only explained, and for queued requests.
    """

    def __init__(
        self,
        settings: RouterSettings,
        block_size: int,
        index: RadixTree | None,
        policy: GuardedPolicy,
        metrics: DecisionMetrics | None = None,
        random: Random | None = None,
    ) -> None:
        super().__init__(settings, block_size, index, metrics, random)
        self._policy = policy
        self._prompt: HashedPrompt | None = None
        self._chosen_by = ""

    def _weigh(
        self,
        tokens: Tokens,
        routing: Routing | None,
        params: CostParams,
        slots: array[int],
        now_s: float,
    ) -> tuple[HashedPrompt, CopyOffer | None]:
        prompt, offer = super()._weigh(tokens, routing, params, slots, now_s)
        self._prompt = prompt
        return prompt, offer

    def _choose(self, slots: array[int], params: CostParams, routing: Routing | None) -> int:
        self._chosen_by = ""
        prompt = self._prompt
        if prompt is None or not self._policy.active or not slots:
            return super()._choose(slots, params, routing)
        if routing is not None and routing.preferred_taints:
            apply_preferred_taints(self._costs, slots, self.worker_pool, routing.preferred_taints)
        workers = [self._worker(index, slot) for index, slot in enumerate(slots)]
        choice = self._policy.choose(self._request(prompt, routing), workers)
        if choice is None:
            # Not super()._choose(), which would apply the preferred taints a second time.
            return choose(self._costs, len(slots), params.temperature, self._uniform())
        if not choice.indexes:
            raise Unavailable(f"policy {self._policy.name} rejects every worker")
        self._chosen_by = self._policy.name
        for index, cost in zip(choice.indexes, choice.costs, strict=True):
            self._costs[index] = cost
        picked = choice.picked
        if picked is None:
            costs = array("d", choice.costs)
            picked = choose(costs, len(costs), params.temperature, self._uniform())
        return choice.indexes[picked]

    def _capture(
        self,
        params: CostParams,
        slots: array[int],
        slot: int,
        prompt: HashedPrompt,
        offer: CopyOffer | None,
        constraints: Constraints | None = None,
    ) -> KvInputs:
        inputs = super()._capture(params, slots, slot, prompt, offer, constraints)
        return msgspec.structs.replace(inputs, policy=self._chosen_by)

    def _worker(self, index: int, slot: int) -> PolicyWorker:
        cached = self._cached_blocks.of(slot)
        return PolicyWorker(
            *self.worker_pool.owners[slot],
            self._costs[index],
            self.active.load(slot)[2],
            self._prefill[slot],
            self._decode[slot],
            *cached,
        )

    def _request(self, prompt: HashedPrompt, routing: Routing | None) -> PolicyRequest:
        return policy_request(prompt.isl_tokens, prompt.blocks, self.block_size, routing)


def make_kv_picker(
    settings: RouterSettings,
    block_size: int,
    index: RadixTree | None,
    metrics: DecisionMetrics,
    registry: Registry,
    labels: RouterLabels,
) -> KvPicker:
    """Return the picker of the kv mode, with the policy of the settings. Raises ConfigError."""
    instance, policies = settings.selection, settings.policies
    if instance is None or policies is None or instance.type == WEIGHTED:
        return KvPicker(settings, block_size, index, metrics)
    policy = GuardedPolicy(make_policy(instance, policies.directory), registry, labels)
    return PolicyPicker(settings, block_size, index, policy, metrics)


def make_guarded_classifier(
    settings: RouterSettings, registry: Registry, labels: RouterLabels
) -> GuardedClassifier | None:
    """Return the classifier of the policy file, if it has one. Raises ConfigError."""
    policies = settings.policies
    if policies is None or policies.classifier is None:
        return None
    policy = make_classifier(policies.classifier, policies.directory)
    return GuardedClassifier(policy, registry, labels)
