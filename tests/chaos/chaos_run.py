"""Runs a deployment under load and faults, and reports whether it kept the promise.

``scripts/chaos`` starts it; docs/guarantees.md explains the promise and the report.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aftermath import cancel_latencies, check_gauges, count_lines, tracebacks
from chaos_load import Load, ask_answers, make_pool
from chaos_world import PROFILES, World
from fault_actions import FaultActions
from fault_schedule import make_schedule
from history import History, read
from small_disk import SmallDisk
from validator import Verdict, Violation, validate

__all__ = [
    "RECOVERY_TIMEOUT_S",
    "SUCCESS_RATE",
    "ChaosOptions",
    "ChaosReport",
    "keep_logs",
    "main",
    "recovered",
    "run_chaos",
    "small_disk",
    "stopped",
]

SUCCESS_RATE = 0.999
CANCEL_LIMIT_S = 0.1
CANCEL_ROUNDS = 5
RECOVERY_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """What to run."""

    seed: int
    seconds: float = 120.0
    profile: str = "agg"
    clients: int = 48
    faults_per_second: float = 1.0
    frontend: str = ""


@dataclass
class ChaosReport:
    """What came of it. ``problems`` are the broken promises that no single request shows."""

    options: ChaosOptions
    verdict: Verdict
    problems: list[Violation] = field(default_factory=list)
    missed: int = 0
    impossible: dict[str, str] = field(default_factory=dict)
    cancel_s: list[float] = field(default_factory=list)
    tracebacks: dict[str, int] = field(default_factory=dict)

    @property
    def violations(self) -> list[Violation]:
        """Every broken promise."""
        found = [*self.verdict.violations, *self.problems]
        if self.verdict.success_rate < SUCCESS_RATE:
            rate = f"{self.verdict.success_rate:.3%} of {self.verdict.counted}"
            found.append(Violation("deployment", "success rate", rate))
        return found

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        verdict = self.verdict
        return {
            "seed": self.options.seed,
            "profile": self.options.profile,
            "seconds": self.options.seconds,
            "requests": verdict.requests,
            "refused": verdict.refused,
            "complete": verdict.complete,
            "cancelled": verdict.cancelled,
            "frontend_lost": verdict.frontend_lost,
            "no_worker": verdict.no_worker,
            "workers_lost": verdict.workers_lost,
            "counted": verdict.counted,
            "succeeded": verdict.succeeded,
            "success_rate": round(verdict.success_rate, 5),
            "tokens": verdict.tokens,
            "longest_gap_s": round(verdict.longest_gap_s, 2),
            "failures": dict(verdict.failures),
            "faults": sum(verdict.faults.values()),
            "faults_by_kind": dict(sorted(verdict.faults.items())),
            "faults_without_target": self.missed,
            "impossible": self.impossible,
            "cancel_ms": [round(seconds * 1e3) for seconds in self.cancel_s],
            "tracebacks": self.tracebacks,
            "violations": [violation._asdict() for violation in self.violations],
            "failed": verdict.failed,
        }


async def run_chaos(options: ChaosOptions, directory: Path) -> ChaosReport:
    """Run in ``directory``, where ``history.jsonl`` and the logs stay."""
    started_s = 0.0

    def clock() -> float:
        return time.monotonic() - started_s

    started_s = time.monotonic()
    with small_disk(directory / "state") as disk:
        world = World(directory, options.profile, options.frontend, clock)
        history = History(directory / "history.jsonl")
        actions = FaultActions(world, disk, history.add)
        try:
            await world.start()
            pool = await ask_answers(world.target, make_pool(options.seed), clock)
            watch = asyncio.create_task(world.watch())
            if not await world.until(world.complete, RECOVERY_TIMEOUT_S):
                raise RuntimeError(f"not ready: {world.lives}")
            load = Load(world.target, pool, options.seed, clock, history.add)
            await _storm(options, actions, load, clock)
            actions.heal()
            report = ChaosReport(options, Verdict(), missed=actions.missed)
            report.impossible = actions.impossible
            report.problems += actions.violations
            report.problems += await recovered(world)
            report.problems += await check_gauges(world)
            report.cancel_s = await cancel_latencies(world, pool, CANCEL_ROUNDS)
            middle_s = sorted(report.cancel_s)[CANCEL_ROUNDS // 2]
            if middle_s > CANCEL_LIMIT_S:
                detail = f"engines idle {middle_s * 1e3:.0f} ms after their clients left"
                report.problems.append(Violation("deployment", "cancelled late", detail))
            report.problems += await check_gauges(world)
            watch.cancel()
            report.problems += await stopped(world)
            report.tracebacks = tracebacks(world.run_directory / "logs")
            deaths = count_lines(world.run_directory / "logs", "has the fatal seed")
            if deaths > 2 * actions.fatal_requests:
                detail = f"{actions.fatal_requests} requests killed {deaths} workers"
                report.problems.append(Violation("deployment", "fatal request", detail))
        finally:
            actions.heal()
            world.serving.close()
            for life in world.lives:
                history.add(life)
            history.close()
            keep_logs(world, directory)
        report.verdict = validate(read(history.path), world.lives)
    return report


async def _storm(
    options: ChaosOptions, actions: FaultActions, load: Load, clock: Callable[[], float]
) -> None:
    """Load for the whole time, faults from the first to the last second but some."""
    offset_s = clock()
    schedule = [
        planned._replace(at_s=planned.at_s + offset_s + 1.0)
        for planned in make_schedule(
            options.seed, max(1.0, options.seconds - 3.0), options.faults_per_second
        )
    ]
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(options.clients))
        await actions.run(schedule)
        await asyncio.sleep(max(0.0, offset_s + options.seconds - clock()))
        load.stop()


async def recovered(world: World) -> list[Violation]:
    """All workers are registered again, and a frontend serves them."""
    if await world.until(world.complete, RECOVERY_TIMEOUT_S) and await world.healthy():
        return []
    found = f"{len(world.live_workers())} of {world.workers} workers after {RECOVERY_TIMEOUT_S:g} s"
    return [Violation("deployment", "not recovered", found)]


async def stopped(world: World) -> list[Violation]:
    """A stop ends with status 0 and leaves nothing."""
    found = []
    assert world.serving.process is not None
    world.serving.process.terminate()
    try:
        status = await world.ended()
        if status != 0:
            found.append(Violation("deployment", "exit status", f"{status} instead of 0"))
        if left := world.leftovers():
            found.append(Violation("deployment", "left on disk", left))
    except AssertionError as error:
        found.append(Violation("deployment", "left running", str(error)[:2000]))
    return found


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[SmallDisk]:
    """A small file system at ``path``, unmounted at the end."""
    disk = SmallDisk(path)
    try:
        yield disk
    finally:
        disk.close()


def keep_logs(world: World, directory: Path) -> None:
    """Copy logs and output of the deployment to ``directory``."""
    (directory / "serve.log").write_text(world.serving.text() + "\n")
    logs = world.run_directory / "logs"
    if logs.is_dir():
        shutil.copytree(logs, directory / "logs", dirs_exist_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run chaos from the command line; return 1 after a violation."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long (120)")
    parser.add_argument("--seed", type=int, help="of load and faults; random without it")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="agg")
    parser.add_argument("--clients", type=int, default=48, help="requests at a time (48)")
    parser.add_argument("--rate", type=float, default=1.0, help="faults a second (1)")
    parser.add_argument("--migration-limit", type=int, help="of the frontend")
    parser.add_argument("--directory", type=Path, help="keep history and logs here")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    flags = parser.parse_args(arguments)
    limit = flags.migration_limit
    options = ChaosOptions(
        seed=secrets.randbelow(1 << 31) if flags.seed is None else flags.seed,
        seconds=flags.seconds,
        profile=flags.profile,
        clients=flags.clients,
        faults_per_second=flags.rate,
        frontend="" if limit is None else f"\n  migration-limit: {limit}",
    )
    print(f"chaos: seed {options.seed}", file=sys.stderr, flush=True)
    directory = flags.directory or Path(tempfile.mkdtemp(prefix="chaos-"))
    directory.mkdir(exist_ok=True)
    report = asyncio.run(run_chaos(options, directory))
    if flags.json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        for key, value in report.as_json().items():
            print(f"{key:22} {value}")
    if not report.violations and flags.directory is None:
        shutil.rmtree(directory)
    else:
        print(f"chaos: history and logs in {directory}", file=sys.stderr)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
