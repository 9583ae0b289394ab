"""The tools that a request offers: their functions, names and schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class RequestTools(NamedTuple):
    """The names of the request's tools, and the JSON schemas of their parameters."""

    names: frozenset[str]
    schemas: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, tools: list[dict[str, Any]] | None) -> RequestTools:
        """The tools of a request."""
        schemas: dict[str, Mapping[str, Any]] = {}
        for function in tool_functions(tools):
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            schemas[function["name"]] = properties if isinstance(properties, dict) else {}
        return cls(frozenset(schemas), schemas)


def tool_functions(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """The ``function`` objects of the tools that have a name."""
    functions = [tool.get("function") for tool in tools or ()]
    return [
        function
        for function in functions
        if isinstance(function, dict) and isinstance(function.get("name"), str)
    ]
