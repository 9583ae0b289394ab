"""The classes of ``dynamo.runtime`` and ``dynamo.llm`` under the name of Dynamo's Rust module.

Workers and examples of NVIDIA Dynamo import ``Context``, ``Endpoint`` and others from here.
"""

from typing import Any

from dynamo import llm, runtime
from dynamo._core import backend
from dynamo.config.worker import (
    REASONING_ALIASES,
    REASONING_PARSERS,
    TOOL_CALL_ALIASES,
    TOOL_CALL_PARSERS,
)
from dynamo.llm import exceptions
from dynamo.runtime.annotated import Responses
from dynamo.runtime.context import SpanProxy
from dynamo.runtime.instances import Instance, TransportType
from dynamo.runtime.logging import log_message
from dynamo.runtime.requests import ResponseSender

__all__ = [
    "Instance",
    "ResponseSender",
    "SpanProxy",
    "TransportType",
    "backend",
    "get_reasoning_parser_names",
    "get_tool_parser_names",
    "log_message",
]

AsyncResponseStream = Responses


def get_tool_parser_names() -> list[str]:
    """Return the formats of tool calls that a worker's ``tool_call_parser`` may name."""
    return sorted({*TOOL_CALL_PARSERS, *TOOL_CALL_ALIASES})


def get_reasoning_parser_names() -> list[str]:
    """Return the formats of reasoning that a worker's ``reasoning_parser`` may name."""
    return sorted({*REASONING_PARSERS, *REASONING_ALIASES})


def __getattr__(name: str) -> Any:
    """Return the class or function of that name in ``dynamo.runtime`` or ``dynamo.llm``."""
    for module in (runtime, exceptions, llm):
        if name in module.__all__:
            return getattr(module, name)
    return getattr(llm, name)
