"""Chat answers of models with a tool-call or reasoning parser.

The text of a choice goes through the parser of its format; a stream writes what that finds as
``delta.content``, ``delta.reasoning_content`` and ``delta.tool_calls``.
"""

from __future__ import annotations

from typing import Any

from dynamo.frontend.answer.choice import Choice, ChoiceRules
from dynamo.frontend.answer.generation import ChatStream
from dynamo.frontend.answer.logprobs import LogprobsCollector
from dynamo.frontend.answer.sse import ChoiceChunks, MessageChunks, json_bytes
from dynamo.frontend.formats.formats import AnswerFormat
from dynamo.frontend.prompt.preprocessor import Prepared
from dynamo.frontend.text.tokenizer import Tokenizer
from dynamo.protocols.engine import EngineOutput

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
        self._parser.finish()
        # A stop string may have cut a call: the client must not run that. OpenAI and vLLM say stop
        # if the request named the function.
        if (
            self.message.called
            and not self._named
            and self.finish_reason == "stop"
            and not isinstance(self.stop_reason, str)
        ):
            self.finish_reason = "tool_calls"


class ParsedChatStream(ChatStream):
    """The answer to POST /v1/chat/completions, parsed by ``prepared.answer``."""

    _chunks = MessageChunks

    def _make_choice(
        self,
        prepared: Prepared,
        tokenizer: Tokenizer,
        rules: ChoiceRules,
        collector: LogprobsCollector | None,
    ) -> Choice:
        assert prepared.answer is not None
        return ParsedChoice(prepared.answer, rules, collector)

    def _part(self, index: int, text: str) -> dict[str, Any]:
        choice = self.choices[index]
        assert isinstance(choice, ParsedChoice)
        return {"index": index, "message": choice.message.whole()}

    def _chunk(self, choice: Choice, writer: ChoiceChunks) -> bytes:
        assert isinstance(choice, ParsedChoice) and isinstance(writer, MessageChunks)
        message, reason = choice.message, choice.finish_reason
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
        logprobs, nvext = self._extras(choice, writer)
        return writer.message_chunk(message.drain(), logprobs, reason, nvext)
