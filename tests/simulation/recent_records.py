"""Judges records of requests, as frontends keep them: they are what clients saw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from machine import START_S
from truth import SEVERAL, Truth, may_serve

if TYPE_CHECKING:
    from history import Request

__all__ = ["check_record", "request_of"]

_ROUNDED_S = 0.01
_PREFIX = "request-"


def request_of(truth: Truth, record: Mapping[str, Any]) -> Request | None:
    """Return the request that a record is of, if its client had given it an id."""
    client_id = record.get("client_id", "")
    if not client_id.startswith(_PREFIX):
        return None
    name = client_id.replace("-", " ")
    return next((one for one in truth.box.requests if one.id == name), None)


def check_record(truth: Truth, record: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is not so of a record."""
    request = request_of(truth, record)
    if request is None or not request.choices or truth.box.models[request.id] in SEVERAL:
        return
    box, name = truth.box, request.id
    model = box.models[request.id]
    if model == "far" and record["model"] != "far":
        return  # of the frontend that serves what the client's frontend relays
    unread = record["model"] == "unknown" and record["outcome"] == "unavailable"
    if record["model"] != model and not unread:  # a drain refuses it before its body is read
        yield f"{name} is of {model}, not {record['model']}"
    worker = record.get("worker", "")
    owner = truth.owner(worker) if worker else None
    if worker and not (owner and may_serve(owner, model)) and model != "far":
        yield f"{name} went to {worker}, which is {owner}"
    if record["duration_s"] > request.ended_s - request.started_s + _ROUNDED_S + _late_s(request):
        yield f"{name} took {request.ended_s - request.started_s:.3f} s, not {record['duration_s']}"
    if not box.clock_set():
        received_s = record["received_at_s"] - START_S
        if not request.started_s - _ROUNDED_S <= received_s <= request.ended_s + _ROUNDED_S:
            yield f"{name} came at {received_s:.3f} s, its client began at {request.started_s:.3f}"
    spent = ("worker_wait_s", "prepare_s", "queue_s", "prefill_s", "decode_s")
    if sum(record.get(one) or 0.0 for one in spent) > record["duration_s"] + _ROUNDED_S:
        yield f"{name}: the times of {record} exceed its duration"
    yield from _check_end(name, request, record)


def _late_s(request: Request) -> float:
    """A client that leaves sees its end before its frontend."""
    return 0.0 if request.ending == "complete" else float("inf")


def _check_end(name: str, request: Request, record: Mapping[str, Any]) -> Iterator[str]:
    failed = any(one.kind == "error" for one in request.events)
    if request.ending != "complete":
        return
    if (failed or request.status != 200) == (record["outcome"] == "ok"):
        yield f"{name} ended with {request.status}, its record with {record['outcome']}"
    if failed or request.status != 200 or not request.expected.finish_reason:
        return
    tokens = request.expected.completion_tokens * max(1, request.choices)
    if record.get("completion_tokens", 0) != tokens:
        yield f"{name} has {tokens} tokens, its record {record.get('completion_tokens', 0)}"
    estimated = record["model"] == "far"  # a frontend has no tokenizer of what it relays
    if not estimated and record.get("prompt_tokens", 0) != request.expected.prompt_tokens:
        yield (
            f"{name} has {request.expected.prompt_tokens} prompt tokens, its record"
            f" {record.get('prompt_tokens', 0)}"
        )
