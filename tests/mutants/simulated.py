"""Finds out which small defects the simulation shows: ``scripts/mutate --simulate N``.

First a healthy simulation runs the seeds and notes the functions that each of them calls. Then each
defect runs, in a process of its own, through the seeds that call its function, until one fails.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import mutant_seeds
from broken_module import replaced
from mutant import ROOT, Mutant
from mutant_seeds import SEEDS

__all__ = ["Hunt", "Simulated", "counts", "function_of", "hunt", "reach", "simulate", "write_seeds"]

Verdict = Literal["found", "not found", "not reached", "error"]
SEED_CPU_S = 60
"""A healthy seed takes a second at most; with a defect it may go on for ever."""
_TIMEOUT_S = 3600
_FIRST = 12
"""So many seeds a mutant runs alone: most of those that are found are found by one of them."""
_GROUP = 8


class Simulated(NamedTuple):
    """What the seeds have shown of a mutant: the first that failed, or how many did not."""

    mutant: Mutant
    verdict: Verdict
    seed: int = 0
    tried: int = 0
    failure: str = ""

    def __str__(self) -> str:
        """The line that is printed."""
        how = f"seed {self.seed}: {self.failure[:140]}" if self.seed else self.failure[-2000:]
        tried = f"{self.tried} seeds" if self.verdict == "not found" else ""
        return f"{self.verdict:12} {self.mutant.name:52} {tried}{how}"

    def row(self) -> dict[str, str | int]:
        """The row of a report in JSON."""
        return {**self._asdict(), "mutant": self.mutant.name, "module": self.mutant.module}


class Hunt(NamedTuple):
    """The seeds that reach each function, and the file of the healthy answers."""

    reached: dict[str, list[int]]
    answers: Path

    def seeds(self, mutant: Mutant) -> list[int]:
        """Return the seeds that call the function of the defect; of its module, if it has none."""
        if mutant.is_compiled:
            return sorted({seed for seeds in self.reached.values() for seed in seeds})
        name = function_of(mutant)
        if not name.endswith(":0"):
            return self.reached.get(name, [])
        inside = [seeds for key, seeds in self.reached.items() if key.startswith(name[:-1])]
        return sorted({seed for seeds in inside for seed in seeds})

    def first_failure(
        self, mutants: Sequence[Mutant], seeds: Sequence[int], environment: dict[str, str]
    ) -> dict[str, Any] | None:
        """Run ``seeds`` with the defects, up to the first that fails; return its outcome."""
        options = ["--among", ",".join(map(str, seeds)), "--answers", str(self.answers)]
        options += ["--stop-at-failure", "--seed-cpu", str(SEED_CPU_S)]
        for mutant in mutants:
            options += [] if mutant.is_compiled else ["--defect", mutant.name]
        failed = simulate(options, environment)["failed"]
        return min(failed, key=lambda one: one["seed"]) if failed else None

    def look(self, mutant: Mutant, seeds: Sequence[int], environment: dict[str, str]) -> Simulated:
        """Run one mutant through ``seeds``."""
        if not seeds:
            return Simulated(mutant, "not reached")
        try:
            failure = self.first_failure([mutant], seeds, environment)
        except (subprocess.SubprocessError, ValueError) as error:
            return Simulated(mutant, "error", failure=str(error))
        if failure is None:
            return Simulated(mutant, "not found", tried=len(seeds))
        tried = list(seeds).index(failure["seed"]) + 1
        return Simulated(mutant, "found", failure["seed"], tried, failure["failures"][0])

    def look_together(self, mutants: Sequence[Mutant]) -> Iterator[Simulated]:
        """Run mutants of several modules at once, and by themselves where a seed fails."""
        left = list(mutants)
        seeds = {mutant.name: self.seeds(mutant) for mutant in mutants}
        todo = sorted({seed for some in seeds.values() for seed in some})
        while left and todo:
            try:
                failure = self.first_failure(left, todo, {})
            except (subprocess.SubprocessError, ValueError):
                break
            if failure is None:
                yield from (Simulated(one, "not found", tried=len(seeds[one.name])) for one in left)
                return
            at = failure["seed"]
            todo = [seed for seed in todo if seed > at]
            for mutant in tuple(left):
                result = self.look(mutant, [at], {})
                if result.verdict == "found":
                    left.remove(mutant)
                    yield result
        for mutant in left:  # none is left to run, or they disturb each other
            own = seeds[mutant.name]
            yield (
                self.look(mutant, own, {}) if todo else Simulated(mutant, "not found", 0, len(own))
            )


def groups(mutants: Iterable[Mutant]) -> list[list[Mutant]]:
    """Return groups of up to eight mutants of as many modules; a compiled one is alone."""
    made: list[list[Mutant]] = []
    for mutant in mutants:
        group = next(
            (
                one
                for one in made
                if len(one) < _GROUP
                and not mutant.is_compiled
                and not any(other.is_compiled or other.module == mutant.module for other in one)
            ),
            None,
        )
        if group is None:
            made.append([mutant])
        else:
            group.append(mutant)
    return made


def hunt(
    mutants: Sequence[Mutant],
    reached: dict[str, list[int]],
    answers: Path,
    jobs: int,
    environment: Callable[[Mutant], AbstractContextManager[dict[str, str]]],
) -> Iterator[Simulated]:
    """Run each mutant through a few seeds, and those that none has shown together through all."""
    own = Hunt(reached, answers)

    def look(mutant: Mutant) -> Simulated:
        with environment(mutant) as variables:
            seeds = own.seeds(mutant)
            return own.look(mutant, seeds if mutant.is_compiled else seeds[:_FIRST], variables)

    left = []
    with ThreadPoolExecutor(jobs) as pool:
        for result in pool.map(look, mutants):
            alone = result.mutant.is_compiled or len(own.seeds(result.mutant)) <= _FIRST
            if result.verdict == "not found" and not alone:
                left.append(result.mutant)
            else:
                yield result
        for results in pool.map(lambda group: list(own.look_together(group)), groups(left)):
            yield from results


def function_of(mutant: Mutant) -> str:
    """Return file and line of the function that the defect changes, as ``--reached`` names it.

    Line 0: it is in none.
    """
    source = mutant.path.read_text()
    broken = replaced(source, mutant.text, mutant.replacement)
    place = next(
        (at for at, (old, new) in enumerate(zip(source, broken, strict=False)) if old != new),
        min(len(source), len(broken)),
    )
    line, first = source.count("\n", 0, place) + 1, 0
    for node in ast.walk(ast.parse(source)) if not mutant.is_compiled else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            since = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if since <= line <= (node.end_lineno or since):
                first = max(first, since)
    return f"{mutant.path.relative_to(ROOT / 'dynamo')}:{first}"


def simulate(options: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run seeds in a process of its own; return its report. ValueError: there is none."""
    command = [sys.executable, "tests/simulation/simulate.py", "--jobs", "1", "--json"]
    done = subprocess.run(
        [*command, "--no-shrink", *options],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        raise ValueError(f"no report: {done.stdout[-500:]}{done.stderr[-1500:]}") from None
    return report


def reach(seeds: int, answers: Path) -> dict[str, list[int]]:
    """Run ``seeds`` without a defect; return which reached each function. Writes the answers."""
    options = ["--seeds", str(seeds), "--reached", "--answers", str(answers)]
    report = simulate(options, {})
    failed = {one["seed"] for one in report["failed"]}  # they show nothing
    return {
        name: [seed for seed in some if seed not in failed]
        for name, some in report["reached"].items()
    }


def counts(results: Sequence[Simulated]) -> str:
    """Return a table of how many were found, reached and not found, or not reached, by package."""
    packages = sorted({one.mutant.package for one in results})
    lines = [f"{'package':16}" + "".join(f"{verdict:>14}" for verdict in get_args(Verdict))]
    for package in [*packages, "all"]:
        found = Counter(one.verdict for one in results if package in (one.mutant.package, "all"))
        lines.append(
            f"{package:16}" + "".join(f"{found[verdict]:14}" for verdict in get_args(Verdict))
        )
    return "\n".join(lines)


def write_seeds(results: Iterable[Simulated]) -> None:
    """Write the seeds of those that were found, and remove those of the others."""
    known = dict(SEEDS) | {one.mutant.name: one.seed for one in results if one.verdict != "error"}
    lines = [f'    "{name}": {seed},' for name, seed in sorted(known.items()) if seed]
    path = Path(mutant_seeds.__file__)
    before = path.read_text().partition("SEEDS")[0]
    path.write_text("\n".join([before + "SEEDS: dict[str, int] = {", *lines, "}", ""]))
