"""The tools of a request, as parsers of calls need them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dynamo.frontend.formats.forced_calls import tool_functions


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
