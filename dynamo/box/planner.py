"""What the planner of a deployment wants: its last decisions, from the file that it writes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dynamo.protocols.status import PlannerSummary

__all__ = ["DECISIONS_FILE", "PlannerWishes", "newest_decisions", "planner_wishes"]

DECISIONS_FILE = "logs/planner-decisions.jsonl"
"""Path of the file in the run directory of a deployment; its logs stay when it ends."""

_TAIL_BYTES = 64 << 10
_OBSERVED = "no-operation"


class _Pool(msgspec.Struct):
    """The fields of a planner's ``PoolChange`` that are shown."""

    pool: str
    before: int
    wanted: int
    rule: str = ""
    error: str = ""


class _Decision(msgspec.Struct):
    """The fields of a planner's ``DecisionRecord`` that are shown."""

    at_s: float
    model: str
    mode: str
    pools: tuple[_Pool, ...] = ()
    outcome: str = ""


_decode = msgspec.json.Decoder(_Decision).decode


@dataclass(frozen=True, kw_only=True)
class PlannerWishes:
    """The workers that the planner wants, by model and pool, and its ``summary``."""

    wanted: Mapping[tuple[str, str], int] = field(default_factory=dict)
    summary: PlannerSummary


def newest_decisions(path: Path, since_s: float) -> list[_Decision]:
    """Return the decisions in the end of the file that were made after ``since_s``, oldest first.

    A damaged line is skipped; a file that cannot be read has none.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            decision = _decode(line)
        except msgspec.MsgspecError:
            continue
        if decision.at_s >= since_s:
            found.append(decision)
    return found


def planner_wishes(decisions: Iterable[_Decision], state: str, mode: str) -> PlannerWishes:
    """Return what the latest of ``decisions`` want, of a planner in ``state``. Pure."""
    wanted: dict[tuple[str, str], int] = {}
    texts: dict[tuple[str, str], str] = {}
    for decision in decisions:
        for pool in decision.pools:
            key = (decision.model, pool.pool)
            if decision.outcome != _OBSERVED:
                wanted[key] = pool.before if pool.error else pool.wanted
            texts[key] = _text(decision, pool)
    summary = PlannerSummary(state=state, mode=mode, decisions=tuple(texts.values()))
    return PlannerWishes(wanted=wanted, summary=summary)


def _text(decision: _Decision, pool: _Pool) -> str:
    step = f"{pool.before}" if pool.wanted == pool.before else f"{pool.before} -> {pool.wanted}"
    failed = f" (failed: {pool.error})" if pool.error else ""
    observed = " (observed only)" if decision.outcome == _OBSERVED else ""
    return f"{decision.model} {pool.pool} {step}: {pool.rule}{failed}{observed}"
