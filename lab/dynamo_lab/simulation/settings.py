"""Options of ``dynamo planner replay``."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.client import trace_format_option
from dynamo.config.option import argument, flag


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """replay: what traffic, what deployment, and what to report"""

    trace: str | None = argument(
        None, metavar="TRACE", help="trace of requests; or use --synthetic"
    )
    trace_format: str = trace_format_option()
    policy: tuple[str, ...] = flag(
        (),
        repeat=True,
        help="auto, load, sla, load+sla, fixed:N, hpa:N, oracle, or module:attribute; may be "
        "repeated; default: --mode",
    )
    rate: float = flag(
        1.0, minimum=0, exclusive_minimum=True, help="replay the trace this many times faster"
    )
    warp: str | None = flag(
        None,
        metavar="CURVE",
        help="factor of the trace's rate over time: flat:X, or sine|day|flash:LOW-HIGH:PERIOD, "
        "such as sine:0.2-2.2:1200",
    )
    synthetic: str | None = flag(
        None,
        metavar="CURVE",
        help="requests per second over time, without a trace, such as sine:5-20:150",
    )
    duration_s: float = flag(
        3600.0,
        "--duration",
        minimum=0,
        exclusive_minimum=True,
        metavar="SECONDS",
        help="length of synthetic traffic; a trace is cut off there",
    )
    isl: int = flag(3000, minimum=1, help="mean prompt tokens of synthetic traffic")
    osl: int = flag(150, minimum=1, help="mean output tokens of synthetic traffic")
    length_cv: float = flag(
        0.0, minimum=0, help="spread of both lengths: standard deviation / mean"
    )
    arrival_cv: float = flag(
        1.0,
        minimum=0,
        exclusive_minimum=True,
        help="spread of the gaps between arrivals: 1 is Poisson, more comes in bursts",
    )
    seed: int = flag(0, minimum=0, help="seed of synthetic traffic")
    service_model: str = flag(
        "qwen3-8b-h100",
        choices=("qwen3-8b-h100", "mocker"),
        help="speed and KV cache of a worker",
        heading="the simulated deployment",
    )
    start_up_s: float | None = flag(
        None,
        "--start-up",
        minimum=0,
        metavar="SECONDS",
        help="from the start of a worker to its first request; default: that of "
        "--profile-results-dir, else 60",
    )
    stop_s: float = flag(
        0.0,
        "--stop",
        minimum=0,
        metavar="SECONDS",
        help="from the last request of a worker to its exit",
    )
    wake_s: float | None = flag(
        None,
        "--wake",
        minimum=0,
        metavar="SECONDS",
        help="from the wake of a sleeping worker to its first request; default: that of "
        "--profile-results-dir, else none sleeps",
    )
    initial_workers: int = flag(1, minimum=0, help="decode or aggregated workers at the start")
    initial_prefill_workers: int | None = flag(
        None, minimum=0, help="prefill workers at the start; default: aggregated serving"
    )
    max_queue: int | None = flag(
        None,
        minimum=0,
        help="requests that may wait for their first token; more are rejected; default: no limit",
    )
    score: bool = flag(
        True,
        help="compare with fixed deployments and the oracle; aggregated serving only",
        heading="the report",
    )
    attainment: float = flag(0.9, minimum=0, maximum=1, help="attainment that the oracle aims at")
    json: bool = flag(False, help="print the figures as JSON instead of a table")
    plot: str | None = flag(None, metavar="FILE", help="write load, workers and attainment as PNG")
