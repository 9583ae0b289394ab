"""POST /v1/chat/completions/batch: several conversations in one request, one choice for each.

The body is that of a chat whose ``messages`` are a list of conversations. Each is checked and
prepared as a chat of its own; the other fields count for all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from dynamo.config.frontend import REFUSE
from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.answer.choice import Choice
from dynamo.frontend.answer.completions import ChatStream
from dynamo.frontend.answer.events import ParsedChatStream
from dynamo.frontend.answer.generation import GenerationStream
from dynamo.frontend.apis.chat.generation import CHAT
from dynamo.frontend.prompt.bounds import DESERIALIZE, MAX_CHOICES
from dynamo.frontend.prompt.engine_options import expand_choices
from dynamo.frontend.prompt.images import PromptImages
from dynamo.frontend.prompt.off_loop import OffLoop
from dynamo.frontend.prompt.preprocessor import Prepared, Preprocessor
from dynamo.frontend.prompt.validation import check_json, parse_chat
from dynamo.frontend.text.tokenizer import Tokenizer
from dynamo.http import Exchange
from dynamo.protocols.openai import (
    CHAT_PATH,
    ChatCompletionRequest,
    GenerationRequest,
    PassingChatCompletionRequest,
)

CHAT_BATCH_PATH = f"{CHAT_PATH}/batch"
_CONVERSATION_BYTES = 2048
"""What a conversation costs beside its text, in bytes of prompt: rendering, sending, a choice."""
_ANY = msgspec.Raw(b'[{"role":"user","content":"."}]')
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_conversations = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.json.encode


class ChatBatchRequest(ChatCompletionRequest, kw_only=True, omit_defaults=True):
    """A batch: ``messages`` are those of all conversations, ``lengths`` their counts in each."""

    lengths: list[int] = []  # noqa: RUF012 - msgspec copies it


class PassingChatBatchRequest(PassingChatCompletionRequest, kw_only=True, omit_defaults=True):
    """As ChatBatchRequest, with the unknown fields of its body, for the engine."""

    lengths: list[int] = []  # noqa: RUF012 - msgspec copies it


ChatBatch = ChatBatchRequest | PassingChatBatchRequest


def conversations(batch: ChatBatch) -> Iterable[list[dict[str, Any]]]:
    """Yield the messages of each conversation."""
    end = 0
    for length in batch.lengths:
        end += length
        yield batch.messages[end - length : end]


class PreparedBatch(Prepared, frozen=True):
    """All engine requests of a batch; ``parts`` are its conversations, one choice each."""

    parts: list[Prepared] = []  # noqa: RUF012 - msgspec copies it


def parse_batch(body: bytes, *, unknown: str = REFUSE) -> ChatBatch:
    """Decode and check a batch, by the rules of a chat. Raises InvalidArgument. O(bytes)."""
    check_json(body)
    try:
        fields = _fields(body)
        entries = _conversations(fields.get("messages", msgspec.Raw(b"[]")))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = f"{DESERIALIZE}{error}; 'messages' of {CHAT_BATCH_PATH} is a list of conversations"
        raise InvalidArgument(text) from None
    if not 0 < len(entries) <= MAX_CHOICES:
        raise InvalidArgument(
            f"Validation: 'messages' must have 1 to {MAX_CHOICES} conversations, got {len(entries)}"
        )
    # Alone, so that an error of another field does not name a conversation.
    chat = parse_chat(_encode({**fields, "messages": _ANY}), unknown=unknown)
    _check_single(chat)
    values = {name: getattr(chat, name) for name in chat.__struct_fields__}
    passes = isinstance(chat, PassingChatCompletionRequest)
    kind: type[ChatBatch] = PassingChatBatchRequest if passes else ChatBatchRequest
    batch = kind(**{**values, "messages": []})
    for number, conversation in enumerate(entries):
        alone = _encode({"model": chat.model, "messages": conversation})
        try:
            messages = parse_chat(alone).messages
        except InvalidArgument as error:
            raise _of(number, error) from None
        batch.messages += messages
        batch.lengths.append(len(messages))
    return batch


def _check_single(chat: ChatCompletionRequest) -> None:
    """Refuse fields without a meaning for several conversations, as vLLM's server does."""
    nvext = chat.nvext
    fields = {
        "stream": chat.stream,
        "n": chat.n not in (None, 1) and chat.n,
        "best_of": chat.best_of not in (None, 1) and chat.best_of,
        "echo": chat.echo,
        "return_prompt_text": chat.return_prompt_text,
        "tools": chat.tools,
        "tool_choice": chat.tool_choice != "none" and chat.tool_choice,
        "nvext.token_data": nvext is not None and nvext.token_data,
        "nvext.annotations": nvext is not None and nvext.annotations,
    }
    for name, value in fields.items():
        if value:
            raise InvalidArgument(
                f"Validation: '{name}' is not supported by {CHAT_BATCH_PATH}, got "
                f"{shorten(json.dumps(value))}; leave it out, or use {CHAT_PATH}"
            )


def _of(number: int, error: InvalidArgument) -> InvalidArgument:
    return InvalidArgument(f"Conversation {number} of 'messages': {error.message}")


def _weigh(batch: ChatBatch, _exchange: Exchange) -> int:
    """Count conversations as bytes: many short ones belong in a thread like a long prompt."""
    return _CONVERSATION_BYTES * len(batch.lengths)


def prepare_batch(preprocessor: Preprocessor, batch: ChatBatch) -> Prepared:
    """Prepare each conversation. Raises InvalidArgument."""
    parts = []
    for number, chat in enumerate(_chats(batch)):
        try:
            parts.append(preprocessor.chat(chat))
        except InvalidArgument as error:
            raise _of(number, error) from None
    return _joined(parts)


async def prepare_batch_off_loop(
    preprocessor: Preprocessor, batch: ChatBatch, threads: OffLoop
) -> Prepared:
    """As :func:`prepare_batch`, in threads, one conversation after another."""
    parts = []
    for number, chat in enumerate(_chats(batch)):
        try:
            parts.append(await preprocessor.chat_off_loop(chat, threads))
        except InvalidArgument as error:
            raise _of(number, error) from None
    return _joined(parts)


def _chats(batch: ChatBatch) -> Iterable[ChatBatch]:
    for messages in conversations(batch):
        yield msgspec.structs.replace(batch, messages=messages)


def _joined(parts: list[Prepared]) -> PreparedBatch:
    """Return one answer's engine requests. Raises InvalidArgument: too large for the engines."""
    requests = [request for part in parts for request in part.requests]
    return PreparedBatch(
        expand_choices(requests, 1),
        [prompt for part in parts for prompt in part.prompts],
        1,
        sum(part.prompt_tokens for part in parts),
        answer=parts[0].answer,
        images=_images(parts),
        fingerprint=parts[0].fingerprint,
        parts=parts,
    )


def _images(parts: list[Prepared]) -> PromptImages | None:
    """Return the images of all conversations, for the metrics; None without any."""
    present = [part.images for part in parts if part.images is not None]
    if not present:
        return None
    hashes = [image_hash for images in present for image_hash in images.hashes]
    return PromptImages([], [], [], hashes, present[0].expansions, {})


class ChatBatchStream(ChatStream):
    """The answer to a batch, whose choices are made as those of one chat each."""

    def _make_choices(
        self, request: GenerationRequest, prepared: Prepared, tokenizer: Tokenizer
    ) -> list[Choice]:
        assert isinstance(prepared, PreparedBatch)
        make = super()._make_choices
        return [make(request, part, tokenizer)[0] for part in prepared.parts]

    # Log probabilities and ids of a prompt are members of its choice.
    _add_prompt_logprobs = GenerationStream._add_prompt_logprobs
    _add_prompt_ids = GenerationStream._add_prompt_ids


class ParsedChatBatchStream(ChatBatchStream, ParsedChatStream):
    """The same, of a model whose answers are parsed."""


CHAT_BATCH = CHAT._replace(
    endpoint="chat_completions_batch",
    parse=parse_batch,
    prepare=prepare_batch,
    prepare_off_loop=prepare_batch_off_loop,
    stream=ChatBatchStream,
    parsed_stream=ParsedChatBatchStream,
    complete=_weigh,
)
