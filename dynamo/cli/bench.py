"""``dynamo bench``: replay a trace or a synthetic load and report latency as users see it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dynamo.bench.runner import Runner, calibrate, first_model
from dynamo.bench.stats import Spread, Summary, parse_goodput, summarize
from dynamo.bench.trace import read_trace
from dynamo.bench.workload import PlannedRequest, Prompts, from_trace, synthetic
from dynamo.cli.frontend_client import find_target
from dynamo.cli.lab import lab_verb
from dynamo.cli.text_table import figures
from dynamo.config import load
from dynamo.config.client import BenchSettings
from dynamo.errors import ConfigError, DynamoError
from dynamo.observability.logs import counted, one_line

DESCRIPTION = """Load any OpenAI endpoint and measure TTFT, ITL, latency, throughput and goodput."""
EPILOG = """examples:
  dynamo bench --requests 200 --concurrency 16 --isl 512 --osl 128
  dynamo bench --trace conversation_trace.jsonl --trace-speedup 10 --goodput ttft:2000,itl:25
  dynamo bench --compare-routing --trace recorded.jsonl --workers 4 --worker-blocks 2000
"""

_REASONS_SHOWN = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status: 1 when no request succeeded, 130 after Ctrl-C."""
    (settings,) = load("dynamo bench", DESCRIPTION, [BenchSettings], argv, epilog=EPILOG)
    errors = Console(stderr=True)
    try:
        if settings.compare_routing:
            status = int(lab_verb("compare_routing").compare_modes(settings, errors))
        else:
            status = asyncio.run(_bench(settings, errors))
    except DynamoError as error:
        message = f"[red]dynamo bench:[/] {_plain(error.message)}"
        errors.print(message, highlight=False, soft_wrap=True)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        status = 130
    if status == 130:
        errors.print("[red]dynamo bench:[/] interrupted", highlight=False)
    return status


async def _bench(settings: BenchSettings, errors: Console) -> int:
    if settings.prompt_format == "tokens" and settings.endpoint_type != "completions":
        raise ConfigError("--prompt-format tokens needs --endpoint-type completions")
    goodput = parse_goodput(settings.goodput) if settings.goodput else None
    planned = plan(settings)
    target = find_target(settings)
    if settings.output is not None:
        _try_output(settings.output)
    model = settings.model or await first_model(target)
    prompts = Prompts(settings.seed)
    with progress(errors, len(planned)) as advance:
        runner = Runner(target, settings, model, prompts, advance)
        if settings.prompt_format == "text":
            prompts.tokens_per_word = await calibrate(runner, prompts)
        scheduled = any(request.at_s is not None for request in planned)
        # Times are an open loop: a cap would slow the load down with a slow server.
        concurrency = settings.concurrency or (None if scheduled else 8)
        interrupted = False
        try:
            await runner.run(planned, concurrency)
        except asyncio.CancelledError:  # Ctrl-C: asyncio lets a second one end the process
            interrupted = True
    summary = summarize(runner.outcomes, runner.duration_s, goodput)
    summary.interrupted = interrupted
    text = msgspec.json.format(msgspec.json.encode(summary), indent=2).decode()
    console = Console()
    if settings.json:
        console.print_json(text)
    else:
        show(console, summary, model)
    if settings.output is not None:
        _write_output(settings.output, text + "\n")
    if interrupted:
        return 130
    return 0 if summary.completed else 1


def _try_output(path: str) -> None:
    """Fail before the run if its result cannot be written. A pipe is opened only at the end."""
    new = not os.path.lexists(path)
    if not new and not Path(path).is_file() and not Path(path).is_dir():
        return
    try:
        with Path(path).open("ab"):
            pass
        if new:
            Path(path).unlink()
    except OSError as error:
        raise ConfigError(f"--output: cannot write {error.filename}: {error.strerror}") from None


def _write_output(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:  # without a name if the disk is full
        reason = f"cannot write {path}: {error.strerror}"
        raise DynamoError(f"--output: {reason}; the result is above") from None


def plan(settings: BenchSettings) -> list[PlannedRequest]:
    """Plan the requests of ``settings``."""
    if settings.trace is None:
        return synthetic(
            settings.requests or 100,
            isl=settings.isl,
            osl=settings.osl,
            prefix_ratio=settings.prefix_ratio,
            rate=settings.rate,
            seed=settings.seed,
        )
    return from_trace(
        read_trace(settings.trace, settings.requests, settings.trace_format),
        block_tokens=settings.trace_block_tokens,
        speedup=settings.trace_speedup,
        output_scale=settings.output_scale,
    )


def show(console: Console, summary: Summary, model: str) -> None:
    """Print the result as text."""
    rows = [("ms", *Spread.__struct_fields__)]
    for label, spread in (
        ("TTFT", summary.ttft_ms),
        ("ITL", summary.itl_ms),
        ("latency", summary.latency_ms),
        ("schedule lag", summary.schedule_lag_ms),
    ):
        if spread is not None:
            rows.append((label, *map(_rounded, msgspec.structs.astuple(spread))))
    title = f"{_plain(model)}: {summary.completed} of {summary.requests} requests"
    if summary.interrupted:
        title += ", interrupted; without those in flight"
    for line in (title, *(figures(rows) if rows[1:] else ()), *_lines(summary)):
        console.print(line, highlight=False, soft_wrap=True)


def _rounded(value: float) -> str:
    """Five digits at least, so that a row fits on 80 columns."""
    return f"{value:,.0f}" if value >= 10_000 else f"{value:,.2f}"


def _plain(text: str) -> str:
    """Escape ``text`` for the terminal and for rich: it may come from the endpoint."""
    return escape(one_line(text))


def _lines(summary: Summary) -> Iterator[str]:
    clock = f"TTFT and latency count from {summary.measured_from}"
    if summary.schedule_lag_ms is not None:
        clock += "; schedule lag is the part before a request was started"
    yield clock
    yield (
        f"{summary.duration_s:.2f} s, {summary.requests_per_s:,.2f} requests/s, "
        f"{_rate(summary.output_tokens_per_s)} output tokens/s, "
        f"{_rate(summary.total_tokens_per_s)} tokens/s in and out"
    )
    if summary.counted:
        yield (
            "the endpoint sends no usage: each piece of a stream counts as an output token, and "
            "prompts have words instead of tokens"
        )
    if summary.hit_rate is not None:
        yield f"prefix cache hit rate {summary.hit_rate:.1%} of {summary.prompt_tokens:,} tokens"
    if summary.busiest_share is not None:
        yield (
            f"{counted(len(summary.workers), 'worker')}; "
            f"the busiest has {summary.busiest_share:.1%} of the "
            f"requests (imbalance {summary.imbalance:.2f}) and {summary.busiest_work_share:.1%} of "
            f"the computed tokens (imbalance {summary.work_imbalance:.2f})"
        )
    if summary.goodput is not None:
        limits_ms = msgspec.to_builtins(summary.goodput)
        limits = ", ".join(f"{name} <= {value:g} ms" for name, value in limits_ms.items())
        yield (
            f"goodput ({limits}): {counted(summary.good_requests or 0, 'request')}, "
            f"{summary.good_requests_per_s:,.2f}/s"
        )
    failures = list(summary.errors.items())
    for reason, count in failures[:_REASONS_SHOWN]:
        yield f"[red]{count} failed[/]: {_plain(reason)}"
    if others := sum(count for _, count in failures[_REASONS_SHOWN:]):
        yield f"[red]{others} failed[/] for other reasons (all: --json)"


def _rate(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}"


@contextlib.contextmanager
def progress(console: Console, total: int, what: str = "requests") -> Iterator[Callable[..., None]]:
    """Show on a terminal how many of ``total`` are done; each call of the result counts one."""
    if not console.is_terminal:
        yield lambda *_: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda *_: bar.advance(task)
