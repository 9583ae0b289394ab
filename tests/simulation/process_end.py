"""What unwinds a simulated process that is killed."""

from __future__ import annotations

__all__ = ["ProcessKilled"]


class ProcessKilled(BaseException):
    """Unwinds the callback in which a process is killed; its handlers have no effect."""
