"""Forced tool calls: ``tool_choice`` "required" or a named function, by structured output.

The engine gets a JSON schema: for a named function that of its parameters, for "required" an array
of objects with a name and parameters, as in vLLM. The answer is then not in the model's own format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.formats.message import AnswerMessage
from dynamo.frontend.formats.scan import JsonSpan, TextSteps
from dynamo.frontend.prompt.bounds import check_engine_value
from dynamo.protocols.openai import ChatCompletionRequest

_FREE = ("none", "auto")
_NAMED = '{"type": "function", "function": {"name": …}}'


class NamedCallParser(TextSteps):
    """An answer that is the arguments of the tool ``name``; anything else is content."""

    __slots__ = ("_message", "_name", "_span")

    def __init__(self, message: AnswerMessage, name: str) -> None:
        super().__init__(self._beginning)
        self._message = message
        self._name = name
        self._span = JsonSpan()

    def finish(self) -> None:
        """Take the text held back into the message: nothing follows."""
        self._message.add_content(self._take_aside() + self._text)
        self._message.finish()

    def _beginning(self) -> bool:
        self._put_space_aside()
        if not self._text:
            return False
        if self._text[0] == "{":
            self._take_aside()
            self._message.begin_call(self._name)
            self._step = self._arguments
        else:
            self._step = self._rest
        return True

    def _arguments(self) -> bool:
        if not self._text:
            return False
        end = self._span.end(self._text)
        self._message.add_json(self._take(len(self._text) if end < 0 else end))
        if end >= 0:
            if not self._span.open:
                self._message.end_call()
            self._step = self._rest
        return end >= 0

    def _rest(self) -> bool:
        self._message.add_content(self._take_aside() + self._take(len(self._text)))
        return False


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
    names = [each["name"] for each in tool_functions(request.tools)]
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


def is_forced(choice: str | dict[str, Any] | None) -> bool:
    """Whether ``tool_choice`` demands a call."""
    return choice is not None and choice not in ("auto", "none")


def forced_name(choice: str | dict[str, Any] | None) -> str | None:
    """The function that ``tool_choice`` names, if any."""
    return choice["function"]["name"] if isinstance(choice, dict) else None


def tool_functions(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """The ``function`` objects of the tools that have a name."""
    functions = [tool.get("function") for tool in tools or ()]
    return [
        each for each in functions if isinstance(each, dict) and isinstance(each.get("name"), str)
    ]


def forced_schema(request: ChatCompletionRequest) -> dict[str, Any]:
    """The JSON schema that makes the model call a tool. Raises InvalidArgument."""
    functions = tool_functions(request.tools)
    name = forced_name(request.tool_choice)
    if name is None:
        limit = 1 if request.parallel_tool_calls is False else None
        schema = _array_of_calls(functions, limit)
    else:
        schema = _parameters(next(each for each in functions if each["name"] == name))
    given = (request.response_format, request.guided_json, request.guided_regex,
             request.guided_choice, request.guided_grammar)  # fmt: skip
    if any(each is not None for each in given):
        raise InvalidArgument(
            "Validation: 'tool_choice' forces a tool call, so the answer cannot follow another "
            "grammar; leave 'response_format' and 'guided_*' out or set 'tool_choice' to 'auto'"
        )
    check_engine_value("tools", schema)
    return schema


def _array_of_calls(functions: list[dict[str, Any]], limit: int | None) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    calls = []
    for each in functions:
        parameters = dict(_parameters(each))
        # References in a schema are relative to its root, which is now the array.
        for key, value in (parameters.pop("$defs", None) or {}).items():
            if definitions.setdefault(key, value) != value:
                raise InvalidArgument(
                    f"Validation: two tools define '$defs.{key}' differently; rename one, or set "
                    "'tool_choice' to 'auto'"
                )
        properties = {"name": {"type": "string", "enum": [each["name"]]}, "parameters": parameters}
        calls.append(
            {"type": "object", "properties": properties, "required": ["name", "parameters"]}
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if limit is not None:
        schema["maxItems"] = limit
    if definitions:
        schema["$defs"] = definitions
    return schema


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    found = function.get("parameters")
    return found if isinstance(found, dict) and found else {"type": "object", "properties": {}}
