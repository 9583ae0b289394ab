"""The answers of OpenAI's two APIs: chat and text completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo.frontend.answer.choice import Choice
from dynamo.frontend.answer.generation import GenerationStream, prompt_logprobs
from dynamo.frontend.answer.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    EchoedPrompt,
    LogprobsCollector,
    echoed_prompts,
)
from dynamo.frontend.answer.sse import ChatChunks, CompletionChunks, json_bytes
from dynamo.frontend.prompt.messages import message_text
from dynamo.frontend.prompt.preprocessor import Prepared
from dynamo.frontend.text.tokenizer import IdNames, Tokenizer
from dynamo.protocols.openai import ChatCompletionRequest, CompletionRequest, GenerationRequest


class ChatStream(GenerationStream):
    """The answer to POST /v1/chat/completions. With ``echo`` it begins with the last message, if
    that is of the same role."""

    _body_object = "chat.completion"
    _chunks = ChatChunks
    _shows_prompt_text = False

    def _make_choices(
        self, request: GenerationRequest, prepared: Prepared, tokenizer: Tokenizer
    ) -> list[Choice]:
        choices = super()._make_choices(request, prepared, tokenizer)
        if isinstance(request, ChatCompletionRequest):
            self._shows_prompt_text = request.return_prompt_text is True
            if request.echo:
                text = _echoed_message(request)
                for choice in choices if text else ():
                    choice.echo(text)
        return choices

    def _collectors(
        self, request: GenerationRequest, prepared: Prepared, tokenizer: Tokenizer
    ) -> Sequence[LogprobsCollector]:
        if not isinstance(request, ChatCompletionRequest) or not request.logprobs:
            return ()
        alternatives = len(request.logprob_token_ids or ()) or request.top_logprobs or 0
        names = IdNames(tokenizer) if request.return_tokens_as_token_ids else tokenizer
        return [ChatLogprobs(names, alternatives) for _ in prepared.requests]

    def _part(self, index: int, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message}

    def unary(self) -> bytes:
        """The whole answer as one JSON body."""
        body = super().unary()
        if not self._shows_prompt_text:
            return body
        return body[:-1] + b',"prompt_text":' + json_bytes(self._prepared.prompts[0].text) + b"}"

    def _add_prompt_logprobs(self, body: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        body["prompt_logprobs"] = prompt_logprobs(self.choices[0])

    def _add_prompt_ids(self, body: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        body["prompt_token_ids"] = self._prompt_ids(0)

    def _opening_members(self, choice: Choice) -> tuple[bytes, bytes]:
        body = b""
        if self._shows_ids:
            body = b',"prompt_token_ids":' + json_bytes(self._prompt_ids(0))
        if self._shows_prompt_text:
            body += b',"prompt_text":' + json_bytes(self._prepared.prompts[0].text)
        return b"", body


class CompletionStream(GenerationStream):
    """The answer to POST /v1/completions. With ``echo`` each choice begins with its prompt."""

    _body_object = "text_completion"
    _chunks = CompletionChunks
    _echoed: Sequence[EchoedPrompt] = ()

    def _make_choices(
        self, request: GenerationRequest, prepared: Prepared, tokenizer: Tokenizer
    ) -> list[Choice]:
        if isinstance(request, CompletionRequest) and request.echo:
            # First, because the collectors of the choices take them.
            names = IdNames(tokenizer) if request.return_tokens_as_token_ids else tokenizer
            self._echoed = echoed_prompts(request, prepared, names)
        choices = super()._make_choices(request, prepared, tokenizer)
        for index, choice in enumerate(choices if self._echoed else ()):
            choice.echo(self._echoed[index // prepared.n].text)
        self._echoed = ()  # the choices have them
        return choices

    def _collectors(
        self, request: GenerationRequest, prepared: Prepared, tokenizer: Tokenizer
    ) -> Sequence[LogprobsCollector]:
        if not isinstance(request, CompletionRequest) or request.logprobs is None:
            return ()
        echoed = self._echoed or [EchoedPrompt("", [])] * len(prepared.prompts)
        skip_special = request.skip_special_tokens is not False
        alternatives = len(request.logprob_token_ids or ()) or request.logprobs
        names = IdNames(tokenizer) if request.return_tokens_as_token_ids else tokenizer
        return [
            CompletionLogprobs(names, alternatives, skip_special, rows, len(text))
            for text, rows in echoed
            for _ in range(prepared.n)
        ]

    def _part(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text}


def _echoed_message(request: ChatCompletionRequest) -> str:
    """The text of the last message if the answer is of the same role, else ""."""
    last = request.messages[-1]
    if last.get("role") != "assistant" and request.add_generation_prompt is not False:
        return ""
    return message_text(len(request.messages) - 1, last)
