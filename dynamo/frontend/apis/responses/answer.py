"""The answer to POST /v1/responses: events of OpenAI's Responses API, or one response object."""

from __future__ import annotations

import secrets
import time
from typing import Any

import orjson

from dynamo.errors import DynamoError, InvalidArgument, ModelNotFound
from dynamo.frontend.answer.events import EventStream
from dynamo.frontend.answer.response_items import OutputItems
from dynamo.frontend.answer.sse import DONE, json_bytes, public_message
from dynamo.frontend.apis.responses.prompt import ResponseChatRequest
from dynamo.frontend.formats.message import AnswerDelta
from dynamo.frontend.prompt.preprocessor import Prepared
from dynamo.frontend.text.tokenizer import Tokenizer
from dynamo.protocols.openai import GenerationRequest

__all__ = ["ResponsesStream", "plain_response_error", "response_error", "response_error_event"]

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_TOO_LONG = "This model's maximum context length"
_TYPES = {429: "rate_limit_error", 401: "authentication_error", 403: "permission_error"}


class ResponsesStream(EventStream):
    """Items of one choice. A response that is complete, or cut by a limit, is stored.

    Where no API keys are needed, a client may read and delete each response whose id it has. So a
    secret is part of the id: those of requests count up, clients may choose them, operators see
    them.
    """

    def __init__(  # noqa: PLR0913 - as its parent
        self,
        request: GenerationRequest,
        prepared: Prepared,
        tokenizer: Tokenizer,
        response_id: str,
        created: int,
        *,
        force_usage: bool = False,
    ) -> None:
        response_id = f"{response_id}-{secrets.token_hex(16)}"
        super().__init__(
            request, prepared, tokenizer, response_id, created, force_usage=force_usage
        )
        assert isinstance(request, ResponseChatRequest)
        origin = self._origin = request.origin
        self._output = OutputItems(
            secrets.token_hex(12),
            origin.tools,
            summarizes=origin.summarizes,
            streams=bool(request.stream),
        )
        self._skipped = 0

    def opening(self) -> bytes:
        """The events before the first delta."""
        shown = {"response": self._response("in_progress")}
        event = self._output.event
        return event("response.created", shown) + event("response.in_progress", shown)

    def _events(self, delta: AnswerDelta) -> bytes:
        return self._output.add(delta, self._logprobs(delta))

    def _last_events(self) -> bytes:
        status = self._status
        events = self._output.close(status)
        response = orjson.Fragment(self._final(status))
        return events + self._output.event(f"response.{status}", {"response": response}) + DONE

    def unary(self) -> bytes:
        """The whole answer as one JSON body."""
        choice = self.choices[0]
        if choice.finish_reason is None:
            choice.close()
        for delta in self._take():
            self._events(delta)
        self.final_usage = self.usage()
        status = self._status
        self._output.close(status)
        return self._final(status)

    def _failed(self, error: DynamoError) -> bytes:
        self.final_usage = self.usage()
        events = self._output.close("incomplete")
        response = self._response("failed")
        response["error"] = {"code": _failure_code(error), "message": public_message(error)}
        return events + self._output.event("response.failed", {"response": response}) + DONE

    @property
    def _status(self) -> str:
        finished = self._finish_reason in ("stop", "tool_calls")
        return "completed" if finished else "incomplete"

    def _final(self, status: str) -> bytes:
        """The response as JSON; store it."""
        response = self._response(status)
        response["completed_at"] = int(time.time())
        reason = _INCOMPLETE.get(self._finish_reason or "")
        if status == "incomplete" and reason is not None:
            response["incomplete_details"] = {"reason": reason}
        if self._extra:
            nvext = self._nvext(self.choices[0], first=True, last=True)
            if nvext is not None:
                response["nvext"] = nvext
        body = json_bytes(response)
        origin = self._origin
        if origin.keep is not None:
            origin.keep(origin, self._response_id, body, self._output.items)
        return body

    def _response(self, status: str) -> dict[str, Any]:
        """The response object, with the items so far."""
        done = self.final_usage is not None
        return {
            "id": self._response_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            **self._origin.echo,
            "output": self._output.items,
            "usage": self._usage_json() if done else None,
        }

    def _usage_json(self) -> orjson.Fragment:
        """The ``usage`` object. Formatted here: a sum of counts may exceed orjson's 64 bits."""
        usage = self.usage()
        given, made = usage.prompt_tokens, usage.completion_tokens
        text = (
            b'{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d,"cache_write_tokens":0},'
            b'"output_tokens":%d,"output_tokens_details":{"reasoning_tokens":%d},"total_tokens":%d}'
        )
        counts = (given, usage.cached_tokens or 0, made, self._reasoning_tokens, given + made)
        return orjson.Fragment(text % counts)

    def _logprobs(self, delta: AnswerDelta) -> list[dict[str, Any]] | None:
        """The log probabilities of the content in ``delta``; those of other text are dropped."""
        collector = self.choices[0].logprobs
        if collector is None or delta.content is None:
            return None
        entries = (collector.drain() or {}).get("content") or []
        reasoning = max(0, self._reasoning_tokens - self._skipped)
        self._skipped += reasoning
        return [_logprob(each) for each in entries[reasoning:]]


def response_error(status: int, error: DynamoError) -> bytes:
    """The body of an error response."""
    return json_bytes({"error": _error(status, error)})


def plain_response_error(status: int, message: str) -> bytes:
    """The body of an error that the HTTP layer responds with."""
    code = "invalid_api_key" if status == 401 else None
    return json_bytes(
        {"error": {"message": message, "type": _type(status), "param": None, "code": code}}
    )


def response_error_event(error: DynamoError) -> bytes:
    """The rest of a stream that began before the request reached its model."""
    shown = _error(error.status, error)
    data = {"type": "error", "sequence_number": 0, **{name: shown[name] for name in _EVENT}}
    return b"event: error\ndata: %b\n\n" % json_bytes(data) + DONE


_EVENT = ("code", "message", "param")


def _error(status: int, error: DynamoError) -> dict[str, Any]:
    code = None if isinstance(error, InvalidArgument) else error.code
    message = public_message(error)
    if message.startswith(_TOO_LONG):
        code = "context_length_exceeded"
    param = "model" if isinstance(error, ModelNotFound) else None
    return {"message": message, "type": _type(status), "param": param, "code": code}


def _type(status: int) -> str:
    return _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")


def _failure_code(error: DynamoError) -> str:
    """A code of ``response.error`` that the official clients accept."""
    if error.status < 500:
        return "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"
    return "server_error"


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of a chat, without the places that have no meaning here."""
    return {
        "token": entry["token"],
        "bytes": entry["bytes"] or [],
        "logprob": entry["logprob"],
        "top_logprobs": [
            {"token": each["token"], "bytes": each["bytes"] or [], "logprob": each["logprob"]}
            for each in entry["top_logprobs"]
        ],
    }
