"""The answer of an API whose streams are events of its own: the base of their streams.

Such an answer has one choice. Its message comes as deltas of reasoning, content and tool calls,
with or without a parser of the model's format; a subclass makes events of them, and one body for a
request that does not stream.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from dynamo.errors import DynamoError
from dynamo.frontend.answer.choice import Choice, ChoiceRules
from dynamo.frontend.answer.completions import ChatStream
from dynamo.frontend.answer.logprobs import LogprobsCollector, OutputRecord, collector_of
from dynamo.frontend.answer.sse import ChoiceChunks, MessageChunks, json_bytes
from dynamo.frontend.formats.formats import AnswerFormat
from dynamo.frontend.formats.message import AnswerDelta
from dynamo.frontend.prompt.preprocessor import Prepared
from dynamo.frontend.text.tokenizer import Tokenizer
from dynamo.protocols.engine import EngineOutput
from dynamo.protocols.openai import ChatCompletionRequest, GenerationRequest

_PIECE = 1024


class ParsedChoice(Choice):
    """A choice whose text becomes the parts of ``message``; ``pending`` stays empty."""

    __slots__ = ("_finished", "_named", "_parser", "message")

    def __init__(
        self, answer: AnswerFormat, rules: ChoiceRules, logprobs: LogprobsCollector | None
    ) -> None:
        super().__init__(answer.tokenizer, rules, logprobs)
        self._named = answer.named
        self.message, self._parser = answer.start()
        self._finished = False

    def push(self, output: EngineOutput) -> bool:
        """Add one engine output; return whether the choice is finished, as in :class:`Choice`."""
        done = super().push(output)
        if self.pending:
            self._parse()
        if done:
            self._finish()
        return done

    def count(self, ids: list[int]) -> None:
        """As in :class:`Choice`."""
        super().count(ids)
        if self.pending:
            self._parse()

    def close(self) -> None:
        """Show the text held back when the engine's stream ends. Idempotent."""
        super().close()
        self._parse()
        self._finish()

    def echo(self, text: str) -> None:
        """As in :class:`Choice`: it is content, however it looks."""
        self.message.add_content(text)

    def _parse(self) -> None:
        push = self._parser.push
        for text in self.pending:
            if len(text) <= _PIECE:
                push(text)
            else:
                # A parser copies the rest of a text for each step.
                for start in range(0, len(text), _PIECE):
                    push(text[start : start + _PIECE])
        self.pending.clear()

    def _finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        message = self.message
        # A stop string may have cut a call: the client must not run that.
        at_stop_string = isinstance(self.stop_reason, str)
        message.stopped = not at_stop_string and self.finish_reason in ("stop", "tool_calls")
        self._parser.finish()
        # OpenAI and vLLM say stop if the request named the function.
        if message.stopped and message.called and not self._named:
            self.finish_reason = "stop" if message.in_call or message.cut else "tool_calls"


class ParsedChatStream(ChatStream):
    """The answer to POST /v1/chat/completions, parsed by ``prepared.answer``.

    A stream writes what the parser finds as ``delta.content``, ``delta.reasoning_content`` (or
    another field) and ``delta.tool_calls``.
    """

    _chunks = MessageChunks
    _hides_reasoning = False

    def _make_choices(
        self, request: GenerationRequest, prepared: Prepared, tokenizer: Tokenizer
    ) -> list[Choice]:
        if isinstance(request, ChatCompletionRequest):
            self._hides_reasoning = request.include_reasoning is False
        return super()._make_choices(request, prepared, tokenizer)

    def _make_choice(
        self,
        prepared: Prepared,
        tokenizer: Tokenizer,
        rules: ChoiceRules,
        collector: LogprobsCollector | None,
    ) -> Choice:
        assert prepared.answer is not None
        return ParsedChoice(prepared.answer, rules, collector)

    def _start_writers(self) -> list[ChoiceChunks]:
        writers = super()._start_writers()
        for writer, choice in zip(writers, self.choices, strict=True):
            assert isinstance(choice, ParsedChoice) and isinstance(writer, MessageChunks)
            writer.name_reasoning(choice.message.reasoning_field)
        return writers

    def _part(self, index: int, text: str) -> dict[str, Any]:
        choice = self.choices[index]
        assert isinstance(choice, ParsedChoice)
        message = choice.message.whole()
        if self._hides_reasoning and message.pop(choice.message.reasoning_field, None):
            _drop_tokens(choice)
        return {"index": index, "message": message}

    def _chunk(self, choice: Choice, writer: ChoiceChunks) -> bytes:
        assert isinstance(choice, ParsedChoice) and isinstance(writer, MessageChunks)
        message, reason = choice.message, choice.finish_reason
        if self._hides_reasoning:
            return self._without_reasoning(choice, writer)
        if reason is None and choice.logprobs is None and writer.started:
            content, reasoning = message.text_alone()
            if content is not None:
                return writer.head + json_bytes(content) + writer.tail
            if reasoning is not None:
                return writer.reasoning_head + json_bytes(reasoning) + writer.tail
            arguments = message.arguments_alone()
            if arguments is not None:
                return writer.arguments_chunk(*arguments)
        if writer.finished or not (message.pending or reason is not None):
            return b""
        return self._chunks_of(choice, writer, message.deltas())

    def _chunks_of(
        self, choice: Choice, writer: MessageChunks, deltas: list[dict[str, Any]]
    ) -> bytes:
        logprobs, members, body = self._extras(choice, writer)
        # Log probabilities are sent once, with the first chunk, other members with the last.
        *earlier, last = deltas or [{}]
        chunks = b""
        for delta in earlier:
            chunks += writer.message_chunk(delta, logprobs)
            logprobs = None
        return chunks + writer.message_chunk(last, logprobs, choice.finish_reason, members, body)

    def _without_reasoning(self, choice: ParsedChoice, writer: MessageChunks) -> bytes:
        """The chunks of all but the reasoning, whose tokens are not shown either."""
        message = choice.message
        if writer.finished or not (message.pending or choice.finish_reason is not None):
            return b""
        deltas = message.deltas()
        kept = [delta for delta in deltas if message.reasoning_field not in delta]
        if len(kept) < len(deltas):
            _drop_tokens(choice)
            if not kept and choice.finish_reason is None:
                return b""
        return self._chunks_of(choice, writer, kept)


def _drop_tokens(choice: Choice) -> None:
    """Drop log probabilities and ids so far: they would show the reasoning."""
    if choice.logprobs is not None:
        choice.logprobs.drain()
    record = collector_of(choice.logprobs, OutputRecord)
    if record is not None:
        record.take_ids()


def named_event(name: str, data: dict[str, Any]) -> bytes:
    """An event with a name and a JSON object."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json_bytes(data))


class EventStream(ChatStream):
    """One choice as events. A subclass implements ``opening`` and the four abstract methods.

    ``_finish_reason`` is OpenAI's (stop, length, tool_calls, content_filter), None before the end
    and where an engine gave none. ``usage()`` has the counts so far. ``_model``, ``_response_id``
    and ``_created`` are set as in :class:`GenerationStream`.
    """

    # --- abstract: each API implements them

    @abstractmethod
    def _events(self, delta: AnswerDelta) -> bytes:
        """The events for ``delta``, which is not empty."""

    @abstractmethod
    def _last_events(self) -> bytes:
        """The events after the last delta of an answer that is complete."""

    @abstractmethod
    def _body(self, deltas: list[AnswerDelta]) -> bytes:
        """The body of a request that does not stream; ``deltas`` are the whole message."""

    @abstractmethod
    def _failed(self, error: DynamoError) -> bytes:
        """The events that end a stream with ``error``, a result of ``explained``."""

    @property
    def _finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def _called(self) -> bool:
        choice = self.choices[0]
        return isinstance(choice, ParsedChoice) and choice.message.called

    @property
    def _reasoning_tokens(self) -> int:
        """Generated tokens before the content or the first tool call, if there is reasoning."""
        choice = self.choices[0]
        return choice.reasoning_tokens if isinstance(choice, CountingChoice) else 0

    # --- what the request calls

    @abstractmethod
    def opening(self) -> bytes:
        """The events before the first delta. There are no annotations in these APIs."""

    def flush(self) -> bytes:
        """The events for everything pushed since the last time."""
        deltas = self._take()
        return self._events(deltas[0]) if len(deltas) == 1 else b"".join(map(self._events, deltas))

    def end(self) -> bytes:
        """The last bytes of the stream."""
        self.choices[0].close()
        last = self.flush()
        self.final_usage = self.usage()
        return last + self._last_events()

    def error(self, error: DynamoError) -> bytes:
        """The last bytes of a stream that failed: the text so far and the error."""
        return self.flush() + self._failed(error)

    def unary(self) -> bytes:
        """The whole answer as one JSON body."""
        choice = self.choices[0]
        if choice.finish_reason is None:
            choice.close()
        deltas = self._take()
        self.final_usage = self.usage()
        return self._body(deltas)

    def _take(self) -> list[AnswerDelta]:
        """What is new, in its order."""
        choice = self.choices[0]
        if isinstance(choice, ParsedChoice):
            return choice.message.take()
        texts = choice.pending
        if not texts:
            return []
        text = texts[0] if len(texts) == 1 else "".join(texts)
        texts.clear()
        return [AnswerDelta(None, text, [])]

    def _make_choice(
        self,
        prepared: Prepared,
        tokenizer: Tokenizer,
        rules: ChoiceRules,
        collector: LogprobsCollector | None,
    ) -> Choice:
        if prepared.answer is None:
            return Choice(tokenizer, rules, collector)
        return CountingChoice(prepared.answer, rules, collector)


class CountingChoice(ParsedChoice):
    """Counts the tokens of the reasoning, which the usage of these APIs shows.

    The log probabilities of content belong to the delta with its text; those of markup, reasoning
    and calls are dropped. Those of a token that is held back belong to the text that shows it.
    """

    __slots__ = ("_answering", "_before", "_entries", "_undecided")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._before = 0
        self._undecided: list[dict[str, Any]] = []
        self._entries: dict[int, list[dict[str, Any]]] = {}
        self._answering = False
        self._one_by_one = True

    @property
    def reasoning_tokens(self) -> int:
        """The tokens before the answer, if some of them are reasoning."""
        return self._before if self.message.reasoned else 0

    def push(self, output: EngineOutput) -> bool:
        """Add one engine output; return whether the choice is finished, as in :class:`Choice`."""
        before = None if self.logprobs is None else self.message.size
        done = super().push(output)
        self._note()
        # Of several tokens each was pushed by itself.
        if before is not None and (len(output.token_ids) < 2 or output.text is not None):
            self._attribute(before)
        return done

    def close(self) -> None:
        """As in :class:`Choice`."""
        before = None if self.logprobs is None else self.message.size
        super().close()
        if before is not None:
            self._attribute(before)

    def content_logprobs(self, deltas: int) -> list[list[dict[str, Any]]]:
        """Take the log probabilities of the content in each of the next ``deltas`` deltas."""
        entries, self._entries = self._entries, {}
        return [entries.get(number, []) for number in range(deltas)]

    def _attribute(self, before: tuple[int, int, int]) -> None:
        """Assign the new log probabilities to the content since the message had size ``before``."""
        assert self.logprobs is not None
        self._undecided += (self.logprobs.drain() or {}).get("content") or ()
        after = self.message.size
        if after == before:
            return
        # Count back over the bytes of the new content; what precedes its tokens was markup. A token
        # may have no bytes of its own, so each counts as one at least.
        missing_bytes = len(self.message.content_since(before).encode())
        first = len(self._undecided)
        while missing_bytes > 0 and first:
            first -= 1
            missing_bytes -= max(1, len(self._undecided[first]["bytes"]))
        self._entries.setdefault(after[0], []).extend(self._undecided[first:])
        self._undecided.clear()

    def count(self, ids: list[int]) -> None:
        """As in :class:`Choice`; several tokens before the answer are parsed one by one."""
        texts = self.plain_texts()
        if self._answering or texts is None or len(ids) == 1:
            super().count(ids)
            self._note()
            return
        # The caller has added all texts; one by one they show at which token the answer begins.
        self.pending.clear()
        for token_id in ids:
            if text := texts[token_id]:
                self.pending.append(text)
            super().count([token_id])
            self._note()

    def _note(self) -> None:
        if not self._answering:
            self._answering = self.message.answering
            if not self._answering:
                self._before = self.tokens
            # From here on no token has to be looked at alone.
            elif self._stops is None and self.logprobs is None:
                self._one_by_one = False
