"""``dynamo record``: write a trace of the live traffic, without anything of its content."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from dynamo.bench.recording import RecordClient, TraceFile
from dynamo.cli.frontend_client import find_target
from dynamo.cli.options import RecordSettings
from dynamo.config import load
from dynamo.config.client import ClientSettings
from dynamo.errors import ConfigError, DynamoError
from dynamo.http.client import Target

DESCRIPTION = """Record a trace of live traffic in the Mooncake format: times, lengths, and which
prompts share a beginning. No text, token, user or session name is in it."""
EPILOG = """examples:
  dynamo record day.jsonl --seconds 3600
  dynamo bench --trace day.jsonl --trace-speedup 2
  dynamo planner replay day.jsonl --policy load --policy fixed:2"""

_SHOWN_EVERY_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status: 1 when nothing was recorded or the stream broke."""
    groups = [RecordSettings, ClientSettings]
    settings, client = load("dynamo record", DESCRIPTION, groups, argv, epilog=EPILOG)
    errors = Console(stderr=True, highlight=False)
    try:
        if settings.file is None:
            raise ConfigError("name the file to write: dynamo record FILE")
        target, path = find_target(client), Path(settings.file)
        with TraceFile(path) as file:
            return asyncio.run(_record(settings, target, file, errors))
    except DynamoError as error:
        errors.print(f"dynamo record: {error.message}", markup=False)
        return 2 if isinstance(error, ConfigError) else 1


async def _record(
    settings: RecordSettings, target: Target, file: TraceFile, errors: Console
) -> int:
    client = RecordClient(target, file.add, settings.requests)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, client.stop)
    try:
        await client.open(settings.model)
        with _progress(errors, client, target, settings.seconds), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.seconds):
                await client.stopped.wait()
        client.stopped.set()
        await client.last_count()
    finally:
        client.close()
        file.finish()
    return _report(settings, client, errors)


@contextlib.contextmanager
def _progress(
    errors: Console, client: RecordClient, target: Target, seconds: float | None
) -> Iterator[None]:
    """Say what is going on: on a terminal with a line that is kept up to date."""
    until = "Ctrl-C ends it" if seconds is None else f"for {seconds:g} s, Ctrl-C ends it before"
    if not errors.is_terminal:
        errors.print(f"recording {target.url} ({until})", markup=False)
        yield
        return
    loop, totals = asyncio.get_running_loop(), client.totals
    with errors.status("") as status:

        def show() -> None:
            lost = f", {totals.lost:,} lost" if totals.lost else ""
            status.update(
                f"recording {target.authority}: {totals.requests:,} requests, "
                f"{totals.running:,} running{lost} ({until})"
            )
            timers.append(loop.call_later(_SHOWN_EVERY_S, show))

        timers: deque[asyncio.Handle] = deque(maxlen=1)
        show()
        try:
            yield
        finally:
            timers[0].cancel()


def _report(settings: RecordSettings, client: RecordClient, errors: Console) -> int:
    totals, failure = client.totals, client.failure
    if totals.requests:
        parts = [
            f"{settings.file}: {totals.requests:,} requests, {totals.prompt_tokens:,} prompt "
            f"tokens, {totals.output_tokens:,} output tokens"
        ]
        if totals.running:
            parts.append(f"{totals.running:,} that are still running are not in it")
        if totals.lost:
            parts.append(f"{totals.lost:,} were lost because this machine reads too slowly")
        Console(highlight=False, soft_wrap=True).print("; ".join(parts), markup=False)
    if failure is not None:
        raise failure
    if not totals.requests:
        raise DynamoError("no request ended in this time; nothing was written")
    return 0
