"""A policy around one that may be code of users: what that raises ends nothing else. Pure.

After three failures in a row the thresholds of mode ``load`` decide instead.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

from dynamo.config.planner import PlannerSettings
from dynamo.errors import DynamoError, text_of
from dynamo.planner.capacity.observation import Observation
from dynamo.planner.policies.base import Policy, ScalingDecision, TargetedPolicy
from dynamo.planner.policies.budget import at_limits
from dynamo.planner.policies.load import LoadPolicy

_FAILURES = 3
"""Failures in a row after which a policy is switched off."""
log = logging.getLogger(__name__)


class GuardedScalingPolicy(TargetedPolicy):
    """A :class:`Policy` that decides as ``policy`` does, and keeps the workers where that fails.

    Switched off, :class:`LoadPolicy` decides, and its rules say why.
    """

    def __init__(self, policy: Policy, settings: PlannerSettings) -> None:
        self.name, self.interval_s = str(policy.name), float(policy.interval_s)
        self.blocking = bool(policy.blocking)
        self._policy = policy
        self._settings = settings
        self._failures = Counter[str]()
        self._reason = ""  # why the policy is switched off
        self._rehearses = False

    @classmethod
    def make(
        cls, make: Callable[[bool], Policy], prefill: bool, settings: PlannerSettings
    ) -> GuardedScalingPolicy:
        """Return the policy that ``make`` makes. Raises DynamoError for one that does not exist."""
        try:
            return cls(make(prefill), settings)
        except DynamoError:
            # A name or settings that do not exist are the user's error: the planner does not start.
            raise
        except BaseException as error:  # noqa: BLE001 - code of users, which may call sys.exit()
            substitute = cls(LoadPolicy(settings), settings)
            substitute._reason = f"it cannot be made: {_text(error)}"
            log.error("the policy is switched off, %s; load decides instead", substitute._reason)
            return substitute

    def decide(self, seen: Observation) -> ScalingDecision:
        """Return the decision of the policy; that to keep the workers if it fails."""
        name = self.name
        try:
            decision = _checked(self._policy.decide(seen), seen)
        except BaseException as error:  # noqa: BLE001 - code of users
            self._failed("decide", error)
            text = f"policy {name} failed: {_text(error)}"
            return replace(at_limits(seen, text), problem=text)
        if self._reason:
            text = f"the policy is switched off: {self._reason}"
            pools = (replace(pool, rule=f"{pool.rule}; {text}") for pool in decision.pools)
            return replace(decision, pools=tuple(pools), problem=text)
        self._failures["decide"] = 0
        return decision

    def applied(self, decision: ScalingDecision, failed: Collection[str]) -> None:
        """Report to the policy which of its decisions were carried out."""
        try:
            self._policy.applied(decision, failed)
            self._failures["applied"] = 0
        except BaseException as error:  # noqa: BLE001 - code of users
            self._failed("applied", error)

    def aim(self, ttft_ms: float, itl_ms: float) -> None:
        """Set the targets of a policy that has some."""
        try:
            if isinstance(self._policy, TargetedPolicy):
                self._policy.aim(ttft_ms, itl_ms)
        except BaseException as error:  # noqa: BLE001 - code of users
            self._failed("aim", error)

    def __deepcopy__(self, memo: dict[int, object]) -> GuardedScalingPolicy:
        rehearsing = copy.copy(self)
        rehearsing._failures, rehearsing._rehearses = Counter(self._failures), True
        try:
            rehearsing._policy = copy.deepcopy(self._policy, memo)
        except BaseException as error:  # noqa: BLE001 - code of users
            rehearsing._policy = _UncopiedPolicy(self.name, error)
        return rehearsing

    def _failed(self, call: str, error: BaseException) -> None:
        self._failures[call] += 1
        log.error("policy %s failed; nothing is changed", self.name, exc_info=error)
        if self._failures[call] >= _FAILURES and not self._reason:
            self._reason = f"{self.name} failed {_FAILURES} times in a row, at last: {_text(error)}"
            if not self._rehearses:  # a copy's end is not that of the policy
                log.error("%s; load decides instead until the planner is restarted", self._reason)
            substitute = self._policy = LoadPolicy(self._settings)
            self.name, self.interval_s = substitute.name, substitute.interval_s
            self.blocking = substitute.blocking


class _UncopiedPolicy:
    """A policy that cannot be asked without an effect on it."""

    interval_s, blocking = 1.0, True

    def __init__(self, name: str, error: BaseException) -> None:
        self.name = name
        self._error = error

    def decide(self, seen: Observation) -> ScalingDecision:
        return at_limits(seen, f"it cannot be asked without an effect on it: {_text(self._error)}")

    def applied(self, decision: ScalingDecision, failed: Collection[str]) -> None:
        """Do nothing."""


def _checked(decision: object, seen: Observation) -> ScalingDecision:
    """Return ``decision`` if it is one about the pools of ``seen``. Raises TypeError."""
    if not isinstance(decision, ScalingDecision):
        raise TypeError(f"decide() must return a ScalingDecision, got {type(decision).__name__}")
    pools = tuple(replace(pool, wanted=operator.index(pool.wanted)) for pool in decision.pools)
    for pool in pools:
        if pool.pool not in seen.pools or pool.wanted < 0:
            raise TypeError(f"decide() returned {pool.wanted} workers of the pool {pool.pool!r}")
    return replace(decision, pools=pools)


def _text(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {text_of(error)}".rstrip(": ").split())
