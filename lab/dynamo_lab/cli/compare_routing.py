"""``dynamo bench --compare-routing``: each routing mode on a trace, in virtual time."""

from __future__ import annotations

import contextlib

import msgspec
from rich.console import Console

from dynamo.bench.trace import read_trace
from dynamo.cli.bench import progress
from dynamo.cli.text_table import figures
from dynamo.config.client import BenchSettings
from dynamo.errors import ConfigError
from dynamo.observability.logs import counted
from dynamo_lab.routing.replay import POLICIES, RoutingResult, arrivals_of, compare


def compare_modes(settings: BenchSettings, errors: Console) -> int:
    """Compare the routing modes on the trace; print the fastest first. Return the exit status."""
    if settings.trace is None:
        raise ConfigError("--compare-routing needs --trace; dynamo record makes one")
    arrivals = arrivals_of(
        read_trace(settings.trace, settings.requests, settings.trace_format),
        settings.trace_block_tokens,
        settings.trace_speedup,
        settings.output_scale,
    )
    rows: list[RoutingResult] = []
    with (
        progress(errors, len(POLICIES), "routing modes") as advance,
        contextlib.suppress(KeyboardInterrupt),
    ):
        for name in POLICIES:
            rows.append(
                compare(
                    name,
                    arrivals,
                    settings.workers,
                    settings.worker_blocks,
                    settings.prefill_rate / settings.trace_block_tokens,
                )
            )
            advance()
    status = 0 if len(rows) == len(POLICIES) else 130
    rows.sort(key=lambda row: row.ttft_mean_s)
    console = Console()
    if settings.json:
        console.print_json(msgspec.json.encode(rows).decode())
        return status
    cells = [("routing", "TTFT mean", "p99", "of the best", "hits", "busiest worker")]
    best = (rows[0].ttft_mean_s if rows else 0) or 1.0
    cells += [
        (
            row.name,
            f"{row.ttft_mean_s:.3f} s",
            f"{row.ttft_p99_s:.2f} s",
            f"{row.ttft_mean_s / best:.2f}",
            f"{row.hit_rate:.1%}",
            f"{row.busiest:.2f}",
        )
        for row in rows
    ]
    requests, workers = counted(len(arrivals), "request"), counted(settings.workers, "worker")
    title = f"{requests}, {workers}, in virtual time"
    if status:
        title += f", interrupted: {len(rows)} of {len(POLICIES)} modes"
    for line in (title, *(figures(cells) if rows else ())):
        console.print(line, highlight=False, soft_wrap=True)
    return status
