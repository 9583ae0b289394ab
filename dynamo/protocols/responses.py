"""Requests of OpenAI's Responses API as typed structs.

Free-form members (items, tools, formats) are checked where they are converted.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from dynamo.protocols.openai import RANGES, Count, GenerationRequest, MaxTokens

__all__ = ["ResponsesRequest", "StrictResponsesRequest"]

_TOP_LOGPROBS = Meta(ge=RANGES["top_logprobs"][0], le=RANGES["top_logprobs"][1])
Label = Annotated[str, Meta(max_length=1024)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class ResponsesRequest(GenerationRequest, kw_only=True, omit_defaults=True):
    """Body of POST /v1/responses, and of POST /v1/responses/input_tokens.

    It takes the sampling fields of a chat as well. Those of the last group are accepted without
    effect, or refused with a reason.
    """

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: MaxTokens | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, _TOP_LOGPROBS] | None = None
    truncation: str | None = None
    metadata: Metadata | None = None
    user: Label | None = None
    prompt_cache_key: Label | None = None
    safety_identifier: Label | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    background: bool | None = None
    client_metadata: Any = None
    conversation: Any = None
    max_tool_calls: Count | None = None
    prompt: Any = None


class StrictResponsesRequest(
    ResponsesRequest, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """As its parent; an unknown field is an error."""
