"""The bodies of POST /tokenize and POST /detokenize, as vLLM's server has them.

Fields that are not here are refused. Those of type None belong to vLLM's own processors: clients
may send null.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

__all__ = ["DetokenizeBody", "DetokenizedPrompt", "TokenizeChat", "TokenizePrompt", "TokenizedBody"]

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
