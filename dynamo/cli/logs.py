"""``dynamo logs``, ``dynamo events``: what processes said, and what happened."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo.cli.console import WatcherPrefix, shows_colour
from dynamo.cli.options import DeploymentSettings, EventsSettings, LogsSettings
from dynamo.cli.text_table import cell_len, printable, wrap
from dynamo.config import load
from dynamo.protocols.status import BAD_EVENTS, BoxEvent
from dynamo.runtime.process.paths import state_path
from dynamo.status.deployment import chosen_runtime
from dynamo.status.logs import (
    EventFilter,
    EventReader,
    LogLine,
    LogReader,
    follow,
    parse_since,
    select_watchers,
)

DESCRIPTION = "Show the output of the processes of a deployment, also after its end."
EPILOG = """NAME is a worker (dynamo_Worker_1) or a service. Lines of several processes have their
names before them, and are sorted by the times in them. Ctrl-C ends -f.
Exit status: 0 shown, 2 there is no such name, or no log."""
_EVENTS = "List the events of a deployment and the users that caused them, also after its end."
_EVENTS_END = """Each line has the time, the kind of event, the worker, service or model, and the
operator or program that asked for it, if any. Ctrl-C ends -f.
Exit status: 0 shown, 2 wrong --since, or several deployments and none is chosen."""
_KIND_WIDTH = 7
_NAME_WIDTH = 20
_LEAST_TEXT = 24
_RED = 31


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo logs``; return the exit status."""
    groups: list[type[Any]] = [LogsSettings, DeploymentSettings]
    settings, deployment = load("dynamo logs", DESCRIPTION, groups, argv, epilog=EPILOG)
    runtime = chosen_runtime(deployment.namespace)
    namespace = runtime.namespace
    directory = state_path(runtime) / namespace / "logs"
    watchers = select_watchers(directory, namespace, settings.name)
    # One watcher named in full needs no prefix; a service may get more workers later.
    prefix = (
        None if watchers == [settings.name] else WatcherPrefix(namespace, shows_colour(sys.stdout))
    )
    reader = LogReader(directory, namespace, settings.name)
    try:
        _print(reader.last(settings.number), prefix)
        if settings.follow:
            asyncio.run(_follow(reader, prefix))
    finally:
        reader.close()
    return 0


async def _follow(reader: LogReader, prefix: WatcherPrefix | None) -> None:
    async for line in follow(reader.directory, reader.read):
        _print([line], prefix)


def _print(lines: Sequence[LogLine], prefix: WatcherPrefix | None) -> None:
    out = sys.stdout.buffer
    for watcher, line in lines:
        out.write((prefix.of(watcher) if prefix else b"") + line + b"\n")
    out.flush()


def events(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo events``; return the exit status."""
    groups: list[type[Any]] = [EventsSettings, DeploymentSettings]
    settings, deployment = load("dynamo events", _EVENTS, groups, argv, epilog=_EVENTS_END)
    runtime = chosen_runtime(deployment.namespace)
    since_s = parse_since(settings.since)
    namespace = runtime.namespace
    chosen = EventFilter(namespace, since_s, settings.model, settings.name)
    reader = EventReader(state_path(runtime) / namespace)
    try:
        past = [event for event in reader.all() if chosen.takes(event)]
        for event in past:
            _print_event(event, settings.json)
        if settings.follow:
            asyncio.run(_follow_events(reader, chosen, settings.json))
        elif not past:
            text = f"dynamo events: none in namespace {namespace!r} since {settings.since}"
            print(text, file=sys.stderr)
    finally:
        reader.close()
    return 0


async def _follow_events(reader: EventReader, chosen: EventFilter, as_json: bool) -> None:
    reader.directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # before the first start
    async for event in follow(reader.directory, reader.read):
        if chosen.takes(event):
            _print_event(event, as_json)


def _print_event(event: BoxEvent, as_json: bool) -> None:
    print(msgspec.json.encode(event).decode() if as_json else _line(event), flush=True)


def _line(event: BoxEvent) -> str:
    """Return the event for people; a terminal gets more than one line if need be."""
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(event.at_s))
    name = printable(event.name)
    kind = f"{event.kind:<{_KIND_WIDTH}}"
    text = printable(event.text) + (f" (by {printable(event.by)})" if event.by else "")
    padded = name + " " * max(0, _NAME_WIDTH - cell_len(name))
    # 6: the three gaps between the columns, of two cells each.
    indent = sum(map(cell_len, (when, kind, padded))) + 6
    room = shutil.get_terminal_size().columns - indent
    if sys.stdout.isatty() and room >= _LEAST_TEXT:
        text = ("\n" + " " * indent).join(wrap(text, room))
    if event.kind in BAD_EVENTS and shows_colour(sys.stdout):
        kind = f"\x1b[{_RED}m{kind}\x1b[0m"
    return "  ".join((when, kind, padded, text)).rstrip()
