"""Commands of the circus endpoint beyond circus's own, and replies that report a failure.

Its own module, because importing a circus command registers it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from circus.commands.base import Command

__all__ = ["RELOAD_GRAPH", "ReloadGraph", "error_reply"]

RELOAD_GRAPH = "reload_graph"


class ReloadGraph(Command):  # type: ignore[misc]
    """Apply a changed graph, or show what would change.

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


def error_reply(reason: str) -> dict[str, str]:
    """Return the reply of a command that ran and failed."""
    return {"status": "error", "reason": reason}
