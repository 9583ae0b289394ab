"""From engine outputs to what the client reads: SSE bytes as they come, or one body at the end.

A stream object lives as long as its request and touches neither sockets nor routers:

* ``opening()`` once; then ``push`` for each engine output and ``flush`` for the bytes to write
  (outputs pushed together become one delta);
* ``close(choice)`` when the engine's stream of a choice has ended;
* ``end()`` after the last, or ``error(...)``; or, for a request that does not stream, ``unary()``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import orjson

from dynamo.errors import DynamoError
from dynamo.frontend.answer.choice import Choice, ChoiceRules, PromptOnlyChoice
from dynamo.frontend.answer.logprobs import (
    LogprobsCollector,
    OutputRecord,
    PromptLogprobs,
    collect_image_tokens,
    collect_prompt_logprobs,
    collector_of,
    record_outputs,
)
from dynamo.frontend.answer.sse import (
    DONE,
    ChoiceChunks,
    annotation,
    error_event,
    json_bytes,
    stream_head,
)
from dynamo.frontend.prompt.preprocessor import Prepared
from dynamo.frontend.text.tokenizer import Tokenizer
from dynamo.protocols.engine import EngineOutput
from dynamo.protocols.openai import GenerationRequest


class Usage(msgspec.Struct, frozen=True):
    """Tokens of all prompts (each counted once), of all choices, and those of the prompts that the
    engines did not have to compute (None if no engine reported it)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None

    def to_json(self) -> bytes:
        """The ``usage`` object. Formatted here: a sum of counts may exceed orjson's 64 bits."""
        prompt, completion, cached = self.prompt_tokens, self.completion_tokens, self.cached_tokens
        return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d%b}' % (
            prompt,
            completion,
            prompt + completion,
            b"" if cached is None else b',"prompt_tokens_details":{"cached_tokens":%d}' % cached,
        )


class GenerationStream(ABC):
    """The answer to one request with its ``n`` choices for each prompt.

    Its user sets ``worker_id`` (a dict) and ``timing`` (called at the end), which are shown if the
    request asks for them in ``nvext.extra_fields``.
    """

    _body_object: str
    _chunks: type[ChoiceChunks]

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
        self._with_usage, self._usage_so_far = force_usage, False
        if options is not None:
            self._with_usage = force_usage or bool(options.include_usage)
            self._usage_so_far = self._with_usage and bool(options.continuous_usage_stats)
        self._extra = frozenset((nvext and nvext.extra_fields) or ())
        self._prepared = prepared
        self._response_id = response_id
        self._created = created
        self._model = request.model
        self._shows_prompt = request.prompt_logprobs is not None
        self._shows_ids = request.return_token_ids is True
        self._shows_transfer = request.kv_transfer_params is not None
        # The choices to show of those generated for a prompt; 0 shows all.
        self._best = (request.n or 1) if prepared.n > (request.n or 1) else 0
        self.choices = self._make_choices(request, prepared, tokenizer)
        # Made with the first chunk: an answer in one body needs none.
        self._writers: list[ChoiceChunks] = []
        self._only_writer: ChoiceChunks | None = None
        self.final_usage: Usage | None = None
        self.worker_id: dict[str, Any] | None = None
        self.timing: Callable[[], dict[str, Any]] | None = None

    # --- streaming

    def opening(self) -> bytes:
        """The annotations that the client asked for, as events; often nothing."""
        annotations = self._prepared.requests[0].annotations
        if not annotations:
            return b""
        first = self._prepared.prompts[0]
        values: dict[str, Callable[[], str | None]] = {
            "request_id": lambda: self._response_id.partition("-")[2],
            "token_ids": lambda: json_bytes(first.token_ids.tolist()).decode(),
            "formatted_prompt": lambda: first.text,
        }
        events = [(name, values[name]()) for name in annotations if name in values]
        return b"".join(annotation(name, value) for name, value in events if value is not None)

    def flush(self) -> bytes:
        """SSE bytes of everything pushed since the last time, mostly one chunk a choice."""
        if self._only_writer is not None:
            return self._chunk(self.choices[0], self._only_writer)
        writers = self._writers or self._start_writers()
        # With the usage so far each tail differs: no shortcut over the only writer then.
        if self._usage_so_far:
            for index, writer in enumerate(writers):
                writer.set_usage(b',"usage":' + self._choice_usage(index).to_json())
        elif len(writers) == 1:
            self._only_writer = writers[0]
        return b"".join(map(self._chunk, self.choices, writers))

    def end(self) -> bytes:
        """The last bytes of the stream: the rest of the text, usage if asked for, ``[DONE]``."""
        for choice in self.choices:
            choice.close()
        last = self.flush()
        if self._with_usage:
            last += self._stream_head() + b'],"usage":' + self.usage().to_json() + b"}\n\n"
        return last + DONE

    def error(self, error: DynamoError) -> bytes:
        """The last bytes of a stream that failed: the text so far, the error object, ``[DONE]``."""
        return self.flush() + error_event(error) + DONE

    def location(self) -> bytes:
        """The whole stream of a ``query_instance_id`` request: where it would go."""
        ids = self._prepared.prompts[0].token_ids.tolist()
        nvext = {"worker_id": {} if self.worker_id is None else self.worker_id, "token_ids": ids}
        body = b',"nvext":' + json_bytes(nvext)
        return self._start_writers()[0].chunk("", finish_reason="stop", body=body) + DONE

    # --- unary

    def unary(self) -> bytes:
        """The whole answer as one JSON body."""
        parts = []
        for index, choice in enumerate(self.choices):
            if choice.finish_reason is None:
                choice.close()
            part = self._part(index, "".join(choice.pending))
            part["logprobs"] = None if choice.logprobs is None else choice.logprobs.drain()
            part["finish_reason"] = choice.finish_reason
            part["stop_reason"] = choice.stop_reason
            parts.append(part)
        usage = self.final_usage = self.usage()
        body = {
            "id": self._response_id,
            "object": self._body_object,
            "created": self._created,
            "model": self._model,
            "choices": parts,
            "usage": orjson.Fragment(usage.to_json()),
        }
        if self._prepared.fingerprint:
            body["system_fingerprint"] = self._prepared.fingerprint
        if self._shows_prompt:
            self._add_prompt_logprobs(body, parts)
        if self._shows_ids or self._shows_transfer or self._best:
            self._add_record(body, parts)
        if self._extra:
            nvext = self._nvext(self.choices[0], first=True, last=True)
            if nvext is not None:
                body["nvext"] = nvext
        return json_bytes(body)

    # --- counts

    def usage(self) -> Usage:
        """Tokens so far. A prompt's tokens are the engine's count where it gave one, else ours;
        generated tokens are always counted here, also those that a second engine got in its prompt.
        Cached tokens are those of the client's prompt, at the last engine."""
        if self.final_usage is not None:
            return self.final_usage
        choices, n = self.choices, self._prepared.n
        if len(choices) == 1:
            return self._choice_usage(0)
        prompt_tokens = 0
        cached_tokens: int | None = None
        # The choices of a prompt are neighbours: its tokens count once, with the first of them.
        for index in range(0, len(choices), n):
            counts = self._choice_usage(index)
            prompt_tokens += counts.prompt_tokens
            if counts.cached_tokens is not None:
                cached_tokens = (cached_tokens or 0) + counts.cached_tokens
        return Usage(prompt_tokens, sum([choice.tokens for choice in choices]), cached_tokens)

    def _choice_usage(self, index: int) -> Usage:
        """The tokens so far of one choice and its prompt, as its engine counts those of the prompt,
        else as we do."""
        prepared, choice = self._prepared, self.choices[index]
        reported, own = choice.usage, len(prepared.prompts[index // prepared.n].token_ids)
        if reported is None:
            return Usage(own, choice.tokens, None)
        prompt_tokens = max(reported.prompt_tokens - choice.prompt_output, 0) or own
        details = reported.prompt_tokens_details
        cached = None if details is None else details.cached_tokens
        if cached is not None and choice.prompt_output:
            # The engine may have cached tokens that an earlier worker generated, too.
            cached = min(cached, prompt_tokens)
        return Usage(prompt_tokens, choice.tokens, cached)

    def _make_choices(
        self, request: GenerationRequest, prepared: Prepared, tokenizer: Tokenizer
    ) -> list[Choice]:
        collectors = self._collectors(request, prepared, tokenizer)
        alternatives = prepared.requests[0].output_options.prompt_logprobs
        if alternatives is not None:
            collectors = collect_prompt_logprobs(prepared, tokenizer, collectors, alternatives)
        if prepared.images is not None:
            collectors = collect_image_tokens(prepared, collectors)
        if self._shows_ids or self._shows_transfer or self._best:
            collectors = record_outputs(prepared, collectors)
        # The choices differ in max_tokens at most, which the engine counts.
        conditions = prepared.requests[0].stop_conditions
        rules = ChoiceRules(request, conditions)
        return [
            self._make_choice(prepared, tokenizer, rules, collector)
            for collector in collectors or (None,) * len(prepared.requests)
        ]

    def _make_choice(
        self,
        prepared: Prepared,
        tokenizer: Tokenizer,
        rules: ChoiceRules,
        collector: LogprobsCollector | None,
    ) -> Choice:
        kind = PromptOnlyChoice if rules.prompt_only else Choice
        return kind(tokenizer, rules, collector)

    @abstractmethod
    def _collectors(
        self, request: GenerationRequest, prepared: Prepared, tokenizer: Tokenizer
    ) -> Sequence[LogprobsCollector]:
        """A collector of log probabilities for each choice; empty if not asked for."""

    @abstractmethod
    def _part(self, index: int, text: str) -> dict[str, Any]:
        """The beginning of one element of ``choices`` in a unary body."""

    def _add_prompt_logprobs(self, body: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        """Add ``prompt_logprobs`` where vLLM's server has it: here to each choice."""
        for part, choice in zip(parts, self.choices, strict=True):
            part["prompt_logprobs"] = prompt_logprobs(choice)

    def _add_record(self, body: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        """Add what only the outputs have: token ids, transfer parameters, the best choices."""
        records = [collector_of(choice.logprobs, OutputRecord) for choice in self.choices]
        rows = [(part, record) for part, record in zip(parts, records, strict=True) if record]
        if self._shows_transfer and rows:
            body["kv_transfer_params"] = rows[0][1].kv_transfer_params
        if self._shows_ids:
            for part, record in rows:
                part["token_ids"] = record.take_ids()
            self._add_prompt_ids(body, parts)
        if self._best:
            n, best = self._prepared.n, []
            for start in range(0, len(rows), n):
                # The sort is stable: of equals the first choice comes first.
                ranked = sorted(rows[start : start + n], key=lambda row: -row[1].likelihood)
                best += [part for part, _ in ranked[: self._best]]
            body["choices"] = [{**part, "index": index} for index, part in enumerate(best)]

    def _add_prompt_ids(self, body: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        """Add ``prompt_token_ids`` where vLLM's server has it: here to each choice."""
        for index, part in enumerate(parts):
            part["prompt_token_ids"] = self._prompt_ids(index)

    def _prompt_ids(self, index: int) -> list[int]:
        return self._prepared.prompts[index // self._prepared.n].token_ids.tolist()

    def _chunk(self, choice: Choice, writer: ChoiceChunks) -> bytes:
        if choice.finish_reason is None and choice.logprobs is None and writer.started:
            texts = choice.pending
            if not texts:
                return b""
            text = texts[0] if len(texts) == 1 else "".join(texts)
            texts.clear()
            return writer.head + json_bytes(text) + writer.tail
        return self._rare_chunk(choice, writer)

    def _rare_chunk(self, choice: Choice, writer: ChoiceChunks) -> bytes:
        """The first and the last chunk of a choice, and all with log probabilities."""
        reason = choice.finish_reason
        if writer.finished or not (choice.pending or reason is not None):
            return b""
        logprobs, members, body = self._extras(choice, writer)
        text = "".join(choice.pending)
        choice.pending.clear()
        return writer.chunk(text, logprobs, reason, members, body)

    def _extras(
        self, choice: Choice, writer: ChoiceChunks
    ) -> tuple[dict[str, Any] | None, bytes, bytes]:
        """``logprobs``, further members of the choice, and of the body, of the next chunk; note
        whether that is the last one."""
        logprobs = choice.logprobs.drain() if choice.logprobs is not None else None
        members = body = b""
        first, finished = not writer.started, choice.finish_reason is not None
        writer.finished = finished
        if finished:
            members = b',"stop_reason":' + json_bytes(choice.stop_reason)
            if self._prepared.fingerprint:
                body = b',"system_fingerprint":' + json_bytes(self._prepared.fingerprint)
        if self._shows_ids:
            record = collector_of(choice.logprobs, OutputRecord)
            members += b',"token_ids":' + json_bytes(record.take_ids() if record else [])
        if first:
            more_members, more_body = self._opening_members(choice)
            members, body = members + more_members, body + more_body
        if self._extra and (first or finished):
            last = all(chunks.finished for chunks in self._writers)
            nvext = self._nvext(choice, first=first, last=last)
            if nvext is not None:
                body += b',"nvext":' + json_bytes(nvext)
        return logprobs, members, body

    def _opening_members(self, choice: Choice) -> tuple[bytes, bytes]:
        """Members of the choice, and of the body, of its first chunk."""
        if not self._shows_ids:
            return b"", b""
        ids = self._prompt_ids(self.choices.index(choice))
        return b',"prompt_token_ids":' + json_bytes(ids), b""

    def _start_writers(self) -> list[ChoiceChunks]:
        head = self._stream_head()
        null = b',"usage":null' if self._with_usage else b""
        self._writers = [self._chunks(head, index, null) for index in range(len(self.choices))]
        return self._writers

    def _stream_head(self) -> bytes:
        return stream_head(self._chunks.kind, self._response_id, self._created, self._model)

    def _nvext(self, choice: Choice, *, first: bool, last: bool) -> dict[str, Any] | None:
        members: dict[str, Any] = {}
        if first and "worker_id" in self._extra and self.worker_id is not None:
            members["worker_id"] = self.worker_id
        if last and "timing" in self._extra and self.timing is not None:
            members["timing"] = self.timing()
        if choice.stop_reason is not None and "stop_reason" in self._extra:
            members["stop_reason"] = choice.stop_reason
        return members or None


class AnswerChoice(Protocol):
    """One choice of an answer; see :class:`Choice`."""

    def push(self, output: EngineOutput, /) -> bool:
        """Add an engine output; return whether the choice is finished."""

    def close(self) -> None:
        """The engine's stream of the choice has ended. Idempotent."""


class Answer(Protocol):
    """What a request calls on its answer, generated here (:class:`GenerationStream`) or relayed.

    ``final_usage`` is set once the counts are final; ``worker_id`` is shown to clients that ask for
    it.
    """

    final_usage: Usage | None
    worker_id: dict[str, Any] | None

    @property
    def choices(self) -> Sequence[AnswerChoice]:
        """One for each engine request."""

    def opening(self) -> bytes:
        """The bytes before the first output of a stream; often none."""

    def flush(self) -> bytes:
        """The bytes of everything pushed since the last time."""

    def end(self) -> bytes:
        """The last bytes of a stream."""

    def error(self, error: DynamoError, /) -> bytes:
        """The last bytes of a stream that failed."""

    def unary(self) -> bytes:
        """The whole answer as one body."""

    def usage(self) -> Usage:
        """The tokens so far."""


def prompt_logprobs(choice: Choice) -> list[dict[str, Any] | None] | None:
    """What the client reads of the prompt's log probabilities; None without them."""
    collector = collector_of(choice.logprobs, PromptLogprobs)
    return None if collector is None else collector.shown()
