"""Content blocks of Anthropic's Messages API to messages and tools of a chat request. Pure.

A turn becomes one chat message, apart from its tool results, each of which is a message of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.prompt.messages import NewMessage, ToolImage

Block = Mapping[str, Any]

_BILLING = "x-anthropic-billing-header:"
"""Claude Code's first block of ``system``. It differs in each request, so no prompt would be found
in a cache."""

_COMMON = frozenset(("type", "cache_control"))
_FIELDS = {
    "text": _COMMON | {"text", "citations"},
    "image": _COMMON | {"source"},
    "document": _COMMON | {"source", "title", "context", "citations"},
    "search_result": _COMMON | {"source", "title", "content", "citations"},
    "tool_reference": _COMMON | {"tool_name"},
    "tool_use": _COMMON | {"id", "name", "input", "caller", "toolset_name"},
    "tool_result": _COMMON | {"tool_use_id", "content", "is_error", "toolset_name"},
    "thinking": _COMMON | {"thinking", "signature"},
    "redacted_thinking": _COMMON | {"data"},
}
_TOOL_FIELDS = frozenset(
    (
        *("name", "description", "input_schema", "type", "strict", "cache_control"),
        *("defer_loading", "eager_input_streaming", "input_examples", "allowed_callers"),
    )
)
_ROLES = ("user", "assistant", "system")


def system_message(system: str | Sequence[Block] | None, strip_preamble: bool) -> NewMessage | None:
    """The system message; None without one. Raises InvalidArgument.

    ``strip_preamble`` leaves the billing header of Claude Code out.
    """
    if system is None:
        return None
    if isinstance(system, str):
        texts = [system]
    else:
        texts = [_text(f"system[{number}]", block) for number, block in enumerate(system)]
    if strip_preamble:
        texts = [text for text in texts if not text.startswith(_BILLING)]
    text = "\n\n".join(texts)
    return {"role": "system", "content": text} if text else None


def chat_messages(messages: Sequence[NewMessage]) -> list[NewMessage]:
    """The messages of a chat request. Turns of one role in a row are one turn.

    A system message after others is part of the user's turn: many templates fail on a second one.
    Raises InvalidArgument.
    """
    converted: list[NewMessage] = []
    turn: _Turn | None = None
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        role = message.get("role")
        if role not in _ROLES:
            raise InvalidArgument(
                f"{where}.role: must be one of {', '.join(_ROLES)}, got {shorten(repr(role))}"
            )
        unknown = message.keys() - {"role", "content"}
        if unknown:
            raise _unsupported(where, unknown)
        if role == "system" and (turn is not None and turn.role != "system"):
            role = "user"
        if turn is None or turn.role != role:
            if turn is not None:
                turn.finish()
            turn = _Turn(role, converted)
        turn.add(f"{where}.content", message.get("content"))
    if turn is not None:
        turn.finish()
    return converted


def chat_tools(tools: Sequence[Block]) -> list[dict[str, Any]]:
    """The tools of a chat request. Raises InvalidArgument for tools of Anthropic's servers."""
    return [_tool(f"tools[{number}]", tool) for number, tool in enumerate(tools)]


class _Turn:
    """The blocks of one role in a row, on their way into ``messages``."""

    def __init__(self, role: str, messages: list[NewMessage]) -> None:
        self.role = role
        self._messages = messages
        self._parts: list[NewMessage] = []
        self._calls: list[NewMessage] = []
        self._thoughts: list[str] = []

    def add(self, where: str, content: Any) -> None:
        if isinstance(content, str):
            self._parts.append({"type": "text", "text": content})
            return
        if not isinstance(content, list):
            raise InvalidArgument(
                f"{where}: must be a string or an array of blocks, got `{type(content).__name__}`"
            )
        for number, block in enumerate(content):
            self._add_block(f"{where}[{number}]", block)

    def finish(self) -> None:
        """Append the message of the blocks so far."""
        if not (self._parts or self._calls or self._thoughts):
            return
        message: NewMessage = {"role": self.role, "content": _content(self._parts)}
        if self._thoughts:
            message["reasoning_content"] = "\n".join(self._thoughts)
        if self._calls:
            # Null beside calls, as OpenAI's clients send it: templates are written for that.
            message["content"] = message["content"] or None
            message["tool_calls"] = self._calls
        self._messages.append(message)
        self._parts, self._calls, self._thoughts = [], [], []

    def _add_block(self, where: str, block: Any) -> None:
        kind = _kind(where, block)
        if kind in ("thinking", "redacted_thinking", "tool_use"):
            if self.role != "assistant":
                raise InvalidArgument(f"{where}: `{kind}` belongs to the role assistant")
            self._add_answer(where, block)
        elif kind == "tool_result":
            if self.role != "user":
                raise InvalidArgument(f"{where}: `tool_result` belongs to the role user")
            self._add_result(where, block)
        else:
            self._parts += _parts(where, block)

    def _add_answer(self, where: str, block: Block) -> None:
        """Add what only the model says. Redacted thinking is readable to Anthropic alone."""
        if block["type"] == "thinking":
            thought = _string(where, block, "thinking")
            if thought:
                self._thoughts.append(thought)
        elif block["type"] == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise InvalidArgument(f"{where}.input: must be an object")
            function = {"name": _string(where, block, "name"), "arguments": arguments}
            call = {"id": _string(where, block, "id"), "type": "function", "function": function}
            self._calls.append(call)

    def _add_result(self, where: str, block: Block) -> None:
        """Append a message of the role tool; its images go to the user's next message."""
        content = block.get("content")
        parts: list[NewMessage] = []
        if isinstance(content, str):
            parts = [{"type": "text", "text": content}]
        elif isinstance(content, list):
            for number, item in enumerate(content):
                inner = f"{where}.content[{number}]"
                _kind(inner, item)
                parts += _parts(inner, item)
        elif content is not None:
            raise InvalidArgument(f"{where}.content: must be a string or an array of blocks")
        images = [ToolImage(part) for part in parts if part["type"] != "text"]
        text = _content([part for part in parts if part["type"] == "text"])
        if block.get("is_error") is True:
            text = f"Error: {text}"
        call_id = _string(where, block, "tool_use_id")
        # What the user said before this result stays in front of it, as a message of its own.
        self.finish()
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        self._parts += images


def _kind(where: str, block: Any) -> str:
    """The type of a block whose fields are all known."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise InvalidArgument(f"{where}: expected an object with a `type`")
    fields = _FIELDS.get(kind)
    if fields is None:
        raise InvalidArgument(
            f"{where}.type: `{shorten(kind)}` is not supported; this server takes "
            f"{', '.join(_FIELDS)}"
        )
    if not fields >= block.keys():
        raise _unsupported(where, block.keys() - fields)
    return kind


def _parts(where: str, block: Block) -> list[NewMessage]:
    """The parts of a chat message for a block that user and tool results may have."""
    convert = _PARTS.get(block["type"])
    if convert is None:
        raise InvalidArgument(f"{where}.type: `{block['type']}` cannot be here")
    return convert(where, block)


def _text_part(where: str, block: Block) -> list[NewMessage]:
    return [{"type": "text", "text": _string(where, block, "text")}]


def _image(where: str, block: Block) -> list[NewMessage]:
    kind, source = _source(block)
    if kind == "base64":
        media_type = _string(f"{where}.source", source, "media_type")
        url = f"data:{media_type};base64,{_string(f'{where}.source', source, 'data')}"
    elif kind == "url":
        url = _string(f"{where}.source", source, "url")
    else:
        raise InvalidArgument(
            f"{where}.source.type: must be base64 or url, got {shorten(repr(kind))}"
        )
    return [{"type": "image_url", "image_url": {"url": url}}]


def _source(block: Block) -> tuple[Any, Block]:
    source = block.get("source")
    return (source.get("type"), source) if isinstance(source, dict) else (None, {})


def _document(where: str, block: Block) -> list[NewMessage]:
    kind, source = _source(block)
    if kind != "text":
        raise InvalidArgument(
            f"{where}.source.type: must be text, got {shorten(repr(kind))}; send the text of the "
            "document"
        )
    heads = [block[name] for name in ("title", "context") if isinstance(block.get(name), str)]
    return [{"type": "text", "text": "\n".join([*heads, _string(where, source, "data")])}]


def _search_result(where: str, block: Block) -> list[NewMessage]:
    content = block.get("content")
    if not isinstance(content, list):
        raise InvalidArgument(f"{where}.content: must be an array of text blocks")
    texts = [_text(f"{where}.content[{number}]", item) for number, item in enumerate(content)]
    heads = [_string(where, block, "title"), _string(where, block, "source")]
    return [{"type": "text", "text": "\n".join([*heads, *texts])}]


def _tool_reference(where: str, block: Block) -> list[NewMessage]:
    """The model has seen all tools: name the one that a search has found."""
    return [{"type": "text", "text": f"Tool found: {_string(where, block, 'tool_name')}"}]


_PARTS: dict[str, Callable[[str, Block], list[NewMessage]]] = {
    "text": _text_part,
    "image": _image,
    "document": _document,
    "search_result": _search_result,
    "tool_reference": _tool_reference,
}


def _content(parts: list[NewMessage]) -> Any:
    """One text if all parts are texts, which every chat template can print."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _text(where: str, block: Any) -> str:
    if _kind(where, block) != "text":
        raise InvalidArgument(f"{where}.type: must be text, got `{block['type']}`")
    return _string(where, block, "text")


def _tool(where: str, tool: Block) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise InvalidArgument(
            f"{where}.type: `{shorten(kind)}` is a tool of Anthropic's servers and models; leave "
            "it out, or define a tool with an `input_schema`"
        )
    unknown = tool.keys() - _TOOL_FIELDS
    if unknown:
        raise _unsupported(where, unknown)
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise InvalidArgument(f"{where}.input_schema: must be a JSON schema")
    function = {"name": _string(where, tool, "name"), "parameters": schema}
    if tool.get("description") is not None:
        function["description"] = _string(where, tool, "description")
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _string(where: str, block: Block, name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidArgument(f"{where}.{name}: must be a string, got `{type(value).__name__}`")
    return value


def _unsupported(where: str, names: Any) -> InvalidArgument:
    listed = ", ".join(f"`{shorten(name)}`" for name in sorted(names))
    return InvalidArgument(f"{where}: {listed} not supported by this server; leave it out")
