"""``dynamo profile graph.yaml``: measure a worker for the planner."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from dynamo.cli.text_table import figures
from dynamo.config import load
from dynamo.errors import ConfigError, DynamoError
from dynamo.observability.logs import one_line
from dynamo.runtime.process.os_process import heeded
from dynamo.serve.graph.overrides import split_overrides
from dynamo.setup.graph_plan import read_graph
from dynamo_lab.profiler.results import ProfileResult, draw_profile, profile_figure
from dynamo_lab.profiler.settings import ProfileSettings
from dynamo_lab.profiler.sweep import ProfileProgress, run_profile

DESCRIPTION = """Start one worker of a graph by itself, measure TTFT and ITL over prompt lengths,
context lengths and concurrency, and write what the planner's SLA mode needs."""
EPILOG = """overrides: --Service.key=value as for dynamo serve. Examples:
  dynamo profile graph.yaml --quick
  dynamo profile graph.yaml --service Worker --max-isl 8192 --output profiles/worker
The worker gets GPUs, a namespace and a state directory of its own. Exit status: 0 complete,
1 it could not be measured, 2 the graph or a flag is wrong, 130 interrupted."""

_NAMESPACE = "profile"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    errors = Console(stderr=True)
    try:
        rest, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
        (settings,) = load("dynamo profile", DESCRIPTION, [ProfileSettings], rest, epilog=EPILOG)
        if settings.plots:
            profile_figure()
        graph = read_graph(settings.graph, overrides, _NAMESPACE)
        with _progress(errors) as on_progress:
            result = asyncio.run(_until_signal(run_profile(graph, settings, on_progress)))
        plots = draw_profile(result, Path(settings.output)) if settings.plots else []
    except DynamoError as error:
        message = f"[red]dynamo profile:[/] {escape(error.message)}"
        errors.print(message, highlight=False, soft_wrap=True)
        return 2 if isinstance(error, ConfigError) else 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        errors.print("dynamo profile: interrupted; nothing was written")
        return 130
    if settings.json:
        print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())
    else:
        _show(Console(), result, plots)
    return 0


async def _until_signal(work: Coroutine[Any, Any, ProfileResult]) -> ProfileResult:
    """Run ``work``; SIGTERM and SIGHUP cancel it, as Ctrl-C does, so that it cleans up."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    for signum in heeded(signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, task.cancel)
    return await work


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Callable[[ProfileProgress], None]]:
    """Show a bar on a terminal, else one line for each measured point."""
    if not console.is_terminal:
        yield lambda progress: console.print(_line(progress), highlight=False, soft_wrap=True)
        return
    columns = (TextColumn("profile"), BarColumn(), TaskProgressColumn())
    left = TextColumn("{task.fields[left]}")
    with Progress(*columns, left, console=console, transient=True) as bar:
        task = bar.add_task("profile", total=1.0, left="")

        def update(progress: ProfileProgress) -> None:
            bar.console.print(_line(progress), highlight=False, soft_wrap=True)
            left = "" if progress.remaining_s is None else f"{progress.remaining_s:.0f} s left"
            bar.update(task, completed=progress.done, left=left)

        yield update


def _line(progress: ProfileProgress) -> str:
    return escape(one_line(progress.text))


def _show(console: Console, result: ProfileResult, plots: Sequence[Path]) -> None:
    prefill = [("prompt tokens", "TTFT (ms)", "tokens/s per GPU")] + [
        (f"{sample.isl}", f"{sample.ttft_ms:.1f}", f"{sample.tokens_per_s_per_gpu:.0f}")
        for sample in result.prefill
    ]
    decode = [("requests", "context", "KV load", "ITL (ms)", "tokens/s per GPU")] + [
        (
            f"{point.concurrency}",
            f"{point.context_tokens:.0f}",
            f"{point.kv_usage:.2f}",
            f"{point.itl_ms:.2f}",
            f"{point.tokens_per_s_per_gpu:.0f}",
        )
        for point in result.decode
    ]
    model = escape(one_line(result.model))
    lines = (f"{model}: prefill", *figures(prefill), f"{model}: decode", *figures(decode))
    for line in (*lines, *_times(result), *_thresholds(result), *_written(result, plots)):
        console.print(line, highlight=False, soft_wrap=True)


def _times(result: ProfileResult) -> Iterator[str]:
    if result.start_s is not None:
        woken = "" if result.wake_s is None else f", from its sleep in {result.wake_s:.2f} s"
        yield f"a worker serves {result.start_s:.1f} s after its start{woken}"


def _thresholds(result: ProfileResult) -> Iterator[str]:
    for name, advice in (
        ("prefill-queue", result.prefill_queue),
        ("decode-kv", result.decode_kv),
    ):
        if advice is not None:
            yield (
                f"--{name}-scale-up-threshold {advice.scale_up:g} "
                f"--{name}-scale-down-threshold {advice.scale_down:g}: {escape(advice.reason)}"
            )


def _written(result: ProfileResult, plots: Sequence[Path]) -> Iterator[str]:
    for skipped in result.skipped:
        yield f"left out: {escape(skipped)}"
    names = ", ".join(str(path) for path in plots)
    yield f"wrote {escape(result.directory)}" + (f" and {escape(names)}" if names else "")
    yield f"planner: --mode sla --profile-results-dir {escape(result.directory)}"
