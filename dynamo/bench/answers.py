"""Reads the answer of an OpenAI endpoint into an Outcome; an invalid one becomes an error."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.bench.stats import Outcome

_SHOWN_CHARS = 160


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class AnswerUsage(msgspec.Struct):
    """The figures of the endpoint."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    """The fields that carry output. Endpoints differ in their types."""

    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class AnswerChunk(msgspec.Struct):
    """A complete answer or a chunk of a stream, chat or completions."""

    choices: list[_Choice] | None = None
    usage: AnswerUsage | None = None
    error: Any = None
    nvext: Any = None


_decode = msgspec.json.Decoder(AnswerChunk).decode


def read_chunk(outcome: Outcome, data: bytes) -> tuple[bool, bool]:
    """Read the data of one event; return whether it has output and whether the answer ends."""
    answer = _read(outcome, data)
    if answer is None:
        return False, False
    output = finished = False
    for choice in answer.choices or ():
        finished = finished or choice.finish_reason is not None
        delta = choice.delta
        if choice.text or (
            delta is not None
            and (
                delta.content
                or delta.reasoning_content
                or delta.reasoning
                or delta.tool_calls
                or delta.refusal
            )
        ):
            output = True
    return output, finished


def read_answer(outcome: Outcome, body: bytes) -> None:
    """Read the body of an answer that is not streamed."""
    answer = _read(outcome, body)
    if answer is not None and not answer.choices:
        outcome.error = f"the answer has no choices: {_shown(body)}"


def error_message(body: bytes, characters: int = _SHOWN_CHARS) -> str:
    """Return the message in the body of an error, else the start of the body."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError):
        return _shown(body)
    if isinstance(decoded, dict):
        message = _message(decoded.get("error"), characters) or decoded.get("message")
        if isinstance(message, str):
            return message[:characters]
    return _shown(body)


def _read(outcome: Outcome, data: bytes) -> AnswerChunk | None:
    try:
        answer = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        outcome.error = f"not an OpenAI answer: {_shown(data)}"
        return None
    if answer.error is not None:
        outcome.error = f"in stream: {_message(answer.error) or _shown(data)}"
        return None
    if answer.usage is not None:
        outcome.prompt_tokens = answer.usage.prompt_tokens
        outcome.output_tokens = answer.usage.completion_tokens
        if answer.usage.prompt_tokens_details is not None:
            outcome.cached_tokens = answer.usage.prompt_tokens_details.cached_tokens
    ids = answer.nvext.get("worker_id") if isinstance(answer.nvext, dict) else None
    if isinstance(ids, dict):
        chosen = ids.get("decode_worker_id") or ids.get("prefill_worker_id")
        outcome.worker_id = chosen if isinstance(chosen, int) else outcome.worker_id
    return answer


def _message(error: object, characters: int = _SHOWN_CHARS) -> str:
    """Return the text of an ``error`` member: an object with a message, or a string."""
    message = error.get("message") if isinstance(error, dict) else error
    return message[:characters] if isinstance(message, str) else ""


def _shown(data: bytes) -> str:
    return repr(data[:_SHOWN_CHARS].decode("utf-8", "replace"))
