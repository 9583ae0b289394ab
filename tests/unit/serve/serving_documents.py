"""A statefile for tests."""

from __future__ import annotations

from typing import Any

__all__ = ["document"]


def document(namespace: str) -> dict[str, Any]:
    """The smallest statefile of ``namespace`` with one component ``A``."""
    name = f"{namespace}_A"
    return {
        "namespace": namespace,
        "circus_endpoint": "ipc:///nowhere",
        "components": {name: {"watcher_name": name, "cmd": "sleep 1000", "resources": {}}},
        "environment": {},
    }
