"""Input items and tools of a Responses request, as chat messages and tools.

What the assistant said in one turn is several items there, but one message with reasoning, content
and tool calls in a chat.

The model is offered functions alone. A custom tool, whose input is free text, is a function with
one text parameter; the functions of a namespace have its name in front of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec

from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.prompt.messages import NewMessage

ADDITIONAL_TOOLS = "additional_tools"
INPUT = "input"
"""The parameter of a custom tool."""
_LEFT_OUT = ("web_search", "image_generation", "tool_search")
_REMEDY = "declare it as a function, and run it in the client"
REFERENCE = "item_reference"
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")
_ITEM = frozenset(("id", "internal_chat_message_metadata_passthrough", "status", "type"))
"""Of every item. Codex adds the second where it takes this server for OpenAI's."""
_CALL = _ITEM | {"call_id", "name"}
_MEMBERS = {
    "message": _ITEM | {"content", "phase", "role"},
    "function_call": _CALL | {"arguments", "namespace"},
    "custom_tool_call": _CALL | {"input", "namespace"},
    "function_call_output": _CALL | {"output"},
    "custom_tool_call_output": _CALL | {"output"},
    ADDITIONAL_TOOLS: _ITEM | {"role", "tools"},
    "reasoning": _ITEM | {"content", "encrypted_content", "summary"},
    "input_text": frozenset(("text", "type")),
    "output_text": frozenset(("annotations", "logprobs", "text", "type")),
    "text": frozenset(("text", "type")),
    "refusal": frozenset(("refusal", "type")),
    "input_image": frozenset(("detail", "file_id", "image_url", "type")),
}


class OfferedTools(NamedTuple):
    """``functions`` are offered to the model, in the form of a chat; ``declared`` are the same
    tools as the client sent them. ``custom`` are the names of custom tools; ``members`` maps the
    name of a function to its namespace and its name there.
    """

    functions: list[dict[str, Any]]
    declared: list[dict[str, Any]]
    custom: frozenset[str]
    members: dict[str, tuple[str, str]]


def flat_name(namespace: Any, name: str) -> str:
    """The name that the model sees. Raises InvalidArgument for a ``namespace`` that is no text."""
    if namespace is None:
        return name
    if not isinstance(namespace, str):
        raise InvalidArgument(
            f"Validation: namespace of `{shorten(name)}`: expected `str`, got {namespace!r:.64}"
        )
    return f"{namespace}__{name}"


def additional_tools(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools that items of the input declare. Raises InvalidArgument."""
    declared: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        if item.get("type") != ADDITIONAL_TOOLS:
            continue
        tools = item.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise InvalidArgument(f"Validation: input[{number}].tools: expected an array of tools")
        declared += tools
    return declared


def offered_tools(tools: list[dict[str, Any]]) -> OfferedTools:
    """The tools that the model can call.

    Tools that OpenAI runs on its own, and agents declare by default, are left out: web search and
    image generation. Raises InvalidArgument for every other type.
    """
    offered = OfferedTools([], [], frozenset(), {})
    custom = set()
    for number, tool in enumerate(tools):
        where, kind = f"tools[{number}]", tool.get("type")
        if isinstance(kind, str) and kind.startswith(_LEFT_OUT):
            continue
        if kind == "function":
            offered.functions.append(_function(where, tool, None))
        elif kind == "custom":
            function = _custom(where, tool)
            custom.add(function["function"]["name"])
            offered.functions.append(function)
        elif kind == "namespace":
            _add_namespace(where, tool, offered)
        else:
            raise InvalidArgument(
                f"Validation: {where}.type: `{shorten(kind)}` is not supported; {_REMEDY}"
            )
        offered.declared.append(tool)
    return offered._replace(custom=frozenset(custom))


def chat_choice(
    choice: str | dict[str, Any], offered: OfferedTools
) -> tuple[str | dict[str, Any], list[dict[str, Any]]]:
    """``tool_choice`` in the form of a chat, and the functions that it leaves.

    Raises InvalidArgument.
    """
    if isinstance(choice, str):
        return choice, offered.functions
    kind = choice.get("type")
    if kind in ("function", "custom"):
        name = flat_name(choice.get("namespace"), _name("tool_choice", choice))
        return {"type": "function", "function": {"name": name}}, offered.functions
    if kind != "allowed_tools":
        raise InvalidArgument(
            f"Validation: tool_choice.type: `{shorten(kind)}` is not supported; use 'auto', 'none',"
            " 'required', a function, a custom tool or allowed_tools"
        )
    mode, allowed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(allowed, list):
        raise InvalidArgument(
            "Validation: tool_choice: allowed_tools needs a `mode`, auto or required, and `tools`, "
            f"got {shorten(repr(choice))}"
        )
    # Allowed tools of other types were not offered either: see _LEFT_OUT.
    names = {
        flat_name(tool.get("namespace"), _name(f"tool_choice.tools[{number}]", tool))
        for number, tool in enumerate(allowed)
        if isinstance(tool, dict) and tool.get("type") in ("function", "custom")
    }
    return mode, [
        function for function in offered.functions if function["function"]["name"] in names
    ]


def _function(where: str, tool: dict[str, Any], namespace: str | None) -> dict[str, Any]:
    """A function of a chat: the same members, one level deeper."""
    function = {name: value for name, value in tool.items() if name != "type"}
    function["name"] = flat_name(namespace, _name(where, tool))
    return {"type": "function", "function": function}


def _custom(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    description, form = tool.get("description") or "", tool.get("format")
    if not isinstance(description, str):
        raise InvalidArgument(
            f"Validation: {where}.description: expected `str`, got {description!r:.64}"
        )
    # Nothing holds the model to the grammar; it follows what it reads.
    if isinstance(form, dict) and form.get("type") == "grammar":
        description += (
            f"\n\nThe {INPUT} follows this {form.get('syntax')} grammar:\n{form.get('definition')}"
        )
    schema = {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    name = _name(where, tool)
    function = {"name": name, "description": description.strip(), "parameters": schema}
    return {"type": "function", "function": function}


def _add_namespace(where: str, tool: dict[str, Any], offered: OfferedTools) -> None:
    namespace, members = _name(where, tool), tool.get("tools")
    if not isinstance(members, list):
        raise InvalidArgument(f"Validation: {where}.tools: expected `array`, got `{members!r:.64}`")
    for number, member in enumerate(members):
        path = f"{where}.tools[{number}]"
        if not isinstance(member, dict) or member.get("type") != "function":
            raise InvalidArgument(f"Validation: {path}: a namespace has functions alone")
        function = _function(path, member, namespace)
        offered.members[function["function"]["name"]] = namespace, member["name"]
        offered.functions.append(function)


def _name(where: str, tool: dict[str, Any]) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"Validation: {where}.name: expected a name, got {name!r:.64}")
    return name


class ItemConverter:
    """Add items; ``messages`` are those of a chat, with system messages where they came.

    An unknown member of an item is an error, or with ``ignore_unsupported`` left out.
    """

    def __init__(self, ignore_unsupported: bool = False) -> None:
        self.messages: list[NewMessage] = []
        self._ignore = ignore_unsupported
        self._convert: dict[str, Callable[[str, dict[str, Any]], None]] = {
            "message": self._message,
            "function_call": self._call,
            "custom_tool_call": self._custom_call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
            "reasoning": self._reasoning,
            ADDITIONAL_TOOLS: lambda where, item: None,  # additional_tools() has read them
        }

    def add(self, where: str, item: dict[str, Any]) -> None:
        """Add ``item``; ``where`` is its place in the request. Raises InvalidArgument."""
        kind = str(item.get("type", "message" if "role" in item else None))
        convert = self._convert.get(kind)
        if convert is None:
            raise InvalidArgument(
                f"Validation: {where}.type: an item `{shorten(kind)}` is not supported; known are "
                f"{', '.join(self._convert)} and {REFERENCE}"
            )
        self._check(where, kind, item)
        convert(where, item)

    def _message(self, where: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise InvalidArgument(
                f"Validation: {where}.role: expected one of {', '.join(_ROLES)}, got "
                f"`{shorten(role)}`"
            )
        content = self._content(f"{where}.content", item.get("content"))
        if role != "assistant":
            role = "system" if role == "developer" else role
            self.messages.append({"role": role, "content": content})
            return
        last = self._assistant()
        if last is None or "content" in last or "tool_calls" in last:
            last = self._new_assistant()
        last["content"] = content

    def _reasoning(self, where: str, item: dict[str, Any]) -> None:
        texts = _texts(f"{where}.content", item.get("content"), "reasoning_text")
        texts = texts or _texts(f"{where}.summary", item.get("summary"), "summary_text")
        if not texts:
            return  # encrypted by another server: there is nothing to read
        last = self._assistant()
        if last is None or "content" in last or "tool_calls" in last:
            last = self._new_assistant()
        earlier = last.get("reasoning_content")
        last["reasoning_content"] = "\n".join(texts if earlier is None else [earlier, *texts])

    def _call(self, where: str, item: dict[str, Any]) -> None:
        self._add_call(where, item, _text(where, item, "arguments"))

    def _custom_call(self, where: str, item: dict[str, Any]) -> None:
        arguments = {INPUT: _text(where, item, "input")}
        self._add_call(where, item, msgspec.json.encode(arguments).decode())

    def _add_call(self, where: str, item: dict[str, Any], arguments: str) -> None:
        name = flat_name(item.get("namespace"), _text(where, item, "name"))
        function = {"name": name, "arguments": arguments}
        call_id = _text(where, item, "call_id")
        last = self._assistant() or self._new_assistant()
        calls = last.setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _output(self, where: str, item: dict[str, Any]) -> None:
        call_id = _text(where, item, "call_id")
        content = self._content(f"{where}.output", item.get("output"))
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _content(self, where: str, content: Any) -> str | list[dict[str, Any]]:
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            kind = type(content).__name__
            raise InvalidArgument(f"Validation: {where}: expected `str | array`, got `{kind}`")
        parts = [self._part(f"{where}[{number}]", part) for number, part in enumerate(content)]
        if len(parts) == 1 and parts[0]["type"] == "text":
            return str(parts[0]["text"])
        return parts

    def _part(self, where: str, part: Any) -> dict[str, Any]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXT_PARTS:
            self._check(where, kind, part)
            return {"type": "text", "text": _text(where, part, "text")}
        if kind == "refusal":
            self._check(where, kind, part)
            return {"type": "text", "text": _text(where, part, "refusal")}
        if kind == "input_image":
            self._check(where, kind, part)
            return _image(where, part)
        raise InvalidArgument(
            f"Validation: {where}.type: a part `{shorten(kind)}` is not supported; send its text, "
            "or an image by URL"
        )

    def _check(self, where: str, kind: str, value: dict[str, Any]) -> None:
        if self._ignore or value.keys() <= _MEMBERS[kind]:
            return
        # Null is as good as absent, in any member.
        unknown = sorted(name for name in value.keys() - _MEMBERS[kind] if value[name] is not None)
        if unknown:
            names = ", ".join(f"`{where}.{shorten(name)}`" for name in unknown[:8])
            raise InvalidArgument(f"Unsupported parameter(s): {names}")

    def _assistant(self) -> NewMessage | None:
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last["role"] == "assistant" else None

    def _new_assistant(self) -> NewMessage:
        last: NewMessage = {"role": "assistant"}
        self.messages.append(last)
        return last


def arranged(instructions: str | None, messages: Sequence[NewMessage]) -> list[NewMessage]:
    """``messages`` with one system message, the first: most templates take no other.

    It has the instructions and the system messages at the beginning; later ones are the user's.
    """
    leading = list(takewhile(lambda message: message["role"] == "system", messages))
    contents: list[Any] = [] if instructions is None else [instructions]
    contents += [message["content"] for message in leading]
    first = [{"role": "system", "content": _joined(contents)}] if contents else []
    return first + [
        {**message, "role": "user"} if message["role"] == "system" else message
        for message in messages[len(leading) :]
    ]


def _joined(contents: list[Any]) -> Any:
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents)
    parts: list[Any] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _image(where: str, part: dict[str, Any]) -> dict[str, Any]:
    url, detail = part.get("image_url"), part.get("detail")
    if not isinstance(url, str):
        raise InvalidArgument(
            f"Validation: {where}.image_url: expected a URL, got {shorten(repr(url))}; no files "
            "are stored here, send the image as a data: URL"
        )
    image_url = {"url": url} if detail is None else {"url": url, "detail": detail}
    return {"type": "image_url", "image_url": image_url}


def _texts(where: str, parts: Any, kind: str) -> list[str]:
    if parts is None:
        return []
    # What is no list is refused below, as an entry of another type is.
    entries: Iterable[Any] = parts if isinstance(parts, list) else [None]
    texts = []
    for number, part in enumerate(entries):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == kind else None
        if not isinstance(text, str):
            raise InvalidArgument(
                f"Validation: {where}[{number}]: expected an object of the type `{kind}`"
            )
        texts.append(text)
    return texts


def _text(where: str, item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        kind = "nothing" if value is None else f"`{type(value).__name__}`"
        raise InvalidArgument(f"Validation: {where}.{name}: expected `str`, got {kind}")
    return value
