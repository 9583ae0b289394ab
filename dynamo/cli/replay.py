"""``dynamo replay``: send recorded requests again, most often to another model."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynamo.bench.client import error_message
from dynamo.bench.recording import ContentReader
from dynamo.cli.frontend_client import BODY_BYTES, find_target
from dynamo.cli.options import ReplayRequestSettings
from dynamo.cli.text_table import cut, printable
from dynamo.config import load
from dynamo.config.client import FrontendClientSettings
from dynamo.errors import ConfigError, Unavailable
from dynamo.http.client import ResponseError, Target, call, cause
from dynamo.observability.logs import counted
from dynamo.protocols.status import RecordedContent

DESCRIPTION = """Send the requests of a recording (dynamo record --content) to the deployment
that runs, one after another, and show both answers. With --model they go to another model."""
EPILOG = """examples:
  dynamo record bodies.jsonl --content --seconds 120
  dynamo replay bodies.jsonl --model other
  dynamo replay bodies.jsonl --request 9a76bf84 --json"""

_ANSWER_CELLS = 100
_DELTAS = (
    "response.output_text.delta",
    "response.function_call_arguments.delta",
    "response.custom_tool_call_input.delta",
)
_Position = tuple[int, int]
"""The number of a choice, and that of a part of it."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was sent again: a line of ``--json``. ``error`` says why its stream ended
    early."""

    request_id: str
    path: str
    model: str
    status: int
    duration_s: float
    answer: str
    error: str
    recorded_model: str
    recorded_outcome: str
    recorded_duration_s: float
    recorded_answer: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status: 1 if a request failed."""
    groups = [ReplayRequestSettings, FrontendClientSettings]
    settings, client = load("dynamo replay", DESCRIPTION, groups, argv, epilog=EPILOG)
    sent = failed = 0
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
        replayed = _send(target, record, body, client.timeout_s)
        sent += 1
        failed += replayed.status != 200 or replayed.error != ""
        if settings.json:
            print(msgspec.json.encode(replayed).decode(), flush=True)
        else:
            print("\n".join(_lines(replayed)), flush=True)
    if not sent:
        raise ConfigError(f"{settings.file} has no such request to send")
    if not settings.json:
        print(f"{counted(sent, 'request')} sent again" + (f", {failed:,} failed" if failed else ""))
    return 1 if failed else 0


def with_model(body: str, model: str | None) -> bytes | None:
    """Return the body of a request for ``model``, None if it is no JSON object."""
    fields = _decoded(body)
    if not isinstance(fields, dict):
        return None
    return msgspec.json.encode(fields if model is None else {**fields, "model": model})


class ReplayedAnswer(NamedTuple):
    """The text of an answer, and the error that ended it early, if any."""

    text: str
    error: str = ""


def read_answer(response: str) -> ReplayedAnswer:
    """Read a response of any of the APIs, complete or a stream of events.

    The texts of its choices and its tool calls are separated by bars.
    """
    texts: dict[_Position, list[str]] = {}
    for chunk in _objects(list(_parts(response))):
        failed = chunk.get("response") if chunk.get("type") == "response.failed" else chunk
        if isinstance(failed, dict) and (failed.get("error") or chunk.get("type") == "error"):
            return ReplayedAnswer(_joined(texts), error_message(msgspec.json.encode(failed)))
        for position, text in _texts(chunk):
            texts.setdefault(position, []).append(text)
    return ReplayedAnswer(_joined(texts))


def _joined(texts: Mapping[_Position, Sequence[str]]) -> str:
    return " | ".join(filter(None, ("".join(texts[position]) for position in sorted(texts))))


def _parts(response: str) -> Iterator[Any]:
    """Yield the JSON of a response, or of each of its events."""
    # ":" is a comment: a stream may begin with one that keeps the connection alive.
    if not response.lstrip().startswith(("data:", "event:", ":")):
        yield _decoded(response)
        return
    for line in response.splitlines():
        if line.startswith("data:"):
            yield _decoded(line[5:].strip())


def _decoded(text: str) -> Any:
    """Return the JSON value, None if it is none."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _texts(chunk: dict[str, Any]) -> Iterator[tuple[_Position, str]]:
    """Yield the texts of a chunk or an answer: chat, completions, messages, responses."""
    kind = str(chunk.get("type"))
    if kind in _DELTAS:
        yield (0, _number(chunk, "output_index")), _text(chunk.get("delta"))
    elif kind == "response.output_item.added":
        yield (0, _number(chunk, "output_index")), _call(chunk.get("item"))
    # The other events of the Responses API repeat what its deltas had.
    if kind.startswith("response."):
        return
    for choice in _objects(chunk.get("choices")):
        number = _number(choice, "index")
        message = choice.get("delta") or choice.get("message") or choice
        if isinstance(message, dict):
            yield (number, 0), _text(message.get("content")) or _text(message.get("text"))
            for index, call in enumerate(_objects(message.get("tool_calls"))):
                # 1 more than its index: part 0 is the text.
                yield (number, _number(call, "index", index) + 1), _call(call.get("function"))
    # An event of the Messages API, which numbers its blocks.
    block = 0, _number(chunk, "index")
    yield block, _call(chunk.get("content_block"))
    for delta in _objects([chunk.get("delta")]):
        yield block, _text(delta.get("text")) or _text(delta.get("partial_json"))
    # A complete answer: ``output`` of the Responses API, ``content`` of the Messages API.
    items = (*_objects(chunk.get("output")), *_objects(chunk.get("content")))
    for index, item in enumerate(items):
        yield (0, index), _text(item.get("text")) or _call(item)
        for part in _objects(item.get("content")):
            yield (0, index), _text(part.get("text"))


def _call(value: Any) -> str:
    """Return the name of a tool call and its arguments, as far as they are there."""
    if not isinstance(value, dict):
        return ""
    arguments = value.get("arguments") or value.get("input") or ""
    name = _text(value.get("name"))
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return f"{name} {text}" if name else text


def _number(value: dict[str, Any], key: str, default: int = 0) -> int:
    number = value.get(key)
    return number if isinstance(number, int) else default


def _objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list; servers of others may send anything."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _send(target: Target, record: RecordedContent, body: bytes, timeout_s: float) -> Replayed:
    begun_s = time.monotonic()
    try:
        answer = asyncio.run(call(target, "POST", record.path, BODY_BYTES, timeout_s, body))
    except (OSError, UnicodeError, ResponseError) as error:
        raise Unavailable(f"{record.request_id}: {target.url}: {cause(error)}") from None
    content = bytes(answer.body)
    text = content.decode("utf-8", "replace")
    fields = msgspec.json.decode(body)
    again = read_answer(text) if answer.status == 200 else ReplayedAnswer(error_message(content))
    return Replayed(
        request_id=record.request_id,
        path=record.path,
        model=str(fields.get("model", "")),
        status=answer.status,
        duration_s=time.monotonic() - begun_s,
        answer=again.text,
        error=again.error,
        recorded_model=record.model,
        recorded_outcome=record.outcome,
        recorded_duration_s=record.duration_s,
        recorded_answer=read_answer(record.response).text,
    )


def _lines(replayed: Replayed) -> Iterator[str]:
    yield f"{replayed.request_id}  {replayed.path}"
    rows = (
        (replayed.recorded_model, replayed.recorded_outcome, replayed.recorded_duration_s),
        (replayed.model, "failed" if replayed.error else str(replayed.status), replayed.duration_s),
    )
    width = max(len(model) for model, *_ in rows)
    for (model, outcome, duration_s), text in zip(
        rows, (replayed.recorded_answer, replayed.error or replayed.answer), strict=True
    ):
        answer = cut(printable(text), _ANSWER_CELLS, "…")
        yield f"  {model:<{width}}  {outcome:<6} {duration_s:8.2f} s  {answer}"
