"""The fixed policy: always the same number of workers, to compare other policies with."""

from __future__ import annotations

import re
from collections.abc import Collection

from dynamo.config.planner import PlannerSettings
from dynamo.errors import ConfigError
from dynamo.planner.observation import Observation
from dynamo.planner.policies.base import DECODE, PREFILL, PoolDecision, ScalingDecision
from dynamo.planner.policies.budget import Workers, affordable, clamp

__all__ = ["FixedPolicy"]

_COUNTS = re.compile(r"(?:(\d{1,4})x)?(\d{1,4})")


class FixedPolicy:
    """Keeps ``counts`` workers, within the limits of the pools and the budget.

    ``counts`` is ``N`` decode workers, or ``PxD`` prefill and decode workers; a plain ``N`` in
    disaggregated serving is N of both.
    """

    blocking = False

    def __init__(self, settings: PlannerSettings, prefill: bool, counts: str) -> None:
        match = _COUNTS.fullmatch(counts)
        if match is None or (match[1] and not prefill):
            form = "PxD, such as fixed:2x2" if prefill else "N, such as fixed:4"
            raise ConfigError(f"policy fixed:{counts}: write fixed:{form}")
        decode = int(match[2])
        self.name = f"fixed:{counts}"
        self.interval_s = settings.adjustment_interval_s
        self._workers = Workers(int(match[1] or decode) if prefill else 0, decode)

    def decide(self, seen: Observation) -> ScalingDecision:
        """Return the fixed counts."""
        wanted = affordable(clamp(self._workers, seen), seen)
        pools = [self._pool(DECODE, wanted.decode, self._workers.decode)]
        if seen.prefill is not None:
            pools.insert(0, self._pool(PREFILL, wanted.prefill, self._workers.prefill))
        return ScalingDecision(pools=tuple(pools))

    def applied(self, decision: ScalingDecision, failed: Collection[str]) -> None:
        """Nothing depends on it."""

    @staticmethod
    def _pool(name: str, wanted: int, fixed: int) -> PoolDecision:
        rule = f"fixed at {fixed} workers"
        if wanted != fixed:
            rule += f", but the limits allow {wanted}"
        return PoolDecision(pool=name, wanted=wanted, rule=rule)
