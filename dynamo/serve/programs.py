"""The programs of a deployment and the names of their watchers. Light: ``dynamo ps`` needs it."""

from __future__ import annotations

__all__ = ["FRONTEND", "MODEL_PROGRAMS", "PLANNER", "watcher_name"]

FRONTEND = "dynamo.frontend"
PLANNER = "dynamo.planner"

MODEL_PROGRAMS = ("dynamo.attach", "dynamo.mocker", "dynamo.vllm")
"""Programs that register a model; the planner scales their services."""


def watcher_name(namespace: str, service: str, index: int) -> str:
    """Return ``{namespace}_{service}`` for the first process, then ``…_1``, ``…_2``."""
    return f"{namespace}_{service}" + (f"_{index}" if index else "")
