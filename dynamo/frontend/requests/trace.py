"""The trace of one request: a span with its stages, made when it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo.frontend.requests.recent import RequestFigures
from dynamo.http import Exchange
from dynamo.observability.tracing import OpenSpan

if TYPE_CHECKING:
    from dynamo.observability.otel import OtelTracing

_NAME = "http-request"
_NO_ERROR = ("ok", "cancelled", "validation", "not_found")
"""Outcomes without the status ERROR: OpenTelemetry blames a server for its own failures alone."""


def begin_trace(tracing: OtelTracing | None, exchange: Exchange) -> OpenSpan:
    """Start the span of a request, below that of its client if it has one."""
    if tracing is None:
        return OpenSpan(exchange.headers)
    return tracing.start(_NAME, exchange.headers, exchange.received_at)


def end_trace(span: OpenSpan, ended: RequestFigures) -> None:
    """End the span of a request with its stages and figures."""
    for name, begun_s, ended_s in ended.stages():
        span.child(name, begun_s, ended_s)
    decision, usage, prefilled = ended.decision, ended.usage, ended.prefilled
    attributes: dict[str, str | int | float] = {
        "gen_ai.request.model": ended.model,
        "dynamo.request_id": ended.info.request_id,
        "dynamo.endpoint": ended.info.endpoint,
        "dynamo.outcome": ended.outcome,
        "dynamo.migrations": ended.migrations,
        "gen_ai.usage.input_tokens": ended.prompt_tokens,
    }
    if usage is not None:
        attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
    if decision is not None:
        attributes["dynamo.worker"] = f"{decision.worker_id:x}"
        attributes["dynamo.dp_rank"] = decision.dp_rank
        attributes["dynamo.overlap_blocks"] = ended.overlap_blocks
        attributes["dynamo.prompt_blocks"] = ended.prompt_blocks
    if prefilled is not None:
        attributes["dynamo.prefill_worker"] = f"{prefilled.worker_id:x}"
    if ended.ttft_s is not None:
        attributes["dynamo.ttft_seconds"] = ended.ttft_s
    error = "" if ended.outcome in _NO_ERROR else ended.outcome
    span.end(ended.ended_s, attributes, error)


def trace_refused(tracing: OtelTracing, exchange: Exchange, ended: RequestFigures) -> None:
    """Export the span of a request that has not reached its model."""
    span = begin_trace(tracing, exchange)
    if span.recording:
        end_trace(span, ended)
