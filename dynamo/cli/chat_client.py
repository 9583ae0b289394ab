"""The requests of ``dynamo chat``: the list of models, and an answer as it arrives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from dynamo.bench.client import AnswerChunk, AnswerUsage, EventParser, error_message, refusal
from dynamo.cli.frontend_client import BODY_BYTES, START
from dynamo.errors import CannotConnect, ConfigError, DynamoError
from dynamo.http.client import HttpClient, ResponseError, Target, call, cause, remedy
from dynamo.protocols.openai import ModelList

_BODY_BYTES = 16 << 20
_CONNECT_S = 10.0
_MODELS_S = 30.0
_ERROR_CHARS = 2000
_EVENT_STREAM = b"text/event-stream"


class ChatTarget(NamedTuple):
    """With whom to talk: an endpoint and one of its models, which ends after ``max_tokens``."""

    endpoint: Target
    model: str
    max_tokens: int | None = None


_decode = msgspec.json.Decoder(AnswerChunk).decode


class ChatAnswer:
    """One answer: its text and figures so far. Times are in seconds from the request."""

    def __init__(self) -> None:
        self._begun_s = time.perf_counter()
        self.text = ""
        self.prompt_tokens = self.output_tokens = 0
        self.cached_tokens: int | None = None
        self.finish_reason = ""
        self.ttft_s = self.last_token_s = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second after the first one; 0 while unknown."""
        decode_s = self.last_token_s - self.ttft_s
        return (self.output_tokens - 1) / decode_s if self.output_tokens > 1 and decode_s else 0.0

    def arrived(self, text: str) -> None:
        """Add ``text`` of the answer, or "" for reasoning, which is not part of it."""
        self.last_token_s = time.perf_counter() - self._begun_s
        self.ttft_s = self.ttft_s or self.last_token_s
        self.text += text

    def count(self, usage: AnswerUsage) -> None:
        """Take the figures of the endpoint."""
        self.prompt_tokens = usage.prompt_tokens or 0
        self.output_tokens = usage.completion_tokens or 0
        details = usage.prompt_tokens_details
        self.cached_tokens = None if details is None else details.cached_tokens


class _AnswerStream(HttpClient):
    """Passes the text of each event to ``show``: (text, whether it is reasoning)."""

    def __init__(self, answer: ChatAnswer, show: Callable[[str, bool], None]) -> None:
        super().__init__(_BODY_BYTES)
        self._answer = answer
        self._show = show
        self._events = EventParser()
        self.error = ""
        self.ended = False

    def on_body(self, data: bytes) -> None:
        """httptools: a piece of the stream, or of an error."""
        if self.status != 200 or self.content_type != _EVENT_STREAM:
            super().on_body(data)
            return
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self.ended = True
            elif event and not self.error:
                self._read(event)

    def _read(self, event: bytes) -> None:
        try:
            chunk = _decode(event)
        except msgspec.MsgspecError as error:
            self.error = f"not an event of a chat: {error}"
            return
        if chunk.error is not None:
            self.error = error_message(event, _ERROR_CHARS)
        if chunk.usage is not None:
            self._answer.count(chunk.usage)
        for choice in chunk.choices or ():
            self._answer.finish_reason = choice.finish_reason or self._answer.finish_reason
            delta = choice.delta
            if delta is None:
                continue
            if reasoning := delta.reasoning_content or delta.reasoning:
                self._answer.arrived("")
                self._show(str(reasoning), True)
            if text := delta.content or delta.refusal:
                self._answer.arrived(str(text))
                self._show(str(text), False)


async def request_answer(
    target: ChatTarget,
    messages: Sequence[Mapping[str, str]],
    answer: ChatAnswer,
    show: Callable[[str, bool], None],
) -> None:
    """Stream an answer into ``answer`` and ``show``; a cancelled call cancels the request.

    Raises DynamoError with the endpoint's message.
    """
    endpoint = target.endpoint
    body = _body(target, messages)
    stream = _AnswerStream(answer, show)
    try:
        # Of the connection alone: an answer takes as long as it takes, and Ctrl-C ends it.
        async with asyncio.timeout(_CONNECT_S):
            await stream.connect_to(endpoint)
    except (OSError, UnicodeError) as error:
        raise _unreachable(endpoint, error) from None
    try:
        await stream.request(endpoint.head("POST", "/v1/chat/completions", len(body)) + body)
    except ResponseError as error:
        raise DynamoError(f"the answer broke off: {error}") from None
    finally:
        stream.close()
    if stream.status != 200:
        text = refusal(stream.status, bytes(stream.body), _ERROR_CHARS)
        raise DynamoError(f"{endpoint.url} answered {text}")
    if stream.error:
        raise DynamoError(stream.error)
    if not stream.ended:
        raise DynamoError(f"{endpoint.url} ended the answer without [DONE]")


def _body(target: ChatTarget, messages: Sequence[Mapping[str, str]]) -> bytes:
    limit = {} if target.max_tokens is None else {"max_tokens": target.max_tokens}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    try:
        return msgspec.json.encode(
            {"model": target.model, "messages": messages, **streamed, **limit}
        )
    except UnicodeEncodeError:  # bytes of the terminal, a pipe or a flag that are no characters
        raise ConfigError("the message is not UTF-8 text; nothing was sent") from None


async def list_models(target: Target) -> list[str]:
    """Return the ids of the endpoint's models. Raises DynamoError."""
    try:
        answer = await call(target, "GET", "/v1/models", BODY_BYTES, _MODELS_S)
        if answer.status != 200:
            text = refusal(answer.status, bytes(answer.body), _ERROR_CHARS)
            raise DynamoError(f"{target.url} answered {text}")
        return [model.id for model in msgspec.json.decode(answer.body, type=ModelList).data]
    except (OSError, UnicodeEncodeError) as error:
        raise _unreachable(target, error) from None
    except (ResponseError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DynamoError(f"{target.url} is not an OpenAI endpoint: {error}") from None


def _unreachable(target: Target, error: Exception) -> CannotConnect:
    return CannotConnect(
        f"cannot connect to {target.authority} ({cause(error)}); {remedy(error, START)}"
    )
