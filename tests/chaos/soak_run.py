"""Runs a deployment for hours under a trace and faults, and reports whether anything grows.

``scripts/soak`` starts it; docs/guarantees.md explains the report.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
from aftermath import check_gauges, tracebacks
from chaos_run import RECOVERY_TIMEOUT_S, keep_logs, recovered, small_disk, stopped
from chaos_world import World
from fault_actions import SPACING_S, FaultActions
from fault_schedule import FAULTS, LASTING_FAULTS, make_schedule, read_weights
from history import Request
from serving import ROOT
from soak_judge import recent
from soak_load import TraceLoad
from soak_report import SoakOptions, SoakReport, as_markdown, trends_of
from soak_samples import Sample, Sampler, directory_size

__all__ = ["main", "run_soak"]

PROBE = Path(__file__).with_name("probe")
POLL_S = 0.1
JUDGED_EVERY_S = 5.0
ROLES = {"dynamo.frontend": "frontend", "dynamo.planner": "planner", "dynamo.mocker": "worker"}
PAGES = ("frontend", "planner", "elder")


class Soak:
    """One run in ``directory``, where ``samples.jsonl`` and what broke stay."""

    def __init__(self, options: SoakOptions, directory: Path) -> None:
        self.options = options
        self.directory = directory
        self.report = SoakReport(options)
        self.stopping = asyncio.Event()
        self._started_s = time.monotonic()
        self._probe = directory / "probe"
        self._probe.mkdir(exist_ok=True)
        self._sampler = Sampler(self._probe)
        self._first_names: dict[str, set[str]] = {}
        self._samples: dict[str, list[Sample]] = {}
        self._workers: set[str] = set()

    def clock(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    async def run(self) -> SoakReport:
        """Run until the time is over, or ``stopping`` is set."""
        with small_disk(self.directory / "state") as disk, self._files():
            world = self.world = World(self.directory, "soak", "", self.clock, POLL_S)
            world.serving.env |= {
                "PYTHONPATH": os.pathsep.join(
                    [str(PROBE), *filter(None, [os.environ.get("PYTHONPATH")])]
                ),
                "DYN_TEST_PROBE": str(self._probe),
            }
            spacing_s = min(SPACING_S, 30 / self.options.faults_per_minute)
            actions = FaultActions(world, disk, self.report.judge.add, spacing_s)
            try:
                await world.start()
                watch = asyncio.create_task(world.watch())
                if not await world.until(world.complete, RECOVERY_TIMEOUT_S):
                    raise RuntimeError(f"not ready: {world.lives}")
                await self._storm(actions)
                actions.heal()
                self.report.problems += actions.violations
                self.report.problems += await recovered(world)
                self.report.problems += await check_gauges(world)
                watch.cancel()
                self.report.problems += await stopped(world)
                self.report.tracebacks = tracebacks(world.run_directory / "logs")
            finally:
                actions.heal()
                world.serving.close()
                keep_logs(world, self.directory)
                self._keep(self.report.judge.finish(world.lives))
                self._conclude(actions)
        return self.report

    @contextlib.contextmanager
    def _files(self) -> Iterator[None]:
        with (
            (self.directory / "samples.jsonl").open("w") as self._sample_file,
            (self.directory / "broken.jsonl").open("w") as self._broken_file,
        ):
            yield

    async def _storm(self, actions: FaultActions) -> None:
        options = self.options
        seconds = options.hours * 3600
        self._load = load = TraceLoad(
            options.trace,
            self.world.target,
            options.seed,
            self.clock,
            self.report.judge.add,
            speed=options.speed,
            block_tokens=options.block_tokens,
            output_scale=options.output_scale,
            model=ROOT / "examples/model",
        )
        offset_s = self.clock()
        schedule = [
            planned._replace(at_s=planned.at_s + offset_s + min(5.0, seconds / 10))
            for planned in make_schedule(
                options.seed,
                seconds - min(20.0, seconds / 4),
                options.faults_per_minute / 60,
                options.faults,
            )
        ]
        async with asyncio.TaskGroup() as group:
            running = group.create_task(load.run())
            faults = group.create_task(actions.run(schedule))
            beside = [group.create_task(self._sample()), group.create_task(self._judge())]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.stopping.wait()
            faults.cancel()
            load.stop()
            await running
            for task in beside:
                task.cancel()
        lasted_s = self.clock() - offset_s
        self.report.facts |= {
            "seconds": round(lasted_s),
            "trace_hours": round(lasted_s * options.speed / 3600, 2),
            "sent": load.sent,
            "most_late_s": round(load.most_late_s, 2),
        }

    async def _judge(self) -> None:
        while True:
            await asyncio.sleep(JUDGED_EVERY_S)
            self._workers |= {life.name for life in self.world.lives if life.role == "worker"}
            self.world.lives = recent(self.world.lives, self.clock())
            self._keep(self.report.judge.settle(self.clock(), self.world.lives))

    def _keep(self, broken: list[Request]) -> None:
        for record in broken[:20]:
            self._broken_file.write(msgspec.json.encode(record).decode() + "\n")
        self._broken_file.flush()

    # -- samples

    async def _sample(self) -> None:
        number = 0
        while True:
            at_s = self.clock()
            for role, pid in self._processes():
                # The arbiter holds the frontend's listener; it has no page of its own.
                page = role in PAGES or (role == "worker" and number % 6 == 0)
                one = await self._sampler.sample(at_s, role, pid, page)
                if one is not None:
                    if role == "arbiter":
                        one.files, one.bytes = directory_size(self.world.state)
                    self._add(one)
            if number % 6 == 0:
                self._progress()
            number += 1
            await asyncio.sleep(max(0.0, at_s + self.options.sample_s - self.clock()))

    def _processes(self) -> Iterator[tuple[str, int]]:
        yield "soak", os.getpid()
        yield "guard", self.world.serving.pid
        arbiter = self.world.arbiter
        if not arbiter:
            return
        yield "arbiter", arbiter
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(arbiter).children():
                with contextlib.suppress(psutil.Error):
                    words = child.cmdline()
                    role = next((ROLES[word] for word in words if word in ROLES), "")
                    if "elder" in words:
                        role = "elder"
                    if role:
                        yield role, child.pid

    def _add(self, one: Sample) -> None:
        self._sample_file.write(msgspec.json.encode(one).decode() + "\n")
        self._sample_file.flush()
        if one.role != "worker":
            self._samples.setdefault(f"{one.role} {one.pid}", []).append(one)
            names = self._sampler.names.get(f"{one.role} {one.pid}")
            if names and self.clock() > self.options.warm_up_s:
                self._first_names.setdefault(f"{one.role} {one.pid}", names)

    def _progress(self) -> None:
        verdict = self.report.judge.verdict
        rss = " ".join(
            f"{name.split()[0]} {one[-1].rss // 1024}" for name, one in self._samples.items()
        )
        print(
            f"soak: {self.clock() / 60:.0f} min, {self._load.sent} requests, "
            f"{sum(self.report.judge.faults.values())} faults, {len(verdict.violations)} broken, "
            f"{self._load.in_flight} in flight, {self._load.most_late_s:.1f} s late at most, "
            f"RSS MiB: {rss}",
            file=sys.stderr,
            flush=True,
        )

    def _conclude(self, actions: FaultActions) -> None:
        report = self.report
        for role, samples in self._samples.items():
            used_s = samples[-1].cpu_s - samples[0].cpu_s
            report.facts.setdefault("cpu_s", {})[role] = round(used_s, 1)
            report.trends[role] = trends_of(samples, self.options.warm_up_s)
        for role, before in self._first_names.items():
            if new := sorted(self._sampler.names[role] - before):
                report.new_series[role] = new[:50]
        report.facts |= {
            "workers_started": len(self._workers),
            "faults_without_target": actions.missed,
            "impossible": actions.impossible,
        }


async def run_soak(options: SoakOptions, directory: Path) -> SoakReport:
    """Run in ``directory``; SIGINT and SIGTERM end it early, with a report."""
    soak = Soak(options, directory)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, soak.stopping.set)
    return await soak.run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak from the command line; return 1 after a violation."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0, help="of wall clock (1)")
    parser.add_argument("--speed", type=float, default=10.0, help="of the trace (10)")
    parser.add_argument("--faults-per-minute", type=float, default=12.0, help="(12)")
    parser.add_argument("--sample-seconds", type=float, default=10.0, help="between samples (10)")
    parser.add_argument("--warm-up", type=float, default=300.0, help="seconds not judged (300)")
    parser.add_argument("--block-tokens", type=int, default=32, help="of a block of the trace (32)")
    parser.add_argument("--output-scale", type=float, default=0.25, help="of answers (0.25)")
    parser.add_argument(
        "--trace", type=Path, default=SoakOptions.trace, help="to repeat (a sample)"
    )
    parser.add_argument(
        "--faults",
        default=",".join(LASTING_FAULTS),
        help="kinds, comma separated, each with its share after a colon if it has one of its own, "
        'or "all"; else those that the measured processes survive',
    )
    parser.add_argument("--seed", type=int, help="of load and faults; random without it")
    parser.add_argument("--directory", type=Path, help="keep samples, logs and report here")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    flags = parser.parse_args(arguments)
    try:
        faults = FAULTS if flags.faults == "all" else read_weights(flags.faults)
    except ValueError as error:
        parser.error(f"--faults: {error}")
    options = SoakOptions(
        seed=secrets.randbelow(1 << 31) if flags.seed is None else flags.seed,
        hours=flags.hours,
        speed=flags.speed,
        faults_per_minute=flags.faults_per_minute,
        sample_s=flags.sample_seconds,
        warm_up_s=flags.warm_up,
        block_tokens=flags.block_tokens,
        output_scale=flags.output_scale,
        trace=flags.trace,
        faults=faults,
    )
    print(f"soak: seed {options.seed}", file=sys.stderr, flush=True)
    directory = flags.directory or Path(tempfile.mkdtemp(prefix="soak-"))
    directory.mkdir(exist_ok=True)
    report = asyncio.run(run_soak(options, directory))
    text = as_markdown(report)
    (directory / "result.md").write_text(text)
    (directory / "result.json").write_text(json.dumps(report.as_json(), indent=1))
    print(json.dumps(report.as_json(), indent=1) if flags.json else text)
    print(f"soak: samples, logs and report in {directory}", file=sys.stderr)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
