"""The interface of scaling policies, and what they decide. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

# Policies of users import all of these names from here.
from dynamo.planner.capacity.observation import (  # noqa: F401
    Observation,
    Pool,
    Pull,
    Traffic,
    WorkerLoad,
)
from dynamo.serve.graph.facts import DECODE, PREFILL  # noqa: F401


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
    Dynamo's metrics without ``dynamo_planner_``. ``problem`` says why the policy did not make it.
    """

    pools: tuple[PoolDecision, ...] = ()
    forecast: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""


class TargetedPolicy(ABC):
    """A policy whose targets may change while it runs."""

    @abstractmethod
    def aim(self, ttft_ms: float, itl_ms: float) -> None:
        """Keep these targets from the next decision on."""


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
