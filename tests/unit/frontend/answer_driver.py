"""A driver of answers: a worker's connection in, what the client of each API reads out.

The answer to some tokens does not depend on how they arrive: one or many in an output, one or many
outputs in a read, one or many reads in a turn of the loop. :func:`drive` sends them in any of these
ways, through the compiled sink of the request plane, and returns the answer as an :class:`Answer`
that can be compared between streams and bodies.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from test_request import Site, turn
from text_kit import card

from dynamo.config.runtime import RequestPlaneSettings
from dynamo.errors import DynamoError
from dynamo.frontend.apis.messages.route import MessagesRoutes
from dynamo.frontend.apis.responses.route import ResponseRoutes
from dynamo.frontend.apis.responses.store import ResponseStore
from dynamo.frontend.apis.tokenize import PromptCountRoutes
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.protocols.codec import encode
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import EngineOutput
from dynamo.runtime.requests import ClientStream
from dynamo.runtime.requests.client_connection import ClientConnection
from dynamo.runtime.requests.frames import DATA, END, PREAMBLE, pack

APIS = ("chat", "completions", "responses", "messages")
MOST_TOKENS = 16
"""In one output."""

_PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


class Owner:
    """Accepts the state of the worker's connection."""

    def silent(self, connection: ClientConnection, text: str) -> None:
        raise AssertionError(text)

    def answered(self, connection: ClientConnection) -> None:
        """Nothing to do."""

    def lost(self, connection: ClientConnection, error: DynamoError | None) -> None:
        """Nothing to do."""


class DrivenSite(Site):
    """A frontend with all four APIs, whose worker is at the end of a real connection."""

    def __init__(self, tool: str | None = None, reasoning: str | None = None) -> None:
        super().__init__()
        if tool is not None or reasoning is not None:
            self.preprocessor = self.entry.preprocessor = _parsing(tool, reasoning)
        counts = PromptCountRoutes(self.active, self, self.tasks)  # type: ignore[arg-type]
        MessagesRoutes(self.active, self.openai, counts).install(self.routes)
        self.store = ResponseStore(1 << 20)
        responses = ResponseRoutes(self.store, lambda _: False, lambda _: None)
        responses.install(self.routes, self.openai, counts)
        loop = asyncio.get_running_loop()
        self.worker = ClientConnection(RequestPlaneSettings(), loop, "worker", cast(Any, Owner()))
        self.worker.data_received(PREAMBLE)
        self.opened: list[ClientStream] = []

    def open(self, worker_id: int, payload: bytes, sink: Any, headers: Any) -> Any:
        stream = self.worker.open("generate", headers, payload, sink, None)
        self.opened.append(stream)
        return stream

    def ask(self, api: str, **fields: Any) -> None:
        """Send a request of ``api`` on a connection of its own."""
        self.bench.transport, self.bench.connection = self.bench.connect()
        body: dict[str, Any] = {"model": "tiny", **fields}
        if api == "completions":
            body.setdefault("prompt", "hello")
        elif api == "responses":
            body.setdefault("input", "hello")
        else:
            body.setdefault("messages", [{"role": "user", "content": "hello"}])
        if api == "messages":
            body.setdefault("max_tokens", 3000)
        if body.get("stream") and api in ("chat", "completions"):
            body["stream_options"] = {"include_usage": True}
        self.post(body, _PATHS[api])
        assert self.opened, self.bench.transport.out

    def frames(self, outputs: Sequence[EngineOutput]) -> list[bytes]:
        """The frames of outputs of the request sent last, and of the end of its stream."""
        number = self.opened[-1]._number
        return [*(pack(DATA, number, encode(each)) for each in outputs), pack(END, number, b"")]

    def ids(self, text: str) -> list[int]:
        return self.preprocessor.tokenizer.encode(text).tolist()


@functools.cache
def _parsing(tool: str | None, reasoning: str | None) -> Preprocessor:
    config = RuntimeConfig(tool_call_parser=tool, reasoning_parser=reasoning)
    return Preprocessor(card(display_name="tiny", context_length=4096, runtime_config=config))


class Cuts:
    """How tokens arrive: the sizes of outputs, of reads and of turns, each drawn from ``dice``.

    Without ``dice`` one token makes an output, a read and a turn.
    """

    def __init__(self, dice: random.Random | None = None) -> None:
        self._dice = dice
        self._large = dice is not None and dice.random() < 0.5

    def outputs(self, count: int) -> Iterator[int]:
        """Tokens of each output, ``count`` together."""
        while count:
            most = (
                1 if self._dice is None or not self._large else self._dice.randint(1, MOST_TOKENS)
            )
            size = min(count, most)
            yield size
            count -= size

    def reads(self, frames: Sequence[bytes]) -> Iterator[bytes]:
        """``frames`` in reads, which may also end within a frame."""
        if self._dice is None:
            yield from frames
            return
        rest = b"".join(frames)
        while rest:
            size = self._dice.choice((1, 20, 60, 150, 400, 10_000))
            yield rest[:size]
            rest = rest[size:]

    def stalled(self) -> bool:
        """Whether the next read comes in the same turn of the loop."""
        return self._dice is not None and self._dice.random() < 0.7


def make_outputs(
    ids: Sequence[int], cuts: Cuts, reason: str | None = "stop", logprobs: bool = False
) -> list[EngineOutput]:
    """``ids`` as the outputs of an engine, the last with the ``reason`` of the end.

    The log probability of a token is its place, so that a lost or moved one is seen.
    """
    found, place = [], 0
    for size in cuts.outputs(len(ids)):
        part = list(ids[place : place + size])
        output = EngineOutput(token_ids=part)
        if logprobs:
            places = range(place, place + size)
            output.log_probs = [-float(each) for each in places]
            output.top_logprobs = [
                [{"token_id": token, "logprob": -float(each), "rank": 1}]
                for each, token in zip(places, part, strict=True)
            ]
        found.append(output)
        place += size
    if not found:
        found.append(EngineOutput())
    found[-1].finish_reason = reason
    return found


class Answer(NamedTuple):
    """What a client reads. ``parts`` are (kind, text) and (call, name, arguments), in their order
    where the API has one; ``counts`` its usage; ``logprobs`` those of the text."""

    parts: list[tuple[str, ...]]
    reason: Any
    counts: dict[str, Any]
    logprobs: Any = None


async def drive(
    site: DrivenSite,
    api: str,
    ids: Sequence[int],
    cuts: Cuts,
    *,
    reason: str | None = "stop",
    **fields: Any,
) -> Answer:
    """The answer of ``api`` to a request with ``fields``, of which a worker sends ``ids``."""
    site.ask(api, **fields)
    logprobs = any(fields.get(name) for name in ("logprobs", "top_logprobs"))
    await send(site, make_outputs(ids, cuts, reason, logprobs), cuts)
    assert site.status == 200, site.bench.transport.out
    streamed = bool(fields.get("stream"))
    answer = _READ[api](site.body, streamed)
    site.opened.clear()
    return answer


async def send(site: DrivenSite, outputs: Sequence[EngineOutput], cuts: Cuts) -> None:
    """Send ``outputs`` to the request sent last, as ``cuts`` says, until it has ended."""
    for read in cuts.reads(site.frames(outputs)):
        site.worker.data_received(read)
        if not cuts.stalled():
            await turn()
    await turn()


# --- what a client reads


def _data(body: bytes) -> list[Any]:
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def _chat(body: bytes, streamed: bool) -> Answer:
    if not streamed:
        (choice,) = (whole := json.loads(body))["choices"]
        message, usage, logprobs = choice["message"], whole["usage"], choice["logprobs"]
        reason, calls = choice["finish_reason"], message.get("tool_calls") or []
    else:
        message, logprobs, calls, reason, usage = {}, None, [], None, None
        for chunk in _data(body):
            assert "error" not in chunk, chunk
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                logprobs = _joined(logprobs, choice["logprobs"])
                reason = choice["finish_reason"] or reason
                _add_delta(message, calls, choice["delta"])
    parts: list[tuple[str, ...]] = [
        (kind, text)
        for kind, text in (
            ("reasoning", message.get("reasoning_content")),
            ("text", message.get("content")),
        )
        if text
    ]
    parts += [("call", one["function"]["name"], one["function"]["arguments"]) for one in calls]
    return Answer(parts, reason, usage, logprobs)


def _add_delta(message: dict[str, Any], calls: list[Any], delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    for part in delta.get("tool_calls", ()):
        if part["index"] == len(calls):
            calls.append({"function": dict(part["function"])})
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


def _completion(body: bytes, streamed: bool) -> Answer:
    wholes = _data(body) if streamed else [json.loads(body)]
    text, reason, logprobs = "", None, None
    usage: dict[str, Any] = {}
    for whole in wholes:
        assert "error" not in whole, whole
        usage = whole.get("usage") or usage
        for choice in whole["choices"]:
            text += choice["text"]
            reason = choice["finish_reason"] or reason
            logprobs = _joined(logprobs, choice["logprobs"])
    return Answer([("text", text)], reason, usage, logprobs)


def _joined(before: Any, more: Any) -> Any:
    """Log probabilities of chunks as those of one body."""
    if before is None or more is None:
        return more if before is None else before
    return {
        name: value + more[name] if isinstance(value, list) else value
        for name, value in before.items()
    }


def _response(body: bytes, streamed: bool) -> Answer:
    if streamed:
        events = _data(body)
        whole = events[-1]["response"]
        _check_items(events, whole["output"])
    else:
        whole = json.loads(body)
    parts: list[tuple[str, ...]] = []
    logprobs: list[Any] = []
    for item in whole["output"]:
        match item["type"]:
            case "message":
                parts.append(("text", item["content"][0]["text"]))
                logprobs += item["content"][0]["logprobs"]
            case "reasoning":
                parts.append(("reasoning", item["content"][0]["text"]))
            case "function_call":
                parts.append(("call", item["name"], item["arguments"]))
    reason = (whole["status"], whole["incomplete_details"])
    return Answer(parts, reason, whole["usage"], logprobs)


def _check_items(events: list[Any], items: list[Any]) -> None:
    """Check that the deltas of each item are together its text."""
    deltas = [""] * len(items)
    for event in events:
        assert event["type"] != "response.failed", event
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] += event["delta"]
    for item, text in zip(items, deltas, strict=True):
        whole = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert text == whole


def _message(body: bytes, streamed: bool) -> Answer:
    whole = _folded(_data(body)) if streamed else json.loads(body)
    parts: list[tuple[str, ...]] = []
    for block in whole["content"]:
        match block["type"]:
            case "tool_use":
                parts.append(("call", block["name"], json.dumps(block["input"])))
            case "thinking":
                parts.append(("reasoning", block["thinking"]))
            case "text":
                parts.append(("text", block["text"]))
    return Answer(parts, (whole["stop_reason"], whole["stop_sequence"]), whole["usage"])


def _folded(events: list[Any]) -> dict[str, Any]:
    """The events of a message as one."""
    blocks: list[dict[str, Any]] = []
    whole: dict[str, Any] = {"content": blocks}
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                _add_to_block(blocks[-1], event["delta"])
            case "message_delta":
                whole |= {**event["delta"], "usage": event["usage"]}
            case "error":
                raise AssertionError(event)
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _input_of(block["json"])
    return whole


def _add_to_block(block: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("text", "thinking"):
        block[name] = block.get(name, "") + delta.get(name, "")
    block["json"] += delta.get("partial_json", "")


def _input_of(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {"INVALID_JSON": text}


_READ = {
    "chat": _chat,
    "completions": _completion,
    "responses": _response,
    "messages": _message,
}
