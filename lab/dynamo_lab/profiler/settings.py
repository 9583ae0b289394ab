"""Options of ``dynamo profile``."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """profile: which worker, how much is measured, and where the result goes"""

    graph: str = option("", "graph", help="YAML file with the services")
    service: str | None = option(
        None,
        "--service",
        help="worker to profile; default: the only one, or the prefill and the decode service",
    )
    output: str = option(
        "profiling_results",
        "--output",
        metavar="DIR",
        help="directory for the npz files and plots; the planner's --profile-results-dir",
    )
    gpus: int | None = option(
        None, "--gpus", minimum=0, maximum=1024, help="assume that this machine has N GPUs"
    )
    quick: bool = option(False, "--quick", help="fewer points, each measured once")
    max_isl: int | None = option(
        None,
        "--max-isl",
        minimum=128,
        help="longest prompt and context; default: what the model takes",
    )
    max_concurrency: int = option(
        512, "--max-concurrency", minimum=1, help="requests that decode at once, at most"
    )
    isl: int = option(3000, "--isl", minimum=1, help="prompt length that thresholds are for")
    osl: int = option(150, "--osl", minimum=1, help="output length that thresholds are for")
    ttft_ms: float = option(
        500.0,
        "--ttft",
        minimum=0,
        exclusive_minimum=True,
        metavar="MS",
        help="target of the time to first token that thresholds are for",
    )
    itl_ms: float = option(
        50.0,
        "--itl",
        minimum=0,
        exclusive_minimum=True,
        metavar="MS",
        help="target of the time between tokens that thresholds are for",
    )
    plots: bool = option(True, "--plots", help="write PNG plots (needs the extra 'planner')")
    json: bool = option(False, "--json", help="print the result as JSON")
