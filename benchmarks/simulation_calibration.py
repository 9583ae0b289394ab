r"""Compare the planner's simulation with the replay of NVIDIA Dynamo 1.6, as a Markdown table.

    python -m venv /tmp/nvidia && /tmp/nvidia/bin/pip install ai-dynamo-runtime
    python benchmarks/simulation_calibration.py --trace mooncake_conversation_trace.jsonl \
        --python /tmp/nvidia/bin/python --policy fixed:5 --policy load+sla --start-up 180

Both replay the same requests at the same times (turns do not wait for answers), with the published
timing of Dynamo's mocker, its KV router, and the same engine limits. A policy decides in both: in
Dynamo's replay it sees each second what that reports, which is not which workers compute prompts.
One row is a policy: attained, GPU-hours, TTFT and ITL of ours, then of Dynamo's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from dynamo.bench.stats import percentile
from dynamo.bench.trace import read_trace
from dynamo.config.planner import PlannerSettings
from dynamo.planner.capacity.observation import Observation, Pool, Pull, Traffic, WorkerLoad
from dynamo.planner.policies.base import Policy
from dynamo.planner.policies.factory import named_policy
from dynamo.serve.graph.facts import DECODE
from dynamo_lab.simulation.cluster import ReplayCluster
from dynamo_lab.simulation.request import (
    BLOCK_TOKENS,
    ReplayRequest,
    from_trace,
    parse_pattern,
    warp,
)
from dynamo_lab.simulation.result import ReplayPlanner
from dynamo_lab.simulation.service_model import ReplaySetup, VirtualClock, service_model

CHILD = Path(__file__).with_name("dynamo_replay.py")
SETTINGS = PlannerSettings(ttft_ms=2000.0, itl_ms=50.0)
TICK_S = 1.0


class Served(NamedTuple):
    """TTFT and mean ITL of one request."""

    ttft_s: float
    itl_s: float


@dataclass(slots=True)
class ReplayTicks:
    """Asks ``policy`` for the workers, at the ticks of Dynamo's replay."""

    policy: Policy
    setup: ReplaySetup
    gpu_s: float = 0.0
    _pulls: list[Pull] = field(default_factory=list)
    _sums: dict[str, float] = field(default_factory=dict)
    _before: Sequence[int] = ()

    def workers(self, tick: dict[str, Any]) -> int:
        """Return the workers to have after ``tick``."""
        pool = Pool(
            ready=tick["active_decode_count"],
            starting=tick["starting_decode_count"],
            draining=tick["draining_decode_count"],
        )
        self.gpu_s += pool.gpus * TICK_S
        now_s = tick["now_ms"] / 1000
        loads = tuple(map(self._load, tick["decode_fpm_snapshots"]))
        self._pulls.append(Pull(at_s=now_s, decode=loads))
        self._add(tick["traffic"])
        if len(self._pulls) * TICK_S < self.policy.interval_s:
            return pool.workers
        wanted = self._decide(pool, tick, now_s)
        self._pulls, self._sums, self._before = [], {}, tick["active_decode_ids"]
        return wanted

    def _load(self, reported: dict[str, Any]) -> WorkerLoad:
        # Prompt tokens are of the last iteration, so they say nothing about a share of the time.
        return WorkerLoad(
            worker_id=reported["worker_id"],
            kv_used_blocks=reported["sum_decode_kv_tokens"] + reported["sum_prefill_kv_tokens"],
            kv_total_blocks=self.setup.model.kv_tokens,
            running=reported["num_prefill_requests"] + reported["num_decode_requests"],
            waiting=reported["num_queued_prefill"],
        )

    def _add(self, traffic: dict[str, Any]) -> None:
        counted = {
            "arrived": (1.0, traffic["num_req"]),
            "isl": (traffic["avg_isl"], traffic["shape_count"]),
            "osl": (traffic["avg_osl"], traffic["shape_count"]),
            "ttft": (traffic["avg_ttft_ms"], traffic["ttft_count"]),
            "itl": (traffic["avg_itl_ms"], traffic["itl_count"]),
        }
        for name, (mean, number) in counted.items():
            self._sums[name] = self._sums.get(name, 0.0) + (mean or 0.0) * number
            self._sums[f"{name}s"] = self._sums.get(f"{name}s", 0.0) + number

    def _mean(self, name: str) -> float | None:
        number = self._sums[f"{name}s"]
        return self._sums[name] / number if number else None

    def _decide(self, pool: Pool, tick: dict[str, Any], now_s: float) -> int:
        reported = tick["decode_fpm_snapshots"]
        queued = sum(r["num_queued_prefill"] + r["num_prefill_requests"] for r in reported)
        traffic = Traffic(
            duration_s=len(self._pulls) * TICK_S,
            arrived=int(self._sums["arrived"]),
            finished=int(self._sums["osls"]),
            isl=self._mean("isl"),
            osl=self._mean("osl"),
            ttft_ms=self._mean("ttft"),
            itl_ms=self._mean("itl"),
            queued=queued,
            inflight=queued + sum(r["num_decode_requests"] for r in reported),
        )
        decision = self.policy.decide(
            Observation(
                now_s=now_s,
                interval_s=self.policy.interval_s,
                decode=pool,
                traffic=traffic,
                pulls=tuple(self._pulls),
                max_gpus=self.setup.max_gpus,
                changed=tick["active_decode_ids"] != self._before,
            )
        )
        wanted = decision.pools[0].wanted
        # A pool changes in one direction at a time, as with our planner.
        turning = pool.draining if wanted > pool.workers else pool.starting
        failed = wanted != pool.workers and turning
        self.policy.applied(decision, {DECODE} if failed else ())
        return pool.workers if failed else wanted


def ours(policy: Policy, requests: Sequence[ReplayRequest], setup: ReplaySetup) -> Row:
    clock = VirtualClock()
    cluster = ReplayCluster(clock, setup, requests)
    ReplayPlanner(clock, cluster, policy)
    while not cluster.complete:
        clock.run_next()
    for pool in cluster.pools.values():
        pool.finish()
    served = [Served(r.ttft_s, r.itl_s) for r in cluster.ended if not r.rejected]
    return Row(served, sum(pool.gpu_s for pool in cluster.pools.values()) / 3600)


def dynamos(policy: Policy, trace: Path, setup: ReplaySetup, python: Path, block_size: int) -> Row:
    report = trace.with_name("report.jsonl")
    options = {
        "workers": setup.workers,
        "kv_tokens": setup.model.kv_tokens,
        "block_size": block_size,
        "start_up_s": setup.start_up_s,
        "tick_s": TICK_S,
    }
    ticks = ReplayTicks(policy, setup)
    with subprocess.Popen(
        [str(python), "-P", str(CHILD), str(trace), str(report), json.dumps(options)],
        env={"PATH": os.defpath, "DYN_LOG": "off"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as child:
        assert child.stdin and child.stdout
        for line in child.stdout:
            if line.startswith("{"):
                print(ticks.workers(json.loads(line)), file=child.stdin, flush=True)
    if child.returncode:
        raise SystemExit(f"Dynamo's replay failed with status {child.returncode}")
    rows = map(json.loads, report.read_text().splitlines())
    served = [Served(r["ttft_ms"] / 1000, (r["itl_ms"] or 0.0) / 1000) for r in rows]
    return Row(served, ticks.gpu_s / 3600)


class Row(NamedTuple):
    served: Sequence[Served]
    gpu_hours: float

    def cells(self) -> list[str]:
        ttfts = sorted(request.ttft_s for request in self.served)
        itls = sorted(request.itl_s for request in self.served if request.itl_s)
        kept = sum(
            1000 * r.ttft_s <= SETTINGS.ttft_ms and 1000 * r.itl_s <= SETTINGS.itl_ms
            for r in self.served
        )
        return [
            f"{kept / len(self.served):.1%} at {self.gpu_hours:.2f}",
            f"{fmean(ttfts):.2f}, {percentile(ttfts, 0.5):.2f}, {percentile(ttfts, 0.99):.1f} s",
            f"{1000 * fmean(itls):.1f}, {1000 * percentile(itls, 0.99):.0f} ms",
        ]


def write_trace(requests: Iterable[ReplayRequest], path: Path) -> None:
    """Write a trace whose blocks are exactly those that our simulation may reuse."""
    fresh = count(10**9)
    with path.open("w") as file:
        for request in requests:
            blocks = -(-request.isl // BLOCK_TOKENS)
            ids = [*request.blocks, *(next(fresh) for _ in range(blocks - len(request.blocks)))]
            line = {
                "timestamp": 1000 * request.at_s,
                "input_length": request.isl,
                "output_length": request.osl,
                "hash_ids": ids,
            }
            print(json.dumps(line), file=file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake conversation trace")
    parser.add_argument("--python", type=Path, required=True, help="has ai-dynamo-runtime")
    parser.add_argument("--policy", action="append", help="default: fixed:3 to fixed:7")
    parser.add_argument("--warp", default="sine:0.2-2.2:1200", help="rate of the trace over time")
    parser.add_argument("--start-up", type=float, default=60.0, help="seconds")
    parser.add_argument("--kv-tokens", type=int, default=350_016, help="KV cache of a worker")
    parser.add_argument("--block-size", type=int, default=64, help="of Dynamo's engine")
    options = parser.parse_args()
    found = warp(from_trace(read_trace(options.trace)), parse_pattern(options.warp, "--warp"))
    requests = [replace(request, parent=None) for request in found]
    model = replace(service_model("mocker"), kv_tokens=options.kv_tokens)
    print("| policy | ours | TTFT mean, p50, p99 | ITL mean, p99 | Dynamo's | TTFT | ITL |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.jsonl"
        write_trace(requests, trace)
        for name in options.policy or [f"fixed:{workers}" for workers in range(3, 8)]:
            kind, _, argument = name.partition(":")
            workers = int(argument) if kind == "fixed" else 4
            setup = ReplaySetup(model=model, start_up_s=options.start_up, workers=workers)
            here = ours(named_policy(name, SETTINGS, False), requests, setup)
            policy = named_policy(name, SETTINGS, False)
            there = dynamos(policy, trace, setup, options.python, options.block_size)
            print(f"| {name} | {' | '.join([*here.cells(), *there.cells()])} |", flush=True)


if __name__ == "__main__":
    main()
