"""The published experiment of the load planner, in virtual time: a sine load on 8 GPUs.

    python benchmarks/planner_sine.py [--markdown OUT.md] [--plot OUT.png] [--json OUT.json]

Source: the planner benchmark in Dynamo 0.2's documentation. 600 s, 5 to 20 requests/s with a
period of 150 s, prompts of 3,000 and answers of 150 tokens, a model of 8 billion parameters with
one GPU per worker. The planner starts with one prefill and one decode worker and decides every
10 s; the baseline is a fixed 2P2D. Published: 1.5 x speed-up with 7.4 % fewer GPUs. Neither the
speed of a worker nor the time that it takes to start is published, so both are varied here.

Speed-up is the baseline's mean request duration, from arrival to last token, over the policy's.
``planner_sine_live.py`` runs the same experiment on mockers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from dynamo.config.planner import PlannerSettings
from dynamo.mocker.timing import Transfer
from dynamo.planner.policies.factory import named_policy
from dynamo_lab.simulation.cluster import ReplayCluster
from dynamo_lab.simulation.request import ReplayRequest, generate, sine
from dynamo_lab.simulation.result import ReplayPlanner
from dynamo_lab.simulation.service_model import (
    ReplaySetup,
    RooflineTime,
    ServiceModel,
    VirtualClock,
)

LOW, HIGH, PERIOD_S, DURATION_S, ISL, OSL = 5, 20, 150, 600, 3000, 150
BASELINE = "fixed:2x2"
PUBLISHED = PlannerSettings(
    adjustment_interval_s=10,
    decode_kv_scale_up_threshold=0.6,
    decode_kv_scale_down_threshold=0.3,
    prefill_queue_scale_up_threshold=10,
    prefill_queue_scale_down_threshold=0.2,
)
"""The options of the published run."""

DEFAULTS = PlannerSettings(adjustment_interval_s=10, ttft_ms=500, itl_ms=50)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a policy with settings, and the workers of each pool at the start."""

    title: str
    policy: str
    settings: PlannerSettings
    workers: int = 1


CASES = (
    Case(title="fixed 2P2D", policy=BASELINE, settings=DEFAULTS, workers=2),
    Case(title="load, published thresholds", policy="load", settings=PUBLISHED),
    Case(title="load, default thresholds", policy="load", settings=DEFAULTS),
    Case(title="load+sla, default", policy="load+sla", settings=DEFAULTS),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The figures of one case; ``course`` are (second, prefill workers, decode workers)."""

    title: str
    duration_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p99_ms: float
    gpu_hours: float
    actions: int
    course: list[tuple[float, int, int]]


def engine(efficiency: float) -> ServiceModel:
    """Llama-8B (8.03e9 parameters, 32 layers, 8 KV heads of 128) on an H100 SXM.

    3.35 TB/s, 989 TFLOP/s: 80 % of the bandwidth, ``efficiency`` of the compute, 2 ms per iteration
    for launch and scheduling; 46 GB of KV.
    """
    bytes_per_s, flop_per_s, kv_tokens = 3.35e12 * 0.8, 989e12 * efficiency, 350_000
    return ServiceModel(
        name="llama-8b-h100",
        time=RooflineTime(
            overhead_s=0.002,
            weights_s=16.06e9 / bytes_per_s,
            token_s=2 * 8.03e9 / flop_per_s,
            attention_s=32 * 4 * 32 * 128 / flop_per_s,
            kv_read_s=kv_tokens * 131_072 / bytes_per_s,
        ),
        kv_tokens=kv_tokens,
        block_size=16,
        transfer=Transfer(),
    )


def run(case: Case, requests: Sequence[ReplayRequest], setup: ReplaySetup) -> Row:
    """Simulate one case."""
    clock = VirtualClock()
    cluster = ReplayCluster(clock, setup, requests)
    planner = ReplayPlanner(clock, cluster, named_policy(case.policy, case.settings, True))
    course: list[tuple[float, int, int]] = []

    def sample() -> None:
        held = {name: len(pool.workers) for name, pool in cluster.pools.items()}
        course.append((clock.now_s, held["prefill"], held["decode"]))
        clock.at(clock.now_s + 1, sample)

    clock.at(0.0, sample)
    while not cluster.complete:
        clock.run_next()
    for pool in cluster.pools.values():
        pool.finish()
    ttfts = sorted(request.ttft_s for request in cluster.ended)
    itls = sorted(request.itl_s for request in cluster.ended)
    return Row(
        title=case.title,
        duration_s=fmean(request.end_s - request.arrived_s for request in cluster.ended),
        ttft_p50_ms=1000 * ttfts[len(ttfts) // 2],
        ttft_p99_ms=1000 * ttfts[int(0.99 * len(ttfts))],
        itl_p99_ms=1000 * itls[int(0.99 * len(itls))],
        gpu_hours=sum(pool.gpu_s for pool in cluster.pools.values()) / 3600,
        actions=planner.actions,
        course=course,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--efficiencies", default="0.6,0.45,0.35", help="shares of the H100's compute")
    add("--start-ups", default="10,30", help="seconds that a new worker takes to serve")
    add("--seed", type=int, default=1)
    add("--markdown", type=Path, help="write the tables here")
    add("--plot", type=Path, help="write the plot of the last table here (PNG)")
    add("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    arrivals = sine(LOW, HIGH, PERIOD_S)
    requests = generate(arrivals, duration_s=DURATION_S, isl=ISL, osl=OSL, seed=options.seed)
    texts, found = [], []
    for start_up_s in map(float, options.start_ups.split(",")):
        for efficiency in map(float, options.efficiencies.split(",")):
            model = engine(efficiency)
            rows = compare(requests, model, start_up_s)
            prefill_ms = 1000 * model.prefill_s(ISL)
            heading = f"a prompt takes {prefill_ms:.0f} ms, a start {start_up_s:g} s"
            texts.append(f"{heading}:\n\n{table(rows)}")
            print(texts[-1], flush=True)
            found.append({"prefill_ms": prefill_ms, "start_up_s": start_up_s, "rows": rows})
    if options.markdown:
        options.markdown.write_text("\n".join(texts))
    if options.json:
        options.json.write_text(json.dumps(found, default=asdict, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot)


def compare(requests: Sequence[ReplayRequest], model: ServiceModel, start_up_s: float) -> list[Row]:
    """Simulate all cases, the baseline first."""
    setup = ReplaySetup(model=model, start_up_s=start_up_s, max_gpus=8)
    return [
        run(case, requests, replace(setup, workers=case.workers, prefill_workers=case.workers))
        for case in CASES
    ]


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table; the first row is the baseline."""
    base = rows[0]
    lines = [
        "| policy | mean duration | speed-up | TTFT p50 | p99 | ITL p99 | GPU-hours | actions |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        saved = row.gpu_hours / base.gpu_hours - 1
        gpus = f"{row.gpu_hours:.3f}" + (f" ({saved:+.1%})" if row is not base else "")
        lines.append(
            f"| {row.title} | {row.duration_s:.2f} s | {base.duration_s / row.duration_s:.2f} | "
            f"{row.ttft_p50_ms:.0f} ms | {row.ttft_p99_ms:.0f} ms | {row.itl_p99_ms:.1f} ms | "
            f"{gpus} | {row.actions} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the rate, and the GPUs of each policy, over time."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(8, 3.8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    seconds = range(DURATION_S)
    above.plot(seconds, [sine(LOW, HIGH, PERIOD_S)(at_s) for at_s in seconds], color="grey")
    above.set_ylabel("requests/s")
    for row in rows:
        at_s = [at_s for at_s, _, _ in row.course]
        below.step(at_s, [p + d for _, p, d in row.course], where="post", label=row.title)
    below.set(xlabel="seconds", ylabel="GPUs", ylim=(0, 8.5))
    below.legend(fontsize="small", ncols=2)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
