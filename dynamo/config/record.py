"""Options of ``dynamo record``."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["RecordSettings"]


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """record: how long, and what"""

    file: str | None = option(None, "file", metavar="FILE", help="the trace to write, a new file")
    seconds: float | None = option(
        None,
        "--seconds",
        minimum=0,
        exclusive_minimum=True,
        help="stop after so many seconds; default: at Ctrl-C",
    )
    requests: int | None = option(
        None, "--requests", minimum=1, help="stop after so many requests; default: at Ctrl-C"
    )
    model: str | None = option(None, "--model", help="record this model only; default: all")
