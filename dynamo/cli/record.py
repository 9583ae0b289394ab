"""``dynamo record``: write a trace of the live traffic, or with ``--content`` its bodies."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from dynamo.bench.recording import RecordClient, RecordFile, TraceFile
from dynamo.cli.frontend_client import find_target
from dynamo.cli.options import RecordSettings
from dynamo.config import load
from dynamo.config.client import ClientSettings
from dynamo.errors import ConfigError, DynamoError
from dynamo.http.client import Target
from dynamo.observability.logs import counted
from dynamo.protocols.status import CONTENT_SECONDS

DESCRIPTION = """Record a trace of live traffic in the Mooncake format: times, lengths, and which
prompts share a beginning. No text, token, user or session name is in it. With --content the file
has the bodies of requests and answers instead, for dynamo replay: keys in them are replaced, the
web page says so while it runs, and it ends after 10 minutes or 64 MiB."""
EPILOG = """examples:
  dynamo record day.jsonl --seconds 3600
  dynamo bench --trace day.jsonl --trace-speedup 2
  dynamo planner replay day.jsonl --policy load --policy fixed:2
  dynamo record bodies.jsonl --content --seconds 120
  dynamo replay bodies.jsonl --model other"""

_SHOWN_EVERY_S = 0.5
_CONTENT_S = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status: 1 when nothing was recorded or the stream broke."""
    groups = [RecordSettings, ClientSettings]
    settings, client = load("dynamo record", DESCRIPTION, groups, argv, epilog=EPILOG)
    errors = Console(stderr=True, highlight=False)
    if settings.file is None:
        raise ConfigError("name the file to write: dynamo record FILE")
    query = _query(settings)
    target, path = find_target(client), Path(settings.file)
    with RecordFile(path) if settings.content else TraceFile(path) as file:
        return asyncio.run(_record(settings, query, target, file, errors))


def _query(settings: RecordSettings) -> dict[str, str]:
    """Return what the frontend is asked for. Raises ConfigError."""
    query = {} if settings.model is None else {"model": settings.model}
    if settings.content:
        seconds = settings.seconds or _CONTENT_S
        if seconds > CONTENT_SECONDS:
            raise ConfigError(f"--seconds: content is recorded for at most {CONTENT_SECONDS} s")
        query |= {"content": "true", "seconds": f"{seconds:f}", "mb": str(settings.content_mb)}
    return query


async def _record(
    settings: RecordSettings,
    query: dict[str, str],
    target: Target,
    file: RecordFile,
    errors: Console,
) -> int:
    add = file.add if isinstance(file, TraceFile) else file.append
    client = RecordClient(target, add, settings.requests)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, client.stop)
    try:
        await client.open(query)
        # The frontend ends a recording of content itself, and says why.
        seconds = None if settings.content else settings.seconds
        with _progress(errors, client, target, settings), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await client.stopped.wait()
        # Also after --seconds: no request is added from now on, and the next count is the last.
        client.stopped.set()
        await client.last_count()
    finally:
        client.close()
        file.finish()
    return _report(settings, client, file)


@contextlib.contextmanager
def _progress(
    errors: Console, client: RecordClient, target: Target, settings: RecordSettings
) -> Iterator[None]:
    """Say what is going on: on a terminal with a line that is kept up to date."""
    seconds = settings.seconds or (_CONTENT_S if settings.content else None)
    until = "Ctrl-C ends it" if seconds is None else f"for {seconds:g} s, Ctrl-C ends it before"
    what = "the content of requests at " if settings.content else ""
    if not errors.is_terminal:
        errors.print(f"recording {what}{target.url} ({until})", markup=False)
        yield
        return
    loop, totals = asyncio.get_running_loop(), client.totals
    with errors.status("") as status:

        def show() -> None:
            lost = f", {totals.lost:,} lost" if totals.lost else ""
            status.update(
                f"recording {what}{target.authority}: {counted(totals.requests, 'request')}, "
                f"{totals.running:,} running{lost} ({until})"
            )
            timers.append(loop.call_later(_SHOWN_EVERY_S, show))

        timers: deque[asyncio.Handle] = deque(maxlen=1)
        show()
        try:
            yield
        finally:
            timers[0].cancel()


def _report(settings: RecordSettings, client: RecordClient, file: RecordFile) -> int:
    totals, failure = client.totals, client.failure
    if totals.requests:
        prompt = counted(totals.prompt_tokens, "prompt token")
        size = f"{prompt}, {counted(totals.output_tokens, 'output token')}"
        if settings.content:
            size = f"{file.size_bytes / 1024:,.0f} KiB of bodies"
        parts = [f"{settings.file}: {counted(totals.requests, 'request')}, {size}"]
        if client.ending:
            parts.append(f"it ended because {client.ending}")
        if totals.running:
            parts.append(f"still running and left out: {totals.running:,}")
        if totals.lost:
            why = "this machine reads too slowly"
            if settings.content:
                why = "they are too large or came too fast"
            parts.append(f"{counted(totals.lost, 'was', 'were')} lost because {why}")
        Console(highlight=False, soft_wrap=True).print("; ".join(parts), markup=False)
    if failure is not None:
        raise failure
    if not totals.requests:
        raise DynamoError("no request ended in this time; nothing was written")
    return 0
