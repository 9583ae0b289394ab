"""``dynamo logs``: the output of a deployment's processes, from their log files."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from dynamo.cli.console import WatcherPrefix, shows_colour
from dynamo.cli.options import DeploymentSettings, LogsSettings
from dynamo.config import load
from dynamo.errors import ConfigError, InvalidArgument
from dynamo.runtime.process.paths import state_path
from dynamo.status.deployment import chosen_runtime
from dynamo.status.logs import LogLine, LogReader, follow, select_watchers

DESCRIPTION = "Show the output of the processes of a deployment, also after its end."
EPILOG = """NAME is a worker (dynamo_Worker_1) or a service. Lines of several processes have their
names before them, and are sorted by the times in them. Ctrl-C ends -f.
Exit status: 0 shown, 2 there is no such name, or no log."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    groups: list[type[Any]] = [LogsSettings, DeploymentSettings]
    settings, deployment = load("dynamo logs", DESCRIPTION, groups, argv, epilog=EPILOG)
    try:
        runtime = chosen_runtime(deployment.namespace)
        namespace = runtime.namespace
        directory = state_path(runtime) / namespace / "logs"
        watchers = select_watchers(directory, namespace, settings.name)
    except (ConfigError, InvalidArgument) as error:
        print(f"dynamo logs: {error.message}", file=sys.stderr)
        return 2
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
