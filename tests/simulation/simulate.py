"""``scripts/simulate``: runs seeds, shrinks the failing ones, prints their histories."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from box import PoolEntry
    from run import Outcome
    from scenario import Scenario

__all__ = ["main"]

_NO_RANDOM_ADDRESSES = 0x0040000
_SHRINK_RUNS = 120
_PROGRESS_S = 30.0
_COUNTED = ("requests", "complete", "faults", "operations", "steps", "virtual_s")
_SHOWN_LINES = 250
_TRIES = 40
"""So often an operation is tried until one must have succeeded."""
_SCENARIO = ("profile", "seconds", "requests", "faults")
"""The options that decide what happens in the run of a seed."""
_TESTS = Path(__file__).resolve().parents[1]
_FOLDERS = ("simulation", "chaos", "mutants", "", "unit/frontend")
_NUMBERS = re.compile(r"\d+(\.\d+)?|\b[0-9a-f]{12,16}\b")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 if every promise was kept, 1 if not, 2 for wrong options."""
    sys.path[:0] = [str(_TESTS / name) for name in _FOLDERS]
    options = _options(argv)
    _same_addresses()
    import defects

    try:
        for name in options.defect:
            defects.install(name)
    except ValueError as error:
        print(f"scripts/simulate: {error}", file=sys.stderr)
        return 2
    import fake_os

    if options.answers is not None and not options.answers.exists():
        import exact_verbs

        exact_verbs.learn_verbs()  # before there are simulated clocks
    tempfile.gettempdir()  # once, since it holds a lock of the interpreter while it writes a file
    clock = time.perf_counter
    fake_os.install()
    import programs

    programs.connect()
    import call
    import run
    import scenario

    gc.collect()
    gc.freeze()
    if options.answers is None and options.defect:
        pool = _healthy_answers()
    elif options.answers is not None and options.answers.exists():
        pool = _read_answers(options.answers)
    else:
        pool = run.learn_answers(scenario.make_scenario(0, "agg"), scenario.POOL_SIZE)
        if options.answers is not None:
            options.answers.write_bytes(msgspec.json.encode((pool, call.ANSWERS)))
    simulation = Simulation(options, pool, clock)
    return simulation.run()


def _healthy_answers() -> list[PoolEntry]:
    """Learn the answers in a process without the defect."""
    with tempfile.TemporaryDirectory(prefix="simulate-") as directory:
        path = Path(directory, "answers")
        command = [sys.executable, __file__, "--seeds", "0", "--answers", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return _read_answers(path)


def _read_answers(path: Path) -> list[PoolEntry]:
    from box import PoolEntry
    from call import ANSWERS
    from history import Answer

    kind = tuple[list[PoolEntry], dict[str, Answer]]
    pool: list[PoolEntry]
    pool, answers = msgspec.json.decode(path.read_bytes(), type=kind)
    ANSWERS.update(answers)
    return pool


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    from scenario import PROFILES

    parser = argparse.ArgumentParser(
        prog="scripts/simulate",
        description="Simulate a box: real frontend, router, arbiter, planner, operators and mock "
        "workers in virtual time, with random requests, operations and faults of a seed.",
        epilog="Exit status: 0 every promise was kept, 1 a seed failed, 2 an option is wrong. "
        "A failing seed is replayed with --seed N.",
    )
    seeds = parser.add_argument_group("which runs")
    seeds.add_argument("--seeds", type=int, default=100, metavar="N", help="run N seeds (100)")
    seeds.add_argument("--first", type=int, default=1, metavar="SEED", help="the first of them (1)")
    seeds.add_argument("--seed", type=int, help="run this one, and print its history")
    seeds.add_argument("--among", type=_numbers, metavar="N,N", help="run these, in order")
    seeds.add_argument(
        "--profile", choices=tuple(PROFILES), default="", help="default: by the seed"
    )
    seeds.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="virtual seconds with requests and faults; default: 2 to 20, by the seed",
    )
    seeds.add_argument(
        "--requests",
        type=float,
        default=0.0,
        metavar="R",
        help="requests a virtual second, nearly all of 1 to 4 tokens; default: 0.5 to 4 longer "
        "ones, by the seed",
    )
    seeds.add_argument(
        "--faults",
        type=float,
        default=0.0,
        metavar="F",
        help="faults a virtual second, beside those that meet operations; default: by the seed",
    )
    seeds.add_argument("--keep", type=_numbers, metavar="N,N", help="only these steps of --seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N",
                        help="runs at once (one per core)")  # fmt: skip
    parser.add_argument("--stop-at-failure", action="store_true", help="end at a failure")
    parser.add_argument("--no-shrink", action="store_true", help="do not shrink failing seeds")
    parser.add_argument("--replay", action="store_true", help="run each seed twice: same history?")
    parser.add_argument(
        "--defect",
        action="append",
        default=[],
        metavar="NAME",
        help="put a defect in first: a name of tests/simulation/defects.py, or of scripts/mutate; "
        "repeatable",
    )
    parser.add_argument(
        "--answers",
        type=Path,
        metavar="FILE",
        help="read the complete answers of the requests from this file; write it if there is none",
    )
    parser.add_argument(
        "--seed-cpu",
        type=int,
        default=0,
        metavar="S",
        help="a seed that needs more CPU seconds fails: with a defect it may run for ever",
    )
    parser.add_argument(
        "--reached", action="store_true", help="count the functions that run: three times slower"
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    options = parser.parse_args(argv)
    if options.keep is not None and options.seed is None:
        parser.error("--keep needs --seed")
    return options


def _numbers(text: str) -> frozenset[int]:
    return frozenset(int(word) for word in text.split(",") if word)


def _same_addresses() -> None:
    """Start again without random hashes and addresses, on which the order of sets depends."""
    if os.environ.get("PYTHONHASHSEED") == "0":
        return
    ctypes.CDLL(None).personality(_NO_RANDOM_ADDRESSES)
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "CUDA_"))
    }
    environment["PYTHONHASHSEED"] = "0"
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


class Simulation:
    """Runs seeds in child processes, ``options.jobs`` at once."""

    def __init__(self, options: argparse.Namespace, pool: Any, clock: Any) -> None:
        self._options = options
        self._pool = pool
        self._clock = clock
        self._running: dict[int, tuple[int, int]] = {}  # pipe: pid, seed
        self._exiting: set[int] = set()

    def run(self) -> int:
        """Run all; return the exit status."""
        options = self._options
        started_s = self._clock()
        if options.seed is not None:
            wanted = iter([options.seed])
        else:
            some = range(options.first, options.first + options.seeds)
            wanted = iter(sorted(options.among) if options.among is not None else some)
        outcomes: list[Outcome] = []
        failed: list[Outcome] = []
        told_s = started_s
        for outcome in self._all(wanted, failed):
            outcomes.append(outcome)
            if outcome.failures:
                failed.append(outcome)
                self._report(outcome)
            elif options.seed is not None and not options.json:
                print("\n".join(outcome.history))
            else:
                outcome.history.clear()  # a long run has millions of lines
            if self._clock() - told_s > _PROGRESS_S:
                told_s = self._clock()
                print(_totals(outcomes, failed), file=sys.stderr, flush=True)
        for pid in self._exiting:
            os.waitpid(pid, 0)
        self._summary(outcomes, failed, self._clock() - started_s)
        return 1 if failed or _refused_always(outcomes) else 0

    def _all(self, seeds: Iterable[int], failed: list[Outcome]) -> Iterable[Outcome]:
        seeds = iter(seeds)
        more = True
        while more or self._running:
            while more and len(self._running) < self._options.jobs:
                seed = next(seeds, None)
                more = seed is not None and not (failed and self._options.stop_at_failure)
                if more:
                    assert seed is not None
                    self._start(self._scenario(seed))
            if self._running:
                ready, _, _ = select.select(list(self._running), [], [])
                for pipe in ready:
                    yield self._result(pipe)

    def _scenario(self, seed: int) -> Scenario:
        from scenario import Rates, make_scenario

        options = self._options
        rates = Rates(options.requests, options.faults)
        made = make_scenario(seed, options.profile, options.seconds, rates)
        return made if options.keep is None else _kept(made, options.keep)

    def _start(self, scenario: Scenario) -> int:
        pipe, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(pipe)
            _child(scenario, self._pool, write, self._options)
        os.close(write)
        self._running[pipe] = pid, scenario.seed
        return pipe

    def _result(self, pipe: int) -> Outcome:
        from run import Outcome

        pid, seed = self._running.pop(pipe)
        with os.fdopen(pipe, "rb") as file:
            data = file.read()
        if not data:
            _, status = os.waitpid(pid, 0)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
                return Outcome(seed, "?", [f"it needed over {self._options.seed_cpu} CPU seconds"])
            return Outcome(seed, "?", ["the run itself crashed: see above"])
        self._exiting.add(pid)  # which takes a while
        self._exiting -= {one for one in self._exiting if os.waitpid(one, os.WNOHANG)[0]}
        return Outcome(**json.loads(data))

    def _one(self, scenario: Scenario) -> Outcome:
        return self._result(self._start(scenario))

    def _report(self, outcome: Outcome) -> None:
        options = self._options
        if options.json:
            return
        print(f"\nseed {outcome.seed} ({outcome.profile}) failed:")
        for failure in outcome.failures[:10]:
            print(f"  {failure}")
        scenario = self._scenario(outcome.seed)
        if not options.no_shrink and not self._running:
            scenario, outcome = self._shrink(scenario, outcome)
        if options.seed is None and options.no_shrink:
            return
        print("steps:")
        for step in scenario.steps:
            print(f"  {step}")
        print("history:")
        for line in outcome.history[-_SHOWN_LINES:]:
            if "Selected worker" not in line:
                print(f"  {line}")
        given: dict[str, Any] = {name: getattr(options, name) for name in _SCENARIO}
        if scenario.steps != self._scenario(outcome.seed).steps or options.keep is not None:
            given["keep"] = ",".join(str(step.number) for step in scenario.steps)
        again = "".join(f" --{name} {value}" for name, value in given.items() if value)
        again += "".join(f" --defect {name}" for name in options.defect)
        print(f"again: scripts/simulate --seed {outcome.seed}{again}")

    def _shrink(self, scenario: Scenario, outcome: Outcome) -> tuple[Scenario, Outcome]:
        """Leave out steps as long as the same promise is broken."""
        wanted, runs = _kind(outcome), 0
        size = max(1, len(scenario.steps) // 2)
        while runs < _SHRINK_RUNS:
            at, before = 0, len(scenario.steps)
            while at < len(scenario.steps) and runs < _SHRINK_RUNS:
                left = scenario.steps[:at] + scenario.steps[at + size :]
                tried = replace(scenario, steps=left)
                found, runs = self._one(tried), runs + 1
                if _kind(found) & wanted:
                    scenario, outcome = tried, found
                else:
                    at += size
            if size == 1 and len(scenario.steps) == before:
                break
            size = max(1, size // 2)
        print(f"  shrunk to {len(scenario.steps)} steps in {runs} runs:")
        for failure in outcome.failures[:10]:
            print(f"  {failure}")
        return scenario, outcome

    def _summary(self, outcomes: list[Outcome], failed: list[Outcome], took_s: float) -> None:
        if self._options.json:
            rows = [{**asdict(one), "history": []} for one in failed]
            totals = {name: _total(outcomes, name) for name in _COUNTED}
            found: dict[str, Any] = {"judged": _judged(outcomes)}
            found["refused_always"] = _refused_always(outcomes)
            if self._options.reached:
                found["reached"] = _reached(outcomes)
            print(json.dumps({"seeds": len(outcomes), **totals, **found, "failed": rows}, indent=2))
            return
        print(
            f"{_totals(outcomes, failed)} in {took_s:.0f} s"
            + (": " + ", ".join(str(one.seed) for one in failed) if failed else "")
        )
        print(_judged(outcomes))
        print(_met(outcomes))
        quiet, verbs = (sum(one.shown[at] for one in outcomes) for at in (0, 1))
        print(f"{verbs} verbs printed what is so, {quiet} of them while nothing changed")
        if self._options.reached:
            from reached import report

            print(report(name for outcome in outcomes for name in outcome.reached))
        for text in _refused_always(outcomes):
            print(text)


def _total(outcomes: list[Outcome], name: str) -> int:
    total: float = sum(getattr(one, name) for one in outcomes)
    return round(total)


def _totals(outcomes: list[Outcome], failed: list[Outcome]) -> str:
    count = {name: _total(outcomes, name) for name in _COUNTED}
    return (
        f"{len(outcomes)} seeds: {count['virtual_s']} virtual seconds, "
        f"{count['requests']} requests ({count['complete']} complete), {count['faults']} faults, "
        f"{count['operations']} operations; {len(failed)} failed"
    )


def _refused_always(outcomes: list[Outcome]) -> list[str]:
    """Return the operations that were tried often and never did what they are for."""
    ended: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    for outcome in outcomes:
        for verb, (ends, tries) in outcome.verbs.items():
            ended[verb] += ends
            tried[verb] += tries
    return [
        f"{verb} was tried {count} times and never ended as it should"
        for verb, count in tried.items()
        if count >= _TRIES and not ended[verb]
    ]


def _judged(outcomes: list[Outcome]) -> str:
    """How many requests had a certain outcome, and which; the others might end in several ways."""
    from judge import EITHER

    counts: Counter[str] = Counter()
    for outcome in outcomes:
        counts.update(outcome.judged)
    total = sum(counts.values())
    if not total:
        return "no request was judged"
    strict = total - sum(count for kind, count in counts.items() if kind.startswith(EITHER))
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    return f"{100 * strict / total:.1f} % of {total} requests were judged strictly: {kinds}"


def _reached(outcomes: list[Outcome]) -> dict[str, list[int]]:
    """Return the seeds that reached each function."""
    seeds: defaultdict[str, list[int]] = defaultdict(list)
    for outcome in sorted(outcomes, key=lambda one: one.seed):
        for name in outcome.reached:
            seeds[name].append(outcome.seed)
    return seeds


def _met(outcomes: list[Outcome]) -> str:
    """How many rows of docs/guarantees.md some run met, and which none did."""
    from promises import ROWS

    seen = {name for outcome in outcomes for name in outcome.met}
    missed = ", ".join(name for name in ROWS if name not in seen)
    met = f"{len(seen)} of {len(ROWS)} rows of docs/guarantees.md were met"
    return f"{met}; not met: {missed}" if missed else met


def _kept(scenario: Scenario, numbers: frozenset[int]) -> Scenario:
    return replace(scenario, steps=tuple(s for s in scenario.steps if s.number in numbers))


def _kind(outcome: Outcome) -> set[str]:
    """The failures without their numbers."""
    return {_NUMBERS.sub("#", failure)[:60] for failure in outcome.failures}


def _child(scenario: Scenario, pool: Any, pipe: int, options: argparse.Namespace) -> None:
    """Run in the child: send the outcome as JSON, exit."""
    import fake_os

    if options.seed_cpu:
        resource.setrlimit(resource.RLIMIT_CPU, (options.seed_cpu, options.seed_cpu))
    gc.disable()  # a run is short, and the objects of dead processes must not end with effects
    try:
        from reached import Reached
        from run import run_scenario

        reached = Reached() if options.reached else None
        if options.replay:
            outcome = _twice(scenario, pool)
        else:
            outcome = run_scenario(scenario, pool, reached)
        data = json.dumps(asdict(outcome)).encode()
        fake_os.use(None)
        view = memoryview(data)
        while view:
            view = view[os.write(pipe, view) :]
    except BaseException:  # noqa: BLE001 - the child ends
        fake_os.use(None)
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def _twice(scenario: Scenario, pool: Any) -> Outcome:
    """Run it in two children of the same state, one after the other; a difference is a failure."""
    import fake_os
    from run import Outcome, run_scenario

    go, run_second = os.pipe()
    pipes = [os.pipe(), os.pipe()]
    pids = []
    for number, (_, write) in enumerate(pipes):
        pid = os.fork()
        if pid == 0:
            if number:
                os.close(pipes[0][1])
                os.read(go, 1)
            outcome = run_scenario(scenario, pool)
            fake_os.use(None)
            with os.fdopen(write, "wb") as file:
                file.write(json.dumps(asdict(outcome)).encode())
            os._exit(0)
        pids.append(pid)
    found = []
    for (read, write), pid in zip(pipes, pids, strict=True):
        os.close(write)
        with os.fdopen(read, "rb") as file:
            found.append(Outcome(**json.loads(file.read())))
        os.waitpid(pid, 0)
        os.write(run_second, b"1")
    first, second = found
    for number, (one, other) in enumerate(zip(first.history, second.history, strict=False)):
        if one != other:
            second.failures.append(f"another history from line {number}: {one!r}, {other!r}")
            break
    return second


if __name__ == "__main__":
    sys.exit(main())
