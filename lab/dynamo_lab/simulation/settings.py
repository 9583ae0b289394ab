"""Options of ``dynamo planner replay``."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.client import trace_format_option
from dynamo.config.option import option


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """replay: what traffic, what deployment, and what to report"""

    trace: str | None = option(
        None, "trace", metavar="TRACE", help="trace of requests; or use --synthetic"
    )
    trace_format: str = trace_format_option()
    policy: tuple[str, ...] = option(
        (),
        "--policy",
        repeat=True,
        help="auto, load, sla, load+sla, fixed:N, hpa:N, oracle, or module:attribute; may be "
        "repeated; default: --mode",
    )
    rate: float = option(
        1.0,
        "--rate",
        minimum=0,
        exclusive_minimum=True,
        help="replay the trace this many times faster",
    )
    warp: str | None = option(
        None,
        "--warp",
        metavar="CURVE",
        help="factor of the trace's rate over time: flat:X, or sine|day|flash:LOW-HIGH:PERIOD, "
        "such as sine:0.2-2.2:1200",
    )
    synthetic: str | None = option(
        None,
        "--synthetic",
        metavar="CURVE",
        help="requests per second over time, without a trace, such as sine:5-20:150",
    )
    duration_s: float = option(
        3600.0,
        "--duration",
        minimum=0,
        exclusive_minimum=True,
        metavar="SECONDS",
        help="length of synthetic traffic; a trace is cut off there",
    )
    isl: int = option(3000, "--isl", minimum=1, help="mean prompt tokens of synthetic traffic")
    osl: int = option(150, "--osl", minimum=1, help="mean output tokens of synthetic traffic")
    length_cv: float = option(
        0.0, "--length-cv", minimum=0, help="spread of both lengths: standard deviation / mean"
    )
    arrival_cv: float = option(
        1.0,
        "--arrival-cv",
        minimum=0,
        exclusive_minimum=True,
        help="spread of the gaps between arrivals: 1 is Poisson, more comes in bursts",
    )
    seed: int = option(0, "--seed", minimum=0, help="seed of synthetic traffic")
    service_model: str = option(
        "qwen3-8b-h100",
        "--service-model",
        choices=("qwen3-8b-h100", "mocker"),
        help="speed and KV cache of a worker",
        heading="the simulated deployment",
    )
    start_up_s: float | None = option(
        None,
        "--start-up",
        minimum=0,
        metavar="SECONDS",
        help="from the start of a worker to its first request; default: that of "
        "--profile-results-dir, else 60",
    )
    stop_s: float = option(
        0.0,
        "--stop",
        minimum=0,
        metavar="SECONDS",
        help="from the last request of a worker to its exit",
    )
    wake_s: float | None = option(
        None,
        "--wake",
        minimum=0,
        metavar="SECONDS",
        help="from the wake of a sleeping worker to its first request; default: that of "
        "--profile-results-dir, else none sleeps",
    )
    initial_workers: int = option(
        1, "--initial-workers", minimum=0, help="decode or aggregated workers at the start"
    )
    initial_prefill_workers: int | None = option(
        None,
        "--initial-prefill-workers",
        minimum=0,
        help="prefill workers at the start; default: aggregated serving",
    )
    max_queue: int | None = option(
        None,
        "--max-queue",
        minimum=0,
        help="requests that may wait for their first token; more are rejected; default: no limit",
    )
    score: bool = option(
        True,
        "--score",
        help="compare with fixed deployments and the oracle; aggregated serving only",
        heading="the report",
    )
    attainment: float = option(
        0.9, "--attainment", minimum=0, maximum=1, help="attainment that the oracle aims at"
    )
    json: bool = option(False, "--json", help="print the figures as JSON instead of a table")
    plot: str | None = option(
        None, "--plot", metavar="FILE", help="write load, workers and attainment as PNG"
    )
