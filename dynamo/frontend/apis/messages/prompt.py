"""The body of a Messages request, and the chat request that it becomes.

Fields of the last group are accepted and have no effect; docs/apis.md lists them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from dynamo.config.frontend import REFUSE
from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.apis.messages.blocks import chat_messages, chat_tools, system_message
from dynamo.frontend.prompt.bounds import MAX_MESSAGES, MAX_TOOLS, decoder_text
from dynamo.frontend.prompt.messages import NewMessage
from dynamo.frontend.prompt.validation import check_chat, check_json, strict_kind
from dynamo.protocols.openai import MAX_TOKENS_LIMIT, ChatCompletionRequest, NvExt

_EFFORTS = {"xhigh": "high", "max": "high"}
"""Chat templates know low, medium and high."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NAMED = 8
_THINKING = ("enable_thinking", "thinking")
"""What chat templates call it: those of Qwen and GLM, those of DeepSeek and Granite."""


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

    model: str = ""
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
    # Only null: a value names what exists on Anthropic's servers alone.
    container: None = None
    thread: Any = None

    anthropic_beta: list[str] | None = None
    anthropic_version: str | None = None
    diagnostics: Any = None
    inference_geo: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


_STRICT_PROMPT, _STRICT_MESSAGES = strict_kind(PromptBody), strict_kind(MessagesBody)


class MessagesChatRequest(ChatCompletionRequest, kw_only=True, omit_defaults=True):
    """A request of the Messages API as a chat request.

    ``hides_thinking`` leaves the text of the reasoning out of the answer.
    """

    hides_thinking: bool = False


Body = TypeVar("Body", bound=PromptBody)


class ThreadUnsupported(InvalidArgument):
    """The request refers to stored messages. Anthropic's clients then send all of them."""

    code = "thread_unsupported"


def parse_messages(
    body: bytes, *, unknown: str = REFUSE, strip_preamble: bool = True
) -> MessagesChatRequest:
    """Decode a body of /v1/messages. Raises InvalidArgument. O(bytes).

    Unknown fields are refused or ignored; ``strip_preamble`` leaves the billing header of
    Claude Code out of the prompt.
    """
    kind = _STRICT_MESSAGES if unknown == REFUSE else MessagesBody
    parsed = _decoded(body, kind)
    if parsed.thread not in (None, False):
        raise ThreadUnsupported("thread: nothing is stored; send all messages")
    request = _chat_request(parsed, strip_preamble)
    request.stream = parsed.stream
    request.stop = parsed.stop_sequences or None
    request.temperature, request.top_p = parsed.temperature, parsed.top_p
    request.top_k = parsed.top_k
    if parsed.output_config is not None and parsed.output_config.format is not None:
        schema = {"name": "output", "schema": parsed.output_config.format.schema}
        request.response_format = {"type": "json_schema", "json_schema": schema}
    if parsed.thinking is not None:
        request.hides_thinking = parsed.thinking.display == "omitted"
        budget = parsed.thinking.budget_tokens
        if budget is not None:
            request.nvext = NvExt(max_thinking_tokens=budget)
    check_chat(request)
    request.max_tokens = parsed.max_tokens  # behind the check: any number counts as the context
    return request


def parse_count(
    body: bytes, *, unknown: str = REFUSE, strip_preamble: bool = True
) -> MessagesChatRequest:
    """Decode a body of /v1/messages/count_tokens; as :func:`parse_messages`."""
    kind = _STRICT_PROMPT if unknown == REFUSE else PromptBody
    request = _chat_request(_decoded(body, kind), strip_preamble)
    check_chat(request)
    return request


def _decoded(body: bytes, kind: type[Body]) -> Body:
    check_json(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _explained(body, error, kind) from None


def _explained(body: bytes, error: Exception, kind: type[PromptBody]) -> InvalidArgument:
    """The error for the client: what is wrong with ``body``, which is no ``kind``."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as syntax:
        return InvalidArgument(f"The body is not valid JSON: {syntax}")
    if not isinstance(raw, dict):
        return InvalidArgument(f"The body must be a JSON object, got `{type(raw).__name__}`")
    # The typed decoder stops at the first unknown field: name all of them at once.
    unknown = sorted(raw.keys() - set(kind.__struct_fields__))
    if unknown and kind.__struct_config__.forbid_unknown_fields:
        names = ", ".join(f"`{shorten(name)}`" for name in unknown[:_NAMED])
        return InvalidArgument(f"{names}: not supported by this server; leave it out")
    return InvalidArgument(decoder_text(error))


def _chat_request(body: PromptBody, strip_preamble: bool) -> MessagesChatRequest:
    """The part of the request that makes the prompt."""
    if not body.messages:
        raise InvalidArgument("messages: at least one message is required")
    for name, values, limit in (
        ("messages", body.messages, MAX_MESSAGES),
        ("tools", body.tools or (), MAX_TOOLS),
    ):
        if len(values) > limit:
            raise InvalidArgument(f"{name}: at most {limit} entries, got {len(values)}")
    messages = _with_system(
        system_message(body.system, strip_preamble), chat_messages(body.messages)
    )
    request = MessagesChatRequest(model=body.model, messages=messages)
    if messages[-1]["role"] == "assistant":  # the answer goes on from this text
        request.continue_final_message, request.add_generation_prompt = True, False
    if body.tools:
        request.tools = chat_tools(body.tools)
    if body.tool_choice is not None:
        _choose_tool(request, body.tool_choice)
    variables = {} if body.chat_template_kwargs is None else dict(body.chat_template_kwargs)
    # Adaptive leaves it to the template; what a client sets for the template itself goes first.
    if body.thinking is not None and body.thinking.type != "adaptive":
        for name in _THINKING:
            variables.setdefault(name, body.thinking.type == "enabled")
    request.chat_template_kwargs = variables or None
    effort = None if body.output_config is None else body.output_config.effort
    request.reasoning_effort = None if effort is None else _EFFORTS.get(effort, effort)
    return request


def _with_system(first: NewMessage | None, messages: list[NewMessage]) -> list[NewMessage]:
    """``messages`` behind the text of ``system``, which one of the role system continues."""
    if not messages:
        raise InvalidArgument("messages: none has content; send a text or another block")
    if first is None:
        return messages
    later = messages[0]
    if later["role"] == "system" and isinstance(later["content"], str):
        first = {**first, "content": f"{first['content']}\n\n{later['content']}"}
        messages = messages[1:]
    return [first, *messages]


def _choose_tool(request: MessagesChatRequest, choice: ToolChoice) -> None:
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidArgument("tool_choice.name: required for the type `tool`")
        request.tool_choice = {"type": "function", "function": {"name": choice.name}}
    elif choice.type != "auto":
        request.tool_choice = _CHOICES[choice.type]
    if choice.disable_parallel_tool_use:
        request.parallel_tool_calls = False
