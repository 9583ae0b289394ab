"""``dynamo replay``: send recorded requests again, most often to another model."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamo.bench.client import error_message
from dynamo.bench.recording import ContentReader
from dynamo.cli.frontend_client import call, find_target
from dynamo.cli.options import ReplayRequestSettings
from dynamo.cli.text_table import cut, printable
from dynamo.config import load
from dynamo.config.client import FrontendClientSettings
from dynamo.errors import ConfigError, DynamoError, Unavailable
from dynamo.http.client import ResponseError, Target, cause
from dynamo.protocols.status import RecordedContent

DESCRIPTION = """Send the requests of a recording (dynamo record --content) to the deployment
that runs, one after another, and show both answers. With --model they go to another model."""
EPILOG = """examples:
  dynamo record bodies.jsonl --content --seconds 120
  dynamo replay bodies.jsonl --model other
  dynamo replay bodies.jsonl --request 9a76bf84 --json"""

_SHOWN = 100


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was sent again: a line of ``--json``."""

    request_id: str
    path: str
    model: str
    status: int
    duration_s: float
    answer: str
    recorded_model: str
    recorded_outcome: str
    recorded_duration_s: float
    recorded_answer: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status: 1 if a request failed."""
    groups = [ReplayRequestSettings, FrontendClientSettings]
    settings, client = load("dynamo replay", DESCRIPTION, groups, argv, epilog=EPILOG)
    sent = failed = 0
    try:
        if not settings.file:
            raise ConfigError("name the recording: dynamo replay FILE")
        target = find_target(client)
        for record in ContentReader(Path(settings.file)):
            if settings.request and settings.request not in record.request_id:
                continue
            body = with_model(record.body, settings.model)
            if body is None:
                print(f"{record.request_id}: left out, its body is no JSON object", file=sys.stderr)
                continue
            found = _send(target, record, body, client.timeout_s)
            sent += 1
            failed += found.status != 200
            if settings.json:
                print(msgspec.json.encode(found).decode(), flush=True)
            else:
                print("\n".join(_lines(found)), flush=True)
        if not sent:
            raise ConfigError(f"{settings.file} has no such request to send")
    except DynamoError as error:
        print(f"dynamo replay: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    if not settings.json:
        print(f"{sent:,} requests sent again" + (f", {failed:,} failed" if failed else ""))
    return 1 if failed else 0


def with_model(body: str, model: str | None) -> bytes | None:
    """Return the body of a request for ``model``, None if it is no JSON object."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    return msgspec.json.encode(fields if model is None else {**fields, "model": model})


def answer_text(response: str) -> str:
    """Return the text of a response of any of the APIs, complete or a stream of events."""
    if not response.lstrip().startswith(("data:", "event:", ":")):
        return "".join(_texts(_decoded(response)))
    pieces: list[str] = []
    for line in response.splitlines():
        if line.startswith("data:"):
            pieces += _texts(_decoded(line[5:].strip()))
    return "".join(pieces)


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _texts(found: Any) -> Iterator[str]:
    """Yield the texts of a chunk or an answer: chat, completions, messages, responses."""
    if not isinstance(found, dict):
        return
    kind = str(found.get("type"))
    if kind == "response.output_text.delta":
        yield _text(found.get("delta"))
        return
    if kind.startswith("response."):  # what has come in deltas already
        return
    for choice in _objects(found.get("choices")):
        message = choice.get("delta") or choice.get("message") or choice
        if isinstance(message, dict):
            yield _text(message.get("content")) or _text(message.get("text"))
    for delta in _objects([found.get("delta")]):
        yield _text(delta.get("text"))
    for item in (*_objects(found.get("output")), found):
        for part in _objects(item.get("content")):
            yield _text(part.get("text"))


def _objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list; servers of others may send anything."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _send(target: Target, record: RecordedContent, body: bytes, timeout_s: float) -> Replayed:
    begun_s = time.monotonic()
    try:
        answer = asyncio.run(call(target, "POST", record.path, body, timeout_s))
    except (OSError, UnicodeError, ResponseError) as error:
        raise Unavailable(f"{record.request_id}: {target.url}: {cause(error)}") from None
    content = bytes(answer.body)
    text = content.decode("utf-8", "replace")
    fields = msgspec.json.decode(body)
    return Replayed(
        request_id=record.request_id,
        path=record.path,
        model=str(fields.get("model", "")),
        status=answer.status,
        duration_s=time.monotonic() - begun_s,
        answer=answer_text(text) if answer.status == 200 else error_message(content),
        recorded_model=record.model,
        recorded_outcome=record.outcome,
        recorded_duration_s=record.duration_s,
        recorded_answer=answer_text(record.response),
    )


def _lines(found: Replayed) -> Iterator[str]:
    yield f"{found.request_id}  {found.path}"
    rows = (
        (found.recorded_model, found.recorded_outcome, found.recorded_duration_s),
        (found.model, str(found.status), found.duration_s),
    )
    width = max(len(model) for model, *_ in rows)
    for (model, outcome, duration_s), text in zip(
        rows, (found.recorded_answer, found.answer), strict=True
    ):
        shown = cut(printable(text), _SHOWN, "…")
        yield f"  {model:<{width}}  {outcome:<6} {duration_s:8.2f} s  {shown}"
