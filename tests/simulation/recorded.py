"""Judges what ``dynamo record`` writes: a line for each request that ended in its time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from box import Box
    from history import Request
    from shell import Shown

__all__ = ["check_recording"]

_BEGIN_S = 0.5
"""So long after its start it surely records, and before its end it surely still does."""
_NOTHING = "no request ended in this time"
_PLAIN = ("chat", "completions")
Line = tuple[str, int, int]
"""Path of the API, or '' of a trace; prompt and output tokens, or the size of the body."""


def check_recording(box: Box, shown: Shown, is_asked: bool) -> Iterator[str]:
    """Yield what is missing in the file of ``shown``, and what is too much.

    ``is_asked``: its frontend lived and answered all the time.
    """
    path = Path(box.env["DYN_LOCAL_STATE_DIR"], shown.words[1])
    ended = [one for one in box.requests if one.api in _PLAIN and _is_of(box, shown, one)]
    inside = [
        one
        for one in ended
        if shown.since_s + _BEGIN_S < one.started_s and one.ended_s < shown.until_s - _BEGIN_S
    ]
    whole = [one for one in inside if _is_whole(one)]
    if shown.status:
        if is_asked and whole:
            yield f"status {shown.status} though {len(whole)} requests ended: {shown.err[:200]}"
        return
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if "--content" in shown.words:
        yield from _check_contents(box, rows, whole if is_asked else [])
        return
    found = Counter((row["input_length"], row["output_length"]) for row in rows)
    wanted = Counter(
        (one.expected.prompt_tokens, one.expected.completion_tokens)
        for one in (whole if is_asked else [])
        if one.choices == 1
    )
    if missing := wanted - found:
        yield f"its file lacks {dict(missing)}, it has {dict(found)}"
    if any(row["timestamp"] < 0 for row in rows):
        yield "a request arrived before its begin"
    times = [row["timestamp"] for row in rows]
    if times != sorted(times):
        yield f"its lines are not in the order of arrival: {times}"
    met = [one for one in box.requests if one.ended_s >= shown.since_s - 1]
    if sum(found.values()) > sum(max(1, one.choices) for one in met):
        yield f"it has {sum(found.values())} lines of {len(met)} requests"


def _is_of(box: Box, shown: Shown, request: Request) -> bool:
    url = shown.words[shown.words.index("--url") + 1]
    return url.endswith(str(box.ports[request.id]))


def _is_whole(request: Request) -> bool:
    failed = any(one.kind == "error" for one in request.events)
    return request.ending == "complete" and request.status == 200 and not failed


def _check_contents(box: Box, rows: list[dict[str, Any]], wanted: list[Request]) -> Iterator[str]:
    """The bodies are those that clients sent and received."""
    by_id = {row["request_id"]: row for row in rows}
    for request in wanted:
        name = request.id.replace(" ", "-")
        if int(request.id.split()[1]) % 2:
            continue  # without an id of its client
        row = by_id.get(name)
        if row is None:
            yield f"its file lacks {request.id}"
            continue
        body = json.loads(row["body"])
        if body["model"] != box.models[request.id]:
            yield f"{request.id} is of {body['model']}"
        if row["outcome"] != "ok" or not row.get("response"):
            yield f"{request.id}: {row['outcome']}, {row.get('note')}"
        elif not request.stream and request.choices == 1:
            text = json.loads(row["response"])["choices"][0]
            text = text.get("text", text.get("message", {}).get("content"))
            if text != request.expected.text:
                yield f"{request.id} answered {text!r}, not {request.expected.text!r}"
