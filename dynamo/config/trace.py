"""The option that names the format of a trace, for ``dynamo bench`` and ``planner replay``."""

from __future__ import annotations

from typing import Any

from dynamo.config.option import option

__all__ = ["TRACE_FORMATS", "trace_format_option"]

TRACE_FORMATS = ("auto", "mooncake", "azure", "aiperf", "tracelab")


def trace_format_option() -> Any:
    """Return the field of ``--trace-format``."""
    return option(
        "auto",
        "--trace-format",
        choices=TRACE_FORMATS,
        help="Mooncake's or aiperf's mooncake_trace JSONL, Azure's CSV, aiperf's multi_turn or "
        "single_turn JSONL, TraceLab's JSONL; auto: by the first line",
    )
