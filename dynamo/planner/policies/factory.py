"""Policies by their names (``load``, ``fixed:4``, ``hpa:12``, ``my_module:my_policy``). Pure.

``fixed`` and ``hpa`` exist to compare others with. ``hpa`` is the rule of Kubernetes' HPA v2 and
KEDA: every 15 s it divides the running and waiting requests per replica by a target. Sources: the
algorithm in Kubernetes' documentation of the horizontal pod autoscaler, and its default behaviour.
"""

from __future__ import annotations

import importlib
import math
import re
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import cast

from dynamo.config.planner import PlannerSettings
from dynamo.errors import ConfigError
from dynamo.observability.logs import counted
from dynamo.planner.capacity.interpolation import read_capacity
from dynamo.planner.capacity.observation import Observation, Pool
from dynamo.planner.policies.auto import AutoPolicy
from dynamo.planner.policies.base import Policy, PoolDecision, ScalingDecision
from dynamo.planner.policies.budget import Workers, allowed
from dynamo.planner.policies.combined import CombinedPolicy
from dynamo.planner.policies.load import LoadPolicy
from dynamo.planner.policies.sla import SlaPolicy
from dynamo.serve.graph.facts import DECODE, PREFILL

Factory = Callable[[PlannerSettings, bool], Policy]
"""Makes a policy; the second argument is True in disaggregated serving."""
POLICIES: dict[str, Factory] = {
    "auto": lambda settings, prefill: AutoPolicy(
        resolve_targets(replace(settings, mode="auto"))[0], prefill
    ),
    "load": lambda settings, prefill: LoadPolicy(settings),
    "sla": SlaPolicy,
    "load+sla": CombinedPolicy,
}
"""Policies without an argument. Those of --mode must be here."""
_TTFT_MS, _ITL_MS = 2000.0, 50.0
"""Targets where nothing is known: for people who wait for an answer and read it."""
_TIGHT_TTFT_MS, _TIGHT_ITL_MS = 500.0, 50.0
_TTFT_FACTOR, _ITL_FACTOR = 5.0, 4.0
"""Targets from a profile: multiples of what an idle worker takes, never tighter than Dynamo's
defaults."""
_SYNC_PERIOD_S = 15.0
_TOLERANCE = 0.1
_SCALE_DOWN_WINDOW_S = 300.0
_MAX_ADDED = 4
"""A sync adds at most as many replicas as there are, or this number if it is larger."""
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
        within, fixed = allowed(self._workers, seen), self._workers
        pools = [self._pool(name, within.of(name), fixed.of(name)) for name in seen.pools]
        return ScalingDecision(pools=tuple(pools))

    def applied(self, decision: ScalingDecision, failed: Collection[str]) -> None:
        """Nothing depends on it."""

    @staticmethod
    def _pool(name: str, wanted: int, fixed: int) -> PoolDecision:
        rule = f"fixed at {counted(fixed, 'worker')}"
        if wanted != fixed:
            rule += f", but the limits allow {wanted}"
        return PoolDecision(pool=name, wanted=wanted, rule=rule)


class HpaPolicy:
    """Keeps running and waiting requests per replica at ``target``.

    Starting workers are pods that are not ready: they count as replicas without requests when the
    load asks for more, and not at all when it asks for fewer. In disaggregated serving the requests
    of the prefill pool are those without a first token.
    """

    interval_s = _SYNC_PERIOD_S
    blocking = False

    def __init__(self, settings: PlannerSettings, prefill: bool, target: str) -> None:
        del settings, prefill
        try:
            self._target = float(target)
        except ValueError:
            self._target = math.nan
        if not 0 < self._target < math.inf:
            raise ConfigError(
                f"policy hpa:{target}: write the requests per worker as a number above 0, such as "
                "hpa:12"
            )
        self.name = f"hpa:{target}"
        self._scale_down = {DECODE: _ScaleDownWindow(), PREFILL: _ScaleDownWindow()}

    def decide(self, seen: Observation) -> ScalingDecision:
        """Return the replicas of both pools, by their requests at the end of the interval."""
        reports = seen.pulls[-1].decode if seen.pulls else ()
        requests = float(sum(worker.running + worker.waiting for worker in reports))
        decisions = {DECODE: self._pool(DECODE, seen.decode, requests, len(reports), seen.now_s)}
        prefill_workers = 0
        if seen.prefill is not None:
            queued = float(seen.traffic.queued)
            reported = seen.prefill.ready if seen.traffic.known else 0
            decisions[PREFILL] = self._pool(PREFILL, seen.prefill, queued, reported, seen.now_s)
            prefill_workers = decisions[PREFILL].wanted
        within = allowed(Workers(prefill_workers, decisions[DECODE].wanted), seen)
        return ScalingDecision(
            pools=tuple(_limited(decisions[name], within.of(name)) for name in seen.pools)
        )

    def applied(self, decision: ScalingDecision, failed: Collection[str]) -> None:
        """Nothing depends on it: the next observation has the replicas."""

    def _pool(
        self, name: str, pool: Pool, requests: float, reported: int, now_s: float
    ) -> PoolDecision:
        reported = min(reported, pool.ready)  # others drain: pods that end are no replicas
        if not reported:
            return PoolDecision(pool=name, wanted=pool.workers, rule="no ready worker reported")
        now = self._recommended(pool, requests, reported)
        stable = self._scale_down[name].highest(now_s, now, pool.workers)
        wanted = max(now, min(pool.workers, stable))
        wanted = min(wanted, max(2 * pool.workers, pool.workers + _MAX_ADDED))
        on = counted(reported, "ready worker")
        rule = f"{counted(requests, 'request')} on {on}, target {self._target:g}"
        if wanted > now:
            rule += f", but {stable} were recommended within {_SCALE_DOWN_WINDOW_S:g} s"
        inputs = {"requests": requests, "recommended": float(now)}
        return PoolDecision(pool=name, wanted=wanted, rule=rule, inputs=inputs)

    def _recommended(self, pool: Pool, requests: float, reported: int) -> int:
        up = requests > self._target * reported
        # The documented damping: a pod that is not ready or has no metrics has no requests when
        # the load asks for more; one that has no metrics has the target when it asks for fewer.
        replicas = pool.workers if up else pool.ready
        if not up:
            requests += self._target * (replicas - reported)
        ratio = requests / (self._target * replicas)
        if abs(ratio - 1) <= _TOLERANCE or (ratio > 1) != up:
            return pool.workers
        return max(1, math.ceil(requests / self._target))


class _ScaleDownWindow:
    """Recommendations of the last 300 s; the highest of them bounds a scale-down."""

    def __init__(self) -> None:
        self._recommended: deque[tuple[float, int]] = deque()

    def highest(self, now_s: float, replicas: int, current: int) -> int:
        """Add the recommendation of now; return the highest one in the window.

        The first call takes the ``current`` replicas as recommended, too.
        """
        recent = self._recommended
        if not recent:
            recent.append((now_s, current))
        while recent and recent[0][0] <= now_s - _SCALE_DOWN_WINDOW_S:
            recent.popleft()
        # Later and not lower: the earlier one can no longer be the highest.
        while recent and recent[-1][1] <= replicas:
            recent.pop()
        recent.append((now_s, replicas))
        return recent[0][1]


def _limited(decision: PoolDecision, workers: int) -> PoolDecision:
    if workers == decision.wanted:
        return decision
    rule = f"{decision.rule}; {decision.wanted} wanted, the limits allow {workers}"
    return PoolDecision(pool=decision.pool, wanted=workers, rule=rule, inputs=decision.inputs)


_WITH_ARGUMENT: dict[str, Callable[[PlannerSettings, bool, str], Policy]] = {
    "fixed": FixedPolicy,
    "hpa": HpaPolicy,
}


def resolve_targets(settings: PlannerSettings) -> tuple[PlannerSettings, str]:
    """Return the settings with the targets of mode ``auto``, and where they come from.

    Other modes keep theirs, with "", or with a warning that ``load`` has none. Raises ConfigError
    for a profile that cannot be read.
    """
    if settings.mode == "load" and settings.is_set("ttft_ms", "itl_ms"):
        return settings, "--ttft and --itl have no effect: --mode auto keeps targets"
    if settings.mode != "auto":
        return settings, ""
    chosen = settings
    ttft_ms, itl_ms = _targets(settings.profile_results_dir)
    source = "conservative" if settings.profile_results_dir is None else "of the profile"
    reasons = []
    if settings.is_set("ttft_ms"):
        reasons.append(f"TTFT {settings.ttft_ms:g} ms as given")
    else:
        chosen = replace(chosen, ttft_ms=ttft_ms)
        reasons.append(f"TTFT {ttft_ms:g} ms ({source}; --ttft sets it)")
    if settings.is_set("itl_ms"):
        reasons.append(f"ITL {settings.itl_ms:g} ms as given")
    else:
        chosen = replace(chosen, itl_ms=itl_ms)
        reasons.append(f"ITL {itl_ms:g} ms ({source}; --itl sets it)")
    # A second call, for the policy of a model, keeps them: an operator may have set others.
    chosen = replace(chosen, given=chosen.given | {"ttft_ms", "itl_ms"})
    return chosen, ", ".join(reasons)


def _targets(profile: str | None) -> tuple[float, float]:
    """Return the targets of TTFT and ITL in ms that a worker of ``profile`` keeps with room."""
    capacity = read_capacity(profile)
    if capacity is None:
        return _TTFT_MS, _ITL_MS
    isl = capacity.prefill.middle_isl
    ttft_ms = _TTFT_FACTOR * capacity.prefill.ttft_ms(isl)
    itl_ms = _ITL_FACTOR * capacity.decode.itl_ms(0.0, isl)
    return max(float(round(ttft_ms)), _TIGHT_TTFT_MS), max(float(round(itl_ms)), _TIGHT_ITL_MS)


def make_policy(settings: PlannerSettings, prefill: bool) -> Policy:
    """Return the policy of ``settings.mode``; ``prefill``: serving is disaggregated."""
    return named_policy(settings.mode, settings, prefill)


def named_policy(name: str, settings: PlannerSettings, prefill: bool) -> Policy:
    """Return the policy ``name``.

    ``module:attribute`` names a class or function of the signature of :data:`Factory`. Raises
    ConfigError if there is none.
    """
    if name in POLICIES:
        return POLICIES[name](settings, prefill)
    kind, _, argument = name.partition(":")
    if argument and kind in _WITH_ARGUMENT:
        return _WITH_ARGUMENT[kind](settings, prefill, argument)
    if argument:
        return _imported(name, kind, argument)(settings, prefill)
    arguments = ", ".join(f"{kind}:…" for kind in _WITH_ARGUMENT)
    raise ConfigError(
        f"policy {name!r}: unknown; there are {', '.join(POLICIES)}, {arguments}, and "
        "module:attribute for your own"
    )


def _imported(name: str, module: str, attribute: str) -> Factory:
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, SystemExit) as error:
        raise ConfigError(f"policy {name!r}: {error}; is it importable from here?") from error
    if not callable(factory):
        raise ConfigError(f"policy {name!r}: it is no class or function that makes a policy")
    return cast(Factory, factory)
