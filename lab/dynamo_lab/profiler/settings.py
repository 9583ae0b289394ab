"""Options of ``dynamo profile``."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import argument, flag


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """profile: which worker, how much is measured, and where the result goes"""

    graph: str = argument("", help="YAML file with the services")
    service: str | None = flag(
        None, help="worker to profile; default: the only one, or the prefill and the decode service"
    )
    output: str = flag(
        "profiling_results",
        metavar="DIR",
        help="directory for the npz files and plots; the planner's --profile-results-dir",
    )
    gpus: int | None = flag(
        None, minimum=0, maximum=1024, help="assume that this machine has N GPUs"
    )
    quick: bool = flag(False, help="fewer points, each measured once")
    max_isl: int | None = flag(
        None, minimum=128, help="longest prompt and context; default: what the model takes"
    )
    max_concurrency: int = flag(512, minimum=1, help="requests that decode at once, at most")
    isl: int = flag(3000, minimum=1, help="prompt length that thresholds are for")
    osl: int = flag(150, minimum=1, help="output length that thresholds are for")
    ttft_ms: float = flag(
        500.0,
        "--ttft",
        minimum=0,
        exclusive_minimum=True,
        metavar="MS",
        help="target of the time to first token that thresholds are for",
    )
    itl_ms: float = flag(
        50.0,
        "--itl",
        minimum=0,
        exclusive_minimum=True,
        metavar="MS",
        help="target of the time between tokens that thresholds are for",
    )
    plots: bool = flag(True, help="write PNG plots (needs the extra 'planner')")
    json: bool = flag(False, help="print the result as JSON")
