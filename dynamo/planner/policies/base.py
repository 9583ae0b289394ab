"""What every policy offers, and what it decides."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dynamo.planner.observation import Observation

DECODE, PREFILL = "decode", "prefill"
"""Names of the pools; an aggregated deployment has only ``DECODE``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDecision:
    """``wanted`` workers in ``pool`` (ready and starting ones), by ``rule``.

    ``rule`` is a sentence for the log, such as "KV load 0.95 > 0.9"; ``inputs`` has the figures
    that the rule used.
    """

    pool: str
    wanted: int
    rule: str
    inputs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """The pools in the order in which they are to be changed.

    A policy names every pool, with the reason if it keeps its workers. An addition may need the
    GPUs that a removal before it frees: if that fails, check the budget again. ``forecast`` has
    predicted and estimated figures of the policy for metrics and tensorboard, by the names of
    Dynamo's metrics without ``dynamo_planner_``.
    """

    pools: tuple[PoolDecision, ...] = ()
    forecast: Mapping[str, float] = field(default_factory=dict)


class Policy(Protocol):
    """Decides once per ``interval_s`` how many workers there should be.

    With ``blocking`` the planner waits until a change is complete (a new worker serves, an old one
    has exited) before it pulls metrics and decides again. Without, it also decides in between.
    """

    name: str
    interval_s: float
    blocking: bool

    def decide(self, seen: Observation) -> ScalingDecision:
        """Return the wanted workers; never more GPUs than ``seen.max_gpus``."""

    def applied(self, decision: ScalingDecision, failed: Collection[str]) -> None:
        """Learn that the changes of ``decision`` were carried out, but not those of the pools
        ``failed``."""
