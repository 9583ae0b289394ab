"""The bodies of /tokenize and /detokenize, as in vLLM's server, and their answers. Pure.

Fields that are not here are refused. Those of type None belong to vLLM's own processors: clients
may send null.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.prompt.bounds import DESERIALIZE, MAX_COUNTED_TOKENS
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.frontend.prompt.validation import check_chat, check_json
from dynamo.protocols.openai import ChatCompletionRequest

_TokenId = Annotated[int, Meta(ge=0, lt=2**32)]


class TokenizePrompt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text to tokenize. Without ``model``: the only one that is served."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A chat to render and tokenize; the fields are those of a chat completion."""

    messages: list[dict[str, Any]]
    model: str | None = None
    add_special_tokens: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    media_io_kwargs: None = None
    mm_processor_kwargs: None = None


class TokenizedBody(msgspec.Struct, kw_only=True):
    """The answer: ``max_model_len`` is null where the model does not state its context."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids to turn into text, special tokens included."""

    tokens: list[_TokenId]
    model: str | None = None


class DetokenizedPrompt(msgspec.Struct):
    """The answer."""

    prompt: str


TokenizeBody = TokenizePrompt | TokenizeChat


class _TokenizeShape(msgspec.Struct):
    """The field that distinguishes a chat from a text."""

    messages: Any = None


_shape = msgspec.json.Decoder(_TokenizeShape).decode


_prompt = msgspec.json.Decoder(TokenizePrompt).decode


_chat = msgspec.json.Decoder(TokenizeChat).decode


_detokenize = msgspec.json.Decoder(DetokenizeBody).decode


_encode = msgspec.json.Encoder().encode


def parse_tokenize(body: bytes) -> TokenizeBody:
    """Decode and check a body of /tokenize. Raises InvalidArgument. O(bytes)."""
    check_json(body)
    try:
        if _shape(body).messages is None:
            return _prompt(body)
        found = _chat(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{DESERIALIZE}{error}") from None
    if found.chat_template is not None:
        raise InvalidArgument(
            "Validation: 'chat_template' of a request is not run; leave it out for the model's own "
            "template, which takes 'chat_template_kwargs'"
        )
    check_chat(_request(found))
    return found


def parse_detokenize(body: bytes) -> DetokenizeBody:
    """Decode and check a body of /detokenize. Raises InvalidArgument. O(bytes)."""
    check_json(body)
    try:
        found = _detokenize(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{DESERIALIZE}{error}") from None
    if len(found.tokens) > MAX_COUNTED_TOKENS:
        raise InvalidArgument(
            f"Validation: 'tokens' takes at most {MAX_COUNTED_TOKENS} ids, got "
            f"{len(found.tokens)}; send fewer"
        )
    return found


def tokenized(preprocessor: Preprocessor, asked: TokenizeBody) -> bytes:
    """The answer of /tokenize, as JSON. Thread-safe. Raises InvalidArgument. O(characters)."""
    if isinstance(asked, TokenizeChat):
        found = preprocessor.chat_tokens(_request(asked))
    else:
        found = preprocessor.text_tokens(asked.prompt, asked.add_special_tokens)
    ids = found.tolist()
    texts = None
    if asked.return_token_strs:
        texts = [preprocessor.tokenizer.vocabulary_entry(each) for each in ids]
    answer = TokenizedBody(
        count=len(ids), max_model_len=preprocessor.context_length, tokens=ids, token_strs=texts
    )
    return _encode(answer)


def detokenized(preprocessor: Preprocessor, asked: DetokenizeBody) -> bytes:
    """The answer of /detokenize; as :func:`tokenized`."""
    tokenizer = preprocessor.tokenizer
    largest = max(asked.tokens, default=0)
    if largest >= tokenizer.vocab_size:
        raise InvalidArgument(
            f"Validation: token id {shorten(largest)} in 'tokens' is out of range, the vocabulary "
            f"has {tokenizer.vocab_size} tokens"
        )
    return _encode(DetokenizedPrompt(tokenizer.decode(asked.tokens, skip_special_tokens=False)))


def _request(asked: TokenizeChat) -> ChatCompletionRequest:
    return ChatCompletionRequest(
        model=asked.model or "",
        messages=asked.messages,
        tools=asked.tools,
        add_special_tokens=asked.add_special_tokens,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        chat_template_kwargs=asked.chat_template_kwargs,
    )
