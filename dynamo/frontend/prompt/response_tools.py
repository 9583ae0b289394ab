"""Tools of the Responses API in the form of a chat, and the names of their calls.

The model is offered functions alone. A custom tool, whose input is free text, is a function with
one text parameter; the functions of a namespace have its name in front of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dynamo.errors import InvalidArgument, shorten

__all__ = [
    "ADDITIONAL_TOOLS",
    "INPUT",
    "OfferedTools",
    "additional_tools",
    "chat_choice",
    "flat_name",
    "offered_tools",
]

ADDITIONAL_TOOLS = "additional_tools"
INPUT = "input"
"""The parameter of a custom tool."""

_LEFT_OUT = ("web_search", "image_generation", "tool_search")
_REMEDY = "declare it as a function, and run it in the client"


class OfferedTools(NamedTuple):
    """``functions`` are offered to the model, in the form of a chat; ``shown`` are the same tools
    as the client declared them. ``custom`` are the names of custom tools; ``members`` maps the name
    of a function to its namespace and its name there.
    """

    functions: list[dict[str, Any]]
    shown: list[dict[str, Any]]
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
    found: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        if item.get("type") != ADDITIONAL_TOOLS:
            continue
        tools = item.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise InvalidArgument(f"Validation: input[{number}].tools: expected an array of tools")
        found += tools
    return found


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
        offered.shown.append(tool)
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
    names = {
        flat_name(each.get("namespace"), _name(f"tool_choice.tools[{number}]", each))
        for number, each in enumerate(allowed)
        if isinstance(each, dict) and each.get("type") in ("function", "custom")
    }
    return mode, [each for each in offered.functions if each["function"]["name"] in names]


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
        place = f"{where}.tools[{number}]"
        if not isinstance(member, dict) or member.get("type") != "function":
            raise InvalidArgument(f"Validation: {place}: a namespace has functions alone")
        function = _function(place, member, namespace)
        offered.members[function["function"]["name"]] = namespace, member["name"]
        offered.functions.append(function)


def _name(where: str, tool: dict[str, Any]) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"Validation: {where}.name: expected a name, got {name!r:.64}")
    return name
