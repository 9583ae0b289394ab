"""Observers of the planner's loop: metrics, tensorboard, the file of decisions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from dynamo.planner.live.actions import WorkerAction
from dynamo.planner.live.model_state import Pools
from dynamo.planner.observation import Observation, Pull
from dynamo.planner.policies.base import ScalingDecision
from dynamo.planner.reports.decisions import DecisionRecord

__all__ = ["LoopObserver", "Observers"]


class LoopObserver(Protocol):
    """Receives what the loop sees and does."""

    def counted(self, model: str, now_s: float, pools: Pools) -> None:
        """The workers were counted: with every pull, and also while they change."""

    def pulled(self, model: str, pull: Pull, pools: Pools) -> None:
        """Metrics were pulled."""

    def decided(self, record: DecisionRecord, seen: Observation, made: ScalingDecision) -> None:
        """A policy decided."""

    def finished(self, record: DecisionRecord) -> None:
        """The changes of a decision are carried out, or there were none."""

    def acted(self, action: WorkerAction) -> None:
        """A worker was added or removed, or could not be."""

    def forgotten(self, model: str) -> None:
        """The graph no longer has the model."""


class Observers:
    """Calls several observers, in order."""

    def __init__(self, observers: Iterable[LoopObserver]) -> None:
        self._all = tuple(observers)

    def counted(self, model: str, now_s: float, pools: Pools) -> None:
        """See :class:`LoopObserver`."""
        for observer in self._all:
            observer.counted(model, now_s, pools)

    def pulled(self, model: str, pull: Pull, pools: Pools) -> None:
        """See :class:`LoopObserver`."""
        for observer in self._all:
            observer.pulled(model, pull, pools)

    def decided(self, record: DecisionRecord, seen: Observation, made: ScalingDecision) -> None:
        """See :class:`LoopObserver`."""
        for observer in self._all:
            observer.decided(record, seen, made)

    def finished(self, record: DecisionRecord) -> None:
        """See :class:`LoopObserver`."""
        for observer in self._all:
            observer.finished(record)

    def acted(self, action: WorkerAction) -> None:
        """See :class:`LoopObserver`."""
        for observer in self._all:
            observer.acted(action)

    def forgotten(self, model: str) -> None:
        """See :class:`LoopObserver`."""
        for observer in self._all:
            observer.forgotten(model)
