"""Measure rows on two running systems in turn: ours, theirs, ours, theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median, quantiles

from load import Load, Prompts, Stopwatch
from results import Figure
from rows import DRIFT_PERCENT, LONG_PROMPT_TOKENS, SOAK_REQUESTS, Row
from samples import Sampler, check_delivery
from systems import System

_SLICES = 20


@dataclass(frozen=True)
class Pair:
    """Both systems, and the duration of a measurement."""

    ours: System
    theirs: System
    wrk: str
    seconds: float
    rounds: int
    soak_requests: int
    say: Callable[[str], None]

    @property
    def both(self) -> tuple[System, System]:
        """Return both systems in the order of measurement."""
        return self.ours, self.theirs


class Measurer:
    """Measures rows; keeps prompts unique over all rows of two systems."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._prompts = Prompts()
        self._sampler = Sampler(pair.wrk)

    def measure(self, row: Row) -> list[Figure]:
        """The figures of ``row``."""
        assert row.load is not None
        if row.kind == "ttft":
            return self._ttft(row, row.load)
        if row.kind == "soak":
            return self._soak(row, row.load)
        if row.kind == "long":
            return [self._cpu(row, replace(row.load, words=self._long_prompt_words()))]
        return [self._cpu(row, row.load)]

    # -- CPU per request or token

    def _cpu(self, row: Row, load: Load) -> Figure:
        per = "token" if load.stream else "request"
        figure = Figure(row.key, row.title, f"µs/{per}", [], [], row.bar)
        total = self._sampler.calibrate(self._pair.both, load, self._pair.seconds)
        for number in range(self._pair.rounds):
            sides = (figure.ours, figure.theirs)
            found = self._sampler.round(self._pair.both, load, total)
            for sample, values in zip(found, sides, strict=True):
                sample["round"] = number
                values.append(sample["cpu_us_per_" + per])
                figure.samples.append(sample)
            self._pair.say(f"{row.key} round {number + 1}: {figure.ratios[-1]:.2f}")
        check_delivery(figure, load)
        return figure

    def _long_prompt_words(self) -> int:
        words = 1000
        usage = self._pair.ours.ask(self._prompts.next(words), 1)
        return int(words * LONG_PROMPT_TOKENS / usage["prompt_tokens"])

    # -- time to first token

    def _ttft(self, row: Row, load: Load) -> list[Figure]:
        figures = self._ttft_figures(load, True, {50: row.bar, 99: row.bar})
        return figures + self._ttft_figures(load, False, {50: None})

    def _ttft_figures(
        self, load: Load, acknowledges_at_once: bool, bars: dict[int, float | None]
    ) -> list[Figure]:
        asks = max(20, int(self._pair.seconds * 40))
        client = "" if acknowledges_at_once else ", client with delayed ACKs"
        cuts = {
            cut: Figure(
                f"ttft-p{cut}{'' if acknowledges_at_once else '-delayed-acks'}",
                f"TTFT p{cut}: {load.words} words, 1 connection{client}",
                *("ms", [], [], bar),
            )
            for cut, bar in bars.items()
        }
        with contextlib.ExitStack() as stack:
            watches = [
                stack.enter_context(contextlib.closing(Stopwatch(one.port, acknowledges_at_once)))
                for one in self._pair.both
            ]
            self._time_asks(watches, load, asks // 4)
            for _ in range(self._pair.rounds):
                timed = self._time_asks(watches, load, asks)
                for cut, figure in cuts.items():
                    _add_quantile(figure, cut, timed)
        for figure in cuts.values():
            self._pair.say(f"{figure.key}: {median(figure.ratios):.2f}")
        return list(cuts.values())

    def _time_asks(
        self, watches: list[Stopwatch], load: Load, asks: int
    ) -> list[tuple[list[float], list[float]]]:
        """For each system, milliseconds to the first token and between later ones."""
        timed: list[tuple[list[float], list[float]]] = [([], []), ([], [])]
        for _ in range(asks):
            prompt = self._prompts.next(load.words)
            for watch, (first_ms, between_ms) in zip(watches, timed, strict=True):
                found = watch.ask(prompt, load.max_tokens)
                first_ms.append(found.first_s * 1e3)
                between_ms.append(found.rest_s * 1e3 / (load.max_tokens - 1))
        return timed

    # -- memory

    def _soak(self, row: Row, load: Load) -> list[Figure]:
        total = self._pair.soak_requests
        judged = total >= SOAK_REQUESTS
        size = Figure(
            row.key, f"frontend RSS after {total:,} requests, prompts never repeated", "MB",
            [], [], row.bar if judged else None,
        )  # fmt: skip
        drift = Figure(
            "rss-drift", "growth of our RSS in the last half of them", "%",
            [], [], DRIFT_PERCENT if judged else None,
        )  # fmt: skip
        seen = {system.name: [system.rss_bytes()] for system in self._pair.both}
        for number in range(_SLICES):
            for system in self._pair.both:
                part = total // _SLICES
                self._sampler.send(system, load, part)
                seen[system.name].append(system.rss_bytes())
            self._sampler.advance(total // _SLICES)
            self._pair.say(
                f"rss after {(number + 1) * total // _SLICES:,}: "
                + ", ".join(f"{name} {sizes[-1] / 1e6:.0f} MB" for name, sizes in seen.items())
            )
        ours, theirs = (seen[system.name] for system in self._pair.both)
        size.ours, size.theirs = [ours[-1] / 1e6], [theirs[-1] / 1e6]
        size.samples = [{"rss_bytes": seen}]
        drift.ours = [_drift_percent(ours)]
        drift.notes = [
            f"theirs: {_drift_percent(theirs):.1f} %; at the start ours {ours[0] / 1e6:.0f} MB, "
            f"theirs {theirs[0] / 1e6:.0f} MB"
        ]
        if not judged:
            size.notes = [f"judged only after {SOAK_REQUESTS:,} requests (--soak)"]
        return [size, drift]


def _add_quantile(figure: Figure, cut: int, timed: list[tuple[list[float], list[float]]]) -> None:
    at = [quantiles(first_ms, n=100, method="inclusive")[cut - 1] for first_ms, _ in timed]
    figure.ours.append(at[0])
    figure.theirs.append(at[1])
    middle = [quantiles(between_ms, n=2)[0] for _, between_ms in timed]
    figure.samples.append({"itl_p50_ms": {"ours": middle[0], "theirs": middle[1]}})


def _drift_percent(sizes: list[int]) -> float:
    half = sizes[len(sizes) // 2 :]
    return (max(half) / half[0] - 1) * 100
