"""The answer of an API whose streams are events of its own: the base of their streams.

Such an answer has one choice. Its message comes as deltas of reasoning, content and tool calls,
with or without a parser of the model's format; a subclass makes events of them, and one body for a
request that does not stream.
"""

from __future__ import annotations

from typing import Any

from dynamo.errors import DynamoError
from dynamo.frontend.answer.choice import Choice, ChoiceRules
from dynamo.frontend.answer.generation import ChatStream
from dynamo.frontend.answer.logprobs import LogprobsCollector
from dynamo.frontend.answer.parsed import ParsedChoice
from dynamo.frontend.answer.sse import json_bytes
from dynamo.frontend.formats.message import AnswerDelta
from dynamo.frontend.prompt.preprocessor import Prepared
from dynamo.frontend.text.tokenizer import Tokenizer
from dynamo.protocols.engine import EngineOutput


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

    def _events(self, delta: AnswerDelta) -> bytes:
        """The events for ``delta``, which is not empty."""
        raise NotImplementedError

    def _last_events(self) -> bytes:
        """The events after the last delta of an answer that is complete."""
        raise NotImplementedError

    def _body(self, deltas: list[AnswerDelta]) -> dict[str, Any]:
        """The body of a request that does not stream; ``deltas`` are the whole message."""
        raise NotImplementedError

    def _failed(self, error: DynamoError) -> bytes:
        """The events that end a stream with ``error``, a result of ``explained``."""
        raise NotImplementedError

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
        return choice.reasoning_tokens if isinstance(choice, _CountingChoice) else 0

    # --- what the request calls

    def opening(self) -> bytes:
        """The events before the first delta. There are no annotations in these APIs."""
        raise NotImplementedError

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
        return json_bytes(self._body(deltas))

    # --- private

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
        return _CountingChoice(prepared.answer, rules, collector)


class _CountingChoice(ParsedChoice):
    """Counts the tokens of the reasoning, which the usage of these APIs shows."""

    __slots__ = ("_answering", "_before")

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self._before = 0
        self._answering = False
        self._one_by_one = True

    @property
    def reasoning_tokens(self) -> int:
        """The tokens before the answer, if some of them are reasoning."""
        return self._before if self.message.reasoned else 0

    def push(self, output: EngineOutput) -> bool:
        """Add one engine output; return whether the choice is finished, as in :class:`Choice`."""
        done = super().push(output)
        self._note()
        return done

    def count(self, ids: list[int]) -> None:
        """As in :class:`Choice`; several tokens before the answer are parsed one by one."""
        texts = self.plain_texts()
        if self._answering or texts is None or len(ids) == 1:
            super().count(ids)
            self._note()
            return
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
            elif self._stops is None:
                self._one_by_one = False
