"""Bodies of Anthropic's Messages API, as typed structs. Blocks of content stay plain dicts.

Fields of the last group are accepted and have no effect; docs/apis.md lists them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dynamo.protocols.openai import MAX_TOKENS_LIMIT, ChatCompletionRequest

__all__ = [
    "JsonOutput",
    "MessagesBody",
    "MessagesChatRequest",
    "OutputConfig",
    "PromptBody",
    "StrictMessagesBody",
    "StrictPromptBody",
    "Thinking",
    "ToolChoice",
]


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model reasons; ``display: omitted`` leaves the reasoning out of the answer."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS_LIMIT)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model calls a tool; ``name`` is for the type ``tool``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class JsonOutput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``effort`` is the chat template's ``reasoning_effort``."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class PromptBody(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens: what makes the prompt."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mcp_servers: Annotated[list[Any], Meta(max_length=0)] | None = None

    betas: list[str] | None = None
    billing_policy: Any = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesBody(PromptBody, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS_LIMIT)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    container: None = None
    thread: Any = None

    anthropic_beta: list[str] | None = None
    anthropic_version: str | None = None
    diagnostics: Any = None
    inference_geo: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


class StrictPromptBody(PromptBody, kw_only=True, forbid_unknown_fields=True):
    """As its parent; an unknown field is an error."""


class StrictMessagesBody(MessagesBody, kw_only=True, forbid_unknown_fields=True):
    """As its parent; an unknown field is an error."""


class MessagesChatRequest(ChatCompletionRequest, kw_only=True, omit_defaults=True):
    """A request of the Messages API as a chat request.

    ``hides_thinking`` leaves the text of the reasoning out of the answer.
    """

    hides_thinking: bool = False
