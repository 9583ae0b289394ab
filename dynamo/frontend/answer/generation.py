"""From engine outputs to what the client reads: SSE bytes as they come, or one body at the end.

A stream object lives as long as its request and knows neither sockets nor routers:

* ``opening()`` once, then for each engine output ``feed(choice, output)``, or ``push`` for several
  outputs and one ``flush`` (what arrived together leaves as one delta);
* ``close(choice)`` when the engine's stream of a choice has ended;
* ``end()`` after the last, or ``error(...)``; or, for a request that does not stream, ``unary()``.

Spec 5.4, 5.6, 5.8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynamo.errors import DynamoError
from dynamo.frontend.answer.choice import Choice, StopRules
from dynamo.frontend.answer.detokenizer import make_detokenizer
from dynamo.frontend.answer.echo import EchoedPrompt, echoed_prompts
from dynamo.frontend.answer.logprobs import ChatLogprobs, CompletionLogprobs, LogprobsCollector
from dynamo.frontend.answer.sse import (
    DONE,
    ChatShape,
    ChunkTemplate,
    CompletionShape,
    Shape,
    annotation,
    error_event,
    json_bytes,
)
from dynamo.frontend.answer.usage import Usage, count_usage
from dynamo.frontend.prompt.preprocessor import Prepared
from dynamo.frontend.prompt.tokenizer import Tokenizer
from dynamo.protocols.engine import EngineOutput
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest, GenerationRequest

__all__ = ["ChatStream", "CompletionStream", "GenerationStream"]

_NOTHING: frozenset[str] = frozenset()


class GenerationStream:
    """The answer to one request with its ``n`` choices for each prompt.

    ``worker_id`` (a dict as in spec 5.6) and ``timing`` (called at the end) are given by who
    knows them; they are shown if the request asks for them in ``nvext.extra_fields``.
    """

    _shape: type[Shape]

    def __init__(
        self,
        request: GenerationRequest,
        prepared: Prepared,
        tokenizer: Tokenizer,
        response_id: str,
        created: int,
        *,
        force_usage: bool = False,
    ) -> None:
        """``response_id`` is e.g. ``chatcmpl-…``, ``created`` seconds since the epoch."""
        options, nvext = request.stream_options, request.nvext
        self._with_usage = force_usage or bool(options is not None and options.include_usage)
        self._extra = _NOTHING if nvext is None else frozenset(nvext.extra_fields or ())
        self._annotations = prepared.requests[0].annotations
        self._prepared = prepared
        self._response_id = response_id
        self._envelope = ChunkTemplate(self._shape, response_id, created, request.model)
        self._choices = self._make_choices(request, prepared, tokenizer)
        self._shapes: list[Shape] = []
        self._own_count: set[int] = set()
        self._started = [False] * len(self._choices)
        self._finished = [False] * len(self._choices)
        self.worker_id: dict[str, Any] | None = None
        self.timing: Callable[[], dict[str, Any]] | None = None

    # --- engine side

    def push(self, index: int, output: EngineOutput) -> bool:
        """Take one engine output of choice ``index`` without writing; whether the choice is done.

        Raises EngineFailure.
        """
        choice = self._choices[index]
        choice.push(output)
        return choice.finish_reason is not None

    def close(self, index: int) -> None:
        """The engine's stream of choice ``index`` has ended."""
        self._choices[index].close()

    def resumed(self, index: int) -> None:
        """Choice ``index`` moved to another worker with its text so far as part of the prompt:
        from now on the engine's prompt count says nothing about this request's prompt."""
        self._own_count.add(index)

    def is_done(self, index: int) -> bool:
        """Whether choice ``index`` needs no more of the engine (finished, or a stop was found)."""
        return self._choices[index].finish_reason is not None

    @property
    def all_done(self) -> bool:
        """Whether every choice is done."""
        return all(choice.finish_reason is not None for choice in self._choices)

    # --- streaming

    def opening(self) -> bytes:
        """The annotations that the client asked for, as events; often nothing."""
        if not self._annotations:
            return b""
        first = self._prepared.prompts[0]
        values: dict[str, Callable[[], str | None]] = {
            "request_id": lambda: self._response_id.partition("-")[2],
            "token_ids": lambda: json_bytes(first.token_ids.tolist()).decode(),
            "formatted_prompt": lambda: first.text,
        }
        found = [(name, values[name]()) for name in self._annotations if name in values]
        return b"".join(annotation(name, value) for name, value in found if value is not None)

    def feed(self, index: int, output: EngineOutput) -> bytes:
        """Take one engine output and give the SSE bytes to write now, perhaps none."""
        self._choices[index].push(output)
        return self._chunk(index)

    def flush(self) -> bytes:
        """SSE bytes of everything pushed since the last time: one chunk a choice at most."""
        if len(self._choices) == 1:
            return self._chunk(0)
        return b"".join([self._chunk(index) for index in range(len(self._choices))])

    def end(self) -> bytes:
        """The last bytes of the stream: what is left, usage if asked for, ``[DONE]``."""
        for choice in self._choices:
            choice.close()
        last = self.flush()
        if self._with_usage:
            last += self._envelope.chunk() + b'],"usage":' + self.usage().to_json() + b"}\n\n"
        return last + DONE

    def error(self, error: DynamoError) -> bytes:
        """The last bytes of a stream that failed: what is left, the error object, ``[DONE]``."""
        return self.flush() + error_event(error) + DONE

    def located(self) -> bytes:
        """The whole stream of a ``query_instance_id`` request: where it would go. Spec 5.6."""
        ids = self._prepared.prompts[0].token_ids.tolist()
        nvext = {"worker_id": self.worker_id or {}, "token_ids": ids}
        return self._shape_of(0).chunk("", finish_reason="stop", nvext=nvext) + DONE

    # --- unary

    def unary(self) -> bytes:
        """The whole answer as one JSON body."""
        parts = []
        for index, choice in enumerate(self._choices):
            choice.close()
            logprobs = choice.logprobs.take() if choice.logprobs is not None else None
            parts.append(self._shape.whole(index, choice.take(), logprobs, choice.finish_reason))
        nvext = self._nvext(self._choices[0], first=True, last=True) if self._extra else None
        return b"".join(
            (
                self._envelope.body(),
                b",".join(parts),
                b'],"usage":',
                self.usage().to_json(),
                b"" if nvext is None else b',"nvext":' + json_bytes(nvext),
                b"}",
            )
        )

    # --- counts

    def usage(self) -> Usage:
        """Tokens so far, all choices."""
        return count_usage(self._prepared, self._choices, self._own_count)

    # --- private

    def _make_choices(
        self, request: GenerationRequest, prepared: Prepared, tokenizer: Tokenizer
    ) -> list[Choice]:
        skip = request.skip_special_tokens is not False
        # The choices differ in max_tokens at most, which the engine counts.
        conditions = prepared.requests[0].stop_conditions
        rules = StopRules(conditions, bool(request.include_stop_str_in_output))
        return [
            Choice(
                make_detokenizer(tokenizer, skip),
                rules,
                self._logprobs(request, tokenizer, index // prepared.n),
            )
            for index in range(len(prepared.requests))
        ]

    def _logprobs(
        self, request: GenerationRequest, tokenizer: Tokenizer, prompt: int
    ) -> LogprobsCollector | None:
        raise NotImplementedError

    def _chunk(self, index: int) -> bytes:
        choice = self._choices[index]
        reason = choice.finish_reason
        if self._started[index] and reason is None and choice.logprobs is None:
            texts = choice.pending
            if not texts:
                return b""
            text = texts[0] if len(texts) == 1 else "".join(texts)
            texts.clear()
            return self._shapes[index].delta(text)
        return self._rare_chunk(index, choice, reason)

    def _rare_chunk(self, index: int, choice: Choice, reason: str | None) -> bytes:
        """The first and the last chunk of a choice, and all with log probabilities."""
        if self._finished[index] or not (choice.pending or reason is not None):
            return b""
        logprobs = choice.logprobs.take() if choice.logprobs is not None else None
        first = not self._started[index]
        self._started[index] = True
        self._finished[index] = reason is not None
        nvext = None
        if self._extra and (first or reason is not None):
            nvext = self._nvext(choice, first=first, last=all(self._finished))
        return self._shape_of(index).chunk(choice.take(), logprobs, reason, nvext)

    def _shape_of(self, index: int) -> Shape:
        if not self._shapes:  # only now is it certain that the answer is streamed
            null = b',"usage":null' if self._with_usage else b""
            self._shapes = [
                self._shape(self._envelope, each, null) for each in range(len(self._choices))
            ]
        return self._shapes[index]

    def _nvext(self, choice: Choice, *, first: bool, last: bool) -> dict[str, Any] | None:
        shown: dict[str, Any] = {}
        if first and "worker_id" in self._extra and self.worker_id is not None:
            shown["worker_id"] = self.worker_id
        if last and "timing" in self._extra and self.timing is not None:
            shown["timing"] = self.timing()
        if choice.stop_reason is not None and "stop_reason" in self._extra:
            shown["stop_reason"] = choice.stop_reason
        return shown or None


class ChatStream(GenerationStream):
    """The answer to POST /v1/chat/completions."""

    _shape = ChatShape

    def _logprobs(
        self, request: GenerationRequest, tokenizer: Tokenizer, prompt: int
    ) -> LogprobsCollector | None:
        if not isinstance(request, ChatCompletionRequest) or not request.logprobs:
            return None
        return ChatLogprobs(tokenizer, request.top_logprobs or 0)


class CompletionStream(GenerationStream):
    """The answer to POST /v1/completions. With ``echo`` each choice begins with its prompt."""

    _shape = CompletionShape

    def _make_choices(
        self, request: GenerationRequest, prepared: Prepared, tokenizer: Tokenizer
    ) -> list[Choice]:
        self._echoed: list[EchoedPrompt] = []
        if isinstance(request, CompletionRequest):
            self._echoed = echoed_prompts(request, prepared, tokenizer)
        choices = super()._make_choices(request, prepared, tokenizer)
        for index, choice in enumerate(choices if self._echoed else ()):
            choice.pending.append(self._echoed[index // prepared.n].text)
        self._echoed = []  # the choices have them
        return choices

    def _logprobs(
        self, request: GenerationRequest, tokenizer: Tokenizer, prompt: int
    ) -> LogprobsCollector | None:
        if not isinstance(request, CompletionRequest) or request.logprobs is None:
            return None
        text, rows = self._echoed[prompt] if self._echoed else ("", ())
        return CompletionLogprobs(tokenizer, request.logprobs, rows, len(text))
