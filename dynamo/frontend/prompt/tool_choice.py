"""What ``tool_choice`` demands of a request: its checks, and the grammar that forces a tool call.

The engine gets a JSON schema: for a named function that of its parameters, for "required" an array
of objects with a name and parameters, as in vLLM. The answer is then not in the model's own format.
"""

from __future__ import annotations

from typing import Any

from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.formats.call_tags import parameters
from dynamo.frontend.formats.forced_calls import forced_name, is_forced
from dynamo.frontend.formats.request_tools import tool_functions
from dynamo.frontend.prompt.bounds import check_engine_value
from dynamo.protocols.openai import ChatCompletionRequest

_FREE = ("none", "auto")
_NAMED = '{"type": "function", "function": {"name": …}}'


def check_tool_choice(request: ChatCompletionRequest) -> None:
    """Check ``tool_choice`` and the older ``function_call``. Raises InvalidArgument."""
    if request.function_call is not None and request.function_call not in _FREE:
        raise InvalidArgument(
            f"Validation: 'function_call' must be 'auto' or 'none', got "
            f"{shorten(repr(request.function_call))}; use 'tools' and 'tool_choice'"
        )
    choice = request.tool_choice
    if not is_forced(choice):
        return
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise InvalidArgument(
            "Validation: 'tool_choice' must be 'auto', 'none', 'required' or "
            f"{_NAMED}, got {shorten(repr(choice))}"
        )
    names = [function["name"] for function in tool_functions(request.tools)]
    if not names:
        raise InvalidArgument(
            "Validation: 'tool_choice' forces a tool call, but no entry of 'tools' is a function "
            "with a name"
        )
    if name is not None and name not in names:
        raise InvalidArgument(
            f"Validation: 'tool_choice' names {shorten(repr(name))}, but 'tools' has "
            f"{shorten(', '.join(names))}"
        )


def forced_schema(request: ChatCompletionRequest) -> dict[str, Any]:
    """The JSON schema that makes the model call a tool. Raises InvalidArgument."""
    functions = tool_functions(request.tools)
    name = forced_name(request.tool_choice)
    if name is None:
        limit = 1 if request.parallel_tool_calls is False else None
        schema = _array_of_calls(functions, limit)
    else:
        schema = parameters(next(tool for tool in functions if tool["name"] == name))
    check_engine_value("tools", schema)
    return schema


def has_grammar(request: ChatCompletionRequest) -> bool:
    """Whether the client sent a grammar. Raises InvalidArgument if a call is forced, too."""
    grammars = (request.response_format, request.guided_json, request.guided_regex,
                request.guided_choice, request.guided_grammar, request.structural_tag)  # fmt: skip
    constrained = any(grammar is not None for grammar in grammars)
    if constrained and is_forced(request.tool_choice):
        raise InvalidArgument(
            "Validation: 'tool_choice' forces a tool call, so the answer cannot follow another "
            "grammar; leave 'response_format' and 'guided_*' out or set 'tool_choice' to 'auto'"
        )
    return constrained


def _array_of_calls(functions: list[dict[str, Any]], limit: int | None) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    calls = []
    for function in functions:
        schema = dict(parameters(function))
        # References in a schema are relative to its root, which is now the array.
        for key, value in (schema.pop("$defs", None) or {}).items():
            if definitions.setdefault(key, value) != value:
                raise InvalidArgument(
                    f"Validation: two tools define '$defs.{key}' differently; rename one, or set "
                    "'tool_choice' to 'auto'"
                )
        properties = {
            "name": {"type": "string", "enum": [function["name"]]},
            "parameters": schema,
        }
        calls.append(
            {"type": "object", "properties": properties, "required": ["name", "parameters"]}
        )
    array: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if limit is not None:
        array["maxItems"] = limit
    if definitions:
        array["$defs"] = definitions
    return array
