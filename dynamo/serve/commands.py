"""The commands of the circus endpoint that replace processes, one watcher after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from circus.arbiter import Arbiter
from circus.commands.base import Command
from circus.util import synchronized

from dynamo.runtime.process.tasks import Tasks
from dynamo.serve.supervision.supervised import SupervisedWatcher

__all__ = [
    "RELOAD_GRAPH",
    "GraphEvents",
    "ReloadGraph",
    "RollWatchers",
    "RollingArbiter",
    "error_reply",
]

RELOAD_GRAPH = "reload_graph"


class GraphEvents(Protocol):
    """Carries out the commands."""

    async def restart(self, watchers: Sequence[SupervisedWatcher], stop_first: bool) -> str:
        """Replace the processes of ``watchers``; return "" or what failed."""

    async def reload(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Apply a changed graph; return the reply."""


class ReloadGraph(Command):  # type: ignore[misc]
    """Apply a changed graph, or show what would change. The class registers itself with circus.

    Properties: ``graph``, the absolute path of the file, and ``overrides``, words of a command
    line; without both, those of the last start or reload. ``dry_run``: change nothing.
    """

    name = RELOAD_GRAPH

    def message(self, *args: str, **options: Any) -> Any:
        """Return the message; the client is ``dynamo reload``."""
        return self.make_message(**options)

    def execute(self, arbiter: Any, properties: Mapping[str, Any]) -> Any:
        """Start it; the reply follows at its end."""
        return arbiter.reload_graph(properties)


class RollWatchers(Command):  # type: ignore[misc]
    """Replace the processes of the watchers in ``names``. Unlike circus's ``restart``, the reply
    says what failed. The class registers itself with circus."""

    name = "roll_watchers"
    properties = ("names",)

    def message(self, *args: str, **options: Any) -> Any:
        """Return the message; the client is ``dynamo restart``."""
        return self.make_message(names=args, **options)

    def execute(self, arbiter: Any, properties: Mapping[str, Any]) -> Any:
        """Start it; the reply follows at its end."""
        return arbiter.roll_named([self._get_watcher(arbiter, n) for n in properties["names"]])


def error_reply(reason: str) -> dict[str, str]:
    """Return the reply of a command that ran and failed."""
    return {"status": "error", "reason": reason}


class RollingArbiter(Arbiter):  # type: ignore[misc]
    """An arbiter whose restarts and reloads keep requests served."""

    _events: GraphEvents
    _tasks: Tasks

    @synchronized("arbiter_restart")  # type: ignore[untyped-decorator]
    def restart(self, inside_circusd: bool = False, watcher_iter_func: Any = None) -> Any:
        """Handle ``circusctl restart``: replace the processes of the chosen watchers, or of all.

        Without a name, circus would end the arbiter and expect circusd to start a new one.
        """
        chosen = (watcher_iter_func or self.iter_watchers)()
        return self._tasks.spawn(self.roll(chosen, False), name="restart")

    @synchronized("arbiter_roll")  # type: ignore[untyped-decorator]
    def roll_named(self, watchers: Sequence[SupervisedWatcher]) -> Any:
        """Handle ``dynamo restart``."""
        return self._tasks.spawn(self.roll(watchers, False), name="restart")

    @synchronized("arbiter_reload")  # type: ignore[untyped-decorator]
    def reload(self, graceful: bool = True, sequential: bool = False) -> Any:
        """Handle ``circusctl reload`` without a name."""
        return self._tasks.spawn(self._reload_all(graceful, sequential), name="reload")

    async def _reload_all(self, graceful: bool, sequential: bool) -> dict[str, str] | None:
        if graceful:
            return await self.roll(self.iter_watchers(), sequential)
        await self._stop_watchers()
        await self._start_watchers()
        return None

    async def roll(
        self, watchers: Sequence[SupervisedWatcher], stop_first: bool
    ) -> dict[str, str] | None:
        """Replace the processes of ``watchers``; return the reply to a client that waits."""
        problem = await self._events.restart(watchers, stop_first)
        return error_reply(problem) if problem else None

    def reload_from_config(self, config_file: object = None, inside_circusd: bool = False) -> Any:
        """Handle ``circusctl reloadconfig``: read the graph again."""
        return self.reload_graph({})

    @synchronized("arbiter_reload_graph")  # type: ignore[untyped-decorator]
    def reload_graph(self, request: Mapping[str, Any]) -> Any:
        """Handle ``dynamo reload``: apply the graph that ``request`` names."""
        return self._tasks.spawn(self._events.reload(request), name="reload the graph")
