"""Measure rows over a mock of vLLM's EngineCore: ours, then each peer, in every round."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from core_systems import PEERS, CoreSystem, Ours, Setup
from load import LoadError
from results import Figure
from rows import Row
from samples import Sampler, check_delivery
from systems import System

_QUESTION, _ANSWER_TOKENS = "Which worker gets this request?", 60


@dataclass(frozen=True)
class Effort:
    """How long and how often to measure, with which client."""

    wrk: str
    seconds: float
    rounds: int
    say: Callable[[str], None]


def measure_core(rows: Sequence[Row], setup: Setup, effort: Effort) -> dict[str, list[Figure]]:
    """Return the figures of ``rows`` by key, one beside each peer."""
    with contextlib.ExitStack() as stack:
        systems: list[CoreSystem] = [stack.enter_context(Ours(setup))]
        systems += [stack.enter_context(build(setup)) for build in PEERS.values()]
        different = _different_answers(systems)
        sampler = Sampler(effort.wrk)
        found = {}
        for row in rows:
            figures = _measured(row, systems, sampler, effort)
            for figure in figures:
                figure.valid = figure.valid and not different
                figure.notes += different
            found[row.key] = figures
        return found


def _measured(
    row: Row, systems: Sequence[System], sampler: Sampler, effort: Effort
) -> list[Figure]:
    assert row.load is not None
    per = "token" if row.load.stream else "request"
    try:
        rounds = _rounds(row, systems, sampler, effort)
    except (LoadError, OSError) as error:
        notes = [f"not measured: {error}"]
        return [Figure(row.key, row.title, "", [], limit=row.bar, valid=False, notes=notes)]
    figures = []
    for number, system in enumerate(systems[1:], 1):
        samples = [[found[0], found[number]] for found in rounds]
        figure = Figure(
            f"{row.key}-{system.name}", f"{row.title}, beside {system.name}", f"µs/{per}", [], [],
            row.bar if system.name == row.judged_peer else None,
        )  # fmt: skip
        figure.ours, figure.theirs = (
            [pair[side][f"cpu_us_per_{per}"] for pair in samples] for side in (0, 1)
        )
        figure.samples = [sample for pair in samples for sample in pair]
        check_delivery(figure, row.load)
        figures.append(figure)
    figures[0].notes.append(_parts(rounds, per))
    return figures


def _rounds(
    row: Row, systems: Sequence[System], sampler: Sampler, effort: Effort
) -> list[list[dict[str, Any]]]:
    """For each round, a sample of each system."""
    assert row.load is not None
    total = sampler.calibrate(systems, row.load, effort.seconds)
    rounds = []
    for number in range(effort.rounds):
        found = sampler.round(systems, row.load, total)
        for sample in found:
            sample["round"] = number
        rounds.append(found)
        spent = ", ".join(f"{one['system']} {one['cpu_us_per_request']:.0f}" for one in found)
        effort.say(f"{row.key} round {number + 1}, µs a request: {spent}")
    return rounds


def _parts(rounds: list[list[dict[str, Any]]], per: str) -> str:
    """Describe how our processes share the cost, in the last round."""
    ours = rounds[-1][0]
    parts = [
        f"{name} {share * ours['cpu_us_per_' + per]:.1f}"
        for name, share in ours["parts_share"].items()
    ]
    return f"ours by process, µs/{per}: {', '.join(parts)}"


def _different_answers(systems: Sequence[System]) -> list[str]:
    """Compare the answers to one question; all systems must give the same text."""
    answers = {
        system.name: system.answer(_QUESTION, _ANSWER_TOKENS)["choices"][0]["message"]["content"]
        for system in systems
    }
    expected = answers[systems[0].name]
    return [
        f"{name} answers {text!r}, ours {expected!r}"
        for name, text in answers.items()
        if text != expected
    ]
