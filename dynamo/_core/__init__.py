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
from dynamo.runtime.endpoints.instances import Instance, TransportType
from dynamo.runtime.endpoints.responses import Responses
from dynamo.runtime.logging import log_message
from dynamo.runtime.requests import ResponseSender
from dynamo.runtime.requests.context import SpanProxy

__all__ = [
    "Instance",
    "ResponseSender",
    "SpanProxy",
    "TransportType",
    "backend",
    "get_reasoning_parser_names",
    "get_tool_parser_names",
    "log_message",
    "resolve_routing_image_token_id",
]

__version__ = "1.6.1"
"""The version of NVIDIA Dynamo whose Python interface this package has."""

AsyncResponseStream = Responses


def resolve_routing_image_token_id(model_id: str, model_dir: str) -> int | None:
    """Return None, as Dynamo does for models of text: blocks of images have a hash of their own.

    A worker that gets None publishes the KV events of its engine as they are.
    """
    return None


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
